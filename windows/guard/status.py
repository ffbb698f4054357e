"""What a person needs to know about this host, and what a coordinator proves against it. Reading only."""

from __future__ import annotations

from windows.guard import clock, files, release, runs, spec, table
from windows.guard import state as states
from windows.guard.errors import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from windows.guard.state import State

    Json = dict[str, Any]


def describe(state: State) -> Json:
    """The answer of ``status``."""
    record, debt, name = state.record(), state.debt(), state.state_name()
    source = record or debt
    return {
        "state": name,
        "in_debt": debt is not None,
        "hold": _hold(state, record) if record else None,
        "stopped": [service["name"] for service in debt["services"]] if debt else [],
        "debt": _debt(debt) if debt else None,
        "runs": runs.summary(state, source["hold_id"]) if source else [],
        "last_outcome": files.read_json(state.path("last-outcome.json")),
        "boot_id": clock.boot_id(),
        "epoch": state.epoch(),
        "incarnation": state.incarnation(),
        "next": next_step(name, source),
    }


def _debt(debt: Json) -> Json:
    return {
        "hold_id": debt["hold_id"],
        "epoch": debt["epoch"],
        "since_utc": debt["since_utc"],
        "services": [service["name"] for service in debt["services"]],
    }


def _hold(state: State, record: Json) -> Json:
    now, pulse = clock.boottime_ns(), state.heartbeat(record["hold_id"])
    same_boot = record["boot_id"] == clock.boot_id()
    fires = states.fires_at_ns(record, pulse)
    shown = ("hold_id", "owner", "reason", "epoch", "since_utc", "until_utc", "plan_sha256", "devices")
    return dict(
        {key: record[key] for key in shown},
        deadline_boottime_ns=record["deadline_ns"],
        remaining_s=max(0.0, (record["deadline_ns"] - now) / 1e9) if same_boot else 0.0,
        run_remaining_s=max(0.0, (states.run_deadline_ns(record) - now) / 1e9) if same_boot else 0.0,
        heartbeat_age_s=(now - (pulse["at_ns"] if pulse else record["acquired_ns"])) / 1e9 if same_boot else None,
        fires_at_boottime_ns=fires,
        fires_in_s=(fires - now) / 1e9 if same_boot else 0.0,
        holder_alive=release.holder_alive(state, record["hold_id"]),
        dead_man_alive=release.dead_man_alive(state, record),
    )


def next_step(name: str, source: Json | None) -> str:
    """The next safe command, with the hold's name where one is needed."""
    text = table.NEXT_STEP[name]
    return f"{text} [hold {source['hold_id']}, epoch {source['epoch']}]" if source else text


def prove(state: State, args: Json) -> Json:
    """Answer only inside exactly this active hold.

    Raises:
        Refusal: ``NO_HOLD``, ``OTHER_HOLD``, ``WRONG_STATE``, ``DEADLINE``, ``HOLDER_DEAD``.
    """
    spec.take(args, {"hold_id": "str", "epoch": "int"})
    record, advice = state.record(), "this program belongs inside a hold; start it through the coordinator"
    asked = f"{args['hold_id']} epoch {args['epoch']}"
    if record is None:
        raise Refusal("NO_HOLD", "no hold is open on this host", asked, "none", advice)
    if (record["hold_id"], record["epoch"]) != (args["hold_id"], args["epoch"]):
        raise Refusal(
            "OTHER_HOLD", "another hold is open", asked, f"{record['hold_id']} epoch {record['epoch']}", advice
        )
    name = state.state_name()
    if name != table.HELD:
        raise Refusal("WRONG_STATE", "the hold is not active", table.HELD, name, advice)
    left_ns = states.run_deadline_ns(record) - clock.boottime_ns()
    if left_ns <= 0:
        raise Refusal("DEADLINE", "the hold's run time is over", "before the run deadline", "after it", advice)
    if not release.holder_alive(state, record["hold_id"]):
        raise Refusal("HOLDER_DEAD", "nobody holds the locks any more", "a live holder", "none", "restore")
    return {
        "hold_id": record["hold_id"],
        "epoch": record["epoch"],
        "remaining_s": left_ns / 1e9,
        "devices": record["devices"],
    }
