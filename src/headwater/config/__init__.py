"""The configuration of every process: one frozen, validated object, built once at start."""

from headwater.config.schema import (
    Config,
    DecodeConfig,
    GatewayConfig,
    GpuConfig,
    KvConfig,
    ModelConfig,
    ObjectivesConfig,
    PrefillConfig,
    RouterConfig,
    ShmConfig,
    StateConfig,
    TelemetryConfig,
)
from headwater.config.sources import load_config, to_toml

__all__ = [
    "Config",
    "DecodeConfig",
    "GatewayConfig",
    "GpuConfig",
    "KvConfig",
    "ModelConfig",
    "ObjectivesConfig",
    "PrefillConfig",
    "RouterConfig",
    "ShmConfig",
    "StateConfig",
    "TelemetryConfig",
    "load_config",
    "to_toml",
]
