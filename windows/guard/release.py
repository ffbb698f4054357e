"""How a hold's record goes away: compare-and-release, the outcome it leaves, and expiry.

Release names hold id and epoch and compares both under the host lock, so nobody ends another's hold, and a hold that
ends "untouched" is proven to be so in the same breath. The outcome is written into space that acquire reserved.
"""

from __future__ import annotations

import contextlib
import os

from windows.guard import adapters, clock, files, launch, proc, runs, table
from windows.guard import state as states

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from windows.guard.state import State

    Json = dict[str, Any]


def invalidated(state: State, hold_id: str) -> list[str]:
    """Foreign device processes the holder has seen."""
    document = files.read_json(state.hold_path(hold_id, "foreign.json"))
    return list(document["seen"]) if document else []


def holder_alive(state: State, hold_id: str) -> bool:
    """True while a process holds the lease lock."""
    return files.is_locked(state.hold_path(hold_id, "holder.lock"))


def dead_man_alive(state: State, record: Json) -> bool | None:
    """Whether the open hold's dead-man runs; None while none was armed. One that could not be started is not alive."""
    record_path = state.hold_path(record["hold_id"], "deadman.json")
    if not os.path.exists(record_path):
        return None if record["state"] in table.UNTOUCHED - {table.ARMED} else False
    return launch.is_running(record_path)


def finish(
    state: State, hold_id: str, epoch: int, outcome: str, reason: str, by: str, result: Json | None = None
) -> Json:
    """End exactly this hold and record how; the outcome, that of the first caller when it had ended already."""
    with state.host_lock():
        return _release(state, hold_id, epoch, outcome, reason, by, result)


def finish_untouched(state: State, record: Json, outcome: str, reason: str, by: str, only_in: str = "") -> Json | None:
    """As ``finish``, but only while nothing was stopped (and the state is ``only_in``); None when that is not so."""
    with state.host_lock():
        current = state.record()
        same = current is not None and (current["hold_id"], current["epoch"]) == (record["hold_id"], record["epoch"])
        if same and current is not None:
            wrong_state = current["state"] not in table.UNTOUCHED or only_in not in ("", current["state"])
            if state.debt() is not None or wrong_state:
                return None
        return _release(state, record["hold_id"], record["epoch"], outcome, reason, by, None)


def _release(state: State, hold_id: str, epoch: int, outcome: str, reason: str, by: str, result: Json | None) -> Json:
    known = state.outcome(hold_id)
    record = state.record()
    matches = record is not None and (record["hold_id"], record["epoch"]) == (hold_id, epoch)
    if known is not None and not matches:
        return known
    document = _outcome(state, hold_id, epoch, outcome, reason, by, result)
    _store_outcome(state, hold_id, document)
    if matches and record is not None:
        if record["state"] in (table.SNAPSHOTTED, table.ARMED):
            adapters.clean_up(state, record)
        files.remove(state.path("record.json"))
    with contextlib.suppress(OSError):
        # before the last line of the log, which a full disk would cost
        files.remove(state.hold_path(hold_id, "ballast"))
    state.event("ended", {"hold_id": hold_id, "epoch": epoch}, outcome=outcome, by=by, reason=reason)
    end_holder(state, hold_id)
    return document


def _outcome(state: State, hold_id: str, epoch: int, outcome: str, reason: str, by: str, result: Json | None) -> Json:
    result = result or {"proven": True, "rows": [], "probes": [], "elapsed_ns": 0, "service_ns": 0}
    return dict(
        {key: result[key] for key in ("proven", "rows", "probes", "elapsed_ns", "service_ns")},
        hold_id=hold_id,
        epoch=epoch,
        outcome=outcome,
        reason=reason,
        by=by,
        utc=clock.utc_now(),
        boottime_ns=clock.boottime_ns(),
        boot_id=clock.boot_id(),
        runs=runs.summary(state, hold_id),
        invalidated=invalidated(state, hold_id),
    )


def _store_outcome(state: State, hold_id: str, document: Json) -> None:
    path = state.hold_path(hold_id, "outcome.json")
    try:
        files.overwrite_slot(path, document, states.SLOT_BYTES)
    except FileNotFoundError:
        os.makedirs(state.hold_path(hold_id), mode=0o700, exist_ok=True)
        state.write(path, document)
    with contextlib.suppress(OSError):
        files.write_json(state.path("last-outcome.json"), document)


def end_holder(state: State, hold_id: str) -> None:
    """The holder sees that its record is gone and leaves; wait for its locks, then make sure."""
    lock = state.hold_path(hold_id, "holder.lock")
    owned = files.read_json(state.hold_path(hold_id, "holder.json"))
    if owned and owned["boot_id"] == clock.boot_id() and owned["pid"] != os.getpid():
        proc.end_tree(owned, 15, 2.0, 2.0)
        clock.wait_until(lambda: not files.is_locked(lock), 2.0)


def expire_if_due(state: State) -> None:
    """End an open hold whose time is over while nothing was stopped; anything else is the dead-man's."""
    record = state.record()
    if record is None or state.debt() is not None:
        return
    if states.boot_of(record) != clock.boot_id():
        reason = "the host was rebooted before anything was stopped"
        finish(state, record["hold_id"], record["epoch"], "void", reason, "guard")
        return
    if record["state"] not in table.UNTOUCHED:
        return
    now = clock.boottime_ns()
    if record["state"] == table.PROVISIONAL and now >= record["provisional_until_ns"]:
        finish_untouched(state, record, "expired", "provisional lease not confirmed", "guard", table.PROVISIONAL)
    elif now >= record["deadline_ns"]:
        finish_untouched(state, record, "expired", "deadline", "guard")
    elif now >= states.fires_at_ns(record, state.heartbeat(record["hold_id"])):
        finish_untouched(state, record, "orphaned", "no heartbeat", "guard")
