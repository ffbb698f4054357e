"""Stopping production and putting it back: the order, the locks and the proofs; the adapters know the kinds.

Stop: debt first, then supervisors, then services in ascending order, then a watch for ghosts. Restore: owned runs end,
devices are free, services start in descending order, supervisors last, then every field is compared and every probe
asked. Both hold the production lock, so at most one of them acts on a host.
"""

from __future__ import annotations

import contextlib
import hashlib
import json

from windows.guard import adapters, by_hand, clock, devices, files, notify, runs, table
from windows.guard import state as states
from windows.guard.errors import Refusal
from windows.guard.probe import probe_once, probe_until

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from windows.guard.state import State

    Json = dict[str, Any]

WATCH_EVERY_S = 0.25


class Stopwatch:
    """Adds up the time spent waiting for services, apart from the guard's own."""

    def __init__(self) -> None:
        self.begun_ns = clock.monotonic_ns()
        self.service_ns = 0

    @contextlib.contextmanager
    def service(self) -> Any:
        """Time inside this block belongs to the services."""
        start = clock.monotonic_ns()
        try:
            yield
        finally:
            self.service_ns += clock.monotonic_ns() - start

    def times(self) -> Json:
        """``{elapsed_ns, service_ns}``."""
        return {"elapsed_ns": clock.monotonic_ns() - self.begun_ns, "service_ns": self.service_ns}


def preflight(state: State, services: list[Json]) -> None:
    """Refuse production that is not as the site file expects, or that could not be brought back.

    Raises:
        Refusal: ``UNEXPECTED_STATE`` or ``UNRESTORABLE`` with rows.
    """
    for code, question in (("UNEXPECTED_STATE", "check_expected"), ("UNRESTORABLE", "check_restorable")):
        rows = [row for service in services for row in adapters.ask(question, state, service)]
        wrong = [row for row in rows if row["ok"] is not True]
        if wrong:
            first = wrong[0]
            raise Refusal(
                code,
                f"{first['service']}: {first['field']}",
                first["expected"],
                first["found"],
                "bring production to the expected state, or correct the site file; nothing was touched",
                {"rows": rows},
            )


def take_snapshot(state: State, record: Json) -> Json:
    """Record production as it is now; durable before it is returned."""
    snapshot = {
        "services": [adapters.of(service).snapshot(state, service) for service in record["services"]],
        "gpus": devices.gpus(),
        "boot_id": clock.boot_id(),
        "utc": clock.utc_now(),
    }
    digest = hashlib.sha256(json.dumps(snapshot, sort_keys=True).encode()).hexdigest()
    return {"snapshot": snapshot, "sha256": digest}


def _ordered(record: Json) -> list[tuple[Json, Json]]:
    """(service, its snapshot) in stop order."""
    pairs = list(zip(record["services"], record["snapshot"]["services"]))  # noqa: B905 - 3.9 has no strict
    return sorted(pairs, key=lambda pair: pair[0]["stop_order"])


def stop(state: State, record: Json) -> Json:
    """Stop production and prove it.

    Raises:
        Refusal: ``STOP_UNPROVEN`` with the rows; the host is then in debt and must be restored.
    """
    watch = Stopwatch()
    with state.production_lock("stop", 60.0):
        done = files.read_json(state.hold_path(record["hold_id"], "stop.json"))
        if done is not None and state.state_name() == table.HELD:
            return done
        with state.host_lock():
            # in one step, so that a hold that ends as untouched cannot slip in between
            _still_ours(state, record)
            state.write_debt(_debt_of(record))
            with contextlib.suppress(OSError):
                by_hand.write(state, record)
            state.write_record(dict(record, state=table.STOPPING))
        state.event("stop-begins", record)
        rows = _stop_all(state, record, watch)
        result = dict(watch.times(), rows=rows)
        if not rows or any(row["ok"] is not True for row in rows):
            state.event("stop-unproven", record, rows=[row for row in rows if row["ok"] is not True])
            raise _unproven(rows, result)
        result = dict(result, **watch.times())
        files.write_json(state.hold_path(record["hold_id"], "stop.json"), result)
        state.set_state(record, table.HELD)
        state.event("held", record, **watch.times())
        return result


