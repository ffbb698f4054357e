"""Waiting on a core instead of in the kernel, for a bounded time: a wake-up costs more than most frames take to read.

Off unless asked for. It helps where each end has a core of its own; elsewhere the end that spins takes time from the
other. Deadlines, TLS and the order of frames are as without it.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from typing import Final

MAX_SPIN_US: Final = 100_000
"""Longer than a round ever takes: beyond it, sleeping costs nothing that matters."""


class SpinningSelector(selectors.DefaultSelector):
    """Looks again and again for ``spin_s`` seconds before it sleeps."""

    def __init__(self, spin_s: float) -> None:
        super().__init__()
        self._spin_s = spin_s

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As the base class: ``timeout`` in seconds, None waits for ever."""
        now = time.monotonic()
        end = None if timeout is None else now + timeout
        until = now + self._spin_s if end is None else min(now + self._spin_s, end)
        while not (ready := super().select(0)) and now < until:
            now = time.monotonic()
        if ready or (end is not None and now >= end):
            return ready
        return super().select(None if end is None else end - now)


def spinning_loop(spin_s: float) -> asyncio.AbstractEventLoop:
    """An event loop for a process that serves the wire; 0 gives the usual one."""
    return asyncio.SelectorEventLoop(SpinningSelector(spin_s)) if spin_s else asyncio.new_event_loop()
