"""The rate meter: counted in one thread, read in another."""

from __future__ import annotations

import threading

from headwater.telemetry.rate import RateMeter


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
