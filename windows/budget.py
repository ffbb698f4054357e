"""The time budget of a hold: admitted before any host is contacted, and asked again before every step.

Rules: the restore reserve is taken out first and nothing may eat into it; every bound is backed by a measured budget
receipt, except in a first-hold, which may only stop and restore (DECISIONS 12), and the programs of a measurement
hold, which the guard ends at their bound (ADR 12); missing evidence refuses; a step whose bound does not fit in what
is left is not started. Times are integers: seconds in plans, ns when measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from windows.compiled import CompiledPlan, PlanStep
from windows.errors import BudgetError
from windows.plan import OPENING_STEPS, Purpose, StepKind

NS_PER_S = 1_000_000_000

DECLARABLE = {
    Purpose.FIRST_HOLD: frozenset({*OPENING_STEPS, StepKind.RESTORE, StepKind.CLOSE}),
    Purpose.MEASUREMENT: frozenset({StepKind.MEASURE}),
}
"""All that plan-declared bounds may pay for, by purpose."""

DECLARED = "declared"
EVIDENCED = "evidence"


@dataclass(frozen=True)
class BudgetEvidence:
    """How long steps took, from one budget receipt that was verified before.

    Attributes:
        receipt: Its digest.
        measured_ns: Step kind to the longest duration measured.
    """

    receipt: str
    measured_ns: Mapping[StepKind, int]


@dataclass(frozen=True)
class BudgetRow:
    """One kind of step of a hold.

    Attributes:
        count: How often it occurs in the hold.
        bound_s: Its bound.
        measured_ns: Longest measured, or None.
        basis: ``evidence`` or ``declared``.
        receipt: The receipt behind it, or None.
    """

    kind: StepKind
    count: int
    bound_s: int
    measured_ns: int | None
    basis: str
    receipt: str | None


@dataclass(frozen=True)
class Budget:
    """The table of one hold, after every bound was backed.

    Attributes:
        rows: One per kind of step, in the order of a hold; preflight is outside the bound.
    """

    hold: int
    bound_s: int
    restore_reserve_s: int
    rows: tuple[BudgetRow, ...]

    @property
    def steps_s(self) -> int:
        """Worst case of all steps inside the bound."""
        return sum(row.count * row.bound_s for row in self.rows if row.kind is not StepKind.PREFLIGHT)

    @property
    def spare_s(self) -> int:
        """What is left over in the worst case, never negative."""
        return self.bound_s - self.restore_reserve_s - self.steps_s

    def to_document(self) -> dict[str, Any]:
        """Plain values for a receipt or a table."""
        return {
            "hold": self.hold,
            "bound_s": self.bound_s,
            "restore_reserve_s": self.restore_reserve_s,
            "steps_s": self.steps_s,
            "spare_s": self.spare_s,
            "rows": [
                {
                    "kind": row.kind.value,
                    "count": row.count,
                    "bound_s": row.bound_s,
                    "measured_ns": row.measured_ns,
                    "basis": row.basis,
                    "receipt": row.receipt,
                }
                for row in self.rows
            ],
        }


def require_budget(compiled: CompiledPlan, hold: int, evidence: Iterable[BudgetEvidence]) -> Budget:
    """Backs every bound of a hold with evidence, or refuses the hold.

    Args:
        compiled: The frozen plan.
        hold: Number of the hold.
        evidence: Verified budget receipts; the longest measurement of a kind counts.

    Raises:
        BudgetError: A bound has no measured evidence, is shorter than what was measured, or the sum does not fit.
    """
    measured = _longest(evidence)
    rows = []
    for kind, steps in _by_kind(compiled.hold_steps(hold)).items():
        rows.append(_row(compiled, kind, steps, measured.get(kind)))
    reserve = _row_of_restore(compiled, measured.get(StepKind.RESTORE))
    budget = Budget(hold, compiled.plan.bound_s, compiled.plan.restore_reserve_s, (*rows, reserve))
    if budget.spare_s < 0:
        raise BudgetError(
            f"hold {hold}: steps {budget.steps_s} s + restore reserve {budget.restore_reserve_s} s, "
            f"expected at most {budget.bound_s} s"
        )
    return budget


def _longest(evidence: Iterable[BudgetEvidence]) -> dict[StepKind, tuple[int, str]]:
    """The longest measurement of each kind, with the receipt it is from."""
    longest: dict[StepKind, tuple[int, str]] = {}
    for item in evidence:
        for kind, ns in item.measured_ns.items():
            if ns > longest.get(kind, (-1, ""))[0]:
                longest[kind] = (ns, item.receipt)
    return longest


def _by_kind(steps: Iterable[PlanStep]) -> dict[StepKind, list[PlanStep]]:
    """Steps that have a bound of their own, by kind, in order."""
    kinds: dict[StepKind, list[PlanStep]] = {}
    for step in steps:
        if step.kind not in (StepKind.RESTORE, StepKind.CLOSE):
            kinds.setdefault(step.kind, []).append(step)
    return kinds


def _row(compiled: CompiledPlan, kind: StepKind, steps: list[PlanStep], measured: tuple[int, str] | None) -> BudgetRow:
    """One kind of step, backed or refused."""
    bound_s = steps[0].bound_s
    _require_backed(compiled, kind, f"step_bounds_s.{kind.value}", bound_s, measured)
    if measured is None:
        return BudgetRow(kind, len(steps), bound_s, None, DECLARED, None)
    return BudgetRow(kind, len(steps), bound_s, measured[0], EVIDENCED, measured[1])


def _row_of_restore(compiled: CompiledPlan, measured: tuple[int, str] | None) -> BudgetRow:
    """The reserve is a bound as well, and the one that matters most; it is no part of the steps' sum."""
    reserve = compiled.plan.restore_reserve_s
    _require_backed(compiled, StepKind.RESTORE, "restore_reserve_s", reserve, measured)
    if measured is None:
        return BudgetRow(StepKind.RESTORE, 0, reserve, None, DECLARED, None)
    return BudgetRow(StepKind.RESTORE, 0, reserve, measured[0], EVIDENCED, measured[1])


