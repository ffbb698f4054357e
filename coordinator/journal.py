"""The journal of one hold: JSON Lines, fsynced before each remote action and after it.

The journal is the coordinator's memory, not the authority: ``hold recover`` works without it by asking the guards.
A torn last line (power loss in the middle of a write) is dropped on reading; a torn line anywhere else refuses.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from coordinator.clock import Clock
from coordinator.errors import UsageError


class Journal:
    """Append-only and fsynced; one writer, the process that opened the hold."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self._clock = clock
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        _fsync_directory(path.parent)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record with its times and force it to disk before returning."""
        stamped = {"utc": self._clock.utc(), "monotonic_ns": self._clock.monotonic_ns(), **record}
        line = json.dumps(stamped, sort_keys=True, separators=(",", ":")) + "\n"
        os.write(self._fd, line.encode())
        os.fsync(self._fd)

    def close(self) -> None:
        """Release the file; the journal stays."""
        os.close(self._fd)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """All whole records of a journal, oldest first.

    Raises:
        UsageError: A line other than the last is not a JSON object.
    """
    lines = path.read_bytes().split(b"\n")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            value = json.loads(line)
        except ValueError:
            if number == len(lines):
                # The write that a crash tore: its action has an intent at most, so the guard is asked.
                break
            raise UsageError(
                "the journal is damaged", where=f"{path}:{number}", expected="one JSON object", next_step="use `hold recover --site`"
            ) from None
        if not isinstance(value, dict):
            raise UsageError("the journal is damaged", where=f"{path}:{number}", expected="one JSON object")
        records.append(value)
    return records


def _fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
