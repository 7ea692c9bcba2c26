"""TLS and addresses: whether the processes will start, and who can reach them."""

from __future__ import annotations

import ssl
import time
from typing import TYPE_CHECKING

from headwater.doctor.finding import Finding, error, ok, warning
from headwater.errors import ConfigError
from headwater.rpc.tls import certificate_of, channel_credentials, is_loopback, is_on

if TYPE_CHECKING:
    from headwater.config import Config, TlsConfig

TLS = "TLS"
_DAY_SECONDS = 86_400
_WARN_DAYS = 14
_SERVICES = ("router", "prefill", "decode")


def check_tls(tls: TlsConfig) -> list[Finding]:
    """Whether certificates can be used, and for how long still."""
    try:
        if not is_on(tls):
            return [ok(TLS, "off: the processes speak plain text")]
        channel_credentials(tls)
        if not tls.cert:
            return [ok(TLS, f"on, for clients: {tls.ca}")]
        ends = ssl.cert_time_to_seconds(certificate_of(tls, "server")["notAfter"])
    except ConfigError as problem:
        return [error(TLS, str(problem), "see docs/security.md")]
    days = (ends - time.time()) / _DAY_SECONDS
    text = f"on: {tls.cert} is valid for {days:.0f} more days"
    if days < _WARN_DAYS:
        return [warning(TLS, text, "issue a new one, and restart the processes")]
    return [ok(TLS, text)]


def check_reach(config: Config) -> list[Finding]:
    """Whether others on the network can read along, or read metrics."""
    findings = []
    for setting, address in _plain_addresses(config).items():
        if is_loopback(address):
            continue
        text = f"{setting} {address} can be reached from elsewhere, in plain text"
        if config.tls.plaintext == "loopback":
            remedy = "listen on 127.0.0.1, or set up TLS (docs/security.md)"
            findings.append(error(TLS, text, remedy))
        else:
            remedy = "make sure that nobody else is on that network, or set up TLS"
            findings.append(warning(TLS, text, remedy))
    gateway = config.gateway
    if gateway.enabled and not gateway.api_key_file and not is_loopback(gateway.listen):
        text = f"gateway.listen {gateway.listen} serves whoever reaches it"
        findings.append(warning(TLS, text, "set gateway.api_key_file"))
    return findings


def _plain_addresses(config: Config) -> dict[str, str]:
    found = {}
    if not (config.tls.ca or config.tls.cert):
        found = {f"{name}.listen": getattr(config, name).listen for name in _SERVICES}
    if config.router.plain_listen:
        found["router.plain_listen"] = config.router.plain_listen
    if config.gateway.enabled and not config.gateway.tls_cert:
        found["gateway.listen"] = config.gateway.listen
    return found
