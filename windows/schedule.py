"""Which step of a hold comes next, and whether the time left allows it.

Rules: steps run in the plan's order and once; an arm is started only if all of it fits, because half an arm is no
evidence; when something does not fit, the next step is the restore. No clock: the time used is an argument.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from windows.budget import NS_PER_S, remaining_ns
from windows.compiled import CompiledPlan, PlanStep
from windows.errors import PlanError
from windows.plan import StepKind


@dataclass(frozen=True)
class Next:
    """The next step, and why it is that one.

    Attributes:
        step: None when the hold has run all its steps.
        skipped: Labels of arms that no longer fit.
    """

    step: PlanStep | None
    why: str
    skipped: tuple[str, ...] = ()


def next_step(compiled: CompiledPlan, hold: int, done: Collection[str], used_ns: int) -> Next:
    """Selects the next step of a hold.

    Args:
        compiled: The frozen plan.
        hold: Number of the hold.
        done: Ids of the steps that ended well.
        used_ns: Monotonic ns since the leases were asked for.

    Raises:
        PlanError: ``done`` is no beginning of the plan's steps.
    """
    steps = compiled.hold_steps(hold)
    position = _position(steps, done)
    if position == len(steps):
        return Next(None, "every step is done")
    step = steps[position]
    if step.kind in (StepKind.PREFLIGHT, StepKind.RESTORE, StepKind.CLOSE):
        return Next(step, "outside the steps' time")
    left = remaining_ns(compiled.plan.bound_s, compiled.plan.restore_reserve_s, used_ns)
    needed = _needed_s(steps, position)
    if needed * NS_PER_S <= left:
        return Next(step, f"needs {needed} s of {left // NS_PER_S} s")
    restore = next(s for s in steps if s.kind is StepKind.RESTORE)
    skipped = tuple(dict.fromkeys(s.arm for s in steps[position:] if s.arm is not None))
    return Next(restore, f"{step.id} needs {needed} s, left are {max(left, 0) // NS_PER_S} s", skipped)


def _position(steps: tuple[PlanStep, ...], done: Collection[str]) -> int:
    """How many steps are done; they must be the first ones."""
    position = 0
    while position < len(steps) and steps[position].id in done:
        position += 1
    unexpected = set(done) - {step.id for step in steps[:position]}
    if unexpected:
        raise PlanError(f"steps done out of order: {', '.join(sorted(unexpected))}, expected {steps[position].id} next")
    return position


def _needed_s(steps: tuple[PlanStep, ...], position: int) -> int:
    """Bound of the step, or of the whole arm where the step begins or continues one."""
    step = steps[position]
    if step.arm is None:
        return step.bound_s
    return sum(s.bound_s for s in steps[position:] if s.arm == step.arm)