def _unproven(rows: list[Json], result: Json) -> Refusal:
    wrong = next(
        (row for row in rows if row["ok"] is not True),
        {"service": "?", "field": "no rows", "expected": "", "found": ""},
    )
    return Refusal(
        "STOP_UNPROVEN",
        f"{wrong['service']}: {wrong['field']} is not proven",
        wrong["expected"],
        wrong["found"],
        "restore now; do not run anything on this host",
        result,
    )


def _debt_of(record: Json) -> Json:
    keys = ("hold_id", "epoch", "incarnation", "boot_id", "services", "snapshot", "notify", "devices", "deadline_ns")
    return dict(
        {key: record[key] for key in keys}, since_utc=clock.utc_now(), restore_reserve_s=record["restore_reserve_s"]
    )


def _still_ours(state: State, record: Json) -> None:
    """Between two steps of a stop: the hold is still open and its time is not over."""
    current = state.record()
    same = current is not None and (current["hold_id"], current["epoch"]) == (record["hold_id"], record["epoch"])
    if not same or current is None or current["state"] not in (table.ARMED, table.STOPPING):
        raise Refusal(
            "HOLD_ENDED",
            "the hold changed while production was being stopped",
            record["hold_id"],
            str(current and current["state"]),
            "ask status",
        )
    if clock.boottime_ns() >= states.run_deadline_ns(record):
        raise Refusal("DEADLINE", "no time left to stop more", "before the run deadline", "after it", "restore now")


def _stop_all(state: State, record: Json, watch: Stopwatch) -> list[Json]:
    rows = adapters.hold_down(state, record)
    for service, _ in _ordered(record):
        _still_ours(state, record)
        with watch.service():
            rows += adapters.of(service).stop(state, service)
    with watch.service():
        rows += _watch_ghosts(state, record)
    free = devices.foreign_processes(record["devices"], set())
    found = "free" if free == [] else "cannot be listed" if free is None else str(free)
    rows.append(
        {
            "service": "host",
            "field": "devices",
            "expected": "free",
            "found": found[:300],
            "ok": None if free is None else not free,
        }
    )
    return rows


def _watch_ghosts(state: State, record: Json) -> list[Json]:
    seen: dict[str, list[str]] = {service["name"]: [] for service in record["services"]}
    begun = clock.boottime_ns()

    def look() -> bool:
        elapsed_s = (clock.boottime_ns() - begun) / 1e9
        for service, snap in _ordered(record):
            if elapsed_s <= service["watch_s"] and not seen[service["name"]]:
                seen[service["name"]] = adapters.of(service).ghosts(state, service, snap)
        return any(seen.values())

    longest = max((service["watch_s"] for service in record["services"]), default=0)
    clock.wait_until(look, longest, WATCH_EVERY_S)
    return [
        {
            "service": name,
            "field": "ghost restart",
            "expected": "none",
            "found": ", ".join(signs)[:300] or "none",
            "ok": not signs,
        }
        for name, signs in seen.items()
    ]


def restore(state: State, hold_id: str, epoch: int, by: str, wait_s: float = 900.0) -> Json:
    """Put production back, prove it, and say so; runs again harmlessly.

    Raises:
        Refusal: ``HOLD_ENDED``/``OTHER_HOLD`` when that hold is not the one to restore.
        TimeoutError: Another stop or restore kept the production lock.
    """
    called_ns = clock.boottime_ns()
    with state.production_lock("restore", wait_s):
        plan = restorable(state, hold_id, epoch)
        previous = stored_result(state, hold_id)
        if (
            previous
            and previous["boot_id"] == clock.boot_id()
            and (previous["proven"] or previous["ended_ns"] >= called_ns)
        ):
            if previous["proven"]:
                _settle(state, plan)
            return previous
        if state.debt() is None and plan["state"] in table.UNTOUCHED:
            return dict(_compare_only(state, plan), by=by)
        _enter(state, hold_id, table.RESTORING)
        state.event("restore-begins", plan, by=by)
        result = _restore_all(state, plan)
        result.update(by=by, boot_id=clock.boot_id(), ended_ns=clock.boottime_ns())
        with contextlib.suppress(OSError):
            state.write(state.hold_path(hold_id, "restore.json"), result)
        if result["proven"]:
            _settle(state, plan)
            state.event("restored", plan, by=by)
        else:
            _enter(state, hold_id, table.DEGRADED)
            wrong = [row for row in result["rows"] + result["probes"] if row["ok"] is not True]
            state.event("degraded", plan, by=by, wrong=wrong[:20])
            notify.send(plan, "degraded")
        return result


