"""The holder: one small process per hold that keeps the lease lock and the device locks until the hold ends.

It ends owned runs at the run deadline, ends an untouched hold whose time is over, reaps runs whose supervisor was lost,
starts a dead-man that died again, and notes foreign device processes. It is not needed for a restore.
"""

from __future__ import annotations

import contextlib
import os

from windows.guard import clock, deadman, devices, files, production, release, runs, table
from windows.guard import state as states
from windows.guard.errors import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from windows.guard.state import State

    Json = dict[str, Any]

TICK_S = 0.5
FOREIGN_EVERY_NS = 15_000_000_000
LOST_EVERY_NS = 5_000_000_000
DEAD_MAN_EVERY_NS = 2_000_000_000
"""Two looks in a row must miss the dead-man: a service manager starts it again by itself after one second."""

COMMIT_WITHIN_NS = 20_000_000_000
LEAVING_S = 1.0

_GUARDED = frozenset([table.ARMED, table.STOPPING, table.HELD, table.RESTORING, table.RESTORED])
"""States in which a dead-man must live; a degraded host waits for a person."""


def hold(state: State, hold_id: str) -> None:
    """Take every lock, say so, and stay until the hold is over."""
    opening = files.read_json(state.hold_path(hold_id, "opening.json")) or {}
    lease_lock = files.try_lock(state.hold_path(hold_id, "holder.lock"))
    locks, busy = _lock_devices(state, opening["devices"])
    if lease_lock is None:
        busy = "the lease itself"
    me = files.read_json(state.hold_path(hold_id, "holder.json")) or {}
    ready = {"pid": os.getpid(), "start_ticks": me.get("start_ticks"), "busy": busy}
    files.write_json(state.hold_path(hold_id, "holder-ready.json"), ready, sync=False)
    if busy is None:
        _stay(state, hold_id, opening["epoch"])
    for descriptor in locks:
        os.close(descriptor)


def _lock_devices(state: State, names: list[str]) -> tuple[list[int], str | None]:
    """All or nothing; the holder of a hold that just ended gets a moment to leave."""
    found: list[tuple[list[int], str | None]] = []

    def locked() -> bool:
        found.append(devices.lock_all(state, names))
        return found[-1][1] is None

    clock.wait_until(locked, LEAVING_S)
    return found[-1]


def _stay(state: State, hold_id: str, epoch: int) -> None:
    started = clock.boottime_ns()
    foreign_at = lost_at = dead_man_at = started
    missed = False
    while True:
        clock.pause(TICK_S)
        now = clock.boottime_ns()
        record = state.record()
        mine = record is not None and (record["hold_id"], record["epoch"]) == (hold_id, epoch)
        if not mine or record is None:
            if now - started > COMMIT_WITHIN_NS or _was_committed(state, hold_id):
                return
            continue
        with contextlib.suppress(OSError, TimeoutError):
            release.expire_if_due(state)
            if state.record() is None:
                return
            if record["state"] == table.HELD and now >= states.run_deadline_ns(record):
                runs.end_all(state, hold_id)
            if record["state"] == table.RESTORED and now >= record["deadline_ns"]:
                deadman.finish_restored(state, hold_id, epoch, "restored-by-dead-man")
            if now - lost_at > LOST_EVERY_NS:
                lost_at = now
                _end_lost_runs(state, hold_id)
            if now - dead_man_at > DEAD_MAN_EVERY_NS:
                dead_man_at = now
                missed = _look_after_dead_man(state, record, missed)
            if now - foreign_at > FOREIGN_EVERY_NS:
                foreign_at = now
                _note_foreign(state, record)


def _was_committed(state: State, hold_id: str) -> bool:
    """A record that was there and is gone means the hold ended; before the commit it never was."""
    record = state.record()
    return (
        state.outcome(hold_id) is not None
        or record is not None
        or not os.path.exists(state.hold_path(hold_id, "opening.json"))
    )


def _look_after_dead_man(state: State, record: Json, missed: bool) -> bool:
    """Start a dead-man that was missing at the last look too; whether it is missing now."""
    if record["state"] not in _GUARDED or release.dead_man_alive(state, record):
        return False
    if not missed:
        return True
    try:
        if deadman.launch_missing(state, record["hold_id"], TICK_S):
            state.event("dead-man-started-again", record)
    except Refusal as refusal:
        state.event("dead-man-missing", record, code=refusal.code, found=refusal.found)
    return False


def _end_lost_runs(state: State, hold_id: str) -> None:
    """A program whose supervisor was killed has no limits any more: end it now."""
    for run in runs.names(state, hold_id):
        folder = state.hold_path(hold_id, "runs", run)
        started = os.path.exists(os.path.join(folder, "child.json"))
        ended = os.path.exists(os.path.join(folder, "result.json"))
        if started and not ended and runs.outcome_of(folder)["state"] == "unknown":
            runs.end(state, hold_id, run, "supervisor lost")


def _note_foreign(state: State, record: Json) -> None:
    owned = {process.pid for process in runs.trees(state, record["hold_id"])}
    if record["state"] != table.HELD:
        owned |= production.pids_of(state, record["services"])
    foreign = devices.foreign_processes(record["devices"], owned)
    if not foreign:
        return
    seen = release.invalidated(state, record["hold_id"])
    new = [f"pid {p['pid']} {p['name']} on {p['uuid']}" for p in foreign]
    new = [text for text in new if text not in seen]
    if new:
        files.write_json(state.hold_path(record["hold_id"], "foreign.json"), {"seen": seen + new})
        state.event("foreign-process", record, processes=new)
