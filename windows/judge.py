"""From an effect to an outcome, by the plan's rules alone.

Rules: three regions, symmetric on the log scale: the whole interval inside the margin is EQUIVALENT, the whole
interval beyond it is BETTER or WORSE, everything else is INCONCLUSIVE, which is a normal result. A pair that points
the other way, or an effect no larger than the noise of an A/A run, is never BETTER or WORSE.
"""

from __future__ import annotations

from enum import StrEnum
from fractions import Fraction

from windows.effect import Effect
from windows.plan import ComparisonPlan


class ComparisonOutcome(StrEnum):
    """What a comparison can say. INCONCLUSIVE is a normal one."""

    BETTER = "BETTER"
    WORSE = "WORSE"
    EQUIVALENT = "EQUIVALENT_WITHIN_MARGIN"
    INCONCLUSIVE = "INCONCLUSIVE"
    INVALID = "INVALID"


class Reason(StrEnum):
    """Reason codes: stable words that a program may look for."""

    BLOCK_MISSING = "block-missing"
    BLOCK_UNEXPECTED = "block-unexpected"
    GATE_FAILED = "gate-failed"
    GATE_UNKNOWN = "gate-unknown"
    NOT_MEASURABLE = "not-measurable"
    TOO_FEW_PAIRS = "too-few-pairs"
    ONE_PAIR_NO_INTERVAL = "one-pair-no-interval"
    REVERSED_PAIR = "reversed-pair"
    BELOW_AA_FLOOR = "below-aa-floor"
    INTERVAL_CROSSES_MARGIN = "interval-crosses-margin"
    INTERVAL_BEYOND_MARGIN = "interval-beyond-margin"
    INTERVAL_WITHIN_MARGIN = "interval-within-margin"
    TWO_PAIRS_NOT_SIGNIFICANT = "two-pairs-are-never-significant"
    IDENTICAL_REPEATS = "identical-repeats"
    AA_PLAN = "aa-plan"
    NO_AA_FLOOR = "no-aa-floor"
    BLOCK_EXCLUDED = "block-excluded"


def judge(
    effect: Effect | None, rules: ComparisonPlan, *, is_higher_better: bool
) -> tuple[ComparisonOutcome, tuple[str, ...]]:
    """The outcome of one metric; the three regions are symmetric on the log scale.

    Args:
        effect: Ratio B/A with its interval, or None when no pair is usable.
        rules: Margin, floor and counts, from the plan.
        is_higher_better: Direction of the metric.
    """
    inconclusive = ComparisonOutcome.INCONCLUSIVE
    if effect is None or effect.num_pairs < rules.min_pairs:
        found = 0 if effect is None else effect.num_pairs
        return inconclusive, (f"{Reason.TOO_FEW_PAIRS}: {found} usable, expected {rules.min_pairs}",)
    if effect.low is None or effect.high is None:
        return inconclusive, (Reason.ONE_PAIR_NO_INTERVAL.value,)
    notes = _notes(effect, rules)
    margin = Fraction(rules.margin_ppm, 1_000_000)
    upper, lower = 1 + margin, 1 / (1 + margin)
    if lower <= effect.low and effect.high <= upper:
        return ComparisonOutcome.EQUIVALENT, (Reason.INTERVAL_WITHIN_MARGIN.value, *notes)
    if effect.low <= upper and effect.high >= lower:
        reversed_pair = (Reason.REVERSED_PAIR.value,) if effect.is_reversed else ()
        return inconclusive, (*reversed_pair, Reason.INTERVAL_CROSSES_MARGIN.value, *notes)
    if effect.is_reversed:
        return inconclusive, (Reason.REVERSED_PAIR.value, *notes)
    if rules.aa_floor_ppm is not None and effect.distance_ppm <= rules.aa_floor_ppm:
        return inconclusive, (
            f"{Reason.BELOW_AA_FLOOR}: {effect.distance_ppm} ppm, floor {rules.aa_floor_ppm} ppm",
            *notes,
        )
    is_up = effect.ratio > 1
    outcome = ComparisonOutcome.BETTER if is_up == is_higher_better else ComparisonOutcome.WORSE
    return outcome, (Reason.INTERVAL_BEYOND_MARGIN.value, *notes)


def _notes(effect: Effect, rules: ComparisonPlan) -> tuple[str, ...]:
    """What a reader must know beside any outcome."""
    notes = []
    if effect.num_pairs == 2:
        notes.append(
            f"{Reason.TWO_PAIRS_NOT_SIGNIFICANT}: a sign test of two pairs cannot go below p = 0.5; "
            "the interval rests on one degree of freedom"
        )
    if effect.is_degenerate:
        notes.append(f"{Reason.IDENTICAL_REPEATS}: all pairs agree exactly; the interval knows nothing of other loads")
    if rules.aa_floor_ppm is None:
        notes.append(f"{Reason.NO_AA_FLOOR}: no A/A run of these hosts says how large noise is")
    return tuple(notes)
