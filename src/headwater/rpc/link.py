"""What both ends of a connection are given: TLS and limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from headwater.config import LimitsConfig, TlsConfig

if TYPE_CHECKING:
    from headwater.config import Config


@dataclass(frozen=True, slots=True)
class Link:
    """Settings of servers and channels; by default plain text and the default limits."""

    tls: TlsConfig = field(default_factory=TlsConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)

    @classmethod
    def of(cls, config: Config) -> Self:
        """The settings of a whole configuration."""
        return cls(config.tls, config.limits)


PLAIN = Link()
