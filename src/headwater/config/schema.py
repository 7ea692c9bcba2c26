"""Every setting with its default, its meaning and its limits.

The section and field names are the keys of the TOML file; see headwater.config.sources for where
values come from. A field's metadata holds `help` and, for checks, `low`, `high`, `choices` or
`kind` ("address": host:port; "optional_address": that, or empty; "objectives": see
headwater.objectives; "devices": see headwater.config.devices; "share": 0, or not too near it).

docs/security.md says how `tls` and `limits` are used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


def setting(default: Any, help_text: str, **limits: Any) -> Any:
    """A field with its default, what it means, and its limits."""
    return field(default=default, metadata={"help": help_text, **limits})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What is served."""

    path: str = setting("", "checkpoint folder; empty: the embedded default model")
    name: str = setting("", "name under which it is served; empty: the folder's name")
    format: Literal["bf16", "fp8"] = setting(
        "bf16", "format of the embedded default model", choices=("bf16", "fp8")
    )
    shards: int = setting(
        0,
        "parts into which experts are cut, one per NUMA node; 0: as many as there are nodes",
        low=0,
        high=64,
    )
    load_threads: int = setting(4, "threads that read the checkpoint", low=1, high=256)
    exact_activations: bool = setting(
        False,
        "whether CPUs multiply activations of 16 bits instead of 8, prompts up to twice as slowly",
    )


@dataclass(frozen=True, slots=True)
class ShmConfig:
    """Shared memory."""

    prefix: str = setting(
        "headwater", "first part of the names of all segments; one per stack", kind="shm_prefix"
    )

    @property
    def name_prefix(self) -> str:
        """What the names of all segments of this stack, and of no other, start with."""
        return f"{self.prefix}."


