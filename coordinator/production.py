"""Production outside a hold: whether a host is free for one, and the rehearsal's own services, up and down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from coordinator.errors import HardwareHeld, NotRestored
from coordinator.guard_client import GuardRefusal, as_coordinator_error
from coordinator.render import Reporter
from coordinator.session import HostSession


def require_free(sessions: Sequence[HostSession]) -> None:
    """Refuse before production is started when a host is held or in debt.

    Raises:
        HardwareHeld: Somebody holds it; the message says who and until when.
        NotRestored: An earlier hold is not proven restored.
    """
    for session in sessions:
        status = session.guard.call("status")
        hold = status.get("hold")
        if hold and not status["in_debt"]:
            raise HardwareHeld(
                f"{session.name} is held by {hold['owner']} ({hold['reason']}) until {hold['until_utc']}",
                where=session.name,
                found=f"hold {hold['hold_id']}, epoch {hold['epoch']}",
                next_step=str(status.get("next", "")),
            )
        if status["in_debt"]:
            raise NotRestored(
                f"{session.name}: an earlier hold is not proven restored",
                where=session.name,
                found=str(status.get("debt") or hold),
                next_step="`coordinator hold recover --site build/rehearsal/latest/site.toml`",
            )


@contextmanager
def production(sessions: Sequence[HostSession], reporter: Reporter) -> Iterator[None]:
    """Production of the rehearsal, up around the whole campaign and down after it, unless a host is in debt."""
    started: list[tuple[HostSession, dict[str, object]]] = []
    try:
        for session in sessions:
            for service in sorted(session.spec.services, key=lambda entry: -entry.stop_order):
                reporter.step(f"start production service {service.name}", host=session.name)
                document = service.to_guard()
                _service(session, "service-start", document, service.start_s)
                started.append((session, document))
        yield
    finally:
        for session, document in reversed(started):
            if session.guard.call("status", with_claim=False)["state"] != "free":
                reporter.step("left as it is: the host is not free", host=session.name)
                continue
            _service(session, "service-stop", document, 60)


def _service(session: HostSession, verb: str, document: dict[str, object], bound_s: int) -> None:
    try:
        session.guard.call(verb, {"service": document}, with_claim=False, timeout_s=bound_s + 30)
    except GuardRefusal as refusal:
        raise as_coordinator_error(refusal) from refusal
