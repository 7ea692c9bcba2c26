"""Runs SMG with its administration closed: python -m headwater.gateway_process OPTIONS...

Left to itself SMG lets whoever reaches it add a router by URL, to which it then sends everybody's
prompts. Here nobody has the key for that: it is made at the start and forgotten. The callers' key
comes from a file: SMG itself takes it from its command line alone, where others can read it.
"""

from __future__ import annotations

import argparse
import secrets
import sys

from headwater.errors import ConfigError
from headwater.rpc.secret_file import read_secret

API_KEY_FILE = "--api-key-file"


def main() -> None:
    """Runs until SIGTERM. Exits with 1 and one clear line when the key cannot be used."""
    # Part of SMG; no other process needs it.
    from smg.launch_router import (  # type: ignore[import-untyped]
        launch_router,
        parse_router_args,
    )

    ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ours.add_argument(API_KEY_FILE)
    known, options = ours.parse_known_args()
    arguments = parse_router_args(options)
    # Id, name, key and role.
    arguments.control_plane_api_keys = [("nobody", "nobody", secrets.token_hex(32), "admin")]
    if known.api_key_file:
        arguments.api_key = _api_key(known.api_key_file)
    launch_router(arguments)


def _api_key(file: str) -> str:
    try:
        return read_secret("gateway.api_key_file", file).decode("ascii").strip()
    except ConfigError as error:
        sys.exit(f"headwater gateway: {error}")
    except UnicodeDecodeError:
        sys.exit(
            f"headwater gateway: gateway.api_key_file: {file} holds more than ASCII; HTTP headers "
            "cannot carry it"
        )


if __name__ == "__main__":
    main()
