"""Channels to our own services."""

from __future__ import annotations

import grpc

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
