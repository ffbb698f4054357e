"""The state of a hold: its journal, folded by the tables of ``hold_table``.

Rules: `HoldState` is frozen and only `apply` makes the next one; a record that the tables refuse raises and changes
nothing; a state knows no clock. What to do next after a crash is ``windows.recovery``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from windows.errors import HoldError, JournalError
from windows.exit_codes import ExitCode, combine
from windows.hold_records import Found, Intent, Note, Opened, Outcome, Record
from windows.hold_table import (
    ACTION_PHASES,
    BAD_NEWS,
    CONDITIONS,
    GONE,
    HOLD_TABLE,
    HOST_TABLE,
    STOP_CONDITION,
    TOUCHED,
    Action,
    HoldEvent,
    HostEvent,
    HostPhase,
    Moment,
    Phase,
    Refusal,
)

NEEDS_REASON: Final = frozenset({HoldEvent.CLEARED, HoldEvent.ABORTED, HoldEvent.OWNERSHIP_LOST})
"""Events that leave a receipt in a person's words."""

_SIDE_EFFECT_FREE: Final = frozenset({Action.READ, Action.STAGE, Action.RUN})
"""Actions of which several may be open on one host; the others go one at a time."""


@dataclass(frozen=True)
class HostState:
    """One host as the journal knows it.

    Attributes:
        epoch: Fence epoch the host gave with the lease; every later answer must carry the same.
        was_stopped: Whether a stop was ever intended here.
        num_restores: Restores intended by us; the host itself makes them one.
    """

    name: str
    phase: HostPhase = HostPhase.UNTOUCHED
    epoch: int | None = None
    was_stopped: bool = False
    num_restores: int = 0

    @property
    def is_in_debt(self) -> bool:
        """Whether production of this host is, or may be, changed without proof that it is back."""
        return self.phase in TOUCHED


@dataclass(frozen=True)
class HoldState:
    """A hold after some records.

    Attributes:
        next_seq: Sequence number the next record must have.
        causes: Bad news so far, in order; the first decides how the hold ended.
        open_ops: Intents without outcome, by operation id, in order.
        arms_done: Labels of arms that finished with their evidence collected.
        arm_running: Label of the arm that has started and not finished.
        clear_reason: The words of the person who cleared it.
    """

    hold_id: str
    hold_number: int
    plan_sha256: str
    phase: Phase
    hosts: tuple[HostState, ...]
    next_seq: int = 1
    causes: tuple[HoldEvent, ...] = ()
    open_ops: tuple[Intent, ...] = ()
    used_ops: frozenset[str] = frozenset()
    arms_done: tuple[str, ...] = ()
    arm_running: str | None = None
    clear_reason: str | None = None

    @property
    def has_ended(self) -> bool:
        """Whether nothing of this hold is left on any host."""
        return self.phase is Phase.CLOSED

    @property
    def has_ended_well(self) -> bool:
        """Whether it ended with all its arms and without bad news: a field of its own, not implied by the end."""
        return self.has_ended and not self.causes and self.clear_reason is None

    @property
    def is_degraded(self) -> bool:
        """Whether a person has to look."""
        return self.phase is Phase.DEGRADED

    def host(self, name: str) -> HostState:
        """The host of that name.

        Raises:
            HoldError: It is not part of this hold.
        """
        for host in self.hosts:
            if host.name == name:
                return host
        raise HoldError(f"hold {self.hold_id}: host {name!r} is not part of it; it has {_names(self.hosts)}")

    def hosts_in_debt(self) -> tuple[HostState, ...]:
        """Hosts whose production is not proven back."""
        return tuple(host for host in self.hosts if host.is_in_debt)


