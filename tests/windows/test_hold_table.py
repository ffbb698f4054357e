"""The tables of the hold machine over their whole product."""

from __future__ import annotations

import itertools

import pytest

from windows.hold_table import (
    ACTION_PHASES,
    BAD_NEWS,
    GONE,
    HOLD_TABLE,
    HOST_EVENTS,
    HOST_TABLE,
    TOUCHED,
    Action,
    HoldEvent,
    HostFact,
    HostPhase,
    Moment,
    Phase,
    Refusal,
)


def test_the_tables_are_total() -> None:
    assert set(HOLD_TABLE) == set(itertools.product(Phase, HoldEvent))
    assert set(HOST_TABLE) == set(itertools.product(HostPhase, HOST_EVENTS))
    assert len(HOST_EVENTS) == len(set(HOST_EVENTS)) == len(Action) * len(Moment) + len(HostFact)
    assert set(ACTION_PHASES) == set(Action)


def test_every_refusal_has_a_reason() -> None:
    for entry in (*HOLD_TABLE.values(), *HOST_TABLE.values()):
        assert not isinstance(entry, Refusal) or entry.reason


@pytest.mark.parametrize("event", HoldEvent)
def test_closed_is_final(event: HoldEvent) -> None:
    assert isinstance(HOLD_TABLE[Phase.CLOSED, event], Refusal)


@pytest.mark.parametrize("event", HoldEvent)
def test_degraded_is_left_by_a_person_only(event: HoldEvent) -> None:
    entry = HOLD_TABLE[Phase.DEGRADED, event]
    if event is HoldEvent.CLEARED:
        assert entry is Phase.CLOSED
    else:
        assert entry is Phase.DEGRADED or isinstance(entry, Refusal)


@pytest.mark.parametrize("phase", Phase)
def test_only_degraded_can_be_cleared(phase: Phase) -> None:
    assert (HOLD_TABLE[phase, HoldEvent.CLEARED] is Phase.CLOSED) == (phase is Phase.DEGRADED)


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(Phase, sorted(BAD_NEWS))))
def test_bad_news_always_leads_back(phase: Phase, event: HoldEvent) -> None:
    entry = HOLD_TABLE[phase, event]
    if phase is Phase.CLOSED:
        assert isinstance(entry, Refusal)
    elif phase is Phase.PLANNED:
        assert entry is Phase.CLOSED
    else:
        assert entry in (Phase.RESTORING, Phase.DEGRADED)


def test_the_hold_only_goes_forward() -> None:
    order = list(Phase)
    for (phase, _), entry in HOLD_TABLE.items():
        if isinstance(entry, Phase) and phase is not Phase.DEGRADED:
            assert order.index(entry) >= order.index(phase)


def test_the_good_path_is_the_designs() -> None:
    path = [
        HoldEvent.ADMITTED,
        HoldEvent.ALL_LEASED,
        HoldEvent.ALL_SNAPSHOT,
        HoldEvent.ALL_HELD,
        HoldEvent.QUALIFY_STARTED,
        HoldEvent.QUALIFIED,
        HoldEvent.RESTORE_STARTED,
        HoldEvent.ALL_RELEASED,
    ]
    phase = Phase.PLANNED
    seen = [phase]
    for event in path:
        entry = HOLD_TABLE[phase, event]
        assert isinstance(entry, Phase)
        phase = entry
        seen.append(phase)
    assert seen == list(Phase)[:-1]


def test_measuring_needs_a_passed_qualification() -> None:
    into = [key for key, entry in HOLD_TABLE.items() if entry is Phase.MEASURING and key[0] is not Phase.MEASURING]
    assert into == [(Phase.QUALIFYING, HoldEvent.QUALIFIED)]


def test_touched_is_left_by_a_proof_only() -> None:
    proofs = {(Action.RESTORE, Moment.DONE), HostFact.FOUND_RESTORED, HostFact.FOUND_RELEASED}
    for (phase, event), entry in HOST_TABLE.items():
        if phase in TOUCHED and isinstance(entry, HostPhase) and entry not in TOUCHED:
            assert event in proofs, (phase, event)


def test_a_stop_needs_an_armed_dead_man() -> None:
    into = {phase for (phase, _), entry in HOST_TABLE.items() if entry is HostPhase.STOPPING and phase is not entry}
    assert into == {HostPhase.ARMED}


def test_released_is_never_left() -> None:
    for (phase, _), entry in HOST_TABLE.items():
        if phase is HostPhase.RELEASED:
            assert isinstance(entry, Refusal) or entry is HostPhase.RELEASED


def test_an_unknown_outcome_never_moves_a_host() -> None:
    for (phase, event), entry in HOST_TABLE.items():
        if isinstance(event, tuple) and event[1] is Moment.UNKNOWN and isinstance(entry, HostPhase):
            assert entry is phase


def test_a_failed_restore_is_debt() -> None:
    assert HOST_TABLE[HostPhase.RESTORING, (Action.RESTORE, Moment.FAILED)] is HostPhase.DEBT


def test_debt_grants_restore_and_news_only() -> None:
    granted = {
        event
        for event in HOST_EVENTS
        if not isinstance(HOST_TABLE[HostPhase.DEBT, event], Refusal)
        and (not isinstance(event, tuple) or event[0] not in (Action.READ, Action.STAGE, Action.RUN))
    }
    assert granted == {(Action.RESTORE, Moment.INTENT), *HostFact}


def test_one_restore_at_a_time_is_a_matter_of_the_open_operation() -> None:
    # A new intent from RESTORING is legal for a recoverer once the old one's outcome is recorded as unknown.
    assert HOST_TABLE[HostPhase.RESTORING, (Action.RESTORE, Moment.INTENT)] is HostPhase.RESTORING
    assert isinstance(HOST_TABLE[HostPhase.RESTORED, (Action.RESTORE, Moment.INTENT)], Refusal)


def test_gone_and_touched_do_not_meet() -> None:
    assert GONE.isdisjoint(TOUCHED)
