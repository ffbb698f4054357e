"""The hold's record while it is open: acquire, the claim, confirm, heartbeat.

An open record is the claim on the host; the epoch fences; the holder's locks show that someone alive stands behind it.
"""

from __future__ import annotations

import contextlib
import os

from windows.guard import clock, devices, files, launch, production, release, spec, table, units
from windows.guard import state as states
from windows.guard.errors import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from windows.guard.state import State

    Json = dict[str, Any]

HOLDER_START_S = 10.0


def acquire(state: State, args: Json, op: str, digest: str) -> Json:
    """Open a hold: locks by its holder, epoch raised, everything preallocated; all or nothing.

    Raises:
        Refusal: See ``acquire`` in the protocol.
    """
    args = spec.check_acquire(args)
    filesystem = _require_host(state, args)
    mine = _already(state, args["hold_id"], op)
    if mine is not None:
        return mine
    _require_free(state)
    production.preflight(state, args["services"])
    with state.host_lock():
        _require_free(state)
        _require_devices(state, args)
        record = _new_record(state, args, op, digest)
        os.makedirs(state.hold_path(args["hold_id"], "runs"), mode=0o700, exist_ok=True)
        try:
            allocated = _preallocate(state, args["hold_id"])
            files.write_json(state.hold_path(args["hold_id"], "opening.json"), record)
            record["holder"] = _start_holder(state, record)
            state.write_record(record)
        except BaseException:
            _undo(state, args["hold_id"])
            raise
    state.event("acquired", record, owner=record["owner"], reason=record["reason"], filesystem=filesystem)
    return _answer(record, allocated)


def _require_host(state: State, args: Json) -> str:
    filesystem = files.require_local(state.folder)
    kinds = {service["kind"] for service in args["services"]}
    if filesystem in files.VOLATILE_FILESYSTEMS and kinds - {"process"}:
        raise Refusal(
            "BAD_FILESYSTEM",
            "debt would not survive a reboot here",
            "a disk",
            f"{state.folder} on {filesystem}",
            "give --state a folder on a local disk",
        )
    if units.under_systemd() and units.manager() == "none":
        raise Refusal(
            "NO_LINGER",
            "this user's processes end with the SSH session",
            "root, or linger enabled and a running user manager",
            f"user {units.user_name()} without them",
            f"loginctl enable-linger {units.user_name()}",
        )
    return filesystem


def _already(state: State, hold_id: str, op: str) -> Json | None:
    """The answer of an earlier, half-finished call with this operation id; also refuses a reused hold id."""
    record = state.record()
    if record is not None and record["op"] == op and record["hold_id"] == hold_id:
        return _answer(record, states.SLOT_BYTES + states.BALLAST_BYTES)
    if state.outcome(hold_id) is not None:
        raise spec.bad("args.hold_id", "a hold id never used on this host", hold_id)
    return None


def _require_free(state: State) -> None:
    name = state.state_name()
    code = table.refusal_code(name, "acquire")
    if code is None:
        if state.record() is not None:
            files.remove(state.path("record.json"))  # an untouched hold of an earlier boot
        return
    record = state.record() or state.debt() or {}
    details = {
        "owner": record.get("owner"),
        "hold_id": record.get("hold_id"),
        "since_utc": record.get("since_utc"),
        "until_utc": record.get("until_utc"),
        "epoch": record.get("epoch"),
        "state": name,
    }
    if code == "HELD" and not files.is_locked(state.hold_path(str(record["hold_id"]), "holder.lock")):
        code = "OPEN_RECORD"
    span = f"since {details['since_utc']} until {details['until_utc']}"
    text = f"{details['hold_id']} of {details['owner']} {span} (epoch {details['epoch']}, {name})"
    advice = (
        f"recover {details['hold_id']}"
        if code in ("DEBT", "OPEN_RECORD")
        else "wait until it ends, or lease break with a reason"
    )
    raise Refusal(code, "this host is not free", "no open hold and no debt", text, advice, details)


def _require_devices(state: State, args: Json) -> None:
    known = {device["uuid"] for device in devices.gpus()} if any(map(devices.is_gpu, args["devices"])) else set()
    missing = [device for device in args["devices"] if devices.is_gpu(device) and device not in known]
    if missing:
        raise Refusal(
            "DEVICE_BUSY",
            "a device is not on this host",
            missing[0],
            f"GPUs {sorted(known)}",
            "correct the site file; UUIDs are shown by doctor",
        )
    owned = production.pids_of(state, args["services"])
    foreign = devices.foreign_processes(args["devices"], owned)
    if foreign is None or foreign:
        raise Refusal(
            "DEVICE_BUSY",
            "a foreign process uses the device",
            "only the named production",
            str(foreign),
            "end it, or wait; the guard never ends what it did not start",
        )