def open_hold(record: Opened) -> HoldState:
    """The state after the first record.

    Raises:
        JournalError: It is not the first, or its hosts repeat.
    """
    if record.seq != 0:
        raise JournalError(f"hold {record.hold_id}: 'opened' has seq {record.seq}, expected 0")
    if len(set(record.hosts)) != len(record.hosts):
        raise JournalError(f"hold {record.hold_id}: hosts repeat in {', '.join(record.hosts)}")
    if not record.adopted:
        hosts = tuple(HostState(name) for name in record.hosts)
        return HoldState(record.hold_id, record.hold_number, record.plan_sha256, Phase.PLANNED, hosts)
    if set(record.adopted) != set(record.hosts):
        raise JournalError(f"hold {record.hold_id}: adopted hosts differ from {', '.join(record.hosts)}")
    hosts = tuple(HostState(name, record.adopted[name].phase, record.adopted[name].epoch) for name in record.hosts)
    # Taken over without the journal: whatever it was doing, only the way back is open.
    return HoldState(
        record.hold_id,
        record.hold_number,
        record.plan_sha256,
        Phase.RESTORING,
        hosts,
        causes=(HoldEvent.RECOVERED,),
    )


def apply(state: HoldState, record: Record) -> HoldState:
    """The next state.

    Raises:
        HoldError: The tables refuse the record; the message is the table's reason.
        JournalError: The record does not continue this journal.
    """
    if record.hold_id != state.hold_id:
        raise JournalError(f"record of hold {record.hold_id}, expected {state.hold_id}: it closes exactly its own hold")
    if record.seq != state.next_seq:
        raise JournalError(f"hold {state.hold_id}: record has seq {record.seq}, expected {state.next_seq}")
    if isinstance(record, Opened):
        raise JournalError(f"hold {state.hold_id}: opened twice")
    state = replace(state, next_seq=state.next_seq + 1)
    if isinstance(record, Note):
        return _settled(_apply_note(state, record))
    if isinstance(record, Intent):
        return _apply_intent(state, record)
    if isinstance(record, Outcome):
        return _apply_outcome(state, record)
    return _apply_found(state, record)


def replay(records: Iterable[Record]) -> HoldState:
    """The state after a whole journal.

    Raises:
        JournalError: It is empty, does not begin with 'opened', or contradicts itself.
    """
    iterator = iter(records)
    first = next(iterator, None)
    if not isinstance(first, Opened):
        raise JournalError("journal does not begin with 'opened': nothing says which hold this is")
    state = open_hold(first)
    for record in iterator:
        state = apply(state, record)
    return state


def _apply_note(state: HoldState, note: Note) -> HoldState:
    """An event of the whole hold."""
    following = HOLD_TABLE[state.phase, note.event]
    where = f"hold {state.hold_id}: {note.event.value} in {state.phase.value}"
    if isinstance(following, Refusal):
        raise HoldError(f"{where} refused: {following.reason}")
    wanted = CONDITIONS.get(note.event)
    if wanted is not None:
        wrong = [host for host in state.hosts if host.phase not in wanted]
        if wrong:
            raise HoldError(f"{where} refused: {_phases(wrong)}, expected {_one_of(wanted)} on every host")
        _require_settled_ops(state, where)
    if note.event in NEEDS_REASON and not note.reason.strip():
        raise HoldError(f"{where} refused: it needs a reason, which goes into a receipt")
    state = _apply_arm(state, note, where)
    causes = state.causes
    if note.event in BAD_NEWS or note.event in (HoldEvent.OWNERSHIP_LOST, HoldEvent.RESTORE_UNPROVEN):
        causes = (*causes, note.event)
    clear_reason = note.reason if note.event is HoldEvent.CLEARED else state.clear_reason
    return replace(state, phase=following, causes=causes, clear_reason=clear_reason)


def _apply_arm(state: HoldState, note: Note, where: str) -> HoldState:
    """Arms run one at a time and each boots once: no launch is retried inside a hold."""
    if note.event is HoldEvent.ARM_STARTED:
        if note.arm is None or state.arm_running is not None or note.arm in state.arms_done:
            raise HoldError(f"{where} refused: arm {note.arm}, running {state.arm_running}, done {state.arms_done}")
        return replace(state, arm_running=note.arm)
    if note.event is HoldEvent.ARM_FINISHED:
        if note.arm is None or note.arm != state.arm_running:
            raise HoldError(f"{where} refused: arm {note.arm} finished, running is {state.arm_running}")
        return replace(state, arm_running=None, arms_done=(*state.arms_done, note.arm))
    if note.event is HoldEvent.RESTORE_STARTED and state.arm_running is not None:
        raise HoldError(f"{where} refused: arm {state.arm_running} is running; say what ended it instead")
    return state


