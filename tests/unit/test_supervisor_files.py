"""The supervisor outlives a file that a process needs and that is not as it should be."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from headwater.cli.supervise import MAX_BACKOFF_SECONDS, Supervisor
from headwater.config import load_config


def test_a_gateway_without_its_key_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "api.key"
    config = load_config(
        config_file=None,
        environ={},
        assignments=[f"state.run_dir={tmp_path}", f"gateway.api_key_file={key}"],
    )
    (tmp_path / config.shm.prefix).mkdir()
    started: list[str] = []
    monkeypatch.setattr(
        "headwater.cli.processes.ManagedProcess.start",
        lambda process, command, environ: started.append(process.name),
    )
    supervisor = Supervisor(config, tmp_path / "config.toml")
    supervisor.check(0.0)
    with caplog.at_level(logging.ERROR):
        supervisor.check(1.0)
    assert "gateway" not in started
    assert "gateway cannot be started again: gateway.api_key_file:" in caplog.text
    key.touch(mode=0o600)
    key.write_text("secret")
    supervisor.check(1.0 + MAX_BACKOFF_SECONDS)
    assert "gateway" in started
