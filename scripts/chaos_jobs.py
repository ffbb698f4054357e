"""Hands the numbers of schedules to worker processes and keeps what comes back: the parent of ``chaos.py``.

A worker reads a number from stdin, answers with one line of JSON, and has hosts of its own. Only this side knows what
is wanted and what is done, so a worker that dies loses nothing: its number runs again, and when the next worker dies of
it too, it is lost. Workers get SIGTERM when this process ends, however it ends, and power their hosts off. This module
knows no schedule and no host.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import signal
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Json = dict[str, Any]

TRIES = 2
END_S = 90.0
"""What a worker needs to power its hosts off, on a busy machine too."""


class Worker:
    """One process that runs schedules, in a session of its own: a terminal's Ctrl-C reaches the parent only.

    Attributes:
        number: What it works on, None when idle.
        until: Deadline on the monotonic clock for that.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self.number: int | None = None
        self.until = float("inf")
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self.stdout = self._process.stdin, self._process.stdout

    def give(self, number: int, timeout_s: float) -> None:
        """Let it run that schedule. A worker that has died is noticed by `take`."""
        self.number, self.until = number, time.monotonic() + timeout_s
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(f"{number}\n")
            self._stdin.flush()

    def take(self) -> Json | None:
        """Its answer, or None: it has died instead."""
        line = self.stdout.readline()
        if not line.endswith("\n"):
            return None
        self.number, self.until = None, float("inf")
        answer: Json = json.loads(line)
        return answer

    def stop(self) -> None:
        """Ask it to end; `wait` waits."""
        if self.number is not None:
            self._process.terminate()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    def wait(self) -> int:
        """Its exit code, killed if need be: its hosts die with it."""
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self.stdout.close()
        return self._process.wait()


class Jobs:
    """Runs numbers on up to ``jobs`` workers."""

    def __init__(self, argv: Sequence[str], jobs: int, done: Callable[[int, Json], None], timeout_s: float) -> None:
        self._argv = argv
        self._jobs = jobs
        self._done = done
        self._timeout_s = timeout_s
        self._selector = selectors.DefaultSelector()
        self._workers: list[Worker] = []
        self._died: Counter[int] = Counter()

    def run(self, numbers: Iterable[int], until: float = float("inf")) -> None:
        """Until all are done, or handed-out ones are after ``until``; ``done`` is called for each in this thread."""
        left = deque(numbers)
        handler = signal.signal(signal.SIGTERM, _exit)
        try:
            while left and len(self._workers) < self._jobs:
                self._start(left)
            while any(worker.number is not None for worker in self._workers):
                if time.monotonic() > until:
                    left.clear()
                self._turn(left)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            for worker in self._workers:
                worker.stop()
            for worker in self._workers:
                worker.wait()
            self._selector.close()
            signal.signal(signal.SIGTERM, handler)

    def _start(self, left: deque[int]) -> None:
        worker = Worker(self._argv)
        self._workers.append(worker)
        self._selector.register(worker.stdout, selectors.EVENT_READ, worker)
        worker.give(left.popleft(), self._timeout_s)

    def _turn(self, left: deque[int]) -> None:
        for key, _ in self._selector.select(1.0):
            worker: Worker = key.data
            number = worker.number
            answer = worker.take()
            if answer is None:
                self._bury(worker, left)
            elif number is not None:
                self._done(number, answer)
                if left:
                    worker.give(left.popleft(), self._timeout_s)
        for worker in list(self._workers):
            if time.monotonic() > worker.until:
                self._bury(worker, left)

    def _bury(self, worker: Worker, left: deque[int]) -> None:
        self._selector.unregister(worker.stdout)
        self._workers.remove(worker)
        is_late = time.monotonic() > worker.until
        worker.stop()
        code = worker.wait()
        number = worker.number
        if number is not None:
            self._died[number] += 1
            if self._died[number] < TRIES:
                left.appendleft(number)
            else:
                why = f"did not answer within {self._timeout_s} s" if is_late else f"ended with {code}"
                self._done(number, {"lost": f"{TRIES} workers died of it, the last one {why}"})
        if left:
            self._start(left)


def _exit(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)
