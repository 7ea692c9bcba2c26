"""What the decode process shows of itself while it runs: see headwater.telemetry.catalogue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.services.decode.models import hybrid_of
from headwater.telemetry.metrics import observe
from headwater.weights.placement import memory_nodes

if TYPE_CHECKING:
    from headwater.kv.pool import KvPool
    from headwater.model.interface import Model
    from headwater.services.decode.engine import DecodeEngine
    from headwater.telemetry.metrics import Reading


def observe_decode(
    model_name: str, model: Model, engine: DecodeEngine, pool: KvPool, read_limit: float
) -> None:
    """Exports batch, KV pool and memory traffic; `read_limit` in bytes/s, zero: not measured."""
    hybrid = hybrid_of(model)
    num_blocks = pool.layout.num_blocks
    nodes = memory_nodes()

    def per_node(total: float) -> Reading:
        # Weights are spread evenly over the nodes, by shards of the experts and else by pages.
        return [(total / len(nodes), {"node": str(node)}) for node in nodes]

    def roofline() -> Reading:
        return [(engine.reading.per_second() / read_limit, {})] if read_limit else []

    observe(
        {
            "vllm:kv_cache_usage_perc": lambda: 1.0 - pool.num_free_blocks / num_blocks,
            "vllm:prefix_cache_queries": lambda: pool.queried_tokens,
            "vllm:prefix_cache_hits": lambda: pool.cached_tokens,
            "vllm:num_preemptions": lambda: engine.num_preemptions,
        },
        {"model_name": model_name},
    )
    observe(
        {
            "headwater.decode.running_requests": lambda: engine.num_running,
            "headwater.decode.waiting_requests": lambda: engine.num_waiting,
            "headwater.decode.batch_limit": lambda: engine.batch_limit,
            "headwater.decode.pending_tokens": lambda: engine.num_extending_tokens,
            "headwater.decode.step_time": lambda: engine.step_seconds,
            "headwater.decode.steps": lambda: engine.reading.num_pieces,
            "headwater.decode.busy_time": lambda: engine.reading.busy_seconds,
            "headwater.decode.generated_tokens": lambda: engine.generated.total,
            "headwater.hybrid.steps": lambda: hybrid.num_device_steps if hybrid else 0,
            "headwater.hybrid.dual_steps": lambda: hybrid.num_dual_steps if hybrid else 0,
            "headwater.hybrid.dual_gain": lambda: hybrid.dual_speedup if hybrid else 0.0,
            "headwater.hybrid.pulled": lambda: hybrid.pulled_bytes if hybrid else 0,
            "headwater.hybrid.fetched": lambda: hybrid.fetched_bytes if hybrid else 0,
            "headwater.hybrid.predictions": lambda: hybrid.num_predicted if hybrid else 0,
            "headwater.hybrid.right_predictions": lambda: hybrid.num_right if hybrid else 0,
            "headwater.dram.read": lambda: per_node(engine.reading.total),
            "headwater.dram.rate": lambda: per_node(engine.reading.per_second()),
            "headwater.dram.limit": lambda: read_limit,
            "headwater.dram.roofline": roofline,
            "headwater.kv.total_blocks": lambda: num_blocks,
            "headwater.kv.free_blocks": lambda: pool.num_free_blocks,
            "headwater.kv.cached_blocks": lambda: pool.num_cached_blocks,
            "headwater.kv.quarantined_blocks": lambda: pool.num_quarantined_blocks,
            "headwater.kv.leases": lambda: pool.num_leases,
        }
    )
