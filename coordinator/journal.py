"""The journal of one hold: records of ``windows.hold_records`` as JSON Lines, fsynced before each action and after it.

The journal is the coordinator's memory, not the authority: ``hold recover`` works without it by asking the guards.
Every record is first applied to the hold machine, so what the tables refuse is never written. A torn last line (power
loss in the middle of a write) is dropped on reading; a damaged line anywhere else refuses.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from pathlib import Path
from typing import Any

from coordinator.clock import Clock
from coordinator.errors import UsageError
from windows.errors import JournalError
from windows.hold import HoldState, apply, open_hold
from windows.hold_records import Found, Intent, Note, Opened, Outcome, Record, parse_record
from windows.hold_table import Action, HoldEvent, HostFact, Moment


class Journal:
    """Append-only; one writer, the process that opened the hold. Thread-safe: hosts act in parallel.

    Args:
        path: The file; must not exist, because a hold has one journal.
        hold_id: The hold.
        hosts: Host names in lease order.
    """

    def __init__(
        self, path: Path, clock: Clock, *, hold_id: str, hold_number: int, plan_sha256: str, hosts: tuple[str, ...]
    ) -> None:
        self.path = path
        self._clock = clock
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        _fsync_directory(path.parent)
        opened = Opened(
            seq=0, utc=clock.utc(), hold_id=hold_id, hold_number=hold_number, plan_sha256=plan_sha256, hosts=hosts
        )
        self.state: HoldState = open_hold(opened)
        self._append(opened)

    def note(self, event: HoldEvent, reason: str = "", arm: str | None = None) -> HoldState:
        """Record an event of the whole hold; returns the state after it.

        Raises:
            windows.errors.HoldError: The tables refuse it; nothing is written.
        """
        with self._lock:
            self._take(Note(**self._head(), event=event, reason=reason[:2000], arm=arm))
            return self.state

    def intent(self, host: str, action: Action, step: str = "") -> str:
        """Record that an action is about to happen; returns its operation id."""
        op = f"{action.value}-{secrets.token_hex(12)}"
        with self._lock:
            self._take(Intent(**self._head(), op=op, host=host, action=action, step=step))
        return op

    def outcome(self, op: str, result: Moment, *, epoch: int | None = None, detail: str = "") -> None:
        """Record what came of it."""
        with self._lock:
            self._take(Outcome(**self._head(), op=op, result=result, epoch=epoch, detail=detail[:2000]))

    def found(self, host: str, fact: HostFact, *, epoch: int | None, detail: str = "") -> None:
        """Record what a host said about itself when asked."""
        with self._lock:
            self._take(Found(**self._head(), host=host, fact=fact, epoch=epoch, detail=detail[:2000]))

    def close(self) -> None:
        """Release the file; the journal stays."""
        os.close(self._fd)

    def _head(self) -> dict[str, Any]:
        return {"seq": self.state.next_seq, "utc": self._clock.utc(), "hold_id": self.state.hold_id}

    def _take(self, record: Record) -> None:
        following = apply(self.state, record)
        self._append(record)
        self.state = following

    def _append(self, record: Record) -> None:
        line = json.dumps(record.to_document(), sort_keys=True, separators=(",", ":")) + "\n"
        os.write(self._fd, line.encode())
        os.fsync(self._fd)


def read_journal(path: Path) -> list[Record]:
    """All whole records of a journal, oldest first.

    Raises:
        UsageError: A line other than the last is not a record.
    """
    lines = path.read_bytes().split(b"\n")
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            records.append(parse_record(line))
        except JournalError as error:
            if number == len(lines):
                # The write that a crash tore: its action has an intent at most, so the guard is asked.
                break
            raise UsageError(
                "the journal is damaged",
                where=f"{path}:{number}",
                found=str(error),
                next_step="`coordinator hold recover --site` asks the guards and needs no journal",
            ) from error
    return records


def _fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
