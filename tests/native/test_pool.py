"""The worker pool: who takes part, and how its threads behave."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading

import pytest
import torch

from headwater.errors import ConfigError
from headwater.kernels import Matrix, WorkerPool, linear


def multiply(pool: WorkerPool, matrix: Matrix, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape[0], matrix.rows)
    linear(pool, matrix, x, out)
    return out


def test_workers_are_pinned_to_allowed_cpus() -> None:
    allowed = os.sched_getaffinity(0)
    pool = WorkerPool(len(allowed))
    assert sorted(pool.cpus) == sorted(allowed)
    assert WorkerPool(len(allowed), pin=False).cpus == ()
    assert WorkerPool(len(allowed) + 1).cpus == ()


@pytest.mark.parametrize("num_threads", [0, 1025])
def test_unreasonable_numbers_of_threads_are_refused(num_threads: int) -> None:
    with pytest.raises(ConfigError, match=f"threads: expected 1 to 1024, got {num_threads}"):
        WorkerPool(num_threads)


@pytest.mark.parametrize("spin_us", [0, 50, 100_000])
@pytest.mark.parametrize("num_threads", [2, 9])
def test_many_short_jobs(num_threads: int, spin_us: int) -> None:
    """More threads than CPUs, awake or asleep: every job is complete when it returns."""
    pool = WorkerPool(num_threads, spin_us=spin_us)
    matrix = Matrix.bf16(torch.ones(640, 96).bfloat16())
    x = torch.empty(2, 96)
    for i in range(300):
        x.fill_(i % 100)
        assert torch.equal(multiply(pool, matrix, x), torch.full((2, 640), 96.0 * (i % 100)))


def test_idle_workers_use_no_cpu() -> None:
    pool = WorkerPool(2, spin_us=1000)
    multiply(pool, Matrix.bf16(torch.ones(64, 64).bfloat16()), torch.ones(1, 64))
    idle = threading.Event()
    idle.wait(0.05)
    before = resource.getrusage(resource.RUSAGE_SELF)
    idle.wait(0.3)
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < 0.1


def test_gil_is_released() -> None:
    """A waiting Python thread gets its turn while products run."""
    pool = WorkerPool(1)
    matrix = Matrix.bf16(torch.zeros(1024, 1024).bfloat16())
    x, out = torch.zeros(16, 1024), torch.zeros(16, 1024)
    may_run = threading.Event()
    has_run: list[bool] = []

    def take_turn() -> None:
        may_run.wait()
        has_run.append(True)

    thread = threading.Thread(target=take_turn)
    thread.start()
    interval = sys.getswitchinterval()
    # No switch by force: the other thread runs only if the GIL is released.
    sys.setswitchinterval(100)
    try:
        may_run.set()
        attempts = 0
        while not has_run and attempts < 1000:
            linear(pool, matrix, x, out)
            attempts += 1
        assert has_run
    finally:
        sys.setswitchinterval(interval)
        thread.join()


@pytest.mark.parametrize("isa", ["avx2", "scalar"])
def test_instruction_set_can_be_forced(isa: str) -> None:
    code = "from headwater import _native as n; n.self_test(n.isa()); print(n.isa())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"HEADWATER_FORCE_ISA": isa},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == isa


def test_unknown_instruction_set_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from headwater import _native; _native.isa()"],
        env=os.environ | {"HEADWATER_FORCE_ISA": "mmx"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "HEADWATER_FORCE_ISA: 'mmx' is unknown or not supported by this CPU" in done.stderr
    assert "ConfigError" in done.stderr