def _new_record(state: State, args: Json, op: str, digest: str) -> Json:
    now = clock.boottime_ns()
    return dict(
        {
            key: args[key]
            for key in (
                "hold_id",
                "owner",
                "reason",
                "plan_sha256",
                "devices",
                "restore_reserve_s",
                "orphan_after_s",
                "services",
                "notify",
            )
        },
        epoch=state.raise_epoch(),
        token=os.urandom(16).hex(),
        incarnation=state.incarnation(),
        boot_id=clock.boot_id(),
        state=table.PROVISIONAL,
        op=op,
        acquired_ns=now,
        provisional_until_ns=now + int(args["provisional_s"] * 1e9),
        deadline_ns=now + int(args["deadline_s"] * 1e9),
        since_utc=clock.utc_now(),
        until_utc=clock.utc_now(args["deadline_s"]),
        guard_sha256=digest,
        mode=units.manager(),
        snapshot=None,
    )


def _preallocate(state: State, hold_id: str) -> int:
    files.preallocate(state.hold_path(hold_id, "outcome.json"), states.SLOT_BYTES)
    files.preallocate(state.hold_path(hold_id, "ballast"), states.BALLAST_BYTES)
    return states.SLOT_BYTES + states.BALLAST_BYTES


def _start_holder(state: State, record: Json) -> Json:
    """Start the holder and wait until it has every lock."""
    hold_id = record["hold_id"]
    launch.background(state, "holder", hold_id, state.hold_path(hold_id, "holder.json"))
    ready = state.hold_path(hold_id, "holder-ready.json")
    clock.wait_until(lambda: os.path.exists(ready), HOLDER_START_S)
    answer = files.read_json(ready)
    if answer is None or answer["busy"] is not None:
        found = "the holder did not report" if answer is None else f"{answer['busy']} is locked by another holder"
        raise Refusal(
            "DEVICE_BUSY",
            "not every lock was free",
            "all device locks",
            found,
            "status on this host; a child of an earlier holder may live",
        )
    return {"pid": answer["pid"], "start_ticks": answer["start_ticks"]}


def _undo(state: State, hold_id: str) -> None:
    """A failed acquire leaves nothing that could block the next one; the raised epoch stays raised."""
    release.end_holder(state, hold_id)
    for name in ("opening.json", "holder-ready.json", "holder.json", "outcome.json", "ballast"):
        with contextlib.suppress(OSError):
            files.remove(state.hold_path(hold_id, name), sync=False)


def _answer(record: Json, allocated: int) -> Json:
    return {
        "claim": {key: record[key] for key in ("incarnation", "hold_id", "epoch", "token")},
        "deadline_boottime_ns": record["deadline_ns"],
        "run_deadline_boottime_ns": states.run_deadline_ns(record),
        "boot_id": record["boot_id"],
        "preallocated_bytes": allocated,
        "holder": record["holder"],
        "devices": record["devices"],
    }


def require_claim(state: State, claim: Json | None) -> Json:
    """The open record, if the claim equals it in all four parts.

    Raises:
        Refusal: ``STALE_CLAIM``, ``HOLD_ENDED`` (details: the outcome) or ``NO_HOLD``.
    """
    if claim is None:
        raise spec.bad("claim", "the claim that acquire returned", None)
    record = state.record()
    if record is None or record["hold_id"] != claim["hold_id"]:
        ended = state.outcome(claim["hold_id"]) if spec.HOLD_ID.match(claim["hold_id"]) else None
        if ended is not None and ended["epoch"] == claim["epoch"] and claim["incarnation"] == state.incarnation():
            raise Refusal(
                "HOLD_ENDED",
                f"this hold is over: {ended['outcome']}",
                "an open hold",
                ended["outcome"],
                "stop touching this host",
                ended,
            )
    for key in ("incarnation", "hold_id", "epoch", "token"):
        found = record.get(key) if record else (state.incarnation() if key == "incarnation" else None)
        if found != claim[key]:
            shown = ("the claim's", "another") if key == "token" else (claim[key], found)
            raise Refusal(
                "STALE_CLAIM",
                f"the claim's {key} is not the open hold's",
                str(shown[0]),
                str(shown[1]),
                "stop touching this host; ask status",
            )
    assert record is not None
    return record


def confirm(state: State, record: Json) -> Json:
    """All hosts have leases: this one is no longer provisional."""
    state.set_state(record, table.LEASED)
    return {"state": table.LEASED, "epoch": record["epoch"]}


def beat(state: State, record: Json, args: Json) -> Json:
    """Note that the coordinator lives, and how long its running step may take."""
    spec.take(args, {"step_bound_s": "num?"})
    now = clock.boottime_ns()
    bound = args["step_bound_s"]
    pulse = {"at_ns": now, "step_until_ns": None if bound is None else now + int(bound * 1e9)}
    files.write_json(state.hold_path(record["hold_id"], "heartbeat.json"), pulse, sync=False)
    return {
        "remaining_s": max(0.0, (record["deadline_ns"] - now) / 1e9),
        "run_remaining_s": max(0.0, (states.run_deadline_ns(record) - now) / 1e9),
        "state": state.state_name(),
        "epoch": record["epoch"],
        "fires_at_boottime_ns": states.fires_at_ns(record, pulse),
        "holder_alive": release.holder_alive(state, record["hold_id"]),
        "dead_man_alive": release.dead_man_alive(state, record),
        "invalidated": release.invalidated(state, record["hold_id"]),
    }
