"""What an engine process does before it computes: it checks the kernels and starts the workers."""

from __future__ import annotations

import logging
import os

import torch

from headwater.kernels.pool import WorkerPool, isa, self_test, set_exact_activations

logger = logging.getLogger(__name__)


def start_workers(num_threads: int, *, exact_activations: bool = False) -> WorkerPool:
    """The process's pool of compute threads; 0: one per CPU that the process may use.

    Its layers, and all others of the process, round activations to BF16 or not.

    Raises ConfigError when HEADWATER_FORCE_ISA or the number is out of range, InternalError when a
    kernel computes something else than the reference.
    """
    set_exact_activations(exact_activations)
    self_test()
    # What torch is left with is small, and its own threads would compete with ours.
    torch.set_num_threads(1)
    workers = WorkerPool(num_threads or len(os.sched_getaffinity(0)))
    pieces = ", activations in two pieces" if exact_activations else ""
    logger.info("CPU kernels: %s%s, %d threads", isa(), pieces, workers.num_threads)
    return workers
