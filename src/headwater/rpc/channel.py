"""Channels to our own services."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from headwater.rpc.link import PLAIN
from headwater.rpc.tls import channel_credentials, is_on

if TYPE_CHECKING:
    from headwater.rpc.link import Link

# A stopped peer is noticed by keepalive within 20 s, a restarted one found again within a second.
_OPTIONS = (
    # Our servers take a ping every ten seconds.
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Whoever listens to a long answer sends nothing himself.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In spite of its name the least time for an attempt to connect; a busy machine takes a while.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Peers on this node are never behind a proxy, whatever the environment says.
    ("grpc.enable_http_proxy", 0),
)


def open_blocking_channel(address: str, link: Link = PLAIN) -> grpc.Channel:
    """The same for programs without an event loop; use it as a context manager."""
    options = _options(link)
    if not is_on(link.tls):
        return grpc.insecure_channel(address, options=options)
    credentials = channel_credentials(link.tls)
    return grpc.secure_channel(callable_address(address), credentials, options=options)


def open_channel(address: str, link: Link = PLAIN) -> grpc.aio.Channel:
    """A channel to `address` (host:port); connects at the first call and reconnects by itself.

    Raises ConfigError when `link.tls` names files that cannot be used.
    """
    options = _options(link)
    if not is_on(link.tls):
        return grpc.aio.insecure_channel(address, options=options)
    credentials = channel_credentials(link.tls)
    return grpc.aio.secure_channel(callable_address(address), credentials, options=options)


def _options(link: Link) -> list[tuple[str, int | str]]:
    options: list[tuple[str, int | str]] = [
        *_OPTIONS,
        ("grpc.max_receive_message_length", link.limits.message_bytes),
        ("grpc.max_send_message_length", link.limits.message_bytes),
    ]
    if link.tls.server_name:
        options.append(("grpc.ssl_target_name_override", link.tls.server_name))
    return options


def callable_address(address: str) -> str:
    """Where a process that listens on `address` is called from here.

    A wildcard leads to this machine itself, but no certificate bears its name.
    """
    host, _, port = address.rpartition(":")
    return f"{_WILDCARDS.get(host, host)}:{port}"


_WILDCARDS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
