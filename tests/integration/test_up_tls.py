"""`headwater up` with mutual TLS, HTTPS and an API key: the life of a whole stack."""

from __future__ import annotations

import os
import signal
import ssl
from pathlib import Path

import openai

from tests.certificates import Authority
from tests.integration.stack import free_port
from tests.integration.test_cli import Cli, cli  # noqa: F401

KEY = "correct-horse-battery-staple"


def test_up_use_kill_down(cli: Cli, tmp_path: Path) -> None:  # noqa: F811
    plain = dict(cli.environ)
    authority = Authority(tmp_path)
    tls, edge = authority.issue("stack"), authority.issue("edge")
    key_file = tmp_path / "api.key"
    key_file.touch(mode=0o600)
    key_file.write_text(KEY)
    cli.environ |= {
        "HEADWATER_TLS_CA": tls.ca,
        "HEADWATER_TLS_CERT": tls.cert,
        "HEADWATER_TLS_KEY": tls.key,
        "HEADWATER_GATEWAY_TLS_CERT": edge.cert,
        "HEADWATER_GATEWAY_TLS_KEY": edge.key,
        "HEADWATER_GATEWAY_API_KEY_FILE": str(key_file),
    }
    refused = cli.run("up", status=1)
    assert "router.plain_listen: is empty, and the gateway speaks no TLS" in refused
    cli.environ["HEADWATER_ROUTER_PLAIN_LISTEN"] = f"127.0.0.1:{free_port()}"
    stranger = authority.issue("stranger", hosts=("elsewhere",))
    refused = cli.run(
        "up", "--set", f"tls.cert={stranger.cert}", "--set", f"tls.key={stranger.key}", status=1
    )
    assert "stranger.crt would be refused: IP address mismatch" in refused

    printed = cli.run("up")
    assert f"grpcurl -cacert {tls.ca} -cert {tls.cert} -key {tls.key} -d" in printed
    assert f"https://{cli.environ['HEADWATER_GATEWAY_LISTEN']}/v1/chat" in printed
    assert KEY not in printed
    states = cli.status()["processes"]
    assert {state["health"] for state in states.values()} == {"SERVING"}
    assert cli.run("health").splitlines() == [
        f"{name} SERVING" for name in ("decode", "prefill", "router", "gateway")
    ]
    assert cli.run("generate", "hello", "--max-tokens", "4")
    assert "blocks flushed" in cli.run("shm", "flush")
    with openai.OpenAI(
        base_url=f"https://{cli.environ['HEADWATER_GATEWAY_LISTEN']}/v1",
        api_key=KEY,
        http_client=openai.DefaultHttpxClient(verify=ssl.create_default_context(cafile=tls.ca)),
    ) as client:
        reply = client.completions.create(model="tiny", prompt="hello", max_tokens=4)
        assert reply.usage is not None

    # The supervisor sees who dies, and starts it again.
    os.kill(states["prefill"]["pid"], signal.SIGKILL)
    while cli.status(status=None)["processes"]["prefill"].get("restarts") != 1:
        pass
    cli.run("up")
    assert cli.run("generate", "hello", "--max-tokens", "4")

    # Without certificates nobody gets in, and is told why.
    stranger_cli = Cli(plain, cli.shm_prefix)
    router = plain["HEADWATER_ROUTER_LISTEN"]
    sentence = f"{router} speaks TLS, and this program called it in plain text; set tls.ca"
    assert sentence in stranger_cli.run("generate", "hello", status=1)
    states = stranger_cli.status(status=1)["processes"]
    assert sentence in states["router"]["problem"]
    assert "speaks TLS" in states["decode"]["problem"]