def _settled(state: HoldState) -> HoldState:
    """A hold on its way back that never touched a host is closed at once."""
    untouched = all(host.phase is HostPhase.UNTOUCHED for host in state.hosts)
    if state.phase is Phase.RESTORING and untouched and not _mutating(state.open_ops):
        return replace(state, phase=Phase.CLOSED)
    return state


def _apply_intent(state: HoldState, intent: Intent) -> HoldState:
    """An action is about to happen."""
    host = state.host(intent.host)
    where = f"hold {state.hold_id}: {intent.action.value} on {host.name} in {state.phase.value}"
    if intent.op in state.used_ops:
        raise JournalError(f"{where} refused: operation {intent.op} exists already; ids are used once")
    if state.phase not in ACTION_PHASES[intent.action]:
        raise HoldError(f"{where} refused: it belongs to {_one_of(ACTION_PHASES[intent.action])}")
    if intent.action not in _SIDE_EFFECT_FREE:
        busy = [op for op in _mutating(state.open_ops) if op.host == host.name]
        if busy:
            raise HoldError(f"{where} refused: {busy[0].action.value} ({busy[0].op}) has no outcome yet: ask the host")
    if intent.action is Action.STOP:
        unarmed = [other for other in state.hosts if other.phase not in STOP_CONDITION]
        if unarmed:
            raise HoldError(f"{where} refused: {_phases(unarmed)}; every dead-man is armed before any stop")
    moved = _move(host, (intent.action, Moment.INTENT), where)
    moved = replace(
        moved,
        was_stopped=moved.was_stopped or intent.action is Action.STOP,
        num_restores=moved.num_restores + (intent.action is Action.RESTORE),
    )
    state = _with_host(state, moved)
    return replace(state, open_ops=(*state.open_ops, intent), used_ops=state.used_ops | {intent.op})


def _apply_outcome(state: HoldState, outcome: Outcome) -> HoldState:
    """What came of an action."""
    intent = next((op for op in state.open_ops if op.op == outcome.op), None)
    if intent is None:
        raise JournalError(f"hold {state.hold_id}: outcome of {outcome.op}, which is not open")
    host = state.host(intent.host)
    where = f"hold {state.hold_id}: outcome {outcome.result.value} of {intent.action.value} on {host.name}"
    if outcome.result is Moment.INTENT:
        raise JournalError(f"{where}: expected done, failed or unknown")
    is_grant = intent.action is Action.LEASE
    if outcome.result is Moment.DONE if is_grant else host.phase not in GONE:
        # Without a lease, or with a refused one, a host answers with the epoch of whoever holds it: not ours.
        host = _checked_epoch(host, outcome.epoch, where, is_grant=is_grant)
    if is_grant and outcome.result is Moment.DONE and host.epoch is None:
        raise HoldError(f"{where}: no epoch, expected the number the host gave with the lease")
    state = _with_host(state, _move(host, (intent.action, outcome.result), where))
    state = replace(state, open_ops=tuple(op for op in state.open_ops if op is not intent))
    return _settled(state)


def _apply_found(state: HoldState, found: Found) -> HoldState:
    """A host says how it stands."""
    host = state.host(found.host)
    where = f"hold {state.hold_id}: {found.fact.value} on {host.name}"
    busy = [op for op in _mutating(state.open_ops) if op.host == host.name]
    if busy:
        raise HoldError(f"{where} refused: {busy[0].action.value} ({busy[0].op}) has no outcome yet: ask for it first")
    host = _checked_epoch(host, found.epoch, where, is_grant=False)
    return _with_host(state, _move(host, found.fact, where))


def _checked_epoch(host: HostState, epoch: int | None, where: str, *, is_grant: bool) -> HostState:
    """Ownership is the epoch, compared for equality (DECISIONS 34)."""
    if epoch is None:
        return host
    if host.epoch is None:
        # A recoverer may learn it later than the grant, when the grant's answer was lost.
        return replace(host, epoch=epoch)
    if epoch != host.epoch or is_grant:
        raise HoldError(f"{where}: host has epoch {epoch}, this hold has {host.epoch}: ownership is lost")
    return host


