"""Time on this host. The only file of the guard that reads a clock.

Deadlines are (boot id, CLOCK_BOOTTIME): it counts suspended time, and no step of the wall clock moves it. Wall-clock
times are for people and receipts only.
"""

from __future__ import annotations

import time

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def boottime_ns() -> int:
    """CLOCK_BOOTTIME in ns."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def monotonic_ns() -> int:
    """CLOCK_MONOTONIC in ns, for durations."""
    return time.monotonic_ns()


def utc_now(ahead_s: float = 0.0) -> str:
    """Wall clock as RFC 3339 with ``Z``, optionally some seconds ahead."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + ahead_s))


def boot_id() -> str:
    """The kernel's id of this boot."""
    with open(_BOOT_ID, encoding="ascii") as handle:
        return handle.read().strip()


def pause(seconds: float) -> None:
    """Sleep; never less than 1 ms, so that no loop can spin."""
    time.sleep(max(seconds, 0.001))


def wait_until(condition: object, timeout_s: float, every_s: float = 0.05) -> bool:
    """Poll ``condition()`` until it is true or the time is over; returns its last answer."""
    if not callable(condition):
        raise TypeError("condition must be callable")
    end = boottime_ns() + int(timeout_s * 1e9)
    while True:
        if condition():
            return True
        left_s = (end - boottime_ns()) / 1e9
        if left_s <= 0:
            return False
        pause(min(every_s, left_s))
