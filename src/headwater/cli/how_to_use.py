"""What `headwater up` prints at its end: addresses, and a first call in each way there is."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.cli import stack
from headwater.client import DEFAULT_ADDRESS
from headwater.rpc.tls import is_on

if TYPE_CHECKING:
    from headwater.config import Config

_PROMPT = "What is the capital of France?"


def how_to_use(config: Config, config_path: Path) -> str:
    """Lines for people; `config_path` is the file with all settings."""
    router = stack.address_of("router", config)
    has_tls = is_on(config.tls)
    lines = [
        f"Serving {config.model.name}",
        f"  router   gRPC  {router}",
        f"  prefill  gRPC  {stack.address_of('prefill', config)}",
        f"  decode   gRPC  {stack.address_of('decode', config)}",
    ]
    if config.gateway.enabled:
        lines.append(f"  gateway  HTTP  {_base_url(config)}")
    flag = "" if router == DEFAULT_ADDRESS else f" --set router.listen={router}"
    if has_tls:
        flag = f" --config {shlex.quote(str(config_path))}"
    lines += [
        "",
        "In a terminal:",
        f'  {_program()} generate "The capital of France is"{flag}',
        f"  {_program()} chat{flag}",
        "",
        "gRPC:",
        f"""  grpcurl {_grpcurl_flags(config)} -d '{{"text": "The capital of France is"}}' """
        f"{router} headwater.v1.RouterService/Generate",
        "",
        "Python:",
        "  import asyncio",
        "  from headwater.client import Client",
        *(_python_imports() if has_tls else ()),
        "  async def main():",
        f"      async with Client({_python_arguments(config, router)}) as client:",
        f'          async for event in client.chat([("user", "{_PROMPT}")]):',
        '              print(event.text, end="", flush=True)',
        "  asyncio.run(main())",
    ]
    if config.gateway.enabled:
        lines += ["", "curl:", f"  {_curl(config)}"]
    lines += ["", f"Stop it with: {_program()} down"]
    return "\n".join(lines)


def _base_url(config: Config) -> str:
    return f"http{'s' if config.gateway.tls_cert else ''}://{config.gateway.listen}"


def _grpcurl_flags(config: Config) -> str:
    if not is_on(config.tls):
        return "-plaintext"
    flags = [f"-cacert {shlex.quote(config.tls.ca)}"]
    if config.tls.server_name:
        flags.append(f"-authority {config.tls.server_name}")
    if config.tls.require_client_cert == "all":
        flags.append(f"-cert {shlex.quote(config.tls.cert)} -key {shlex.quote(config.tls.key)}")
    return " ".join(flags)


def _python_imports() -> tuple[str, ...]:
    return ("  from headwater.config import TlsConfig", "  from headwater.rpc.link import Link")


def _python_arguments(config: Config, router: str) -> str:
    if not is_on(config.tls):
        return f'"{router}"'
    names = ["ca", *(["server_name"] if config.tls.server_name else [])]
    if config.tls.require_client_cert == "all":
        names += ["cert", "key"]
    settings = ", ".join(f"{name}={getattr(config.tls, name)!r}" for name in names)
    return f'"{router}", Link(TlsConfig({settings}))'


def _curl(config: Config) -> str:
    body = (
        f'{{"model": "{config.model.name}", "messages": '
        f'[{{"role": "user", "content": "{_PROMPT}"}}]}}'
    )
    key = ""
    if config.gateway.api_key_file:
        file = shlex.quote(config.gateway.api_key_file)
        key = f'-H "Authorization: Bearer $(cat {file})" '
    return (
        f"curl {_base_url(config)}/v1/chat/completions {key}"
        f"-H 'Content-Type: application/json' -d '{body}'"
    )


def _program() -> str:
    """How this command can be called again from here."""
    return "headwater" if shutil.which("headwater") else os.path.relpath(sys.argv[0])
