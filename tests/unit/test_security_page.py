"""docs/security.md: its commands work, and what it says of settings is so."""

from __future__ import annotations

import dataclasses
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from headwater.config import LimitsConfig, TlsConfig, load_config
from headwater.rpc.secret_file import read_secret
from headwater.rpc.tls import channel_credentials, check_listen, check_names, server_credentials

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs the command openssl: apt-get install openssl"
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def run(script: str, folder: Path) -> None:
    subprocess.run(
        ["bash", "-euc", script], cwd=folder, check=True, capture_output=True, timeout=60
    )


@needs_openssl
def test_the_certificates_that_it_makes_can_be_used(tmp_path: Path) -> None:
    [script] = blocks("bash")
    run(script, tmp_path)
    folder = tmp_path / "tls"
    tls = TlsConfig(
        ca=str(folder / "ca.pem"), cert=str(folder / "cert.pem"), key=str(folder / "key.pem")
    )
    server_credentials(tls, "engine")
    channel_credentials(tls)
    # What deploy/compose.tls.yaml needs, too.
    check_names(tls, ["localhost", "127.0.0.1", "router", "prefill", "decode"])
    assert stat.S_IMODE((folder / "ca.key").stat().st_mode) == 0o600


@needs_openssl
def test_the_key_that_it_makes_can_be_used(tmp_path: Path) -> None:
    [script] = re.findall(r"^    (\(umask 077; openssl rand.*)$", PAGE, re.MULTILINE)
    run(script, tmp_path)
    key = read_secret("gateway.api_key_file", str(tmp_path / "api.key")).decode("ascii").strip()
    assert len(key) == 64


def test_its_settings_exist(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("\n".join(blocks("toml")), encoding="utf-8")
    config = load_config(config_file=str(file), environ={})
    assert config.tls.ca
    assert config.router.plain_listen
    assert config.gateway.api_key_file


def test_it_names_every_limit() -> None:
    named = set(re.findall(r"^\| `(\w+)`", PAGE.partition("## Limits")[2], re.MULTILINE))
    assert named == {field.name for field in dataclasses.fields(LimitsConfig)}


def test_the_containers_with_tls_find_each_other() -> None:
    services = yaml.safe_load((ROOT / "deploy" / "compose.tls.yaml").read_text(encoding="utf-8"))[
        "services"
    ]
    base = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
    assert services.keys() == base.keys() - {
        *("memory", "model", "collector", "jaeger", "prometheus", "grafana")
    }

    def plain(environ: dict[str, str]) -> dict[str, str]:
        return {name: re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", text) for name, text in environ.items()}

    configs = {
        name: load_config(
            config_file=None, environ=plain({**base[name]["environment"], **each["environment"]})
        )
        for name, each in services.items()
    }
    tls = {config.tls.cert for name, config in configs.items() if name != "gateway"}
    assert len(tls) == 1
    assert tls != {""}
    routers = configs["gateway"].gateway.routers
    assert routers.partition(":")[2] == configs["router"].router.plain_listen.rpartition(":")[2]
    router = configs["router"]
    check_listen("plain_listen", router.router.plain_listen, router.tls, is_encrypted=False)


def test_a_connection_is_refused_calls_before_it_has_to_wait() -> None:
    # One connection carries all calls of a router, its lease renewals and health checks too.
    limits = LimitsConfig()
    assert limits.streams_per_connection >= 2 * limits.concurrent_calls
