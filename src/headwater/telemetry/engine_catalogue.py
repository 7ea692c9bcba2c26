"""Metrics that prefill and decode export; see catalogue.py, which has all of them."""

from __future__ import annotations

from headwater.telemetry.metric import counter, gauge

_MODEL = ("model_name",)
_NODE = ("node",)

PREFILL = (
    gauge(
        "headwater.prefill.running_requests", "{request}", "prefill", "Prompts begun and not done"
    ),
    gauge("headwater.prefill.waiting_requests", "{request}", "prefill", "Prompts not begun"),
    gauge(
        "headwater.prefill.pending_tokens", "{token}", "prefill", "Prompt tokens not computed yet"
    ),
    counter("headwater.prefill.computed_tokens", "{token}", "prefill", "Prompt tokens computed"),
    counter("headwater.prefill.passes", "{pass}", "prefill", "Passes over the weights"),
    counter(
        "headwater.prefill.shared_passes",
        "{pass}",
        "prefill",
        "Those of them that several GPUs computed together",
    ),
    gauge("headwater.prefill.gpus", "{gpu}", "prefill", "GPUs that the next pass takes"),
    gauge(
        "headwater.prefill.copy_share",
        "1",
        "prefill",
        "Share of the time that copies of weights may take while answers are computed",
    ),
    counter(
        "headwater.prefill.lost_ranks",
        "{loss}",
        "prefill",
        "GPUs that computed together with others and were lost and started again",
    ),
    counter("headwater.prefill.busy_time", "s", "prefill", "Time spent in passes"),
    counter(
        "headwater.h2d.copied",
        "By",
        "prefill",
        "Weights copied from host memory to the GPU; stays 0 on a CPU",
    ),
    gauge(
        "headwater.h2d.rate",
        "By/s",
        "prefill",
        "The same per second of the passes of the last ten seconds",
    ),
    gauge(
        "headwater.ring.occupancy",
        "1",
        "prefill",
        "Share of the GPU ring's slots with experts that are still to be used",
    ),
)

DECODE = (
    gauge(
        "vllm:kv_cache_usage_perc",
        "",
        "decode",
        "Share of the KV pool's blocks that requests hold, 0 to 1",
        _MODEL,
    ),
    counter(
        "vllm:prefix_cache_queries", "{token}", "decode", "Prompt tokens of all leases", _MODEL
    ),
    counter(
        "vllm:prefix_cache_hits",
        "{token}",
        "decode",
        "Those of them that were found in the KV pool",
        _MODEL,
    ),
    counter(
        "vllm:num_preemptions",
        "{preemption}",
        "decode",
        "How often a request gave its KV blocks back, to compute them again",
        _MODEL,
    ),
    gauge("headwater.decode.running_requests", "{request}", "decode", "Requests in the batch"),
    gauge(
        "headwater.decode.waiting_requests",
        "{request}",
        "decode",
        "Requests waiting for a place in the batch, or for blocks",
    ),
    gauge(
        "headwater.decode.batch_limit",
        "{request}",
        "decode",
        "Requests that may run at once, as speed and objectives allow",
    ),
    gauge(
        "headwater.decode.pending_tokens",
        "{token}",
        "decode",
        "Prompt tokens that decode has still to compute",
    ),
    gauge(
        "headwater.decode.step_time",
        "s",
        "decode",
        "Time that a step takes now, with the requests that run; 0: not known yet",
    ),
    counter("headwater.decode.steps", "{step}", "decode", "Steps of the batch"),
    counter(
        "headwater.decode.busy_time",
        "s",
        "decode",
        "Time spent in steps, without what is computed of prompts",
    ),
    counter("headwater.decode.generated_tokens", "{token}", "decode", "Tokens sampled"),
    counter(
        "headwater.hybrid.steps",
        "{step}",
        "decode",
        "Steps that a GPU computed a part of; stays 0 on a CPU",
    ),
    counter(
        "headwater.hybrid.dual_steps",
        "{step}",
        "decode",
        "Those of them that ran as two micro-batches",
    ),
    gauge(
        "headwater.hybrid.dual_gain",
        "1",
        "decode",
        "Time of one batch over time of two micro-batches, where that is greatest; 0: not known",
    ),
    counter(
        "headwater.hybrid.pulled",
        "By",
        "decode",
        "Keys and values copied from the KV pool to the GPU",
    ),
    counter(
        "headwater.hybrid.fetched",
        "By",
        "decode",
        "Expert weights read into the CPU's caches before the GPU asked for them",
    ),
    counter(
        "headwater.hybrid.predictions",
        "{layer}",
        "decode",
        "Layers of steps whose experts were predicted",
    ),
    counter(
        "headwater.hybrid.right_predictions",
        "{layer}",
        "decode",
        "Those of them whose likeliest expert was then asked for",
    ),
    counter(
        "headwater.dram.read",
        "By",
        "decode",
        "Weights and KV that steps read, by NUMA node; computed from what a step must read",
        _NODE,
    ),
    gauge(
        "headwater.dram.rate",
        "By/s",
        "decode",
        "The same per second of the steps of the last ten seconds",
        _NODE,
    ),
    gauge(
        "headwater.dram.limit",
        "By/s",
        "decode",
        "Plain reading of the weights by all threads, all nodes, measured at the start; 0: not yet",
    ),
    gauge(
        "headwater.dram.roofline",
        "1",
        "decode",
        "headwater.dram.rate over all nodes, as a share of headwater.dram.limit",
    ),
    gauge("headwater.kv.total_blocks", "{block}", "decode", "Blocks of the KV pool"),
    gauge(
        "headwater.kv.free_blocks",
        "{block}",
        "decode",
        "Blocks that a lease could get, cached ones among them",
    ),
    gauge(
        "headwater.kv.cached_blocks",
        "{block}",
        "decode",
        "Free blocks whose content may be used again",
    ),
    gauge(
        "headwater.kv.quarantined_blocks",
        "{block}",
        "decode",
        "Blocks of ended leases that a writer may still hold",
    ),
    gauge("headwater.kv.leases", "{lease}", "decode", "Leases alive"),
)
