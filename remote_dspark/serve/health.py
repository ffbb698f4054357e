"""The worker's state, judged by progress: what ``/health`` says and when it is WEDGED or POISONED.

A listening port proves nothing. READY means that the model answered a warm-up and that no engine call has been in
flight longer than the bound; WEDGED ends by itself when that call ends; POISONED never ends: only a restart clears it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from remote_dspark.contract import ServerState


class Health:
    """State of one worker process, safe to read from any thread.

    Args:
        clock_ns: Monotonic clock.
        wedge_after_s: Longest time an engine call may be in flight.
        weights: ``checkpoint``, or the label of synthetic ones.
    """

    def __init__(self, clock_ns: Callable[[], int], wedge_after_s: float, weights: str = "checkpoint") -> None:
        self._weights = weights
        self._clock_ns = clock_ns
        self._wedge_after_ns = int(wedge_after_s * 1e9)
        self._lock = threading.Lock()
        self._phase = ServerState.BOOTING
        self._detail = ""
        self._in_flight_since: int | None = None
        self._rounds = 0

    def enter(self, phase: ServerState) -> None:
        """Move to the next phase; a poisoned worker stays poisoned."""
        with self._lock:
            if self._phase is not ServerState.POISONED:
                self._phase = phase

    def poison(self, detail: str) -> None:
        """Something failed that no request caused; nothing is served any more. The first reason is kept."""
        with self._lock:
            if self._phase is not ServerState.POISONED:
                self._phase, self._detail = ServerState.POISONED, detail

    def call_started(self) -> None:
        """An engine call began; there is one at a time."""
        with self._lock:
            self._in_flight_since = self._clock_ns()

    def call_ended(self) -> None:
        """It ended, or failed."""
        with self._lock:
            self._in_flight_since = None

    def count_rounds(self, num_rounds: int) -> None:
        """A STEP was drafted for this many requests."""
        with self._lock:
            self._rounds += num_rounds

    @property
    def poison_detail(self) -> str | None:
        """Why nothing is served any more, or None."""
        with self._lock:
            return self._detail if self._phase is ServerState.POISONED else None

    @property
    def state(self) -> ServerState:
        """The state now."""
        with self._lock:
            waiting = self._in_flight_since is not None
            is_late = waiting and self._clock_ns() - (self._in_flight_since or 0) > self._wedge_after_ns
            return ServerState.WEDGED if is_late and self._phase is not ServerState.POISONED else self._phase

    def to_document(self) -> dict[str, str | int]:
        """The JSON of ``GET /health``."""
        state = self.state
        with self._lock:
            since = self._in_flight_since
            return {
                "state": state.value,
                "rounds": self._rounds,
                "in_flight_ns": 0 if since is None else self._clock_ns() - since,
                "detail": self._detail,
                "weights": self._weights,
            }
