"""The limits of a server, as gRPC's options.

Which options there are: grpc/impl/channel_arg_names.h of gRPC core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headwater.config import LimitsConfig

# Whoever connects and then says nothing is disconnected.
_HANDSHAKE_MS = 20_000


def server_options(limits: LimitsConfig) -> tuple[tuple[str, int], ...]:
    """For grpc.aio.server."""
    return (
        # Two servers on one port would each get half of the calls.
        ("grpc.so_reuseport", 0),
        # The interceptor refuses at half of it, and says which limit it is. This one protects
        # memory from what is larger still.
        ("grpc.max_receive_message_length", 2 * limits.message_bytes),
        ("grpc.max_send_message_length", limits.message_bytes),
        # Between the soft and the hard one gRPC refuses at random.
        ("grpc.max_metadata_size", limits.metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.metadata_bytes),
        ("grpc.max_concurrent_streams", limits.streams_per_connection),
        ("grpc.http2.min_ping_interval_without_data_ms", round(1000 * limits.min_ping_seconds)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
    )


def max_rpcs(limits: LimitsConfig) -> int:
    """Calls of all kinds at once.

    Twice those of our own services: whoever only asks for health or reflection must not lack an
    answer because of them, nor be without a limit.
    """
    return 2 * limits.concurrent_calls
