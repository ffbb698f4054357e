"""The comparison of OFF and ON: from blocks to an outcome with its reasons.

The steps, numbered as in the code and in ``docs/comparison.md``:

1. the blocks are exactly those of the plan's design;
2. every gate of every block, and between arms, is evaluated; a finding excludes a pair only if the plan said so
   before, anything else that is not a PASS makes the whole comparison INVALID;
3. each remaining block gives one number per metric, recomputed from raw records: the boot is the unit of replication;
4. each pair gives a ratio B/A; the effect is the geometric mean, its interval a t interval over the pairs' log ratios;
5. drift per hold, between holds, order effect and noise floor are reported beside it;
6. the outcome follows from interval, margin, sign and floor.

Rules: INVALID beats all; nothing is left out silently; the same inputs give the same document on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from windows import gates
from windows.arm import ArmBlock, labels_in_order
from windows.effect import Drift, Effect, drift_of, effect_of
from windows.errors import MeasureError
from windows.judge import ComparisonOutcome, Reason, judge
from windows.measures import Measures, decimal_text, measure
from windows.plan import Arms, ComparisonPlan, ExclusionRule, Load, PrimaryMetric, WindowPlan
from windows.verdicts import Finding

_EXCLUDABLE: Final[dict[str, ExclusionRule]] = {
    gates.FOREIGN_REQUESTS: ExclusionRule.FOREIGN_REQUESTS,
    gates.PREFIX_HITS: ExclusionRule.PREFIX_HITS,
    gates.CLOCK_OFFSET: ExclusionRule.CLOCK_OFFSET,
    gates.DEVICE_CLOCKS: ExclusionRule.DEVICE_CLOCKS,
    gates.THROTTLED: ExclusionRule.THROTTLED,
}
"""Only a FAIL of these may exclude a pair. An unknown one never does: not knowing is no reason to drop a block."""

LOWER_IS_BETTER_SUFFIX: Final = "-ns"


@dataclass(frozen=True)
class MetricResult:
    """One metric over all usable pairs.

    Attributes:
        blocks: Label to value.
        outcome: By the same rules for every metric; only the primary one's is the comparison's.
    """

    name: str
    blocks: tuple[tuple[ArmBlock, Fraction], ...]
    effect: Effect | None
    drift: Drift
    outcome: ComparisonOutcome
    reasons: tuple[str, ...]

    @property
    def is_higher_better(self) -> bool:
        """Direction: times are better when lower."""
        return not self.name.endswith(LOWER_IS_BETTER_SUFFIX)


@dataclass(frozen=True)
class Exclusion:
    """A block that was left out, with the reason."""

    label: str
    reason: str


@dataclass(frozen=True)
class Comparison:
    """The whole result; `to_document` is the body of its receipt.

    Attributes:
        findings: Every gate of every block and pair, passes included.
        measures: Label to its numbers, for the blocks that could be measured.
        significant: Never true below three pairs, whatever the interval says.
    """

    order: str
    num_pairs: int
    metrics: tuple[MetricResult, ...]
    findings: tuple[Finding, ...]
    excluded: tuple[Exclusion, ...]
    measures: Mapping[str, Measures]
    outcome: ComparisonOutcome
    reasons: tuple[str, ...]
    plan: ComparisonPlan

    @property
    def primary(self) -> MetricResult | None:
        """The metric the outcome is about; None when nothing could be measured."""
        return next((m for m in self.metrics if m.name == self.plan.primary_metric.value), None)

    def to_document(self) -> dict[str, Any]:
        """Plain values: the body of a ``comparison`` receipt."""
        return {
            "order": self.order,
            "num_pairs": self.num_pairs,
            "metrics": [_metric_document(metric, self.plan) for metric in self.metrics],
            "mechanism": [finding.to_row() for finding in self.findings],
            "excluded": [{"arm": e.label[0], "block": e.label, "reason": e.reason} for e in self.excluded],
            "outcome": self.outcome.value,
            "reasons": list(self.reasons),
            "claim": "CONTROLLED",
        }


def compare(plan: WindowPlan, blocks: Sequence[ArmBlock]) -> Comparison:
    """Judges a campaign.

    Args:
        plan: The window plan, written before the first hold.
        blocks: What the arms left behind, in any order.

    Raises:
        MeasureError: The plan compares nothing (a first-hold).
    """
    if plan.comparison is None or plan.arms is None or plan.load is None:
        raise MeasureError(f"plan {plan.name!r} has no comparison: a first-hold stops and restores only")
    rules = plan.comparison
    orders = [plan.arm_order(number) for number in plan.hold_numbers()]
    order_text = " | ".join(" ".join(order) for order in orders)

    # 1. the design
    invalid = _design_faults(plan, blocks)
    by_label = {block.label: block for block in blocks}

    # 2. the gates
    findings = _findings(plan.arms, plan.load, rules, by_label, labels_in_order(orders))
    exclusions, faults = _sort_findings(findings, rules)
    invalid += faults

    # 3. the numbers
    measures, unmeasured = _measures(by_label)
    invalid += unmeasured

    # 4 and 5. pairs, effect, drift
    dropped = {int(label[1:]) for exclusion in exclusions for label in exclusion.label.split("-")}
    pairs = [
        (by_label[f"A{n}"], by_label[f"B{n}"])
        for n in range(1, len(labels_in_order(orders)) // 2 + 1)
        if n not in dropped and {f"A{n}", f"B{n}"} <= set(measures)
    ]
    metrics = tuple(_metric(name, pairs, measures, orders, rules) for name in _metric_names(measures))

    # 6. the outcome
    outcome, reasons = _outcome(plan, metrics, invalid, exclusions)
    return Comparison(
        order_text, len(pairs), metrics, findings, _excluded(exclusions, dropped), measures, outcome, reasons, rules
    )


def _design_faults(plan: WindowPlan, blocks: Sequence[ArmBlock]) -> list[str]:
    """Blocks that are missing, too many, or in another hold than planned."""
    wanted = {label: number for number in plan.hold_numbers() for label in plan.arm_order(number)}
    faults = []
    seen: set[str] = set()
    for block in blocks:
        if wanted.get(block.label) != block.hold or block.label in seen:
            faults.append(f"{Reason.BLOCK_UNEXPECTED}: {block.label} in hold {block.hold}")
        seen.add(block.label)
    faults += [f"{Reason.BLOCK_MISSING}: {label}" for label in wanted if label not in seen]
    return faults


def _findings(
    arms: Arms, load: Load, rules: ComparisonPlan, by_label: Mapping[str, ArmBlock], labels: Sequence[str]
) -> tuple[Finding, ...]:
    """Every gate of every block that is there, and between the arms."""
    findings: list[Finding] = []
    present = [by_label[label] for label in labels if label in by_label]
    for block in present:
        arm = arms.A if block.arm == "A" else arms.B
        findings += gates.arm_findings(
            block, mode=arm.mode, manifest_sha256=load.manifest_sha256, min_rounds=rules.min_rounds
        )
    for other in present[1:]:
        # Against the first arm: what must be equal is equal everywhere, not only inside a pair.
        findings += gates.identity_findings(present[0], other)
    for block in present:
        partner = by_label.get("B" + block.label[1:])
        if block.arm == "A" and partner is not None:
            findings += gates.pair_findings(block, partner, max_clock_delta_ppm=rules.max_clock_delta_ppm)
    return tuple(findings)


def _sort_findings(findings: Sequence[Finding], rules: ComparisonPlan) -> tuple[list[Exclusion], list[str]]:
    """What is not a PASS either excludes a block, by a rule declared before, or invalidates."""
    exclusions: list[Exclusion] = []
    faults: list[str] = []
    for finding in gates.failed(findings):
        rule = _EXCLUDABLE.get(finding.gate)
        if finding.ok is False and rule is not None and rule in rules.exclude_on:
            exclusions.append(Exclusion(finding.subject, finding.reason))
        else:
            code = Reason.GATE_FAILED if finding.ok is False else Reason.GATE_UNKNOWN
            faults.append(f"{code}: {finding.reason}")
    return exclusions, faults


def _excluded(exclusions: Sequence[Exclusion], dropped: set[int]) -> tuple[Exclusion, ...]:
    """Every block left out, the partners too: a pair is used whole or not at all."""
    rows: dict[str, str] = {}
    for exclusion in exclusions:
        for label in exclusion.label.split("-"):
            rows.setdefault(label, exclusion.reason)
    for number in sorted(dropped):
        for label in (f"A{number}", f"B{number}"):
            rows.setdefault(label, f"partner of an excluded block of pair {number}")
    return tuple(Exclusion(label, reason) for label, reason in sorted(rows.items()))


def _measures(by_label: Mapping[str, ArmBlock]) -> tuple[dict[str, Measures], list[str]]:
    """The numbers of every block that has them."""
    measures: dict[str, Measures] = {}
    faults: list[str] = []
    for label, block in sorted(by_label.items()):
        try:
            measures[label] = measure(block)
        except MeasureError as error:
            faults.append(f"{Reason.NOT_MEASURABLE}: {error}")
    return measures, faults


def _metric_names(measures: Mapping[str, Measures]) -> list[str]:
    """Metrics that every measured block has, in a fixed order."""
    if not measures:
        return []
    names = set.intersection(*(set(m.rates) for m in measures.values()))
    first = next(iter(measures.values()))
    return [name for name in first.rates if name in names]


def _metric(
    name: str,
    pairs: Sequence[tuple[ArmBlock, ArmBlock]],
    measures: Mapping[str, Measures],
    orders: Sequence[Sequence[str]],
    rules: ComparisonPlan,
) -> MetricResult:
    """One metric over the usable pairs."""
    values = [(measures[a.label].rates[name], measures[b.label].rates[name]) for a, b in pairs]
    a_first = [_runs_first(a.label, orders) for a, _ in pairs]
    usable = bool(values) and all(a > 0 and b > 0 for a, b in values)
    effect = effect_of([b / a for a, b in values], rules.confidence_ppm) if usable else None
    drift = drift_of(pairs, values if usable else [], a_first)
    blocks = tuple(
        (block, value)
        for pair, both in zip(pairs, values, strict=True)
        for block, value in zip(pair, both, strict=True)
    )
    is_higher_better = not name.endswith(LOWER_IS_BETTER_SUFFIX)
    outcome, reasons = judge(effect, rules, is_higher_better=is_higher_better)
    return MetricResult(name, blocks, effect, drift, outcome, reasons)


def _runs_first(label: str, orders: Sequence[Sequence[str]]) -> bool:
    """Whether an arm A runs before its partner."""
    order = next(order for order in orders if label in order)
    return list(order).index(label) < list(order).index("B" + label[1:])


def _outcome(
    plan: WindowPlan, metrics: Sequence[MetricResult], invalid: Sequence[str], exclusions: Sequence[Exclusion]
) -> tuple[ComparisonOutcome, tuple[str, ...]]:
    """The comparison's outcome: the primary metric's, unless anything makes it INVALID."""
    assert plan.comparison is not None
    primary = next((m for m in metrics if m.name == plan.comparison.primary_metric.value), None)
    notes = tuple(f"{Reason.BLOCK_EXCLUDED}: {exclusion.reason}" for exclusion in exclusions)
    if plan.arms is not None and plan.arms.is_aa:
        notes = (*notes, f"{Reason.AA_PLAN}: both arms are the same; the ratio is the noise floor")
    if invalid:
        return ComparisonOutcome.INVALID, (*invalid, *notes)
    if primary is None:
        name = plan.comparison.primary_metric.value
        return ComparisonOutcome.INVALID, (f"{Reason.NOT_MEASURABLE}: {name} is not in every block", *notes)
    return primary.outcome, (*primary.reasons, *notes)


def _metric_document(metric: MetricResult, plan: ComparisonPlan) -> dict[str, Any]:
    """One metric as plain values."""
    effect = metric.effect
    interval = effect is not None and effect.low is not None and effect.high is not None
    return {
        "metric": metric.name,
        "unit": _unit(metric.name),
        "better": "higher" if metric.is_higher_better else "lower",
        "blocks": [
            {
                "hold_number": block.hold,
                "arm": block.arm,
                "block": block.label,
                "value": decimal_text(value),
                "receipt": block.receipt,
            }
            for block, value in metric.blocks
        ],
        "paired": [
            {"pair": f"B{block.pair}/A{block.pair}", "delta_ppm": delta}
            for (block, _), delta in zip(metric.blocks[::2], effect.deltas_ppm if effect else (), strict=False)
        ],
        "ratio": decimal_text(effect.ratio) if effect else None,
        "interval_low": decimal_text(effect.low) if effect and effect.low is not None else None,
        "interval_high": decimal_text(effect.high) if effect and effect.high is not None else None,
        "interval_method": effect.method if effect and interval else "",
        "drift_ppm": metric.drift.to_values(),
        "aa_floor_ppm": plan.aa_floor_ppm,
        "margin_ppm": plan.margin_ppm,
        "outcome": metric.outcome.value,
        "reasons": list(metric.reasons),
    }


def _unit(name: str) -> str:
    """Unit of a metric's values."""
    if name.endswith("-ns"):
        return "ns"
    if name == PrimaryMetric.TOKENS_PER_ROUND.value:
        return "tokens"
    return "tokens/s" if name == PrimaryMetric.TOKENS_PER_SECOND.value else "rounds/s"
