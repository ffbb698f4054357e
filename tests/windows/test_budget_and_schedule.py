"""The budget refuses what is not measured or does not fit; the schedule never starts what may not end in time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from windows_examples import BOUNDS, SHA, changed, first_hold_document, plan_document, site_document

from windows.budget import (
    DECLARED,
    EVIDENCED,
    NS_PER_S,
    BudgetEvidence,
    remaining_ns,
    require_budget,
    require_fits,
)
from windows.compiled import CompiledPlan, compile_plan
from windows.errors import BudgetError, PlanError
from windows.plan import StepKind, parse_plan
from windows.schedule import next_step
from windows.site import parse_site


def compiled(plan: dict[str, Any] | None = None) -> CompiledPlan:
    return compile_plan(parse_site(site_document()), parse_plan(plan or plan_document()), {"guard": SHA})


def evidence(**changes: int | None) -> BudgetEvidence:
    measured: dict[str, int | None] = {kind: bound * NS_PER_S for kind, bound in BOUNDS.items()}
    measured["restore"] = 1200 * NS_PER_S
    measured.update(changes)
    return BudgetEvidence(SHA, {StepKind(kind): ns for kind, ns in measured.items() if ns is not None})


def test_a_backed_budget_is_a_table() -> None:
    budget = require_budget(compiled(), 1, [evidence()])
    document = budget.to_document()
    assert document["steps_s"] == 2680
    assert document["spare_s"] == 5400 - 1200 - 2680
    rows = {row["kind"]: row for row in document["rows"]}
    assert rows["boot"]["count"] == 2
    assert rows["restore"]["bound_s"] == 1200
    assert {row["basis"] for row in document["rows"]} == {EVIDENCED}
    assert {row["receipt"] for row in document["rows"]} == {SHA}


@pytest.mark.parametrize("kind", [*BOUNDS, "restore"])
def test_missing_evidence_refuses_whatever_is_missing(kind: str) -> None:
    with pytest.raises(BudgetError, match=f"no measured budget evidence.*'{kind}'"):
        require_budget(compiled(), 1, [evidence(**{kind: None})])


def test_no_evidence_at_all_refuses() -> None:
    with pytest.raises(BudgetError, match="no measured budget evidence"):
        require_budget(compiled(), 1, [])


@pytest.mark.parametrize("kind", [*BOUNDS, "restore"])
def test_a_bound_shorter_than_what_was_measured_refuses(kind: str) -> None:
    limit = (1200 if kind == "restore" else BOUNDS[kind]) * NS_PER_S
    require_budget(compiled(), 1, [evidence(**{kind: limit})])
    with pytest.raises(BudgetError, match="expected at least"):
        require_budget(compiled(), 1, [evidence(**{kind: limit + 1})])


def test_the_longest_measurement_counts() -> None:
    slow = BudgetEvidence("cd" * 32, {StepKind.BOOT: BOUNDS["boot"] * NS_PER_S + 1})
    for order in ([evidence(), slow], [slow, evidence()]):
        with pytest.raises(BudgetError, match="receipt cdcdcdcdcdcd"):
            require_budget(compiled(), 1, order)


def test_a_first_hold_needs_no_evidence_and_only_stops_and_restores() -> None:
    budget = require_budget(compiled(first_hold_document()), 1, [])
    assert {row.basis for row in budget.rows} == {DECLARED}
    assert {row.kind for row in budget.rows} == {
        StepKind.PREFLIGHT,
        StepKind.LEASE,
        StepKind.SNAPSHOT,
        StepKind.ARM_DEAD_MAN,
        StepKind.STOP,
        StepKind.RESTORE,
    }


def test_a_first_hold_is_still_refused_where_evidence_contradicts_it() -> None:
    slow = BudgetEvidence(SHA, {StepKind.STOP: 121 * NS_PER_S})
    with pytest.raises(BudgetError, match="expected at least 121 s"):
        require_budget(compiled(first_hold_document()), 1, [slow])


@given(st.integers(0, 6000 * NS_PER_S))
def test_a_step_never_reaches_into_the_restore_reserve(used_ns: int) -> None:
    plan = compiled()
    step = next(s for s in plan.steps if s.kind is StepKind.BOOT)
    end = used_ns + step.bound_s * NS_PER_S
    reserve_begins = (5400 - 1200) * NS_PER_S
    if end <= reserve_begins:
        require_fits(step, 5400, 1200, used_ns)
    else:
        with pytest.raises(BudgetError, match="production goes back now"):
            require_fits(step, 5400, 1200, used_ns)


def test_remaining_is_negative_inside_the_reserve() -> None:
    assert remaining_ns(5400, 1200, 4200 * NS_PER_S) == 0
    assert remaining_ns(5400, 1200, 4201 * NS_PER_S) == -NS_PER_S


# -- schedule --------------------------------------------------------------------------------------------------------


def test_with_time_enough_the_schedule_is_the_plan() -> None:
    plan = compiled()
    done: list[str] = []
    while (chosen := next_step(plan, 2, done, 0)).step is not None:
        done.append(chosen.step.id)
    assert done == [step.id for step in plan.hold_steps(2)]


def test_an_arm_that_does_not_fit_whole_is_not_started() -> None:
    plan = compiled()
    steps = plan.hold_steps(1)
    first_b = next(i for i, s in enumerate(steps) if s.arm == "B1")
    done = [s.id for s in steps[:first_b]]
    arm_s = sum(s.bound_s for s in steps if s.arm == "B1")
    last_moment = (5400 - 1200 - arm_s) * NS_PER_S
    assert next_step(plan, 1, done, last_moment).step == steps[first_b]
    late = next_step(plan, 1, done, last_moment + 1)
    assert late.step is not None
    assert late.step.kind is StepKind.RESTORE
    assert late.skipped == ("B1",)


def test_in_the_middle_of_an_arm_only_its_rest_must_fit() -> None:
    plan = compiled()
    steps = plan.hold_steps(1)
    at = next(i for i, s in enumerate(steps) if s.id == "hold1/B1/headline")
    rest = sum(s.bound_s for s in steps[at:] if s.arm == "B1")
    done = [s.id for s in steps[:at]]
    assert next_step(plan, 1, done, (4200 - rest) * NS_PER_S).step == steps[at]


def test_restore_and_close_are_never_too_late() -> None:
    plan = compiled()
    steps = plan.hold_steps(1)
    done = [s.id for s in steps[:-2]]
    assert next_step(plan, 1, done, 10**15).step == steps[-2]


def test_steps_out_of_order_are_refused() -> None:
    plan = compiled()
    with pytest.raises(PlanError, match="out of order"):
        next_step(plan, 1, ["hold1/A1/boot"], 0)


def test_a_plan_with_a_short_bound_goes_back_before_the_first_arm() -> None:
    plan = compiled(changed(plan_document(), "bound_s", 3880))
    steps = plan.hold_steps(1)
    done = [s.id for s in steps[:6]]
    assert next_step(plan, 1, done, 480 * NS_PER_S).step == steps[6]
    chosen = next_step(plan, 1, done, 1700 * NS_PER_S)
    assert chosen.step is not None
    assert chosen.step.kind is StepKind.RESTORE
    assert chosen.skipped == ("A1", "B1")
