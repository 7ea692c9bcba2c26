"""The rate meters: counted in one thread, read in another; what they remember."""

from __future__ import annotations

import threading
import tracemalloc

import pytest

from headwater.telemetry import rate
from headwater.telemetry.rate import BusyRate, RateMeter


class Clock:
    """Stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rate, "time", clock)
    return clock


def test_reading_while_another_thread_counts() -> None:
    meter = RateMeter()
    counted = threading.Event()

    def count() -> None:
        for _ in range(2_000):
            meter.add(1)
        counted.set()

    thread = threading.Thread(target=count)
    thread.start()
    while not counted.is_set():
        assert meter.per_second() >= 0
    thread.join()
    assert meter.total == 2_000


def test_the_window_moves(clock: Clock) -> None:
    meter = RateMeter()
    meter.add(50)
    clock.now += 6.0
    meter.add(30)
    assert meter.per_second() == 8.0
    clock.now += 5.0
    assert meter.per_second() == 3.0
    clock.now += 11.0
    assert meter.per_second() == 0.0
    assert meter.total == 80


def test_a_fast_process_remembers_little(clock: Clock) -> None:
    meter = RateMeter()
    meter.add(1)
    tracemalloc.start()
    for _ in range(50_000):
        clock.now += 0.0001
        meter.add(1)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Fifty tenths of a second, of some hundred bytes each.
    assert grown < 50_000
    assert meter.per_second() == pytest.approx(5_000.1)


def test_a_rate_while_busy(clock: Clock) -> None:
    meter = BusyRate()
    assert meter.per_second() == 0.0
    meter.add(100.0, 2.0)
    clock.now += 5.0
    meter.add(20.0, 1.0)
    assert meter.per_second() == 40.0
    clock.now += 6.0
    assert meter.per_second() == 20.0
    assert (meter.total, meter.busy_seconds, meter.num_pieces) == (120.0, 3.0, 2)


def test_a_total_that_begins_anew(clock: Clock) -> None:
    meter = BusyRate()
    meter.reached(100.0, 1.0)
    meter.reached(150.0, 1.0)
    meter.reached(30.0, 1.0)
    assert meter.total == 180.0
    assert meter.per_second() == 60.0
