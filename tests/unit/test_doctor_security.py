"""What `headwater doctor` says of TLS, and of who can reach the processes."""

from __future__ import annotations

import re
from pathlib import Path

from headwater.config import Config, GatewayConfig, RouterConfig, TlsConfig
from headwater.doctor import security
from tests.certificates import Authority


def test_tls_and_who_can_reach_the_processes(tmp_path: Path) -> None:
    authority = Authority(tmp_path)

    def levels(tls: TlsConfig, **gateway: str) -> list[str]:
        config = Config(
            tls=tls,
            router=RouterConfig(listen="0.0.0.0:50050"),
            gateway=GatewayConfig(**gateway),  # type: ignore[arg-type]
        )
        findings = [*security.check_tls(config.tls), *security.check_reach(config)]
        return [f"{finding.level.value}: {finding.text}" for finding in findings]

    assert levels(TlsConfig()) == [
        "ok: off: the processes speak plain text",
        "error: router.listen 0.0.0.0:50050 can be reached from elsewhere, in plain text",
    ]
    assert levels(TlsConfig(plaintext="anywhere"), listen="0.0.0.0:8000")[1:] == [
        "warning: router.listen 0.0.0.0:50050 can be reached from elsewhere, in plain text",
        "warning: gateway.listen 0.0.0.0:8000 can be reached from elsewhere, in plain text",
        "warning: gateway.listen 0.0.0.0:8000 serves whoever reaches it",
    ]
    [fresh] = levels(authority.issue(days=100))
    assert re.fullmatch(r"ok: on: .*service\.crt is valid for 100 more days", fresh)
    [short] = levels(authority.issue(days=3))
    assert short.startswith("warning: on: ")
    [expired] = levels(authority.issue(days=-1))
    assert expired.startswith("error: tls.cert: ")
    assert "expired" in expired
