"""What is said of certificates, keys and addresses before anybody connects."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID

from headwater.config import TlsConfig
from headwater.errors import ConfigError
from headwater.rpc.channel import callable_address
from headwater.rpc.tls import (
    certificate_of,
    channel_credentials,
    check_listen,
    check_names,
    is_on,
    server_credentials,
    wants_client_cert,
)
from tests.certificates import Authority

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_a_good_pair_serves_and_calls(authority: Authority) -> None:
    tls = authority.issue()
    assert is_on(tls)
    server_credentials(tls, "engine")
    channel_credentials(tls)
    assert ("DNS", "localhost") in certificate_of(tls, "server")["subjectAltName"]


def test_without_a_ca_there_is_no_tls() -> None:
    assert not is_on(TlsConfig())


def test_a_client_needs_no_certificate(authority: Authority) -> None:
    tls = TlsConfig(ca=str(authority.path))
    channel_credentials(tls)
    with pytest.raises(ConfigError, match=r"tls\.cert: is empty.*set tls\.cert and tls\.key"):
        server_credentials(tls, "router")


def test_a_certificate_for_clients_alone_does_not_serve(authority: Authority) -> None:
    tls = authority.issue(uses=(ExtendedKeyUsageOID.CLIENT_AUTH,))
    channel_credentials(tls)
    with pytest.raises(ConfigError, match=r"service\.crt would be refused: .*purpose"):
        server_credentials(tls, "engine")


def _missing(tls: TlsConfig) -> TlsConfig:
    Path(tls.cert).unlink()
    return tls


def _foreign_key(tls: TlsConfig) -> TlsConfig:
    other = Authority(Path(tls.ca).parent, "other").issue("foreign")
    return dataclasses.replace(tls, key=other.key)


def _foreign_ca(tls: TlsConfig) -> TlsConfig:
    return dataclasses.replace(tls, ca=str(Authority(Path(tls.ca).parent, "other").path))


def _no_pem(tls: TlsConfig) -> TlsConfig:
    Path(tls.cert).write_text("nothing of the kind")
    return tls


def _no_pem_ca(tls: TlsConfig) -> TlsConfig:
    Path(tls.ca).write_text("nothing of the kind")
    return tls


def _empty(tls: TlsConfig) -> TlsConfig:
    Path(tls.ca).write_text("\n")
    return tls


def _open_to_all(tls: TlsConfig) -> TlsConfig:
    Path(tls.key).chmod(0o644)
    return tls


def _half(tls: TlsConfig) -> TlsConfig:
    return dataclasses.replace(tls, key="")


def _no_ca(tls: TlsConfig) -> TlsConfig:
    return dataclasses.replace(tls, ca="")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_missing, r"tls\.cert: .*/service\.crt cannot be read: No such file.*correct the path"),
        (_foreign_key, r"tls\.key: .*/foreign\.key is not the key of the certificate .*service\."),
        (_foreign_ca, r"tls\.cert: .*/service\.crt would be refused: .*CA in .*/other\.pem"),
        (_no_pem, r"tls\.cert, tls\.key: .*service\.crt and .*are not a certificate and an"),
        (_no_pem_ca, r"tls\.ca: .*/ca\.pem holds no certificates in PEM format"),
        (_empty, r"tls\.ca: .*/ca\.pem is empty"),
        (_open_to_all, r"tls\.key: .*service\.key has mode 0644.*`chmod 600 .*service\.key`"),
        (_half, r"tls\.key: is empty, but tls\.cert is set"),
        (_no_ca, r"tls\.cert: is set, but tls\.ca is not"),
    ],
)
def test_what_is_wrong_is_named(
    authority: Authority, spoil: Callable[[TlsConfig], TlsConfig], message: str
) -> None:
    tls = spoil(authority.issue())
    with pytest.raises(ConfigError, match=message):
        server_credentials(tls, "router")
    with pytest.raises(ConfigError, match=message):
        channel_credentials(tls)


def test_an_expired_certificate_is_refused(authority: Authority) -> None:
    tls = authority.issue(days=-1)
    with pytest.raises(ConfigError, match=r"service\.crt would be refused: certificate has expire"):
        server_credentials(tls, "router")


def test_the_group_may_read_a_key(authority: Authority) -> None:
    tls = authority.issue()
    Path(tls.key).chmod(0o440)
    server_credentials(tls, "router")


def test_names_are_compared(authority: Authority) -> None:
    tls = authority.issue(hosts=("localhost", "decode", "127.0.0.1"))
    check_names(tls, ["localhost", "127.0.0.1", "decode"])
    with pytest.raises(ConfigError, match=r"IP address mismatch.*subjectAltName holds 10\.0\.0\.1"):
        check_names(tls, ["localhost", "10.0.0.1"])
    with pytest.raises(ConfigError, match=r"Hostname mismatch.*set tls\.server_name"):
        check_names(tls, ["prefill"])
    # One name stands for all addresses.
    check_names(dataclasses.replace(tls, server_name="decode"), ["10.0.0.1"])


@pytest.mark.parametrize(
    ("choice", "wanted_by"), [("all", ["router", "engine"]), ("engines", ["engine"]), ("none", [])]
)
def test_who_wants_a_client_certificate(choice: str, wanted_by: list[str]) -> None:
    tls = TlsConfig(require_client_cert=choice)  # type: ignore[arg-type]
    assert [kind for kind in ("router", "engine") if wants_client_cert(tls, kind)] == wanted_by


@pytest.mark.parametrize("listen", ["127.0.0.1:1", "127.1.2.3:1", "[::1]:1", "localhost:1"])
def test_plain_text_stays_on_this_machine(listen: str) -> None:
    check_listen("router.listen", listen, TlsConfig(), is_encrypted=False)


@pytest.mark.parametrize("listen", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1"])
def test_plain_text_to_others_must_be_allowed(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"router\.listen: .* is beyond this machine.*plaintext"):
        check_listen("router.listen", listen, TlsConfig(), is_encrypted=False)
    check_listen("router.listen", listen, TlsConfig(plaintext="anywhere"), is_encrypted=False)
    check_listen("router.listen", listen, TlsConfig(), is_encrypted=True)


def test_a_wildcard_is_called_at_loopback() -> None:
    assert callable_address("0.0.0.0:5") == "127.0.0.1:5"
    assert callable_address("[::]:5") == "[::1]:5"
    assert callable_address("decode:5") == "decode:5"
