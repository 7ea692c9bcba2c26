"""What does it gain to compute waiting prompts together, and what does a long one cost a short one?

`python benchmarks/prefill_packing.py CHECKPOINT [--threads N] [--json FILE]`; for the gain to show,
the checkpoint must have many experts, such as
`headwater synth --shape qwen3-30b --layers 2 --format fp8 --out FOLDER`.
"""

from __future__ import annotations

import argparse
import os
import queue
import statistics
import time
from pathlib import Path

from record import write_result

from headwater.config import KvConfig
from headwater.kernels import Mode, WorkerPool
from headwater.kernels.model import NativeTransformer
from headwater.kv.layout import LAYOUT_VERSION
from headwater.kv.pool import KvPool
from headwater.kv.sizing import plan_layout
from headwater.kv.writer import KvWriter
from headwater.model.spec import ModelSpec
from headwater.services.prefill.engine import PrefillEngine
from headwater.services.prefill.job import PrefillDone, PrefillJob, PrefillProgress
from headwater.shm import Lifetime, Segment, SegmentKind, reap
from headwater.weights.loader import load_weights

PREFIX = f"hwbench-{os.getpid()}"
SHORT_TOKENS, NUM_SHORT = 32, 8
LONG_TOKENS, PASS_TOKENS = 2048, 256
REPEATS = 3


class Bench:
    """An engine on its own pool."""

    def __init__(self, folder: Path, threads: int) -> None:
        spec = ModelSpec.load(folder)
        self.vocab_size = spec.vocab_size
        weights = load_weights(folder, spec.tensors(), shm_prefix=PREFIX)
        self.model = NativeTransformer(spec, weights, WorkerPool(threads), mode=Mode.PREFILL)
        layout = plan_layout(spec, KvConfig(pool_tokens=4 * LONG_TOKENS))
        self._segment = Segment.create(
            f"{PREFIX}.kv",
            layout.payload_bytes,
            kind=SegmentKind.KV,
            lifetime=Lifetime.BOUND,
            epoch=1,
            layout_version=LAYOUT_VERSION,
        )
        self._segment.mark_ready()
        self.pool = KvPool(self._segment, layout, ttl_ms=10**7)
        self.writer = KvWriter(self._segment.handle, layout)
        self.engine = PrefillEngine(chunk_tokens=PASS_TOKENS, max_waiting=1000)
        self.engine.start()

    def submit(self, num_tokens: int, first_token: int) -> queue.SimpleQueue[float]:
        """Starts a prompt; its time of completion arrives in the queue."""
        lease = self.pool.reserve("bench", num_tokens, 1)
        done: queue.SimpleQueue[float] = queue.SimpleQueue()

        def emit(event: object) -> None:
            if isinstance(event, PrefillProgress):
                return
            assert isinstance(event, PrefillDone), event
            self.pool.release(1, [lease.lease_id])
            done.put(time.perf_counter())

        tokens = tuple((first_token + 37 * i) % self.vocab_size for i in range(num_tokens))
        self.engine.submit(PrefillJob("bench", tokens, lease, self.model, self.writer, emit))
        return done

    def one_by_one(self) -> float:
        """Seconds for all short prompts, each in a pass of its own."""
        began_at = time.perf_counter()
        for i in range(NUM_SHORT):
            self.submit(SHORT_TOKENS, i).get()
        return time.perf_counter() - began_at

    def together(self) -> float:
        """Seconds for the same, waiting together."""
        began_at = time.perf_counter()
        waiting = [self.submit(SHORT_TOKENS, i) for i in range(NUM_SHORT)]
        return max(done.get() for done in waiting) - began_at

    def alone(self, num_tokens: int) -> float:
        """Seconds for a prompt that has the engine for itself."""
        began_at = time.perf_counter()
        return self.submit(num_tokens, 0).get() - began_at

    def beside(self) -> tuple[float, float]:
        """Seconds for a long prompt, and for a short one that comes just after it."""
        began_at = time.perf_counter()
        long = self.submit(LONG_TOKENS, 0)
        short = self.submit(SHORT_TOKENS, 1)
        return long.get() - began_at, short.get() - began_at

    def close(self) -> None:
        """Stops, and removes the pool."""
        self.engine.stop()
        self.writer.close()
        self._segment.close()


def measure(bench: Bench) -> dict[str, float]:
    """All of it once, in turn."""
    long_beside, short_beside = bench.beside()
    return {
        "short_one_by_one_seconds": bench.one_by_one(),
        "short_together_seconds": bench.together(),
        "short_alone_seconds": bench.alone(SHORT_TOKENS),
        "long_alone_seconds": bench.alone(LONG_TOKENS),
        "long_beside_short_seconds": long_beside,
        "short_behind_long_seconds": short_beside,
    }


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("checkpoint", type=Path)
parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
parser.add_argument("--json")
arguments = parser.parse_args()
try:
    bench = Bench(arguments.checkpoint, arguments.threads)
    bench.together()
    runs = [measure(bench) for _ in range(REPEATS)]
    bench.close()
finally:
    reap(f"{PREFIX}.", release_weights=True)
median = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
print(
    f"{NUM_SHORT} prompts of {SHORT_TOKENS} tokens; one of {LONG_TOKENS}; passes of {PASS_TOKENS}"
)
for key, value in median.items():
    print(f"{key:28} {value:.3f}")
sizes = {
    "checkpoint": arguments.checkpoint.name,
    "threads": arguments.threads,
    "short_tokens": SHORT_TOKENS,
    "num_short": NUM_SHORT,
    "long_tokens": LONG_TOKENS,
    "pass_tokens": PASS_TOKENS,
}
write_result(arguments.json, {"sizes": sizes, "median": median, "runs": runs})