def _move(host: HostState, event: HostEvent, where: str) -> HostState:
    """One step of a host by its table."""
    following = HOST_TABLE[host.phase, event]
    if isinstance(following, Refusal):
        raise HoldError(f"{where} refused while {host.phase.value}: {following.reason}")
    return replace(host, phase=following)


def _with_host(state: HoldState, host: HostState) -> HoldState:
    """The state with one host replaced."""
    return replace(state, hosts=tuple(host if other.name == host.name else other for other in state.hosts))


def _mutating(ops: Iterable[Intent]) -> tuple[Intent, ...]:
    """Open operations that may have changed something on their host."""
    return tuple(op for op in ops if op.action not in _SIDE_EFFECT_FREE)


def _require_settled_ops(state: HoldState, where: str) -> None:
    """An event about all hosts waits for every outcome that could contradict it."""
    busy = _mutating(state.open_ops)
    if busy:
        raise HoldError(f"{where} refused: {busy[0].action.value} on {busy[0].host} has no outcome yet")


def _names(hosts: Iterable[HostState]) -> str:
    return ", ".join(host.name for host in hosts)


def _phases(hosts: Iterable[HostState]) -> str:
    return ", ".join(f"{host.name} is {host.phase.value}" for host in hosts)


def _one_of(phases: Iterable[Phase | HostPhase]) -> str:
    return " or ".join(sorted(phase.value for phase in phases))


_CAUSE_CODES: Final[dict[HoldEvent, ExitCode]] = {
    HoldEvent.REFUSED: ExitCode.ADMISSION_REFUSED,
    HoldEvent.HELD_BY_OTHER: ExitCode.HELD_BY_OTHER,
    HoldEvent.UNREACHABLE: ExitCode.HOST_UNREACHABLE,
    HoldEvent.STEP_FAILED: ExitCode.GATE_FAILED,
    HoldEvent.GATE_FAILED: ExitCode.GATE_FAILED,
    HoldEvent.BUDGET_SPENT: ExitCode.GATE_FAILED,
    HoldEvent.INTERRUPTED: ExitCode.INTERRUPTED,
    HoldEvent.ABORTED: ExitCode.INTERRUPTED,
    HoldEvent.LINK_LOST: ExitCode.LINK_LOST,
    HoldEvent.HOST_REBOOTED: ExitCode.INVALID,
    HoldEvent.RECOVERED: ExitCode.DONE,
    HoldEvent.OWNERSHIP_LOST: ExitCode.OWNERSHIP_LOST,
    HoldEvent.RESTORE_UNPROVEN: ExitCode.NOT_RESTORED,
}


def exit_code(state: HoldState) -> ExitCode:
    """The exit code of a command that ends with the hold in this state.

    A closed hold is restored and checked, so a link lost on the way no longer matters: what is left is that the run
    did not complete. A hold that is neither closed nor degraded is left to its hosts (51), once one is touched.
    """
    codes = [_CAUSE_CODES[cause] for cause in state.causes]
    if state.has_ended:
        over = {ExitCode.LINK_LOST: ExitCode.INTERRUPTED, ExitCode.NOT_RESTORED: ExitCode.DONE}
        if any(host.was_stopped for host in state.hosts):
            # "Nothing was touched" would be untrue of a refusal that came after the first stop.
            over[ExitCode.ADMISSION_REFUSED] = ExitCode.GATE_FAILED
        return combine([ExitCode.DONE, *(over.get(code, code) for code in codes)])
    if state.is_degraded:
        # Whoever holds it now owes the proof when ownership is lost; until then nobody knows: a person must look.
        lost_only = ExitCode.OWNERSHIP_LOST in codes and not state.hosts_in_debt()
        return ExitCode.OWNERSHIP_LOST if lost_only else ExitCode.NOT_RESTORED
    if all(host.phase in GONE for host in state.hosts):
        return combine([ExitCode.DONE, *codes])
    return combine([ExitCode.LINK_LOST, *codes])
