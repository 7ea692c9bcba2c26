"""How large the KV pool is: as configured, or as much as is sensible on this machine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from headwater.errors import SharedMemoryFullError
from headwater.kv.layout import KvLayout
from headwater.weights.memory import plan_memory

if TYPE_CHECKING:
    from headwater.config import KvConfig
    from headwater.model.spec import ModelSpec

logger = logging.getLogger(__name__)

# Without a configured size: room for this many full contexts, but no more than this share of what
# memory is left, for activations and the page cache need some too.
AUTO_CONTEXTS = 4
AUTO_MEMORY_SHARE = 0.5


def plan_layout(spec: ModelSpec, config: KvConfig) -> KvLayout:
    """The pool's layout.

    Raises SharedMemoryFullError when a configured size does not fit, or not even one block does.
    """
    available = plan_memory(0)
    free_bytes = min(available.shm_available_bytes, available.ram_available_bytes)
    pool_tokens = config.pool_tokens or AUTO_CONTEXTS * spec.max_context_tokens
    layout = _layout(spec, config, num_blocks=max(1, -(-pool_tokens // config.block_tokens)))
    if config.pool_tokens == 0:
        per_block = layout.num_layers * layout.block_bytes
        num_affordable = int(free_bytes * AUTO_MEMORY_SHARE) // per_block
        if 0 < num_affordable < layout.num_blocks:
            logger.warning(
                "the KV pool holds %d tokens, less than %d contexts of %d: memory is short",
                num_affordable * config.block_tokens,
                AUTO_CONTEXTS,
                spec.max_context_tokens,
            )
            layout = _layout(spec, config, num_blocks=num_affordable)
    if layout.payload_bytes > free_bytes:
        raise SharedMemoryFullError(
            f"kv.pool_tokens: {layout.num_blocks * config.block_tokens} tokens need "
            f"{layout.payload_bytes} bytes of shared memory, {free_bytes} are free, "
            f"{layout.payload_bytes - free_bytes} short; lower it, or enlarge /dev/shm"
        )
    return layout


def _layout(spec: ModelSpec, config: KvConfig, *, num_blocks: int) -> KvLayout:
    return KvLayout.of(
        spec, num_blocks=num_blocks, block_tokens=config.block_tokens, num_slots=config.slots
    )
