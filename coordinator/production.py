"""Production outside a hold: whether a host is free for one, and the rehearsal's own services, up and down."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from coordinator.errors import GateFailed, HardwareHeld, HostUnreachable, NotRestored
from coordinator.guard_client import GuardRefusal, Json, as_coordinator_error
from coordinator.render import Reporter
from coordinator.session import HostSession
from windows.guard.proc import is_alive

TRIAL_PREFIX = "trial-"
"""What the name of a service starts with while the trial runs it beside production."""


_LOOK = ("degraded", "void")
"""States of a host in which nobody drives the hold any more."""


def program() -> str:
    """How a person starts this program: its name when a shell finds it, else the path beside this interpreter."""
    return "coordinator" if shutil.which("coordinator") else str(Path(sys.executable).with_name("coordinator"))


def recover_command(site: Path, store: Path) -> str:
    """What a person runs to end the hold that the hosts of a site know; the store is its campaign's."""
    return f"{program()} hold recover --site '{site}' --store '{store}'"


def require_free(
    sessions: Sequence[HostSession], site: Path = Path("site.toml"), store: Path = Path("receipts-store")
) -> None:
    """Refuse before production is started when a host is held or in debt.

    Args:
        sessions: The hosts.
        site: The site file that the printed command names.
        store: The receipt store that it names: a recovery belongs to the chain of its campaign.

    Raises:
        HardwareHeld: Somebody holds it; the message says who and until when.
        NotRestored: An earlier hold is not proven restored.
    """
    recover = f"`{recover_command(site, store)}`"
    for session in sessions:
        status = session.guard.call("status")
        hold = status.get("hold")
        if hold and status["state"] not in _LOOK:
            raise HardwareHeld(
                f"{session.name} is held by {hold['owner']} ({hold['reason']}) until {hold['until_utc']}",
                where=session.name,
                found=f"hold {hold['hold_id']}, epoch {hold['epoch']}, state {status['state']}; last heartbeat "
                f"{seconds(hold['heartbeat_age_s'])} ago, the host acts in {seconds(hold['fires_in_s'])}",
                next_step=f"wait for it; if nobody runs it any more, {recover} ends it and puts production back",
            )
        if status["in_debt"]:
            debt = status.get("debt") or hold or {}
            services = ", ".join(debt.get("services", ())) or "production"
            raise NotRestored(
                f"{session.name}: an earlier hold is not proven restored",
                where=session.name,
                found=f"hold {debt.get('hold_id')} stopped {services} at {debt.get('since_utc')}",
                next_step=recover,
            )


def seconds(value: float | None) -> str:
    """Seconds for a person: whole, because nobody acts on less, and never below zero, which would mean now."""
    return "an unknown time" if value is None else f"{max(value, 0):.0f} s"


@contextmanager
def production(sessions: Sequence[HostSession], reporter: Reporter) -> Iterator[None]:
    """Production of the rehearsal, up around the whole campaign and down after it, unless a host is in debt.

    Raises:
        GateFailed: A service does not come up; its log says why.
    """
    started: list[tuple[HostSession, Json]] = []
    try:
        for session in sessions:
            end_leftovers(session, reporter)
            for service in sorted(session.spec.services, key=lambda entry: -entry.stop_order):
                reporter.step(f"start production service {service.name}", host=session.name)
                document = service.to_guard()
                started.append((session, document))
                # Listening and answering have a bound of start_s each.
                _require_up(session, document, _service(session, "service-start", document, 2 * service.start_s))
        yield
    finally:
        for session, document in reversed(started):
            if session.guard.call("status", with_claim=False)["state"] != "free":
                reporter.step("left as it is: the host is not free", host=session.name)
                continue
            _service(session, "service-stop", document, 60)


def end_leftovers(session: HostSession, reporter: Reporter) -> None:
    """End what a killed rehearsal left: outside a hold nobody else does, and the guard knows services by name only."""
    for service in sorted(session.spec.services, key=lambda entry: entry.stop_order):
        for name in (TRIAL_PREFIX + service.name, service.name):
            if _left_running(session, name):
                reporter.step(f"end {name}, which an interrupted rehearsal left running", host=session.name)
                _service(session, "service-stop", {**service.to_guard(), "name": name}, 60)


def _left_running(session: HostSession, name: str) -> bool:
    record: dict[str, Any] = {}
    with suppress(HostUnreachable, ValueError):
        record = json.loads(session.host.read(f"{session.spec.state_dir}/services/{name}.json", max_bytes=1 << 20))
    return is_alive(record.get("pid"), record.get("start_ticks"))


def _require_up(session: HostSession, document: Json, result: Json) -> None:
    wrong = [row for row in (*result["rows"], *result["probes"]) if row.get("ok") is False]
    if wrong:
        raise GateFailed(
            f"production service {document['name']} did not come up; no hold was opened",
            where=session.name,
            expected="; ".join(f"{row.get('field', 'probe')}: {row.get('expected', 'the answer')}" for row in wrong),
            found="; ".join(str(row.get("found") or row.get("detail")) for row in wrong),
            next_step=f"read {document['log']}",
        )


def _service(session: HostSession, verb: str, document: Json, bound_s: int) -> Json:
    try:
        return session.guard.call(verb, {"service": document}, with_claim=False, timeout_s=bound_s + 30)
    except GuardRefusal as refusal:
        raise as_coordinator_error(refusal) from refusal
