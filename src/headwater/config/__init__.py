"""The configuration of every process: one frozen, validated object, built once at start."""

from headwater.config.schema import (
    Config,
    DecodeConfig,
    GatewayConfig,
    GpuConfig,
    KvConfig,
    LimitsConfig,
    ModelConfig,
    ObjectivesConfig,
    PrefillConfig,
    RouterConfig,
    ShmConfig,
    StateConfig,
    TelemetryConfig,
    TlsConfig,
)
from headwater.config.sources import load_config, to_toml

__all__ = [
    "Config",
    "DecodeConfig",
    "GatewayConfig",
    "GpuConfig",
    "KvConfig",
    "LimitsConfig",
    "ModelConfig",
    "ObjectivesConfig",
    "PrefillConfig",
    "RouterConfig",
    "ShmConfig",
    "StateConfig",
    "TelemetryConfig",
    "TlsConfig",
    "load_config",
    "to_toml",
]
