"""The dead-man: restores production when nobody else did. Armed and self-tested before the first stop.

It is a program of its own, in its own unit or session, with its own copy of what it needs in memory; it fires at
min(deadline, max(last heartbeat + orphan_after, running step's bound)), or at once when the state folder is gone.
"""

from __future__ import annotations

import contextlib
import os

from windows.guard import adapters, clock, files, launch, notify, proc, production, release, table, units
from windows.guard import state as states
from windows.guard.errors import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from windows.guard.state import State

    Json = dict[str, Any]

TICK_S = 0.5
START_S = 15.0
LAUNCH_S = 20.0
TAKE_OVER_S = 5.0


def arm(state: State, record: Json) -> Json:
    """Start the dead-man, let it test itself where it will run, and require that every check is true.

    Raises:
        Refusal: ``SELF_TEST``.
    """
    hold_id = record["hold_id"]
    record_path = state.hold_path(hold_id, "deadman.json")
    launch_missing(state, hold_id, LAUNCH_S)
    clock.wait_until(lambda: files.read_json(state.hold_path(hold_id, "self-test.json")) is not None, START_S)
    report = files.read_json(state.hold_path(hold_id, "self-test.json")) or {"checks": []}
    checks = report["checks"] + [
        _check("dead-man alive", "running", "running" if launch.is_running(record_path) else "gone")
    ]
    checks += adapters.arm(state, record)
    wrong = [check for check in checks if check["ok"] is False]
    if wrong or not report["checks"]:
        first = wrong[0] if wrong else _check("self-test", "a report", "none")
        raise Refusal(
            "SELF_TEST",
            f"the dead-man's {first['check']} failed",
            first["expected"],
            first["found"],
            "nothing was stopped; close",
            {"self_test": checks},
        )
    state.set_state(record, table.ARMED)
    state.event("armed", record, checks=len(checks))
    mode = "session" if units.manager() == "none" else "systemd-timer"
    return {
        "mode": mode,
        "fires_at_boottime_ns": states.fires_at_ns(record, state.heartbeat(hold_id)),
        "self_test": checks,
    }


def launch_missing(state: State, hold_id: str, wait_s: float) -> bool:
    """Start the hold's dead-man unless it runs; whether it was started. Whoever calls, and how often: there is one.

    Raises:
        Refusal: ``START_FAILED``.
        TimeoutError: Somebody else is starting it, for longer than ``wait_s``.
    """
    record_path = state.hold_path(hold_id, "deadman.json")
    with files.locked(state.hold_path(hold_id, "deadman.lock"), wait_s):
        if launch.is_running(record_path):
            return False
        for name in ("deadman.json", "self-test.json"):
            files.remove(state.hold_path(hold_id, name), sync=False)
        launch.background(state, "deadman", hold_id, record_path)
        return True


def _check(name: str, expected: str, found: str, ok: bool | None = None) -> Json:
    return {"check": name, "expected": expected, "found": found, "ok": expected == found if ok is None else ok}


def self_test(state: State, record: Json, digest: str) -> list[Json]:
    """What the dead-man can prove about itself from inside its own unit."""
    checks = [_check("guard", record["guard_sha256"], digest)]
    snapshot = record.get("snapshot")
    checks.append(_check("snapshot", "readable", "readable" if snapshot else "missing"))
    for service in record["services"]:
        rows = adapters.ask("check_restorable", state, service)
        wrong = [f"{row['field']}: {row['found']}" for row in rows if row["ok"] is not True]
        checks.append(_check(f"{service['name']} restorable", "yes", "; ".join(wrong)[:200] or "yes"))
    files.require_private(state.debt_folder)
    writable = os.access(state.debt_folder, os.W_OK) and os.access(state.folder, os.W_OK)
    checks.append(_check("debt folder", "writable", "writable" if writable else "not writable"))
    return checks


