"""Configuration: precedence, round trip, and what is said about each kind of mistake."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from headwater.config import Config, load_config, to_toml
from headwater.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def load(
    *, file: Path | None = None, environ: dict[str, str] | None = None, flags: tuple[str, ...] = ()
) -> Config:
    return load_config(
        config_file=str(file) if file else None, environ=environ or {}, assignments=flags
    )


def test_defaults_listen_on_loopback_only() -> None:
    config = load()
    for section in (config.router, config.prefill, config.decode, config.gateway):
        assert section.listen.startswith("127.0.0.1:")
    assert config.gateway.metrics_listen.startswith("127.0.0.1:")


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[kv]\nslots = 1\nblock_tokens = 2\nlease_ttl_ms = 300\n")
    environ = {"HEADWATER_KV_BLOCK_TOKENS": "4", "HEADWATER_KV_LEASE_TTL_MS": "400"}
    kv = load(file=file, environ=environ, flags=("kv.lease_ttl_ms=500",)).kv
    assert (kv.slots, kv.block_tokens, kv.lease_ttl_ms) == (1, 4, 500)


def test_file_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[kv]\nslots = 7\n")
    assert load(environ={"HEADWATER_CONFIG": str(file)}).kv.slots == 7


def test_written_file_reads_back_equal(tmp_path: Path) -> None:
    config = load(flags=('model.name=with "quotes" and ü', "telemetry.trace_ratio=0.25"))
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert load(file=file) == config


@pytest.mark.parametrize(
    ("environ", "flags", "message"),
    [
        ({"HEADWATER_KV_SLOTS": "many"}, (), "HEADWATER_KV_SLOTS: kv.slots: expected an integer"),
        ({"HEADWATER_KV_SLOT": "1"}, (), "HEADWATER_KV_SLOT: unknown setting; section [kv] has"),
        ({"HEADWATER_NONSENSE": "1"}, (), "HEADWATER_NONSENSE: unknown setting"),
        ({}, ("kv.slots=0",), "kv.slots: must be between 1 and 65536, got 0"),
        ({}, ("kv.slots",), "must have the form section.key=value"),
        ({}, ("nope.slots=1",), "unknown section nope"),
        ({}, ("kv.nope=1",), "unknown key kv.nope; section [kv] has pool_tokens"),
        ({}, ("telemetry.trace_ratio=nan",), "must be finite"),
        ({}, ("telemetry.log_level=loud",), "must be one of debug, info, warning, error"),
        ({}, ("router.listen=50050",), "must have the form host:port"),
        ({}, ("router.listen=a:70000",), "must have the form host:port"),
        ({}, ("shm.prefix=../x",), "must be 1 to 64 letters"),
        ({}, ("gateway.enabled=perhaps",), "expected true or false, got 'perhaps'"),
        ({}, ("state.run_dir=",), "must not be empty"),
    ],
)
def test_mistakes_are_named(environ: dict[str, str], flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(environ=environ, flags=flags)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[kv]\nslot = 1\n", "unknown key kv.slot"),
        ("[kvv]\nslots = 1\n", "unknown section [kvv]"),
        ("kv = 1\n", "kv must be a section"),
        ("[kv]\nslots = 1.5\n", "expected an integer, got 1.5"),
        ("[kv]\nslots = true\n", "expected an integer, got True"),
        ("[gateway]\nenabled = 1\n", "expected true or false, got 1"),
        ("[kv\n", "not a TOML file"),
    ],
)
def test_mistakes_in_a_file_name_the_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(file=file)
    assert str(caught.value).startswith(str(file))
    assert message in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(file=tmp_path / "none.toml")
