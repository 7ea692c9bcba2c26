"""Why a connection fails over TLS, in one sentence, found out by connecting once more.

gRPC says little more than that it could not connect, and not to whom.
"""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.rpc import tls as certificates

if TYPE_CHECKING:
    from headwater.config import TlsConfig

_SECONDS = 2.0


def tls_problem(address: str, tls: TlsConfig) -> str | None:
    """None when nobody listens at `address`, or when TLS is not what is wrong.

    Blocks for a few seconds at most.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), _SECONDS) as connection:
            if certificates.is_on(tls):
                return _refusal(connection, tls.server_name or host, address, tls)
            if _speaks_tls(connection):
                return (
                    f"{address} speaks TLS, and this program called it in plain text; set tls.ca, "
                    "and tls.cert and tls.key if it wants a client certificate"
                )
    except (OSError, ValueError):
        # A ValueError: an address of another form than host:port.
        return None
    return None


def _refusal(connection: socket.socket, name: str, address: str, tls: TlsConfig) -> str | None:
    if tls.cert:
        context = certificates.pair_context("tls", tls.cert, tls.key, ssl.PROTOCOL_TLS_CLIENT)
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(Path(tls.ca).expanduser())
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(connection, server_hostname=name) as wrapped:
            # With TLS 1.3 the server judges our certificate after our part of the handshake. One
            # of gRPC then speaks first, or hangs up, mostly without an alert.
            if wrapped.recv(1):
                return None
            reason = "it hung up"
    except ssl.SSLCertVerificationError as error:
        return (
            f"the certificate of {address} is refused: {error.verify_message}; compare tls.ca and "
            "tls.server_name with the certificate it has"
        )
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "UNEXPECTED_EOF_WHILE_READING"):
            return (
                f"{address} does not speak TLS, and this program does as tls.ca is set; set up "
                "TLS there too"
            )
        reason = error.reason or "no reason given"
    except ConnectionResetError:
        reason = "it hung up"
    whom = f"the certificate {tls.cert}" if tls.cert else "callers without a certificate"
    return (
        f"{address} refuses {whom} ({reason}); give one that its tls.ca has signed with tls.cert "
        "and tls.key"
    )


def _speaks_tls(connection: socket.socket) -> bool:
    """Whether a handshake gets an answer of TLS, whatever it is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # Nothing is sent; whoever it is, is only asked which language they speak.
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(connection) as wrapped:
            return wrapped.version() is not None
    except ssl.SSLError as error:
        return error.reason not in ("WRONG_VERSION_NUMBER", "UNEXPECTED_EOF_WHILE_READING")
    except (TimeoutError, OSError):
        return False
