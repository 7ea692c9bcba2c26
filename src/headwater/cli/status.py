"""`headwater status`: what every process does, as a table or as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.json_format import MessageToDict

from headwater.cli import stack
from headwater.cli.supervise import read_restarts
from headwater.cli.table import print_table
from headwater.rpc.channel import callable_address, open_blocking_channel
from headwater.rpc.link import Link
from headwater.rpc.tls_problem import tls_problem
from headwater.shm import list_segments
from headwater.v1 import (
    decode_service_pb2,
    decode_service_pb2_grpc,
    prefill_service_pb2,
    prefill_service_pb2_grpc,
    router_service_pb2,
    router_service_pb2_grpc,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from headwater.config import Config

# Stub and request of each service's GetStatus.
_CALLS: dict[str, tuple[Callable[[grpc.Channel], Any], Callable[[], Any]]] = {
    "router": (
        router_service_pb2_grpc.RouterServiceStub,
        router_service_pb2.GetRouterStatusRequest,
    ),
    "prefill": (
        prefill_service_pb2_grpc.PrefillServiceStub,
        prefill_service_pb2.GetPrefillStatusRequest,
    ),
    "decode": (
        decode_service_pb2_grpc.DecodeServiceStub,
        decode_service_pb2.GetDecodeStatusRequest,
    ),
}

_CLASS_TITLES = (
    "CLASS",
    "TTFT, TPOT",
    "FINISHED",
    "ATTAINED",
    "LATE",
    "SLOW",
    "SHED",
)


def status(arguments: argparse.Namespace, config: Config) -> int:
    """Prints the state of the stack; the exit status is 1 when a process is not serving."""
    states = read_states(config)
    segments = [
        {"name": s.name, "total_bytes": s.total_bytes, "state": s.state.value}
        for s in list_segments(config.shm.name_prefix)
    ]
    if arguments.json:
        print(json.dumps({"processes": states, "segments": segments}, indent=2))
    else:
        _print_tables(states, segments)
    return 0 if all(state["health"] == "SERVING" for state in states.values()) else 1


def read_states(config: Config) -> dict[str, dict[str, Any]]:
    """What each process of the stack says of itself, by name; see `_state`."""
    states = {name: _state(name, config) for name in (*_CALLS, stack.GATEWAY)}
    for name, count in read_restarts(config).items():
        states[name]["restarts"] = count
    if not config.gateway.enabled or states[stack.GATEWAY]["health"] == "DOWN":
        has_run = stack.processes(config)[stack.GATEWAY].log_path.exists()
        if not (config.gateway.enabled and has_run):
            del states[stack.GATEWAY]
    return states


def _state(name: str, config: Config) -> dict[str, Any]:
    """Address, health and, when it answers, the process's own status, in snake_case."""
    state: dict[str, Any] = {"address": stack.address_of(name, config), "health": "DOWN"}
    if name == stack.GATEWAY:
        state["health"] = "SERVING" if stack.is_serving(name, config) else "DOWN"
        state["pid"] = stack.processes(config)[name].pid()
        return state
    make_stub, make_request = _CALLS[name]
    with open_blocking_channel(state["address"], Link.of(config)) as channel:
        try:
            reply = make_stub(channel).GetStatus(make_request(), timeout=stack.PROBE_SECONDS)
        except grpc.RpcError:
            problem = tls_problem(callable_address(state["address"]), config.tls)
            return state | ({"problem": problem} if problem else {})
    state["health"] = "SERVING" if stack.is_serving(name, config) else "NOT_SERVING"
    state.update(
        MessageToDict(
            reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
    )
    return state


def _print_tables(states: dict[str, Any], segments: list[dict[str, Any]]) -> None:
    titles = (
        "PROCESS",
        "ADDRESS",
        "HEALTH",
        "PID",
        "RUNNING",
        "WAITING",
        "TOK/S",
        "RESTARTS",
        "MODEL",
    )
    print_table(titles, [_row(name, state) for name, state in states.items()])
    for name, state in states.items():
        if "problem" in state:
            print(f"{name}: {state['problem']}")
    decode = states["decode"]
    if "kv_layout" in decode:
        layout = decode["kv_layout"]
        how = "re-attached" if decode["weights_reattached"] else "loaded from disk"
        print(
            f"\nweights  {decode['weights']['name']}, "
            f"{int(decode['weights']['total_bytes']) / 2**20:.1f} MiB, {how}"
        )
        if "weights_placement" in decode:
            print(f"experts  {_placement_text(decode['weights_placement'])}")
        print(
            f"KV pool  {decode['kv_pool']['name']}, {decode['kv_free_blocks']} of "
            f"{layout['num_blocks']} blocks of {layout['block_tokens']} tokens free, "
            f"{decode['kv_leases']} leases"
        )
        print(f"prefixes {_prefix_text(decode)}")
    elif segments:
        print("\nsegments " + ", ".join(segment["name"] for segment in segments))
    if objectives := states["router"].get("objectives"):
        print()
        print_table(_CLASS_TITLES, [_class_row(objective) for objective in objectives])


def _class_row(objective: dict[str, Any]) -> tuple[object, ...]:
    finished, attained = (int(objective[f"{key}_requests"]) for key in ("finished", "attained"))
    wishes = f"{objective['ttft_objective_seconds']:g} s, {objective['tpot_objective_seconds']:g} s"
    misses = (objective[f"{key}_requests"] for key in ("missed_ttft", "missed_tpot", "shed"))
    share = f"{attained / finished:.1%}" if finished else ""
    return (objective["name"], wishes, finished, share, *misses)


def _prefix_text(decode: dict[str, Any]) -> str:
    asked, found = int(decode["prefix_queried_tokens"]), int(decode["prefix_cached_tokens"])
    share = f", {found / asked:.0%}" if asked else ""
    return (
        f"{decode['kv_cached_blocks']} free blocks may be used again; found {found} of {asked} "
        f"prompt tokens{share}"
    )


def _placement_text(placement: dict[str, Any]) -> str:
    nodes = ", ".join(map(str, placement["shard_nodes"]))
    text = f"{len(placement['shard_nodes'])} shards on NUMA nodes {nodes}"
    if placement["problem"]:
        return f"{text}; {placement['problem']}"
    misplaced, checked = int(placement["misplaced_pages"]), int(placement["checked_pages"])
    found = f"{misplaced} of {checked} pages elsewhere" if misplaced else "all pages in place"
    return f"{text}, {found}"


def _row(name: str, state: dict[str, Any]) -> tuple[object, ...]:
    rate = state.get("tokens_per_second")
    numbers = (state.get(key, "") for key in ("pid", "running_requests", "waiting_requests"))
    speed = "" if rate is None else f"{rate:.1f}"
    rest = (speed, state.get("restarts", 0), state.get("model_name", ""))
    return (name, state["address"], state["health"], *numbers, *rest)
