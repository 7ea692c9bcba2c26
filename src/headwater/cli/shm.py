"""`headwater shm ls|reap|flush`: what lies in shared memory; removing what nobody needs."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import grpc

from headwater.cli.table import print_table
from headwater.rpc.channel import open_channel
from headwater.rpc.link import Link
from headwater.shm import list_segments, reap
from headwater.v1 import memory_service_pb2, memory_service_pb2_grpc
from headwater.wire.status import error_from_rpc

if TYPE_CHECKING:
    import argparse

    from headwater.config import Config
    from headwater.shm import SegmentInfo

FLUSH_SECONDS = 10.0


def shm(arguments: argparse.Namespace, config: Config) -> int:
    """Lists or cleans the segments of this stack's prefix."""
    if arguments.action == "reap":
        removed = reap(config.shm.name_prefix, release_weights=arguments.release)
        print(json.dumps(removed) if arguments.json else "\n".join(removed) or "nothing to remove")
        return 0
    if arguments.action == "flush":
        _flush(config, as_json=arguments.json)
        return 0
    segments = list_segments(config.shm.name_prefix)
    if arguments.json:
        print(json.dumps([_as_dict(segment) for segment in segments], indent=2))
    else:
        _print_table(segments)
    return 0


def _flush(config: Config, *, as_json: bool) -> None:
    """Raises HeadwaterError when decode does not answer."""
    reply = asyncio.run(_flushed(config))
    if as_json:
        print(json.dumps({"flushed": reply.flushed_blocks, "in_use": reply.remaining_blocks}))
    else:
        print(f"{reply.flushed_blocks} blocks flushed, {reply.remaining_blocks} in use")


async def _flushed(config: Config) -> memory_service_pb2.FlushKvResponse:
    async with open_channel(config.decode.listen, Link.of(config)) as channel:
        stub = memory_service_pb2_grpc.MemoryServiceStub(channel)
        request = memory_service_pb2.FlushKvRequest()
        try:
            reply: memory_service_pb2.FlushKvResponse = await stub.FlushKv(
                request, timeout=FLUSH_SECONDS
            )
        except grpc.aio.AioRpcError as failure:
            raise error_from_rpc(failure) from failure
    return reply


def _as_dict(segment: SegmentInfo) -> dict[str, object]:
    return {
        "name": segment.name,
        "total_bytes": segment.total_bytes,
        "kind": segment.kind and segment.kind.name.lower(),
        "lifetime": segment.lifetime and segment.lifetime.name.lower(),
        "state": segment.state.value,
        "problem": segment.problem,
        "epoch": segment.epoch,
        "owner_pid": segment.owner_pid if segment.is_owner_alive else None,
        "is_attached": segment.is_attached,
    }


def _print_table(segments: list[SegmentInfo]) -> None:
    titles = ("NAME", "MIB", "KIND", "LIFETIME", "STATE", "OWNER", "ATTACHED")
    rows = [
        (
            entry["name"],
            f"{segment.total_bytes / 2**20:.1f}",
            entry["kind"] or "",
            entry["lifetime"] or "",
            f"{entry['state']} {entry['problem']}".strip(),
            entry["owner_pid"] or "none",
            "yes" if segment.is_attached else "no",
        )
        for segment in segments
        for entry in (_as_dict(segment),)
    ]
    print_table(titles, rows)
