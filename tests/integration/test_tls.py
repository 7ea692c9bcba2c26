"""TLS over real sockets: who is let in, and what those hear who are not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from headwater.config import TlsConfig
from headwater.errors import ConfigError, UnavailableError
from headwater.rpc.link import Link
from tests.certificates import Authority
from tests.integration.echo import answer, echoing


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def refusal(address: str, tls: TlsConfig) -> str:
    with pytest.raises(UnavailableError) as caught:
        await answer(address, Link(tls))
    return str(caught.value)


async def test_both_ends_show_certificates(authority: Authority) -> None:
    async with echoing(Link(authority.issue("router"))) as address:
        assert await answer(address, Link(authority.issue("client"))) == "hello"


async def test_without_a_client_certificate_nobody_is_let_in(authority: Authority) -> None:
    async with echoing(Link(authority.issue())) as address:
        message = await refusal(address, TlsConfig(ca=str(authority.path)))
    assert f"{address} refuses callers without a certificate" in message
    assert "with tls.cert and tls.key" in message


@pytest.mark.parametrize("kind", ["router", "engine"])
async def test_the_edge_may_do_without_client_certificates(authority: Authority, kind: str) -> None:
    tls = dataclasses.replace(authority.issue(), require_client_cert="engines")
    async with echoing(Link(tls), kind) as address:  # type: ignore[arg-type]
        caller = TlsConfig(ca=str(authority.path))
        if kind == "router":
            assert await answer(address, Link(caller)) == "hello"
        else:
            assert "refuses callers without a certificate" in await refusal(address, caller)


async def test_a_client_of_another_ca_is_refused(authority: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger").issue("client")
    # It trusts the server; the server does not trust it. Only its own side can be checked by it.
    async with echoing(Link(authority.issue())) as address:
        bundle = tmp_path / "both.pem"
        bundle.write_bytes(authority.path.read_bytes() + Path(stranger.ca).read_bytes())
        message = await refusal(address, dataclasses.replace(stranger, ca=str(bundle)))
    assert f"{address} refuses the certificate {stranger.cert}" in message


async def test_a_server_of_another_ca_is_refused(authority: Authority, tmp_path: Path) -> None:
    async with echoing(Link(Authority(tmp_path, "stranger").issue())) as address:
        message = await refusal(address, authority.issue("client"))
    assert f"the certificate of {address} is refused" in message
    assert "compare tls.ca" in message


async def test_a_server_of_another_name_is_refused(authority: Authority) -> None:
    tls = authority.issue(hosts=("router.example",))
    async with echoing(Link(tls)) as address:
        assert "is refused: IP address mismatch" in await refusal(address, tls)
        named = dataclasses.replace(tls, server_name="router.example")
        assert await answer(address, Link(named)) == "hello"


async def test_plain_text_to_a_server_with_tls(authority: Authority) -> None:
    async with echoing(Link(authority.issue())) as address:
        message = await refusal(address, TlsConfig())
    assert message == (
        f"{address} speaks TLS, and this program called it in plain text; set tls.ca, and tls.cert "
        "and tls.key if it wants a client certificate"
    )


async def test_tls_to_a_server_in_plain_text(authority: Authority) -> None:
    async with echoing() as address:
        message = await refusal(address, authority.issue())
    assert message == (
        f"{address} does not speak TLS, and this program does as tls.ca is set; set up TLS there "
        "too"
    )


async def test_a_server_with_an_expired_certificate_does_not_start(authority: Authority) -> None:
    with pytest.raises(ConfigError, match="would be refused: certificate has expired"):
        async with echoing(Link(authority.issue(days=-1))):
            pass


async def test_a_server_beyond_this_machine_wants_tls(authority: Authority) -> None:
    from headwater.rpc.server import Server

    server = Server("0.0.0.0:0", ())
    with pytest.raises(ConfigError, match=r"listen: 0\.0\.0\.0:0 is beyond this machine"):
        await server.start()
    await server.stop(0)
    encrypted = Server("0.0.0.0:0", (), Link(authority.issue()))
    assert await encrypted.start()
    await encrypted.stop(0)
