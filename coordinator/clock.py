"""Time for the control side: the only file that reads a clock.

Monotonic nanoseconds decide; UTC text is for people and receipts. ``ManualClock`` is for tests of code that waits.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """What code that needs time takes as an argument."""

    def monotonic_ns(self) -> int:
        """Nanoseconds of a clock that never steps."""

    def utc(self) -> str:
        """RFC 3339 UTC with ``Z`` and milliseconds."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


class SystemClock:
    """The machine's clocks."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since an arbitrary start."""
        return time.monotonic_ns()

    def utc(self) -> str:
        """Now, in UTC."""
        return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"

    def sleep(self, seconds: float) -> None:
        """Wait for real."""
        time.sleep(max(seconds, 0.0))


class ManualClock:
    """A clock that moves only when told to, or when somebody sleeps on it."""

    def __init__(self, start_ns: int = 0, utc: str = "2000-01-01T00:00:00.000Z") -> None:
        self._now_ns = start_ns
        self._utc = utc

    def monotonic_ns(self) -> int:
        """The set time."""
        return self._now_ns

    def utc(self) -> str:
        """The set text."""
        return self._utc

    def sleep(self, seconds: float) -> None:
        """Advance."""
        self._now_ns += int(seconds * 1e9)
