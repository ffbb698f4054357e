"""The state folder: where every record lies, and the locks that order writers.

``record.json`` is the one open hold; ``DIR.debt/debt.json`` beside the folder is the debt; ``epoch.json`` only grows.
Order of locks: ``production.lock`` (a stop or a restore, long), then ``host.lock`` (one read-modify-write, short).
"""

from __future__ import annotations

import contextlib
import json
import os

from windows.guard import clock, files, proc, table
from windows.guard.errors import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from typing import Any

    Json = dict[str, Any]

SLOT_BYTES = 64 << 10
BALLAST_BYTES = 1 << 20
"""Preallocated by acquire: the outcome slot is written in place, the ballast is given up when the disk is full."""

EVENT_LIMIT = 500


class State:
    """Paths and records of one state folder."""

    def __init__(self, folder: str) -> None:
        self.folder = os.path.abspath(folder)
        self.debt_folder = self.folder + ".debt"

    # -- layout ---------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Create or check the folder and its incarnation."""
        files.require_private(self.folder)
        if files.read_json(self.path("incarnation.json")) is not None:
            return
        for name in ("devices", "services", "holds", "ops"):
            os.makedirs(self.path(name), mode=0o700, exist_ok=True)
        with self.host_lock():
            if files.read_json(self.path("incarnation.json")) is None:
                files.write_json(self.path("incarnation.json"), {"incarnation": os.urandom(16).hex()})

    def path(self, *parts: str) -> str:
        """A path inside the folder."""
        return os.path.join(self.folder, *parts)

    def hold_path(self, hold_id: str, *parts: str) -> str:
        """A path inside one hold's folder."""
        return self.path("holds", hold_id, *parts)

    def incarnation(self) -> str:
        """The id of this state folder; a wiped folder gets another."""
        document = files.read_json(self.path("incarnation.json"))
        return str(document["incarnation"]) if document else ""

    def host_lock(self) -> AbstractContextManager[int]:
        """The short lock around every change of a record."""
        return files.locked(self.path("host.lock"), 20.0)

    @contextlib.contextmanager
    def production_lock(self, what: str, timeout_s: float) -> Iterator[None]:
        """The long lock: at most one stop or restore at a time on this host. Notes who has it, for a take-over."""
        with files.locked(self.path("production.lock"), timeout_s):
            me = proc.read_process(os.getpid())
            owner = {
                "pid": os.getpid(),
                "start_ticks": me.start_ticks if me else -1,
                "boot_id": clock.boot_id(),
                "since_ns": clock.boottime_ns(),
                "what": what,
            }
            with contextlib.suppress(OSError):
                files.write_json(self.path("production-owner.json"), owner, sync=False)
            yield

    # -- records --------------------------------------------------------------------------------------------------

    def record(self) -> Json | None:
        """The open hold, or None."""
        return files.read_json(self.path("record.json"))

    def write_record(self, record: Json) -> None:
        """Replace the open hold's record (caller holds the host lock)."""
        self.write(self.path("record.json"), record)

    def set_state(self, record: Json, state: str) -> None:
        """Move the open hold to ``state``, unless it ended or was broken meanwhile."""
        with self.host_lock():
            current = self.record()
            if current is None or current["hold_id"] != record["hold_id"] or current["epoch"] != record["epoch"]:
                raise Refusal(
                    "HOLD_ENDED",
                    "the hold ended while this call was running",
                    record["hold_id"],
                    str(current and current["hold_id"]),
                    "stop touching this host; ask status",
                )
            current["state"] = state
            self.write_record(current)
            record.update(current)

    def debt(self) -> Json | None:
        """What this host owes: a restore that is not proven yet; None when nothing."""
        return files.read_json(os.path.join(self.debt_folder, "debt.json"))

    def write_debt(self, debt: Json) -> None:
        """Put the host in debt (before the first stop), durably."""
        files.require_private(self.debt_folder)
        self.write(os.path.join(self.debt_folder, "debt.json"), debt)
        files.sync_folder(os.path.dirname(self.debt_folder))

    def clear_debt(self) -> None:
        """End the debt. Removing needs no free space."""
        with contextlib.suppress(FileNotFoundError):
            files.remove(os.path.join(self.debt_folder, "debt.json"))

    def epoch(self) -> int:
        """The fence epoch; 0 before the first hold."""
        document = files.read_json(self.path("epoch.json"))
        return int(document["epoch"]) if document else 0

    def raise_epoch(self) -> int:
        """The next epoch, durable before it is used (caller holds the host lock)."""
        debt = self.debt()
        epoch = max(self.epoch(), debt["epoch"] if debt else 0) + 1
        self.write(self.path("epoch.json"), {"epoch": epoch})
        return epoch

    def heartbeat(self, hold_id: str) -> Json | None:
        """The last heartbeat ``{at_ns, step_until_ns}`` of a hold."""
        return files.read_json(self.hold_path(hold_id, "heartbeat.json"))

    def state_name(self) -> str:
        """Which row of the table this host is in."""
        return effective_state(self.record(), self.debt(), clock.boot_id())

    def outcome(self, hold_id: str) -> Json | None:
        """How a hold ended, or None."""
        try:
            return files.read_json(self.hold_path(hold_id, "outcome.json"))
        except ValueError:
            return None  # still the blank slot

    # -- writing on a full disk -----------------------------------------------------------------------------------

    def write(self, path: str, document: Json) -> None:
        """Durable write; when the disk is full the ballast of the open hold is given up first."""
        try:
            files.write_json(path, document)
        except OSError:
            if not self._drop_ballast():
                raise
            files.write_json(path, document)

    def _drop_ballast(self) -> bool:
        dropped = False
        for hold_id in self._names("holds"):
            with contextlib.suppress(OSError):
                dropped |= files.remove(self.hold_path(hold_id, "ballast"))
        return dropped

    def _names(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(self.path(folder)))
        except FileNotFoundError:
            return []

    # -- events ---------------------------------------------------------------------------------------------------

    def event(self, name: str, record: Json | None, **detail: Any) -> None:
        """Append one line to the event log; a full disk costs the line, never the action."""
        line = {
            "utc": clock.utc_now(),
            "boottime_ns": clock.boottime_ns(),
            "boot_id": clock.boot_id(),
            "event": name,
            "hold_id": record["hold_id"] if record else None,
            "epoch": record["epoch"] if record else None,
            "detail": detail,
        }
        with contextlib.suppress(OSError):
            descriptor = os.open(
                self.path("events.jsonl"), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
            try:
                os.write(descriptor, _torn_end(descriptor) + json.dumps(line, sort_keys=True).encode("ascii") + b"\n")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def events(self, since: int) -> list[Json]:
        """Events from sequence number ``since`` on; the number is the line's index, and torn lines keep theirs."""
        result: list[Json] = []
        with contextlib.suppress(FileNotFoundError), open(self.path("events.jsonl"), "rb") as handle:
            for sequence, line in enumerate(handle):
                if sequence < since or len(result) >= EVENT_LIMIT:
                    continue
                try:
                    result.append(dict(json.loads(line), seq=sequence))
                except ValueError:
                    result.append({"seq": sequence, "event": "torn-line", "detail": {}})
        return result


def _torn_end(descriptor: int) -> bytes:
    """A newline when the file ends in the middle of a line: what a full disk tore must not swallow the next line."""
    size = os.fstat(descriptor).st_size
    return b"\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else b""


def effective_state(record: Json | None, debt: Json | None, boot_id: str) -> str:
    """The state of a host from what is on its disk. Pure."""
    if record is None:
        return table.DEGRADED if debt else table.FREE
    if boot_of(record) != boot_id:
        return table.VOID if debt else table.FREE
    state = str(record["state"])
    if debt and state in table.UNTOUCHED:
        return table.STOPPING
    return state


def boot_of(record: Json) -> str:
    """The boot in which the record's state was written: the hold's own, or that of a restore after a reboot."""
    return str(record.get("restored_boot_id") or record["boot_id"])


def fires_at_ns(record: Json, heartbeat: Json | None) -> int:
    """When an orphaned hold ends: min(deadline, max(last heartbeat + orphan_after, running step's bound)). Pure."""
    last = heartbeat["at_ns"] if heartbeat else record["acquired_ns"]
    step = (heartbeat or {}).get("step_until_ns") or 0
    return int(min(record["deadline_ns"], max(last + int(record["orphan_after_s"] * 1e9), step)))


def run_deadline_ns(record: Json) -> int:
    """The last moment at which owned runs may live. Pure."""
    return int(record["deadline_ns"] - int(record["restore_reserve_s"] * 1e9))
