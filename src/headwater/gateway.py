"""How SMG, the HTTP gateway, is started in front of routers, and how it tells that it is ready.

Starts no process itself.

SMG is made for fleets. Its means against bad workers do harm here: while a long prompt is computed
it would take a busy router for a hung one, and after a restart of an engine it would keep refusing
requests. The router does these things itself: it queues, refuses and reports. What is left to SMG
where there are several nodes is to send a request to the node that holds its prefix, and one that a
node refused or lost before its answer began to another node.
"""

from __future__ import annotations

import http.client
import json
import ssl
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from headwater.errors import ConfigError
from headwater.gateway_protection import Protection

# A day: longer than any prompt takes.
_NEVER_SECONDS = "86400"
_PROBE_SECONDS = 2.0

# The router's own queue says what is too much, and its refusal reaches the caller.
_ONE_NODE = ("--policy", "round_robin", "--disable-retries")
_SEVERAL_NODES = (
    *("--policy", "cache_aware"),
    # Enough tries to reach another node, soon; a refusal by all of them reaches the caller.
    *("--retry-max-retries", "5", "--retry-max-backoff-ms", "1000"),
)


def gateway_command(
    *,
    listen: str,
    metrics_listen: str,
    router_addresses: Sequence[str],
    otlp_endpoint: str = "",
    grace_seconds: float = 5.0,
    log_level: str = "warn",
    python: str = sys.executable,
    protection: Protection | None = None,
) -> list[str]:
    """The command line of SMG; all addresses are host:port, an IPv6 host in brackets.

    `log_level` is debug, info, warn or error. Spans go to `otlp_endpoint`, unless it is empty or
    wants TLS, which SMG does not speak to a collector. Raises ConfigError for an address that is
    none, and when `protection` does not suffice or cannot be used.
    """
    host, port = _split(listen, "gateway.listen")
    metrics_host, metrics_port = _split(metrics_listen, "gateway.metrics_listen")
    for address in router_addresses:
        _split(address, "router.listen" if len(router_addresses) == 1 else "gateway.routers")
    protection = protection or Protection()
    protection.check(listen)
    return [
        *(python, "-m", "headwater.gateway_process"),
        *("--host", host, "--port", port),
        # Left out, these would listen on every interface.
        *("--prometheus-host", metrics_host, "--prometheus-port", metrics_port),
        *("--worker-urls", *(f"grpc://{address}" for address in router_addresses)),
        *("--backend", "vllm"),
        *protection.options(),
        *(_ONE_NODE if len(router_addresses) == 1 else _SEVERAL_NODES),
        *("--log-level", log_level),
        # Behind it, for the later one wins.
        *_tracing(otlp_endpoint),
        "--disable-circuit-breaker",
        "--disable-worker-overload-protection",
        *("--worker-wedge-secs", _NEVER_SECONDS),
        # An engine that is back is used within a second.
        *("--health-check-interval-secs", "1"),
        *("--health-success-threshold", "1"),
        *("--worker-startup-check-interval", "1"),
        *("--request-timeout-secs", _NEVER_SECONDS),
        *("--shutdown-grace-period-secs", str(max(1, round(grace_seconds)))),
    ]


def gateway_not_ready_reason(listen: str, tls_cert: str = "") -> str | None:
    """Why the gateway at `listen` does not serve yet; None when it does.

    `tls_cert` is the file with its certificate, if it speaks HTTPS.

    It lists a model before it can serve it, so that only its own readiness check counts.
    """
    host, port = _split(listen, "gateway.listen")
    connection = _connection(host, int(port), tls_cert)
    try:
        connection.request("GET", "/readiness")
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        return f"the gateway at {listen} does not answer: {error}"
    finally:
        connection.close()
    if response.status == http.client.OK:
        return None
    try:
        return str(json.loads(body)["reason"])
    except (ValueError, KeyError, TypeError):
        return f"the gateway at {listen} answers with status {response.status}"


def _connection(host: str, port: int, tls_cert: str) -> http.client.HTTPConnection:
    if not tls_cert:
        return http.client.HTTPConnection(host, port, timeout=_PROBE_SECONDS)
    # The very certificate is trusted, whatever its name and whoever signed it.
    context = ssl.create_default_context(cafile=Path(tls_cert).expanduser())
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return http.client.HTTPSConnection(host, port, timeout=_PROBE_SECONDS, context=context)


def gateway_environment(environ: Mapping[str, str], trace_ratio: float = 1.0) -> dict[str, str]:
    """The environment for SMG: it takes the tokenizer from the router, never from the network.

    It traces `trace_ratio` of the requests whose caller has not decided it.
    """
    return {
        **environ,
        "HF_HUB_OFFLINE": "1",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": str(trace_ratio),
    }


def _tracing(otlp_endpoint: str) -> tuple[str, ...]:
    scheme, _, address = otlp_endpoint.rpartition("://")
    if not address or scheme == "https":
        return ()
    return (
        *("--enable-trace", "--otlp-traces-endpoint", address.rstrip("/")),
        # Its spans are of this level, and are dropped with the log lines.
        *("--log-level", "info"),
    )


def _split(address: str, setting: str) -> tuple[str, str]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ConfigError(f"{setting}: expected host:port, got {address!r}")
    return host.removeprefix("[").removesuffix("]"), port
