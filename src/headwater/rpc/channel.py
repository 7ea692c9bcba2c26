"""Channels to our own services."""

from __future__ import annotations

import grpc

# A dead peer is noticed by keepalive, a restarted one is found again within a second.
_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    # Peers on this node are never behind a proxy, whatever the environment says.
    ("grpc.enable_http_proxy", 0),
)


def open_blocking_channel(address: str) -> grpc.Channel:
    """The same for programs without an event loop; use it as a context manager."""
    return grpc.insecure_channel(address, options=_OPTIONS)


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to `address` (host:port); connects at the first call and reconnects by itself."""
    return grpc.aio.insecure_channel(address, options=_OPTIONS)
