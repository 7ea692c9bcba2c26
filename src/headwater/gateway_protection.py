"""How SMG, the HTTP gateway, is protected: HTTPS, its API key, and limits.

It speaks no TLS to routers: SMG 1.13 takes grpcs:// and certificates for them, but its gRPC client
uses none, and fails. So the router listens for it in plain text, on loopback.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from headwater.config import GatewayConfig, LimitsConfig, TlsConfig
from headwater.errors import ConfigError
from headwater.gateway_process import API_KEY_FILE
from headwater.rpc.secret_file import read_secret
from headwater.rpc.tls import check_listen, pair_context

if TYPE_CHECKING:
    from headwater.config import Config


@dataclass(frozen=True, slots=True)
class Protection:
    """Of the gateway; by default none but the limits."""

    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)

    @classmethod
    def of(cls, config: Config) -> Self:
        """The settings of a whole configuration."""
        return cls(config.gateway, config.tls, config.limits)

    def check(self, listen: str) -> None:
        """Raises ConfigError when a file cannot be used, or SMG would speak plain text to others.

        SMG itself takes its listening without a word.
        """
        cert, key = self.gateway.tls_cert, self.gateway.tls_key
        if bool(cert) != bool(key):
            raise ConfigError(
                "gateway.tls_cert, gateway.tls_key: one is set and the other is empty; set both or "
                "none"
            )
        check_listen("gateway.listen", listen, self.tls, is_encrypted=bool(cert))
        if cert:
            pair_context("gateway", cert, key, ssl.PROTOCOL_TLS_SERVER)
        if self.gateway.api_key_file:
            read_secret("gateway.api_key_file", self.gateway.api_key_file)

    def options(self) -> tuple[str, ...]:
        """Options of headwater.gateway_process; none of them is secret."""
        chosen = ["--max-payload-size", str(self.limits.message_bytes)]
        if self.gateway.tls_cert:
            chosen += ["--tls-cert-path", _path(self.gateway.tls_cert)]
            chosen += ["--tls-key-path", _path(self.gateway.tls_key)]
        if self.gateway.api_key_file:
            chosen += [API_KEY_FILE, _path(self.gateway.api_key_file)]
        return tuple(chosen)


def _path(name: str) -> str:
    return str(Path(name).expanduser())
