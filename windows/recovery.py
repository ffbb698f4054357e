"""What may safely be done next with a hold whose coordinator is gone, from its journal alone.

Rules: a recoverer never resumes a measurement, never guesses an outcome and never touches a host of another hold; it
asks the hosts by operation id first, then restores, then releases, then closes. Following the answers always ends in
CLOSED or in DEGRADED, and the property tests hold this file to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from windows.hold import HoldState, HostState
from windows.hold_table import GONE, Action, HoldEvent, HostPhase, Phase


class NextKind(StrEnum):
    """The kinds of next step, safest first."""

    NOTHING = "nothing"
    ASK = "ask"
    """Ask the named hosts what came of these operations; record the outcomes, ``unknown`` where they cannot tell."""
    NOTE = "note"
    """Record an event; no host is contacted."""
    RESTORE = "restore"
    RELEASE = "release"
    PERSON = "person"
    """Nothing is left that a program may do: a person looks, then ``hold clear --reason``."""


@dataclass(frozen=True)
class NextStep:
    """The next safe step.

    Attributes:
        hosts: Hosts it concerns.
        ops: Operation ids to ask for.
        event: The event to record.
        command: What a person would type.
        why: One sentence.
    """

    kind: NextKind
    why: str
    hosts: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    event: HoldEvent | None = None
    command: str = ""


MAX_RESTORES: Final = 3
"""A restore whose outcome stays unknown this often is given up: the hold is degraded and a person looks."""


def next_safe_step(state: HoldState, *, may_retry: bool = False) -> NextStep:
    """The one next step that is safe whatever happened after the last record.

    Args:
        state: The replayed journal.
        may_retry: A person asked for one more restore of a degraded hold; the caller makes one attempt per command.
    """
    if state.has_ended:
        return NextStep(NextKind.NOTHING, "the hold is closed")
    asked = [op for op in state.open_ops if op.action not in (Action.READ, Action.STAGE)]
    if asked:
        return NextStep(
            NextKind.ASK,
            "these operations have an intent and no outcome",
            hosts=tuple(dict.fromkeys(op.host for op in asked)),
            ops=tuple(op.op for op in asked),
            command=_recover(state),
        )
    if state.phase not in (Phase.RESTORING, Phase.DEGRADED):
        return NextStep(
            NextKind.NOTE,
            "its coordinator is gone, so the hold goes back to production",
            event=HoldEvent.RECOVERED,
            command=_recover(state),
        )
    if state.hosts_in_debt() and HoldEvent.OWNERSHIP_LOST not in state.causes:
        return _next_for_debt(state, may_retry=may_retry)
    return _wind_up(state)


def _next_for_debt(state: HoldState, *, may_retry: bool) -> NextStep:
    """One attempt per host; then the hold is degraded, and a person decides about further ones."""
    debt = state.hosts_in_debt()
    if state.phase is Phase.DEGRADED:
        due = debt if may_retry else ()
    else:
        due = tuple(host for host in debt if not _is_given_up(host))
    if due:
        return NextStep(
            NextKind.RESTORE,
            "production of these hosts is not proven back",
            hosts=tuple(host.name for host in due),
            command=_recover(state),
        )
    names = tuple(host.name for host in debt)
    if state.phase is Phase.DEGRADED:
        return NextStep(NextKind.PERSON, "these hosts are in restore debt", hosts=names, command=_recover(state))
    return NextStep(
        NextKind.NOTE,
        "restoring these hosts did not succeed",
        hosts=names,
        event=HoldEvent.RESTORE_UNPROVEN,
        command=_recover(state),
    )


def _is_given_up(host: HostState) -> bool:
    """Whether a program has tried often enough."""
    return (host.phase is HostPhase.DEBT and host.num_restores >= 1) or host.num_restores >= MAX_RESTORES


def _wind_up(state: HoldState) -> NextStep:
    """The steps after the last restore."""
    if HoldEvent.OWNERSHIP_LOST in state.causes:
        return NextStep(
            NextKind.PERSON,
            "the hold is no longer ours: we may ask its hosts, not change them",
            command=f'coordinator hold clear --hold {state.hold_id} --reason "…"',
        )
    held = [host.name for host in state.hosts if host.phase not in GONE]
    if held:
        return NextStep(
            NextKind.RELEASE,
            "production of these hosts is proven back, or was never touched",
            hosts=tuple(held),
            command=_recover(state),
        )
    if state.phase is Phase.DEGRADED:
        return NextStep(
            NextKind.PERSON,
            "production is proven back; the hold stays degraded until a person has looked",
            command=f'coordinator hold clear --hold {state.hold_id} --reason "…"',
        )
    return NextStep(
        NextKind.NOTE,
        "every host is released",
        event=HoldEvent.ALL_RELEASED,
        command=_recover(state),
    )


def _recover(state: HoldState) -> str:
    """The command that does all of this."""
    return f"coordinator hold recover --hold {state.hold_id}"


def doubtful_hosts(state: HoldState) -> tuple[str, ...]:
    """Hosts of which the journal cannot say how they stand."""
    doubt = {HostPhase.LEASING, HostPhase.ARMING, HostPhase.STOPPING, HostPhase.RESTORING, HostPhase.RELEASING}
    return tuple(host.name for host in state.hosts if host.phase in doubt)