@dataclass(frozen=True, slots=True)
class KvConfig:
    """The KV pool."""

    pool_tokens: int = setting(
        0, "tokens the pool holds; 0: four times the context, if memory allows", low=0, high=2**31
    )
    block_tokens: int = setting(16, "tokens per block", low=1, high=1024)
    slots: int = setting(256, "leases alive at once", low=1, high=65536)
    lease_ttl_ms: int = setting(
        30_000, "life of a lease without renewal, in milliseconds", low=100, high=3_600_000
    )


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """The decode process."""

    listen: str = setting("127.0.0.1:50052", "address to listen on", kind="address")
    threads: int = setting(0, "compute threads; 0: one per usable core", low=0, high=1024)
    max_batch: int = setting(16, "requests generating at once", low=1, high=4096)
    extend_tokens: int = setting(
        64, "prompt tokens that decode computes per step, at most", low=1, high=65536
    )
    grace_seconds: float = setting(
        10.0, "time for running requests to end at a stop, in seconds", low=0.0, high=3600.0
    )


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """The prefill process."""

    listen: str = setting("127.0.0.1:50051", "address to listen on", kind="address")
    decode_address: str = setting(
        "127.0.0.1:50052", "where the decode process listens", kind="address"
    )
    threads: int = setting(0, "compute threads; 0: one per usable core", low=0, high=1024)
    chunk_tokens: int = setting(
        2048, "tokens computed in one go; bounds the memory for activations", low=1, high=1_048_576
    )
    max_waiting: int = setting(1024, "prompts waiting at once", low=1, high=1_000_000)
    grace_seconds: float = setting(
        10.0, "time for running requests to end at a stop, in seconds", low=0.0, high=3600.0
    )


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """The GPU through which prefill streams the weights, and on which decode keeps a part."""

    prefill: Literal["auto", "on", "off"] = setting(
        "auto",
        "whether prompts are computed on a GPU: auto where there is one that will do, on or not at "
        "all, or off",
        choices=("auto", "on", "off"),
    )
    decode: Literal["auto", "on", "off"] = setting(
        "auto",
        "whether a GPU computes everything of an answer but the routed experts: auto where there "
        "is one that will do, on or not at all, or off",
        choices=("auto", "on", "off"),
    )
    device: int = setting(0, "number of the first CUDA device", low=0, high=63)
    prefill_devices: str = setting(
        "auto",
        "devices that compute each prompt together, such as `cuda:0, cuda:1`, each streaming a "
        "part of the weights; the first goes on alone while decode needs another; auto: gpu.device "
        "and all GPUs after it that this process sees; `cpu, cpu` tries it without any",
        kind="devices",
    )
    decode_device: int = setting(
        -1,
        "number of the CUDA device that decode uses; -1: the last of gpu.prefill_devices, where it "
        "disturbs sweeps least",
        low=-1,
        high=63,
    )
    copy_share: float = setting(
        1.0,
        "share of the time that copies of weights take while answers are computed; less leaves "
        "decode more of host memory's rate, and prompts take longer; 0: as measured, so that steps "
        "take at most 15 % longer while weights are copied",
        low=0.0,
        high=1.0,
        kind="share",
    )
    vram_gib: float = setting(
        0.0,
        "device memory that prefill uses, in GiB; 0: all that is free, decode's taken off",
        low=0.0,
        high=10_000.0,
    )
    decode_vram_gib: float = setting(
        0.0,
        "device memory that decode uses, in GiB; 0: what it needs, but no more than half of what "
        "is free, or all of it when gpu.prefill is off",
        low=0.0,
        high=10_000.0,
    )
    sweep_tokens: int = setting(
        65536,
        "tokens computed in one pass over the weights, if device memory allows",
        low=128,
        high=1_048_576,
    )
    quantize_from: int = setting(
        0,
        "passes of at least so many tokens round activations that meet FP8 experts to FP8, which "
        "loses some 3 % and helps cards that multiply FP8 much faster than FP16; 0: none does",
        low=0,
        high=2**31,
    )


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The router process."""

    listen: str = setting("127.0.0.1:50050", "address to listen on", kind="address")
    plain_listen: str = setting(
        "",
        "address to listen on without TLS as well, for the gateway, which speaks none to routers; "
        "empty: none",
        kind="optional_address",
    )
    prefill_address: str = setting(
        "127.0.0.1:50051", "where the prefill process listens", kind="address"
    )
    decode_address: str = setting(
        "127.0.0.1:50052", "where the decode process listens", kind="address"
    )
    max_running_requests: int = setting(64, "requests in work at once", low=1, high=65536)
    max_waiting_requests: int = setting(
        256, "requests waiting at once; more are refused", low=0, high=1_000_000
    )
    prompt_path: Literal["auto", "prefill", "extend"] = setting(
        "auto",
        "who computes prompts: prefill, decode (extend), or whoever is expected to be faster",
        choices=("auto", "prefill", "extend"),
    )
    recovery_seconds: float = setting(
        60.0, "how long a request waits for an engine it lost, in seconds", low=0.0, high=3600.0
    )
    grace_seconds: float = setting(
        10.0, "time for running requests to end at a stop, in seconds", low=0.0, high=3600.0
    )


@dataclass(frozen=True, slots=True)
class ObjectivesConfig:
    """What classes of requests are promised, and when a request is refused instead."""

    classes: str = setting(
        "interactive=30/0.05, batch=600/1",
        "classes of requests: name=TTFT/TPOT, ..., in seconds to the first token and per token "
        "after it",
        kind="objectives",
    )
    default_class: str = setting("interactive", "class of requests that name none")
    shed_factor: float = setting(
        0.8,
        "refuse a request whose first token is expected later than this many times its class's "
        "TTFT; 0: never",
        low=0.0,
        high=1000.0,
    )


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """The HTTP gateway, SMG."""

    enabled: bool = setting(True, "whether `headwater up` starts it")
    listen: str = setting("127.0.0.1:8000", "address to listen on", kind="address")
    metrics_listen: str = setting(
        "127.0.0.1:29000", "address of its Prometheus metrics", kind="address"
    )
    routers: str = setting(
        "",
        "routers that it spreads requests over, one per node: host:port, ...; empty: the one at "
        "router.plain_listen, or router.listen",
    )
    tls_cert: str = setting("", "certificate for HTTPS, a PEM file; empty: HTTP")
    tls_key: str = setting("", "private key of gateway.tls_cert, a PEM file")
    api_key_file: str = setting(
        "", "file with the key that callers must send as `Authorization: Bearer`; empty: none"
    )


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """TLS between the processes, and of whoever calls them; on as soon as `ca` is set."""

    ca: str = setting("", "certificates that sign our peers', a PEM file; empty: no TLS")
    cert: str = setting("", "this process's certificate and what links it to the CA, a PEM file")
    key: str = setting("", "private key of tls.cert, a PEM file that others cannot read")
    server_name: str = setting(
        "",
        "name that the certificates of called processes must bear; empty: the host they are "
        "called at",
    )
    require_client_cert: Literal["all", "engines", "none"] = setting(
        "all",
        "which processes want a certificate of whoever calls them: router and engines, engines "
        "(prefill and decode) alone, or none",
        choices=("all", "engines", "none"),
    )
    plaintext: Literal["loopback", "anywhere"] = setting(
        "loopback",
        "where a process may listen without TLS: on loopback, or anywhere, for networks that "
        "nobody else is on",
        choices=("loopback", "anywhere"),
    )


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """What a caller may ask of each process at most."""

    message_bytes: int = setting(
        16 * 1024 * 1024, "bytes of a message, either way", low=1024 * 1024, high=2**30
    )
    prompt_bytes: int = setting(
        8 * 1024 * 1024, "bytes of a prompt's text, as UTF-8", low=1, high=2**30
    )
    prompt_tokens: int = setting(
        0, "tokens of a prompt; 0: as many as the model's context holds", low=0, high=2**31
    )
    concurrent_calls: int = setting(
        4096, "calls under way at once; more are refused", low=1, high=1_000_000
    )
    streams_per_connection: int = setting(
        8192,
        "calls under way at once on one connection; more wait, lease renewals and health checks "
        "among them: keep it above concurrent_calls",
        low=1,
        high=1_000_000,
    )
    metadata_bytes: int = setting(
        16 * 1024, "bytes of a call's metadata (headers)", low=1024, high=1024 * 1024
    )
    min_ping_seconds: float = setting(
        10.0,
        "least time between keepalive pings on a connection, in seconds; whoever sends them "
        "faster is disconnected",
        low=0.1,
        # Our own channels ping every 15 s.
        high=14.0,
    )


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """Traces, metrics and logs."""

    otlp_endpoint: str = setting(
        "", "OTLP gRPC endpoint for traces and metrics, such as http://127.0.0.1:4317; empty: none"
    )
    trace_ratio: float = setting(
        1.0,
        "share of requests that are traced, of those whose caller has not decided it",
        low=0.0,
        high=1.0,
    )
    record_content: bool = setting(
        False, "whether spans hold prompts and answers; nothing else ever does"
    )
    prometheus_listen: str = setting(
        "",
        "where Prometheus scrapes the router, such as 127.0.0.1:9464; prefill, decode and the "
        "supervisor take the three ports after it; empty: nowhere",
        kind="optional_address",
    )
    log_format: Literal["human", "json"] = setting(
        "human", "how log lines look", choices=("human", "json")
    )
    log_level: str = setting(
        "info", "least severity logged", choices=("debug", "info", "warning", "error")
    )


@dataclass(frozen=True, slots=True)
class StateConfig:
    """Where files are kept."""

    cache_dir: str = setting("~/.cache/headwater", "converted models", kind="path")
    run_dir: str = setting(
        "~/.local/state/headwater", "process ids and logs of `headwater up`", kind="path"
    )


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of one stack."""

    model: ModelConfig = field(default_factory=ModelConfig)
    shm: ShmConfig = field(default_factory=ShmConfig)
    kv: KvConfig = field(default_factory=KvConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    gpu: GpuConfig = field(default_factory=GpuConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    objectives: ObjectivesConfig = field(default_factory=ObjectivesConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    state: StateConfig = field(default_factory=StateConfig)