def _require_backed(
    compiled: CompiledPlan, kind: StepKind, field: str, bound_s: int, measured: tuple[int, str] | None
) -> None:
    """Refuses a bound without evidence, or one that the evidence contradicts."""
    if measured is None:
        if kind in DECLARABLE.get(compiled.plan.purpose, ()):
            return
        raise BudgetError(
            f"{field}: {bound_s} s has no measured budget evidence, expected a budget receipt that measured "
            f"{kind.value!r}; run a first-hold (stop and restore) or a rehearsal of this plan first"
        )
    ns, receipt = measured
    if ns > bound_s * NS_PER_S:
        raise BudgetError(
            f"{field}: {bound_s} s, expected at least {-(-ns // NS_PER_S)} s: receipt {receipt[:12]} measured {ns} ns"
        )


def deadline_for_steps_ns(bound_s: int, restore_reserve_s: int) -> int:
    """Last moment of any step, in ns after the hold began: the bound minus the reserve."""
    return (bound_s - restore_reserve_s) * NS_PER_S


def remaining_ns(bound_s: int, restore_reserve_s: int, used_ns: int) -> int:
    """What steps may still use, in ns; negative once the reserve has begun."""
    return deadline_for_steps_ns(bound_s, restore_reserve_s) - used_ns


def require_fits(step: PlanStep, bound_s: int, restore_reserve_s: int, used_ns: int) -> None:
    """Refuses to start a step that may not end before the restore reserve begins.

    Args:
        step: The step about to start.
        bound_s: The hold's bound.
        restore_reserve_s: The hold's reserve.
        used_ns: Monotonic ns since the hold began.

    Raises:
        BudgetError: Says what is left; the next thing to do is to restore.
    """
    left = remaining_ns(bound_s, restore_reserve_s, used_ns)
    if step.bound_s * NS_PER_S > left:
        raise BudgetError(
            f"{step.id}: bound {step.bound_s} s, left before the restore reserve {max(left, 0) // NS_PER_S} s; "
            "the step is not started, production goes back now"
        )
