"""The hold machine: records, conditions over several hosts, ownership, and a random walk against its rules."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from windows_examples import SHA

from windows.errors import HoldError, JournalError
from windows.exit_codes import ExitCode
from windows.hold import HoldState, apply, exit_code, open_hold, replay
from windows.hold_records import Found, Intent, Note, Opened, Outcome, Record, parse_record, record_from_document
from windows.hold_table import GONE, TOUCHED, Action, HoldEvent, HostFact, HostPhase, Moment, Phase
from windows.recovery import NextKind, doubtful_hosts, next_safe_step

UTC = "2026-01-02T03:04:05Z"
HOLD = "tiny-1-0123456789ab"


class Writer:
    """Writes a journal the way the coordinator does, with a fresh operation id for every intent."""

    def __init__(self, hosts: tuple[str, ...] = ("a", "b"), adopted: dict[str, Any] | None = None) -> None:
        self.records: list[Record] = []
        document = {"type": "opened", "hold_number": 1, "plan_sha256": SHA, "hosts": list(hosts)}
        self.state = open_hold(self._record(Opened, {**document, "adopted": adopted or {}}))
        self.ops = itertools.count(1)

    def _record(self, kind: type[Any], fields: dict[str, Any]) -> Any:
        record = record_from_document({"seq": len(self.records), "utc": UTC, "hold_id": HOLD, **fields})
        assert isinstance(record, kind)
        self.records.append(record)
        return record

    def _apply(self, kind: type[Any], fields: dict[str, Any]) -> HoldState:
        record = self._record(kind, fields)
        try:
            self.state = apply(self.state, record)
        except HoldError:
            self.records.pop()
            raise
        return self.state

    def note(self, event: HoldEvent, reason: str = "", arm: str | None = None) -> HoldState:
        return self._apply(Note, {"type": "note", "event": event.value, "reason": reason, "arm": arm})

    def intent(self, host: str, action: Action, op: str | None = None) -> str:
        op = op or f"op-{next(self.ops)}"
        self._apply(Intent, {"type": "intent", "op": op, "host": host, "action": action.value})
        return op

    def outcome(self, op: str, result: Moment, epoch: int | None = None) -> HoldState:
        return self._apply(Outcome, {"type": "outcome", "op": op, "result": result.value, "epoch": epoch})

    def found(self, host: str, fact: HostFact, epoch: int | None = None) -> HoldState:
        return self._apply(Found, {"type": "found", "host": host, "fact": fact.value, "epoch": epoch})

    def do(self, host: str, action: Action, result: Moment = Moment.DONE, epoch: int | None = None) -> None:
        grants = action is Action.LEASE and result is Moment.DONE
        self.outcome(self.intent(host, action), result, epoch or (7 if grants else None))

    def on_all(self, action: Action) -> None:
        for host in self.state.hosts:
            self.do(host.name, action)

    def to_held(self) -> Writer:
        self.note(HoldEvent.ADMITTED)
        self.on_all(Action.LEASE)
        self.note(HoldEvent.ALL_LEASED)
        self.on_all(Action.SNAPSHOT)
        self.note(HoldEvent.ALL_SNAPSHOT)
        self.on_all(Action.ARM)
        self.on_all(Action.STOP)
        self.note(HoldEvent.ALL_HELD)
        return self

    def to_closed(self) -> Writer:
        self.to_held()
        self.note(HoldEvent.QUALIFY_STARTED)
        self.do("a", Action.RUN)
        self.note(HoldEvent.QUALIFIED)
        for arm in ("A1", "B1"):
            self.note(HoldEvent.ARM_STARTED, arm=arm)
            self.do("a", Action.RUN)
            self.note(HoldEvent.ARM_FINISHED, arm=arm)
        self.note(HoldEvent.RESTORE_STARTED)
        self.on_all(Action.RESTORE)
        self.on_all(Action.RELEASE)
        self.note(HoldEvent.ALL_RELEASED)
        return self


def test_a_whole_hold() -> None:
    writer = Writer().to_closed()
    assert writer.state.has_ended_well
    assert writer.state.arms_done == ("A1", "B1")
    assert exit_code(writer.state) is ExitCode.DONE
    assert replay(writer.records) == writer.state


def test_records_survive_their_json() -> None:
    for record in Writer().to_closed().records:
        assert record_from_document(record.to_document()) == record


@pytest.mark.parametrize("index", range(10))
def test_a_journal_with_a_missing_record_is_refused(index: int) -> None:
    records = Writer().to_closed().records
    del records[index]
    with pytest.raises(JournalError):
        replay(records)


def test_an_empty_journal_is_refused() -> None:
    with pytest.raises(JournalError, match="does not begin with 'opened'"):
        replay([])


@pytest.mark.parametrize(
    "line",
    [b"", b"{}", b'{"type":"note"}', b'{"type":"stolen","seq":0}', b"[1]", b'{"type":"note","seq":0,"extra":1}'],
)
def test_a_line_that_is_no_record_is_refused(line: bytes) -> None:
    with pytest.raises(JournalError, match="journal line refused"):
        parse_record(line)


def test_an_outcome_cannot_be_an_intent() -> None:
    writer = Writer()
    with pytest.raises(JournalError, match="expected what came of it"):
        writer._record(Outcome, {"type": "outcome", "op": "x", "result": "intent"})


def test_a_long_message_is_cut_and_never_refused() -> None:
    writer = Writer()
    writer.note(HoldEvent.REFUSED, "x" * 100_000)
    record = writer.records[-1]
    assert isinstance(record, Note)
    assert len(record.reason) == 2000


def test_no_stop_before_every_dead_man_is_armed() -> None:
    writer = Writer()
    writer.note(HoldEvent.ADMITTED)
    writer.on_all(Action.LEASE)
    writer.note(HoldEvent.ALL_LEASED)
    writer.on_all(Action.SNAPSHOT)
    writer.note(HoldEvent.ALL_SNAPSHOT)
    writer.do("a", Action.ARM)
    with pytest.raises(HoldError, match="b is snapshot; every dead-man is armed before any stop"):
        writer.intent("a", Action.STOP)
    op = writer.intent("b", Action.ARM)
    with pytest.raises(HoldError, match="b is arming"):
        writer.intent("a", Action.STOP)
    writer.outcome(op, Moment.UNKNOWN)
    with pytest.raises(HoldError, match="b is arming"):
        writer.intent("a", Action.STOP)


def test_all_of_something_means_every_host_and_no_open_operation() -> None:
    writer = Writer()
    writer.note(HoldEvent.ADMITTED)
    writer.do("a", Action.LEASE)
    with pytest.raises(HoldError, match="b is untouched, expected leased on every host"):
        writer.note(HoldEvent.ALL_LEASED)
    writer.do("b", Action.LEASE)
    writer.note(HoldEvent.ALL_LEASED)
    writer.on_all(Action.SNAPSHOT)
    writer.note(HoldEvent.ALL_SNAPSHOT)


def test_nothing_is_released_before_its_production_is_proven_back() -> None:
    writer = Writer().to_held()
    writer.note(HoldEvent.ABORTED, "test")
    with pytest.raises(HoldError, match="stopped and not proven back"):
        writer.intent("a", Action.RELEASE)
    writer.do("a", Action.RESTORE)
    writer.do("a", Action.RELEASE)
    with pytest.raises(HoldError, match="b is stopped, expected released or untouched"):
        writer.note(HoldEvent.ALL_RELEASED)


def test_one_operation_at_a_time_on_a_host() -> None:
    writer = Writer().to_held()
    writer.note(HoldEvent.ABORTED, "test")
    writer.intent("a", Action.RESTORE, "first")
    with pytest.raises(HoldError, match=r"restore \(first\) has no outcome yet"):
        writer.intent("a", Action.RESTORE)
    with pytest.raises(HoldError, match="has no outcome yet"):
        writer.found("a", HostFact.FOUND_RESTORED)
    writer.intent("b", Action.RESTORE)


def test_operation_ids_are_used_once() -> None:
    writer = Writer()
    writer.note(HoldEvent.ADMITTED)
    writer.outcome(writer.intent("a", Action.LEASE, "one"), Moment.FAILED)
    with pytest.raises(JournalError, match="ids are used once"):
        writer.intent("a", Action.LEASE, "one")
    with pytest.raises(JournalError, match="which is not open"):
        writer.outcome("one", Moment.DONE)


def test_a_host_with_another_epoch_is_not_ours() -> None:
    writer = Writer().to_held()
    op = writer.intent("a", Action.READ)
    with pytest.raises(HoldError, match="host has epoch 8, this hold has 7: ownership is lost"):
        writer.outcome(op, Moment.DONE, epoch=8)
    writer.outcome(op, Moment.DONE, epoch=7)
    writer.note(HoldEvent.OWNERSHIP_LOST, "epoch 8 on a")
    assert writer.state.is_degraded
    assert exit_code(writer.state) is ExitCode.NOT_RESTORED


def test_a_refused_lease_teaches_no_epoch() -> None:
    writer = Writer()
    writer.note(HoldEvent.ADMITTED)
    writer.outcome(writer.intent("a", Action.LEASE), Moment.FAILED, epoch=41)
    assert writer.state.host("a").epoch is None


def test_a_granted_lease_needs_an_epoch() -> None:
    writer = Writer()
    writer.note(HoldEvent.ADMITTED)
    op = writer.intent("a", Action.LEASE)
    with pytest.raises(HoldError, match="no epoch"):
        writer.outcome(op, Moment.DONE)


def test_a_record_of_another_hold_is_refused() -> None:
    writer = Writer()
    record = record_from_document(
        {"type": "note", "seq": 1, "utc": UTC, "hold_id": "another-hold", "event": "admitted"}
    )
    with pytest.raises(JournalError, match="it closes exactly its own hold"):
        apply(writer.state, record)


@pytest.mark.parametrize("event", [HoldEvent.CLEARED, HoldEvent.ABORTED])
def test_a_persons_act_needs_a_persons_reason(event: HoldEvent) -> None:
    writer = Writer().to_held()
    if event is HoldEvent.CLEARED:
        writer.note(HoldEvent.OWNERSHIP_LOST, "x")
    with pytest.raises(HoldError, match="it needs a reason"):
        writer.note(event, "  ")
    writer.note(event, "looked at both hosts")


def test_no_arm_is_launched_twice_and_arms_do_not_overlap() -> None:
    writer = Writer().to_held()
    writer.note(HoldEvent.QUALIFY_STARTED)
    writer.note(HoldEvent.QUALIFIED)
    writer.note(HoldEvent.ARM_STARTED, arm="A1")
    for event, arm in (
        (HoldEvent.ARM_STARTED, "B1"),
        (HoldEvent.ARM_FINISHED, "B1"),
        (HoldEvent.RESTORE_STARTED, None),
    ):
        with pytest.raises(HoldError):
            writer.note(event, arm=arm)
    writer.note(HoldEvent.ARM_FINISHED, arm="A1")
    with pytest.raises(HoldError):
        writer.note(HoldEvent.ARM_STARTED, arm="A1")


def test_refused_before_any_host_is_touched_closes_at_once() -> None:
    writer = Writer()
    writer.note(HoldEvent.ADMITTED)
    assert writer.note(HoldEvent.REFUSED).phase is Phase.CLOSED
    assert exit_code(writer.state) is ExitCode.ADMISSION_REFUSED


def test_a_lease_in_doubt_is_settled_before_the_hold_closes() -> None:
    writer = Writer()
    writer.note(HoldEvent.ADMITTED)
    op = writer.intent("a", Action.LEASE)
    assert writer.note(HoldEvent.LINK_LOST).phase is Phase.RESTORING
    writer.outcome(op, Moment.UNKNOWN)
    assert doubtful_hosts(writer.state) == ("a",)
    with pytest.raises(HoldError):
        writer.note(HoldEvent.ALL_RELEASED)
    writer.do("a", Action.RELEASE)
    assert writer.note(HoldEvent.ALL_RELEASED).phase is Phase.CLOSED


def test_a_denied_second_lease_gives_the_first_one_back() -> None:
    writer = Writer()
    writer.note(HoldEvent.ADMITTED)
    writer.do("a", Action.LEASE)
    writer.do("b", Action.LEASE, Moment.FAILED)
    writer.note(HoldEvent.HELD_BY_OTHER)
    assert next_safe_step(writer.state).hosts == ("a",)
    writer.do("a", Action.RELEASE)
    writer.note(HoldEvent.ALL_RELEASED)
    assert exit_code(writer.state) is ExitCode.HELD_BY_OTHER


CAUSE_CODES = {
    HoldEvent.GATE_FAILED: (51, 30),
    HoldEvent.INTERRUPTED: (51, 130),
    HoldEvent.LINK_LOST: (51, 130),
    HoldEvent.HOST_REBOOTED: (51, 33),
    HoldEvent.RECOVERED: (51, 0),
}


@pytest.mark.parametrize("cause", CAUSE_CODES)
def test_exit_codes_before_and_after_the_proof(cause: HoldEvent) -> None:
    writer = Writer().to_held()
    writer.note(cause, "x")
    assert exit_code(writer.state) == CAUSE_CODES[cause][0]
    writer.on_all(Action.RESTORE)
    writer.on_all(Action.RELEASE)
    writer.note(HoldEvent.ALL_RELEASED)
    assert exit_code(writer.state) == CAUSE_CODES[cause][1]
    assert not writer.state.has_ended_well


def test_an_unproven_restore_is_50_until_a_person_clears_it() -> None:
    writer = Writer().to_held()
    writer.note(HoldEvent.RESTORE_STARTED)
    writer.do("a", Action.RESTORE, Moment.FAILED)
    writer.do("b", Action.RESTORE)
    assert next_safe_step(writer.state).event is HoldEvent.RESTORE_UNPROVEN
    writer.note(HoldEvent.RESTORE_UNPROVEN)
    assert exit_code(writer.state) is ExitCode.NOT_RESTORED
    assert next_safe_step(writer.state).kind is NextKind.PERSON
    assert next_safe_step(writer.state, may_retry=True).hosts == ("a",)
    writer.do("a", Action.RESTORE)
    writer.on_all(Action.RELEASE)
    # Proof ends the debt; the hold stays degraded until a person has looked.
    assert writer.state.is_degraded
    assert not writer.state.hosts_in_debt()
    assert writer.note(HoldEvent.CLEARED, "unit file was edited by hand").has_ended
    assert not writer.state.has_ended_well


def test_a_hold_without_its_journal_can_only_go_back() -> None:
    adopted = {"a": {"phase": "stopped", "epoch": 7}, "b": {"phase": "untouched", "epoch": None}}
    writer = Writer(adopted=adopted)
    assert next_safe_step(writer.state).hosts == ("a",)
    with pytest.raises(HoldError):
        writer.intent("a", Action.RUN)
    writer.do("a", Action.RESTORE)
    writer.do("a", Action.RELEASE)
    assert next_safe_step(writer.state).event is HoldEvent.ALL_RELEASED
    writer.note(HoldEvent.ALL_RELEASED)
    assert writer.state.has_ended


def follow(writer: Writer, answers: Any) -> list[NextKind]:
    """Does what `next_safe_step` says until nothing is left or a person is needed."""
    kinds: list[NextKind] = []
    for _ in range(60):
        step = next_safe_step(writer.state)
        kinds.append(step.kind)
        if step.kind in (NextKind.NOTHING, NextKind.PERSON):
            return kinds
        if step.kind is NextKind.NOTE:
            assert step.event is not None
            writer.note(step.event)
        elif step.kind is NextKind.ASK:
            for op in step.ops:
                intent = next(i for i in writer.state.open_ops if i.op == op)
                grants = intent.action is Action.LEASE
                result = answers(intent)
                writer.outcome(op, result, 7 if grants and result is Moment.DONE else None)
        else:
            action = Action.RESTORE if step.kind is NextKind.RESTORE else Action.RELEASE
            for host in step.hosts:
                writer.outcome(writer.intent(host, action), Moment.DONE)
    raise AssertionError(f"no end: {kinds}")


@pytest.mark.parametrize("answer", [Moment.DONE, Moment.FAILED, Moment.UNKNOWN])
@pytest.mark.parametrize("length", range(1, len(Writer().to_closed().records) + 1))
def test_a_coordinator_killed_after_every_record_is_recovered(length: int, answer: Moment) -> None:
    records = Writer().to_closed().records[:length]
    writer = Writer()
    writer.records = list(records)
    writer.state = replay(records)
    writer.ops = itertools.count(1000)
    kinds = follow(writer, lambda intent: answer)
    if writer.state.has_ended:
        assert all(host.phase in GONE for host in writer.state.hosts)
    else:
        assert writer.state.is_degraded
        assert answer is Moment.FAILED
        assert any(op.action is Action.RESTORE for op in records if isinstance(op, Intent))
    assert kinds.count(NextKind.RESTORE) <= 1 or answer is Moment.UNKNOWN


class HoldMachine(RuleBasedStateMachine):
    """Random records: whatever is accepted keeps the rules of the protocol."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = Writer(("a", "b", "c"))
        self.was_degraded = False

    def attempt(self, action: Any) -> None:
        before = self.writer.state
        is_refused = False
        try:
            action()
        except HoldError:
            is_refused = True
        # A refused record changes nothing.
        assert not is_refused or self.writer.state is before

    @rule(
        event=st.sampled_from(HoldEvent),
        reason=st.sampled_from(["", "because"]),
        arm=st.sampled_from(["A1", "B1", None]),
    )
    def note(self, event: HoldEvent, reason: str, arm: str | None) -> None:
        self.attempt(lambda: self.writer.note(event, reason, arm))

    @rule()
    def forward(self) -> None:
        """The next event of the good path, so that walks get far."""
        path = {
            Phase.PLANNED: HoldEvent.ADMITTED,
            Phase.ADMITTED: HoldEvent.ALL_LEASED,
            Phase.LEASED: HoldEvent.ALL_SNAPSHOT,
            Phase.SNAPSHOT: HoldEvent.ALL_HELD,
            Phase.HELD: HoldEvent.QUALIFY_STARTED,
            Phase.QUALIFYING: HoldEvent.QUALIFIED,
            Phase.MEASURING: HoldEvent.RESTORE_STARTED,
            Phase.RESTORING: HoldEvent.ALL_RELEASED,
        }
        event = path.get(self.writer.state.phase)
        if event is not None:
            self.attempt(lambda: self.writer.note(event))

    @rule(host=st.sampled_from("abc"), action=st.sampled_from(Action))
    def intent(self, host: str, action: Action) -> None:
        before = {h.name: h.phase for h in self.writer.state.hosts}

        def act() -> None:
            self.writer.intent(host, action)
            if action is Action.STOP:
                armed = {HostPhase.ARMED, HostPhase.STOPPING, HostPhase.STOPPED}
                assert set(before.values()) <= armed

        self.attempt(act)

    @rule(
        action=st.sampled_from([Action.LEASE, Action.SNAPSHOT, Action.ARM, Action.STOP, Action.RESTORE, Action.RELEASE])
    )
    def everywhere(self, action: Action) -> None:
        for host in "abc":
            self.attempt(lambda host=host: self.writer.do(host, action))

    @precondition(lambda self: self.writer.state.open_ops)
    @rule(
        data=st.data(),
        result=st.sampled_from([Moment.DONE, Moment.FAILED, Moment.UNKNOWN]),
        epoch=st.sampled_from([7, 8, None]),
    )
    def outcome(self, data: st.DataObject, result: Moment, epoch: int | None) -> None:
        op = data.draw(st.sampled_from(self.writer.state.open_ops))
        self.attempt(lambda: self.writer.outcome(op.op, result, epoch))

    @rule(host=st.sampled_from("abc"), fact=st.sampled_from(HostFact), epoch=st.sampled_from([7, None]))
    def found(self, host: str, fact: HostFact, epoch: int | None) -> None:
        self.attempt(lambda: self.writer.found(host, fact, epoch))

    @invariant()
    def replay_gives_the_same_state(self) -> None:
        assert replay(self.writer.records) == self.writer.state

    @invariant()
    def closed_leaves_nothing_behind(self) -> None:
        state = self.writer.state
        if state.phase is Phase.CLOSED and state.clear_reason is None:
            assert all(host.phase in GONE for host in state.hosts)

    @invariant()
    def degraded_is_sticky(self) -> None:
        state = self.writer.state
        if self.was_degraded:
            assert state.is_degraded or state.clear_reason is not None
        self.was_degraded = self.was_degraded or state.is_degraded

    @invariant()
    def debt_is_visible(self) -> None:
        state = self.writer.state
        if any(host.phase in TOUCHED for host in state.hosts) and not state.has_ended:
            assert state.hosts_in_debt()
            assert state.phase not in (Phase.PLANNED, Phase.ADMITTED, Phase.LEASED, Phase.CLOSED)

    @invariant()
    def at_most_one_mutation_per_host(self) -> None:
        mutating = [
            op.host for op in self.writer.state.open_ops if op.action not in (Action.READ, Action.STAGE, Action.RUN)
        ]
        assert len(set(mutating)) == len(mutating)

    @invariant()
    def there_is_always_a_next_safe_step(self) -> None:
        step = next_safe_step(self.writer.state)
        assert step.why
        assert (step.kind is NextKind.NOTHING) == self.writer.state.has_ended
        exit_code(self.writer.state)

    def teardown(self) -> None:
        follow(self.writer, lambda intent: Moment.DONE)
        assert self.writer.state.has_ended or self.writer.state.is_degraded


HoldMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestHoldMachine = HoldMachine.TestCase
