"""Runs SMG with an API key from a file: python -m headwater.keyed_gateway FILE OPTIONS...

SMG itself takes the key from its command line alone, where everybody on the machine can read it.
"""

from __future__ import annotations

import sys

from headwater.errors import ConfigError
from headwater.rpc.secret_file import read_secret


def main() -> None:
    """Runs until SIGTERM. Exits with 1 and one clear line when the file cannot be used."""
    # Part of SMG; no other process needs it.
    from smg.launch_router import (  # type: ignore[import-untyped]
        launch_router,
        parse_router_args,
    )

    key_file, *options = sys.argv[1:]
    arguments = parse_router_args(options)
    try:
        key = read_secret("gateway.api_key_file", key_file)
        arguments.api_key = key.decode("ascii").strip()
    except ConfigError as error:
        sys.exit(f"headwater gateway: {error}")
    except UnicodeDecodeError:
        sys.exit(
            f"headwater gateway: gateway.api_key_file: {key_file} holds more than ASCII; HTTP "
            "headers cannot carry it"
        )
    launch_router(arguments)


if __name__ == "__main__":
    main()
