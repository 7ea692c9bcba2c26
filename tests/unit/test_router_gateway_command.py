"""The command line of the HTTP gateway."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from headwater.cli.stack import gateway_command_of
from headwater.config import Config, GatewayConfig, RouterConfig, TlsConfig
from headwater.errors import ConfigError
from headwater.gateway import gateway_command, gateway_environment, gateway_not_ready_reason
from headwater.gateway_protection import Protection
from tests.certificates import Authority


def _command(
    *routers: str,
    listen: str = "127.0.0.1:8000",
    metrics_listen: str = "127.0.0.1:29000",
    otlp_endpoint: str = "",
    protection: Protection | None = None,
) -> list[str]:
    return gateway_command(
        listen=listen,
        metrics_listen=metrics_listen,
        router_addresses=routers or ["127.0.0.1:50050"],
        otlp_endpoint=otlp_endpoint,
        grace_seconds=2.4,
        python="python3",
        protection=protection,
    )


def _value(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_everything_listens_where_it_is_told() -> None:
    command = _command(metrics_listen="[::1]:29001")
    assert command[:3] == ["python3", "-m", "headwater.gateway_process"]
    assert _value(command, "--host") == "127.0.0.1"
    assert _value(command, "--port") == "8000"
    assert _value(command, "--prometheus-host") == "::1"
    assert _value(command, "--prometheus-port") == "29001"
    assert _value(command, "--worker-urls") == "grpc://127.0.0.1:50050"
    assert _value(command, "--shutdown-grace-period-secs") == "2"
    assert "0.0.0.0" not in command


def test_a_busy_router_is_never_taken_for_a_broken_one() -> None:
    command = _command()
    assert int(_value(command, "--worker-wedge-secs")) >= 3600
    assert "--disable-circuit-breaker" in command
    assert "--disable-retries" in command


def test_several_nodes_stand_in_for_each_other() -> None:
    command = _command("node-a:50050", "node-b:50050")
    first = command.index("--worker-urls") + 1
    assert command[first : first + 3] == [
        "grpc://node-a:50050",
        "grpc://node-b:50050",
        "--backend",
    ]
    assert _value(command, "--policy") == "cache_aware"
    assert int(_value(command, "--retry-max-retries")) >= 2
    assert "--disable-retries" not in command


def test_an_address_in_a_list_is_named() -> None:
    with pytest.raises(ConfigError, match=r"gateway\.routers: expected host:port, got ''"):
        _command("node-a:50050", "")


@pytest.mark.parametrize("address", ["8000", ":8000", "localhost", "localhost:http", ""])
def test_what_is_no_address_is_named(address: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.listen: expected host:port"):
        _command(listen=address)


def test_environment_keeps_the_gateway_off_the_network() -> None:
    environment = gateway_environment({"A": "b"})
    assert environment["A"] == "b"
    assert environment["HF_HUB_OFFLINE"] == "1"


def test_the_gateway_traces_what_the_other_processes_trace() -> None:
    assert "--enable-trace" not in _command()
    command = _command(otlp_endpoint="http://127.0.0.1:4317/")
    assert command[command.index("--otlp-traces-endpoint") + 1] == "127.0.0.1:4317"
    assert "--enable-trace" in command
    # It would send plain text.
    assert "--enable-trace" not in _command(otlp_endpoint="https://collector:4317")
    environment = gateway_environment({}, trace_ratio=0.25)
    assert environment["OTEL_TRACES_SAMPLER"] == "parentbased_traceidratio"
    assert environment["OTEL_TRACES_SAMPLER_ARG"] == "0.25"


def test_a_gateway_that_is_not_there_is_not_ready() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        # Bound but not listening: the connection is refused.
        reason = gateway_not_ready_reason(address)
    assert reason is not None
    assert address in reason


def test_a_key_is_on_no_command_line(tmp_path: Path) -> None:
    file = tmp_path / "api.key"
    file.write_text("secret\n")
    file.chmod(0o644)
    protection = Protection(GatewayConfig(api_key_file=str(file)))
    with pytest.raises(ConfigError, match=r"gateway\.api_key_file: .*has mode 0644.*chmod 600"):
        _command(protection=protection)
    file.chmod(0o600)
    command = _command(protection=protection)
    assert _value(command, "--api-key-file") == str(file)
    assert not any("secret" in argument for argument in command)
    file.write_text("")
    with pytest.raises(ConfigError, match=r"api\.key is empty"):
        _command(protection=protection)


def test_https_needs_a_pair_that_belongs_together(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    one, other = authority.issue("one"), authority.issue("other")
    command = _command(protection=Protection(GatewayConfig(tls_cert=one.cert, tls_key=one.key)))
    assert _value(command, "--tls-cert-path") == one.cert
    assert _value(command, "--tls-key-path") == one.key
    with pytest.raises(ConfigError, match=r"gateway\.tls_key: .*other\.key is not the key of"):
        _command(protection=Protection(GatewayConfig(tls_cert=one.cert, tls_key=other.key)))
    with pytest.raises(ConfigError, match=r"one is set and the other is empty"):
        _command(protection=Protection(GatewayConfig(tls_cert=one.cert)))


def test_beyond_this_machine_it_wants_https(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.listen: 0\.0\.0\.0:80 is beyond this machine"):
        _command(listen="0.0.0.0:80")
    _command(listen="0.0.0.0:80", protection=Protection(tls=TlsConfig(plaintext="anywhere")))
    pair = Authority(tmp_path).issue()
    _command(
        listen="0.0.0.0:80",
        protection=Protection(GatewayConfig(tls_cert=pair.cert, tls_key=pair.key)),
    )


def test_the_gateway_reaches_a_router_with_tls_in_plain_text() -> None:
    tls = TlsConfig(ca="ca.pem", cert="a", key="b")
    with pytest.raises(
        ConfigError, match=r"router\.plain_listen: is empty, and the gateway speaks"
    ):
        gateway_command_of(Config(tls=tls))
    router = RouterConfig(plain_listen="127.0.0.1:50049")
    command = gateway_command_of(Config(tls=tls, router=router))
    assert _value(command, "--worker-urls") == "grpc://127.0.0.1:50049"
    assert _value(command, "--max-payload-size") == str(16 * 1024 * 1024)
