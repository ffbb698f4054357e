"""The last steps' times, for a probe to fetch: what the engine measured, and what the worker adds around it.

Safe to read from any thread. Only numbers: nothing of a request's content is here.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from remote_dspark.drafter.timings import StepTimings

KEPT_STEPS: Final = 4096


class StepLog:
    """A bounded log of steps, oldest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: deque[tuple[StepTimings | None, dict[str, int]]] = deque(maxlen=KEPT_STEPS)
        self._num_steps = 0

    def add(self, timings: StepTimings | None, encode_ns: int, thread_ns: int) -> None:
        """Add a step.

        Args:
            timings: What the engine measured.
            encode_ns: Rows to a reply.
            thread_ns: The whole step on the engine's thread: message in, reply out.
        """
        with self._lock:
            own = {"number": self._num_steps, "encode_ns": encode_ns, "thread_ns": thread_ns}
            # laid out when somebody asks: the reply still waits for this call
            self._steps.append((timings, own))
            self._num_steps += 1

    def to_document(self) -> dict[str, object]:
        """The JSON of ``GET /timings``: the number of steps ever, and the last ones."""
        with self._lock:
            num_steps, steps = self._num_steps, list(self._steps)
        documents = [own if timings is None else timings.to_document() | own for timings, own in steps]
        return {"num_steps": num_steps, "steps": documents}
