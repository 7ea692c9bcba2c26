"""What an engine process does before it computes: it checks the kernels and starts the workers."""

from __future__ import annotations

import logging
import os

import torch

from headwater.kernels.pool import WorkerPool, isa, self_test

logger = logging.getLogger(__name__)


def start_workers(num_threads: int) -> WorkerPool:
    """The process's pool of compute threads; 0: one per CPU that the process may use.

    Raises ConfigError when HEADWATER_FORCE_ISA or the number is out of range, InternalError when a
    kernel computes something else than the reference.
    """
    self_test()
    # What torch is left with is small, and its own threads would compete with ours.
    torch.set_num_threads(1)
    workers = WorkerPool(num_threads or len(os.sched_getaffinity(0)))
    logger.info("CPU kernels: %s, %d threads", isa(), workers.num_threads)
    return workers
