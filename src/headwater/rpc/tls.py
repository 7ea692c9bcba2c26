"""Certificates and keys: read, checked before anybody connects, and handed to gRPC.

What OpenSSL would say to a peer in the middle of a connection, gRPC hardly passes on. So the files
are first tried out on each other, in a handshake in memory.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import grpc

from headwater.errors import ConfigError
from headwater.rpc.secret_file import read_file, read_secret

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headwater.config import TlsConfig

_HANDSHAKE_ROUNDS = 8

# What a certificate is used for, and which kind of process a server is.
Use: TypeAlias = Literal["server", "client"]
Kind: TypeAlias = Literal["router", "engine"]


def is_on(tls: TlsConfig) -> bool:
    """Whether connections are encrypted. Raises ConfigError for settings that do not fit."""
    for name in ("cert", "key"):
        if getattr(tls, name) and not tls.ca:
            raise ConfigError(
                f"tls.{name}: is set, but tls.ca is not; set it to the certificates that sign our "
                "peers'"
            )
    if bool(tls.cert) != bool(tls.key):
        given, missing = ("cert", "key") if tls.cert else ("key", "cert")
        raise ConfigError(f"tls.{missing}: is empty, but tls.{given} is set; set both or none")
    return bool(tls.ca)


@dataclass(frozen=True, slots=True)
class _Files:
    """PEM; without a certificate of our own, both are None."""

    ca: bytes
    cert: bytes | None
    key: bytes | None


def channel_credentials(tls: TlsConfig) -> grpc.ChannelCredentials:
    """For a client. Raises ConfigError when a file is missing, broken, expired or exposed."""
    files = _read(tls, "client")
    return grpc.ssl_channel_credentials(files.ca, files.key, files.cert)


def server_credentials(tls: TlsConfig, kind: Kind) -> grpc.ServerCredentials:
    """For a server. Raises ConfigError as `channel_credentials`, and without a certificate."""
    files = _read(tls, "server")
    if files.cert is None or files.key is None:
        raise ConfigError(
            "tls.cert: is empty, but tls.ca asks for TLS; set tls.cert and tls.key to the "
            "certificate and the key of this process"
        )
    wants_cert = wants_client_cert(tls, kind)
    return grpc.ssl_server_credentials(
        [(files.key, files.cert)],
        root_certificates=files.ca if wants_cert else None,
        require_client_auth=wants_cert,
    )


def wants_client_cert(tls: TlsConfig, kind: Kind) -> bool:
    """Whether a server of that kind refuses callers without a certificate."""
    return tls.require_client_cert == "all" or (
        tls.require_client_cert == "engines" and kind == "engine"
    )


def certificate_of(tls: TlsConfig, use: Use, host: str = "") -> dict[str, Any]:
    """Our own certificate as ssl.SSLSocket.getpeercert describes it; both files must be set.

    Raises ConfigError when a peer would refuse it; as a server's, one that calls it `host`, if that
    is not empty.
    """
    cert, ca = Path(tls.cert).expanduser(), Path(tls.ca).expanduser()
    server = pair_context("tls", tls.cert, tls.key, ssl.PROTOCOL_TLS_SERVER)
    client = pair_context("tls", tls.cert, tls.key, ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = bool(host)
    client.verify_mode = ssl.CERT_REQUIRED if use == "server" else ssl.CERT_NONE
    server.verify_mode = ssl.CERT_REQUIRED if use == "client" else ssl.CERT_NONE
    for context in (client, server):
        context.load_verify_locations(ca)
    try:
        return _handshake(client, server, host or None, use)
    except ssl.SSLCertVerificationError as error:
        remedy = (
            f"issue one whose subjectAltName holds {host}, or set tls.server_name to a name that "
            "it bears"
            if "match" in error.verify_message.lower()
            else f"issue a new one with the CA in {ca}"
        )
        raise ConfigError(
            f"tls.cert: {cert} would be refused: {error.verify_message}; {remedy}"
        ) from error
    except ssl.SSLError as error:
        raise ConfigError(
            f"tls.cert: {cert} cannot be used: {error.reason}; issue a new one with the CA in {ca}"
        ) from error


def pair_context(section: str, cert: str, key: str, protocol: int) -> ssl.SSLContext:
    """With the PEM files of the settings `tls.cert` and `tls.key`, or `gateway.tls_cert` and so on.

    Raises ConfigError when they do not belong together or are no PEM files.
    """
    prefix = "tls." if section == "tls" else f"{section}.tls_"
    context = ssl.SSLContext(protocol)
    cert_path, key_path = Path(cert).expanduser(), Path(key).expanduser()
    read_file(f"{prefix}cert", cert)
    read_secret(f"{prefix}key", key)
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(cert_path, key_path, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"{prefix}key: {key_path} is not the key of the certificate {cert_path}; give the "
                "pair that was made together"
            ) from error
        raise ConfigError(
            f"{prefix}cert, {prefix}key: {cert_path} and {key_path} are not a certificate and an "
            f"unencrypted private key in PEM format ({error.reason or error})"
        ) from error
    return context


def check_names(tls: TlsConfig, hosts: Iterable[str]) -> None:
    """Raises ConfigError when our own certificate does not bear the name it is called by."""
    for host in sorted({tls.server_name} if tls.server_name else set(hosts)):
        certificate_of(tls, "server", host)


def check_listen(setting: str, listen: str, tls: TlsConfig, *, is_encrypted: bool) -> None:
    """Raises ConfigError when a server would speak plain text to more than this machine."""
    if is_encrypted or tls.plaintext == "anywhere" or is_loopback(listen):
        return
    raise ConfigError(
        f"{setting}: {listen} is beyond this machine, and without TLS everybody who reaches it may "
        "read and send requests; listen on 127.0.0.1, or set up TLS (docs/security.md), or, on a "
        "network that nobody else is on, set tls.plaintext to anywhere"
    )


def is_loopback(address: str) -> bool:
    """Whether host:port leads to this machine alone."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(each).partition("%")[0]).is_loopback for each in found)


def _read(tls: TlsConfig, use: Use) -> _Files:
    is_on(tls)
    ca = read_file("tls.ca", tls.ca)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(
            cadata=ca.decode("ascii", "replace")
        )
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"tls.ca: {Path(tls.ca).expanduser()} holds no certificates in PEM format"
        ) from error
    if not tls.cert:
        return _Files(ca, None, None)
    certificate_of(tls, use)
    return _Files(ca, read_file("tls.cert", tls.cert), read_secret("tls.key", tls.key))


def _handshake(
    client_context: ssl.SSLContext, server_context: ssl.SSLContext, host: str | None, use: Use
) -> dict[str, Any]:
    """Connects both in memory; returns the certificate that was verified."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=host)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    ends = (client, server)
    for _ in range(_HANDSHAKE_ROUNDS):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
        if all(end.version() for end in ends):
            break
    return (client if use == "server" else server).getpeercert() or {}
