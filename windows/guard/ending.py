"""Every way a hold ends: restore and close, recover, abort, clear, break; and removal of the guard itself.

All of them compare hold id and epoch and go through the one ``production.restore``.
"""

from __future__ import annotations

import contextlib
import os

from windows.guard import adapters, by_hand, files, production, release, runs, table
from windows.guard.errors import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from windows.guard.state import State

    Json = dict[str, Any]

_ANSWER = ("proven", "rows", "probes", "elapsed_ns", "service_ns", "by")


def restore(state: State, record: Json) -> Json:
    """The verb ``restore``: production back, proven or degraded; the hold stays open."""
    result = production.restore(state, record["hold_id"], record["epoch"], "restore")
    return {key: result[key] for key in _ANSWER}


def close(state: State, record: Json | None, claim: Json) -> Json:
    """The verb ``close``: compare and release."""
    if record is None:
        ended = state.outcome(claim["hold_id"])
        assert ended is not None
        return dict(ended, already=True)
    hold_id, epoch = record["hold_id"], record["epoch"]
    if record["state"] in table.UNTOUCHED:
        ended = release.finish_untouched(state, record, "closed-untouched", "", "close")
        if ended is None:
            raise Refusal("NOT_RESTORED", "a stop began meanwhile", "nothing stopped", "debt", "restore")
        return {"outcome": "closed-untouched", "epoch": epoch}
    result = production.stored_result(state, hold_id)
    if result is None or not result["proven"]:
        raise Refusal("NOT_RESTORED", "no proof that production is back", "a proven restore", "none", "restore")
    if state.debt() is not None:
        production.restore(state, hold_id, epoch, "close")
    release.finish(state, hold_id, epoch, "closed", "", "close", result)
    return {"outcome": "closed", "epoch": epoch}


def recover(state: State, hold_id: str, epoch: int | None, outcome: str, reason: str, by: str) -> Json:
    """Close exactly this hold without its claim; the outcome, also of a hold that already ended.

    Raises:
        Refusal: ``OTHER_HOLD``, ``NO_HOLD``, ``DEGRADED``.
    """
    source = state.debt() or state.record()
    if source is None or source["hold_id"] != hold_id:
        return _ended(state, hold_id, epoch, source)
    if epoch is not None and epoch != source["epoch"]:
        raise Refusal(
            "OTHER_HOLD",
            "the epoch is not the open hold's",
            str(source["epoch"]),
            str(epoch),
            "ask status, then name exactly what it shows",
        )
    if state.debt() is None and source["state"] in table.UNTOUCHED:
        ended = release.finish_untouched(state, source, outcome, reason, by)
        if ended is not None:
            return ended
    try:
        result = production.restore(state, hold_id, source["epoch"], by)
    except Refusal as refusal:
        if refusal.code == "HOLD_ENDED" and refusal.details:
            return dict(refusal.details)  # the dead-man was faster
        raise
    if not result["proven"]:
        wrong = next(row for row in result["rows"] + result["probes"] if row["ok"] is not True)
        raise Refusal(
            "DEGRADED",
            f"production is not proven to be back: {wrong['service']}",
            str(wrong.get("expected", "an answer as expected")),
            str(wrong.get("found", wrong.get("detail"))),
            "look at production and RESTORE.txt; then recover again, or clear with a reason",
            dict(result, hold_id=hold_id, epoch=source["epoch"], outcome="degraded"),
        )
    return release.finish(state, hold_id, source["epoch"], outcome, reason, by, result)


def _ended(state: State, hold_id: str, epoch: int | None, source: Json | None) -> Json:
    known = state.outcome(hold_id)
    if known is not None and epoch in (None, known["epoch"]):
        return known
    if source is not None:
        raise Refusal(
            "OTHER_HOLD",
            "another hold is open on this host",
            hold_id,
            f"{source['hold_id']} epoch {source['epoch']}",
            "ask status",
        )
    raise Refusal("NO_HOLD", "this host knows no such hold", hold_id, str(known and known["epoch"]), "ask status")


def clear(state: State, hold_id: str, reason: str) -> Json:
    """A person takes over: the debt ends without proof, blocks are lifted, nothing is started."""
    source = _named(state, hold_id)
    if not reason.strip():
        raise Refusal(
            "BAD_REQUEST", "clear needs a reason", "a reason", "nothing", "say why production is right as it is"
        )
    with state.production_lock("clear", 60.0):
        runs.end_all(state, hold_id)
        adapters.release(state, source)
        adapters.clean_up(state, source)
        state.clear_debt()
        by_hand.remove(state)
    last = production.stored_result(state, hold_id) or {"rows": [], "probes": [], "elapsed_ns": 0, "service_ns": 0}
    return release.finish(state, hold_id, source["epoch"], "cleared", reason, "clear", dict(last, proven=False))


def break_hold(state: State, hold_id: str, reason: str) -> Json:
    """Take the host from its holder: runs end, the epoch rises, debt stays."""
    source = _named(state, hold_id)
    if not reason.strip():
        raise Refusal("BAD_REQUEST", "break needs a reason", "a reason", "nothing", "say why the holder may be cut off")
    with state.host_lock():
        epoch = state.raise_epoch()
        record = state.record()
        if record is not None and state.debt() is not None:
            # the claim is void from here on: a token in a claim is a string and never equals null
            record.update(token=None, state=table.DEGRADED)
            state.write_record(record)
    state.event("broken", source, reason=reason, new_epoch=epoch)
    runs.end_all(state, hold_id)
    if state.debt() is None:
        result = production.stored_result(state, hold_id)
        release.finish(state, hold_id, source["epoch"], "broken", reason, "break", result)
    return {"epoch": epoch, "in_debt": state.debt() is not None, "state": state.state_name()}


def _named(state: State, hold_id: str) -> Json:
    source = state.debt() or state.record()
    if source is None or source["hold_id"] != hold_id:
        raise Refusal(
            "OTHER_HOLD", "another hold is open on this host", hold_id, str(source and source["hold_id"]), "ask status"
        )
    return source


def uninstall(state: State, keep: str) -> list[str]:
    """Remove records and units; the caller's own journal entry goes last, with the folder, by hand."""
    removed = adapters.uninstall(state)
    for folder, _, names in os.walk(state.folder, topdown=False):
        for name in names:
            path = os.path.join(folder, name)
            if not path.startswith(state.path(keep)) and not path.endswith("host.lock"):
                files.remove(path, sync=False)
                removed.append(path)
        with contextlib.suppress(OSError):
            os.rmdir(folder)
    with contextlib.suppress(OSError):
        os.rmdir(state.debt_folder)
        removed.append(state.debt_folder)
    return removed