def watch(state: State, hold_id: str, digest: str) -> None:
    """Stay until the hold is over or it is time to restore."""
    record = state.record()
    if record is None or record["hold_id"] != hold_id:
        _fire_if_indebted(state, hold_id)
        return
    if record["boot_id"] != clock.boot_id():
        return
    with contextlib.suppress(OSError):
        # one that is started again on a full disk goes on; an `arm` that finds no report refuses
        files.write_json(state.hold_path(hold_id, "self-test.json"), {"checks": self_test(state, record, digest)})
    epoch = record["epoch"]
    while True:
        clock.pause(TICK_S)
        record = state.record()
        if record is None or (record["hold_id"], record["epoch"]) != (hold_id, epoch):
            _fire_if_indebted(state, hold_id)
            return
        if record["state"] == table.DEGRADED:
            return
        if clock.boottime_ns() < states.fires_at_ns(record, state.heartbeat(hold_id)):
            continue
        if state.debt() is None:
            with contextlib.suppress(OSError, TimeoutError):
                release.expire_if_due(state)
            if record["state"] == table.RESTORED:
                finish_restored(state, hold_id, epoch, "restored-by-dead-man")
            continue
        fire(state, hold_id, epoch, "dead-man", "restored-by-dead-man")
        return


def _fire_if_indebted(state: State, hold_id: str) -> None:
    """The record is gone but the debt is not: someone removed the state folder. Restore now."""
    debt = state.debt()
    if debt is not None and debt["hold_id"] == hold_id:
        state.open()
        fire(state, hold_id, debt["epoch"], "dead-man", "restored-by-dead-man")


def fire(state: State, hold_id: str, epoch: int, by: str, outcome: str) -> Json | None:
    """Restore this hold without anybody's help, and end it when the proof is there."""
    debt = state.debt()
    if debt is not None:
        notify.send(debt, f"{by}-fired")
    state.event("fired", {"hold_id": hold_id, "epoch": epoch}, by=by)
    try:
        result = production.restore(state, hold_id, epoch, by, TAKE_OVER_S)
    except TimeoutError:
        _take_over(state)
        result = production.restore(state, hold_id, epoch, by, 60.0)
    except Refusal as refusal:
        state.event("fire-refused", {"hold_id": hold_id, "epoch": epoch}, code=refusal.code, found=refusal.found)
        return None
    if not result["proven"]:
        return result
    return release.finish(state, hold_id, epoch, outcome, "nobody closed the hold in time", by, result)


def finish_restored(state: State, hold_id: str, epoch: int, outcome: str) -> None:
    """Production was restored but never closed: end the hold with the stored proof."""
    result = production.stored_result(state, hold_id)
    if result and result["proven"]:
        release.finish(state, hold_id, epoch, outcome, "restored, but nobody closed the hold", "dead-man", result)


def _take_over(state: State) -> None:
    """Somebody keeps the production lock. A restore gets its reserve; a frozen or late stop is ended."""
    debt = state.debt() or {}
    owner = files.read_json(state.path("production-owner.json"))
    if owner and owner["what"] == "restore":
        until = owner["since_ns"] + int(debt.get("restore_reserve_s", 60) * 1e9)
        clock.wait_until(
            lambda: not files.is_locked(state.path("production.lock")), max(0.0, (until - clock.boottime_ns()) / 1e9)
        )
    if owner and files.is_locked(state.path("production.lock")) and owner["boot_id"] == clock.boot_id():
        process = proc.Process(owner["pid"], 0, 0, 0, owner["start_ticks"])
        if any("guard" in part for part in proc.argv_of(owner["pid"])):
            proc.send_signal(process, 9)
            state.event("took-over", None, pid=owner["pid"], what=owner["what"])


def fire_unit(state: State, hold_id: str, role: str) -> int:
    """The program of the deadline timer and of the boot unit; the exit code starts the path without Python."""
    debt = state.debt()
    if debt is None or debt["hold_id"] != hold_id:
        return 0
    state.open()
    record = state.record()
    if role == "fire" and record and record["state"] == table.DEGRADED:
        return 0  # the dead-man was here; degraded is sticky
    outcome = "restored-by-boot" if role == "boot" else "restored-by-dead-man"
    # a finished attempt is an answer even when it is not proven: the path without Python is for no answer at all
    fire(state, hold_id, debt["epoch"], "boot-restore" if role == "boot" else "dead-man", outcome)
    return 0
