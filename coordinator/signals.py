"""Interruption as a value: the first signal asks the run to stop at its next safe point, and nothing skips the restore.

SIGINT, SIGTERM and SIGHUP set a flag. The first one is acknowledged at once on stderr; a second changes
nothing: production comes back first.
"""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType

from coordinator.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class InterruptFlag:
    """Context manager: while inside, the three signals only set ``requested``."""

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> InterruptFlag:
        """Install the handlers."""
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_exc: object) -> None:
        """Put the previous handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested = signal.Signals(number)
            # Not through the Reporter, which this may have interrupted in a line; a closed stderr changes nothing.
            text = f"{self.requested.name}: ending; production comes back first, another one changes nothing\n"
            with contextlib.suppress(OSError):
                os.write(2, text.encode())

    def check(self) -> None:
        """A safe point.

        Raises:
            Interrupted: A signal arrived since the run began.
        """
        if self.requested is not None:
            raise Interrupted(f"interrupted by {self.requested.name}")