def restorable(state: State, hold_id: str, epoch: int) -> Json:
    """The debt or open record of exactly this hold, with its snapshot."""
    plan = state.debt() or state.record()
    ended = state.outcome(hold_id)
    if ended is not None and ended["epoch"] == epoch and (plan is None or plan["hold_id"] != hold_id):
        raise Refusal(
            "HOLD_ENDED", f"this hold is over: {ended['outcome']}", "an open hold", ended["by"], "status", ended
        )
    if plan is None:
        raise Refusal("NO_HOLD", "nothing to restore", hold_id, "no open hold, no debt", "status")
    if (plan["hold_id"], plan["epoch"]) != (hold_id, epoch):
        raise Refusal(
            "OTHER_HOLD",
            "another hold is open",
            f"{hold_id} epoch {epoch}",
            f"{plan['hold_id']} epoch {plan['epoch']}",
            "status shows it",
        )
    return plan


def stored_result(state: State, hold_id: str) -> Json | None:
    """The last restore's result of this hold."""
    return files.read_json(state.hold_path(hold_id, "restore.json"))


def _settle(state: State, plan: Json) -> None:
    """After the proof: disarm by a state write, then end the debt. In this order a crash leaves debt, never less."""
    _enter(state, plan["hold_id"], table.RESTORED)
    adapters.clean_up(state, plan)
    state.clear_debt()
    by_hand.remove(state)


def _enter(state: State, hold_id: str, name: str) -> None:
    """Write the state if the record is there and the disk allows; a restore never stops for its own notes."""
    with contextlib.suppress(OSError, Refusal), state.host_lock():
        record = state.record()
        if record is not None and record["hold_id"] == hold_id:
            record["state"] = name
            record["restored_boot_id"] = clock.boot_id()
            state.write_record(record)


def _restore_all(state: State, plan: Json) -> Json:
    watch = Stopwatch()
    rows = runs.end_all(state, plan["hold_id"])
    probes: list[Json] = []
    known = pids_of(state, plan["services"]) if any(map(devices.is_gpu, plan["devices"])) else set()
    foreign = devices.foreign_processes(plan["devices"], known)
    found = "free" if foreign == [] else str(foreign)[:300]
    rows.append(
        {
            "service": "host",
            "field": "devices",
            "expected": "free",
            "found": found,
            "ok": None if foreign is None else not foreign,
        }
    )
    if all(row["ok"] for row in rows):
        adapters.release(state, plan)
        for service, snap in reversed(_ordered(plan)):
            with watch.service():
                rows += adapters.of(service).restore(state, service, snap)
                if snap["state"] == "running":
                    answer = probe_until(service, service["start_s"], _liveness(state, service))
                    probes += [answer] if answer else []
        rows += adapters.resume(state, plan)
        rows += _compare(state, plan)
    return _judge(watch, rows, probes)


def _compare(state: State, plan: Json) -> list[Json]:
    rows = [row for service, snap in _ordered(plan) for row in adapters.of(service).compare(state, service, snap)]
    return rows + devices.compare(plan["snapshot"]["gpus"], devices.gpus() if plan["snapshot"]["gpus"] else [])


def _compare_only(state: State, plan: Json) -> Json:
    """Nothing was stopped under this hold: say whether production is as recorded, and touch nothing."""
    watch = Stopwatch()
    running = [service for service, snap in _ordered(plan) if snap["state"] == "running" and service["probe"]]
    return _judge(watch, _compare(state, plan), [probe_once(service) for service in running])


def _judge(watch: Stopwatch, rows: list[Json], probes: list[Json]) -> Json:
    """Proven only when there is something to prove it with, and all of it is true."""
    proven = bool(rows) and all(row["ok"] is True for row in rows) and all(answer["ok"] for answer in probes)
    return dict(watch.times(), proven=proven, rows=rows, probes=probes)


def _liveness(state: State, service: Json) -> Any:
    return lambda: adapters.of(service).is_running(state, service)


def pids_of(state: State, services: list[Json]) -> set[int]:
    """Pids of every process of these services."""
    return {process.pid for service in services for process in adapters.of(service).tree(state, service)}
