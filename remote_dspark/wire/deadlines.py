"""How long a worker waits for a client, and the timer that ends the wait.

Rules: times come from the running loop. Bytes arrive far more often than deadlines pass, so arming only notes the
new deadline; the one timer moves itself on when it fires early.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerDeadlines:
    """Seconds after which a silent or slow client is let go (its slots are freed through ``on_disconnect``).

    Attributes:
        hello_s: From connecting (TLS included) to a settled HELLO.
        frame_s: From the first byte of a frame to its last.
        idle_s: Between two frames; clients that may be silent for longer use a heartbeat.
        write_s: For the client to take what was written.
    """

    hello_s: float = 10.0
    frame_s: float = 10.0
    idle_s: float = 120.0
    write_s: float = 10.0


class Watch:
    """A deadline that is moved with every arrival; ``on_late`` is called with the reason once it passed."""

    def __init__(self, on_late: Callable[[str], None]) -> None:
        self._on_late = on_late
        self._deadline_s = 0.0
        self._why = ""
        self._timer: asyncio.TimerHandle | None = None

    def arm(self, seconds: float, why: str) -> None:
        """Replaces the deadline."""
        loop = asyncio.get_running_loop()
        self._deadline_s, self._why = loop.time() + seconds, why
        if self._timer is None or self._timer.when() > self._deadline_s:
            self.cancel()
            self._timer = loop.call_at(self._deadline_s, self._fire)

    def cancel(self) -> None:
        """No deadline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        if loop.time() < self._deadline_s:
            self._timer = loop.call_at(self._deadline_s, self._fire)
        else:
            self._on_late(self._why)
