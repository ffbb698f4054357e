"""Verdicts computed again from raw files and parents: the rules of ``windows`` handed to ``receipts.verify``.

An arm's numbers follow from its raw samples and counters; a comparison's follow from its arms. A receipt that states
more than its own raw records give is a finding, whatever its text says. What is not there to compute from is UNKNOWN.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, Final

from receipts import bodies
from receipts.fields import Kind, Row, Verdict
from receipts.findings import Recompute, Sources
from receipts.model import Predicate
from receipts.verdict import conclude_rows
from windows.arm import INTER_TOKEN_FILE, POINTS, REQUESTS_FILE, ArmBlock
from windows.compare import LOWER_IS_BETTER_SUFFIX
from windows.effect import Effect, effect_of
from windows.errors import MeasureError
from windows.measures import MILLION, measure, to_integer
from windows.student_t import critical

ROUNDING_PPM: Final = 2
"""Block values are written with six decimals: a delta of two of them may differ by this much from the exact one."""

_CONFIDENCE_PPM: Final = 950_000
"""Needed to call ``effect_of`` where no interval is stated; the ratio does not depend on it."""

_LEAST_CONFIDENCE_PPM: Final = 500_000
"""Below even odds an interval can be made as narrow as anybody likes."""

_LEVEL: Final = re.compile(r"level=([1-9][0-9]{4,5}) ppm")
_CLAIMS: Final = frozenset({"BETTER", "WORSE", "EQUIVALENT_WITHIN_MARGIN"})


def recompute_arm(predicate: Predicate, sources: Sources) -> Verdict:
    """An arm's counters from its observation, its numbers from its raw files."""
    body = predicate.body
    assert isinstance(body, bodies.ArmBody)
    if not body.observations:
        return conclude_rows([Row(field="observation", expected="one", found="none", ok=None)])
    rows = list(_counters(body, body.observations[0]))
    files = {name: content for name in (REQUESTS_FILE, INTER_TOKEN_FILE) if (content := sources.sample(name))}
    if len(files) < 2:
        rows.append(Row(field="raw-files", expected="both", found=", ".join(files) or "none", ok=None))
        return conclude_rows(rows)
    try:
        found = measure(_block(predicate, body.observations[0], files)).to_values()
    except MeasureError as error:
        rows.append(Row(field="measures", expected="computable", found=str(error)[:400], ok=False))
        return conclude_rows(rows)
    names = sorted(found.keys() | body.values.keys())
    rows += [_equal(f"values.{name}", body.values.get(name), found.get(name)) for name in names]
    return conclude_rows(rows)


def _block(predicate: Predicate, observation: bodies.Observation, files: Mapping[str, bytes]) -> ArmBlock:
    document = observation.model_dump(mode="json") | {"schema": observation.format}
    position = predicate.position
    return ArmBlock.from_files(position.arm or "", position.hold_number or 0, document, files)


def _counters(body: bodies.ArmBody, observation: bodies.Observation) -> Iterator[Row]:
    for point in POINTS:
        stated: Mapping[str, int] = getattr(body, point)
        prefix = f"{point}."
        told = {k.removeprefix(prefix): v for k, v in observation.values.items() if k.startswith(prefix)}
        for name in sorted(told.keys() | stated.keys()):
            yield _equal(f"{point}.{name}", stated.get(name), told.get(name))


def recompute_comparison(predicate: Predicate, sources: Sources) -> Verdict:
    """A comparison's blocks from its arm receipts, its deltas and ratios from its blocks."""
    body = predicate.body
    assert isinstance(body, bodies.ComparisonBody)
    parents = {parent.sha256 for parent in predicate.parents if parent.kind is Kind.ARM}
    arms = {sha256: sources.parent(sha256) for sha256 in parents}
    rows: list[Row] = []
    for metric in body.metrics:
        for block in metric.blocks:
            rows.append(_block_row(metric.metric, block, arms.get(block.receipt)))
        rows += _effect_rows(metric)
    if body.outcome in _CLAIMS:
        found = {metric.outcome for metric in body.metrics}
        rows.append(Row(field="outcome", expected="one metric's", found=body.outcome, ok=body.outcome in found))
    return conclude_rows(rows)


def _block_row(metric: str, block: bodies.BlockValue, arm: Predicate | None) -> Row:
    name = f"{metric}.{block.block}"
    if arm is None or not isinstance(arm.body, bodies.ArmBody):
        return Row(field=name, expected="an arm among the parents", found=f"no {block.receipt}", ok=False)
    if (arm.position.arm, arm.position.hold_number) != (block.block, block.hold_number):
        found = f"arm {arm.position.arm} of hold {arm.position.hold_number}"
        return Row(field=name, expected=f"arm {block.block} of hold {block.hold_number}", found=found, ok=False)
    is_time = metric.endswith("-ns")
    stated = to_integer(Fraction(block.value) * (1 if is_time else MILLION))
    return _equal(name, stated, arm.body.values.get(metric if is_time else f"{metric}-micro"))


def _effect_rows(metric: bodies.MetricComparison) -> Iterator[Row]:
    values = [Fraction(block.value) for block in metric.blocks]
    if not values or len(values) % 2 or any(value <= 0 for value in values):
        yield Row(field=f"{metric.metric}.pairs", expected="whole pairs above 0", found=str(len(values)), ok=None)
        return
    yield _pairs_row(metric)
    ratios = [b / a for a, b in zip(values[::2], values[1::2], strict=True)]
    deltas = [to_integer((ratio - 1) * MILLION) for ratio in ratios]
    stated = [pair.delta_ppm for pair in metric.paired]
    is_close = len(stated) == len(deltas) and all(
        abs(a - b) <= ROUNDING_PPM for a, b in zip(stated, deltas, strict=True)
    )
    yield Row(field=f"{metric.metric}.paired", expected=str(deltas), found=str(stated), ok=is_close)
    level = _LEVEL.search(metric.interval_method)
    confidence_ppm = int(level[1]) if level else _CONFIDENCE_PPM
    effect, slack_ppm = effect_of(ratios, confidence_ppm), _interval_slack_ppm(len(ratios), confidence_ppm)
    yield _near(f"{metric.metric}.ratio", metric.ratio, effect.ratio, ROUNDING_PPM)
    expected = "lower" if metric.metric.endswith(LOWER_IS_BETTER_SUFFIX) else "higher"
    yield _equal(f"{metric.metric}.better", metric.better, expected)
    if level or metric.interval_low is not None or metric.interval_high is not None:
        yield _near(f"{metric.metric}.interval_low", metric.interval_low, effect.low, slack_ppm)
        yield _near(f"{metric.metric}.interval_high", metric.interval_high, effect.high, slack_ppm)
    if metric.outcome in _CLAIMS:
        is_judged = level is not None and confidence_ppm >= _LEAST_CONFIDENCE_PPM
        yield _outcome_row(metric, effect, slack_ppm, is_judged=is_judged)


def _interval_slack_ppm(num_pairs: int, confidence_ppm: int) -> int:
    """How far an interval may move with the rounding of its values: by the quantile times as much."""
    return 2 * ROUNDING_PPM * (1 + math.ceil(critical(num_pairs - 1, confidence_ppm))) if num_pairs > 1 else 0


def _pairs_row(metric: bodies.MetricComparison) -> Row:
    """OFF first, ON second, of one number and one hold each; no block twice."""
    pairs = list(zip(metric.blocks[::2], metric.blocks[1::2], strict=True))
    labels = [block.block for block in metric.blocks]
    is_paired = len(set(labels)) == len(labels) and all(
        (a.arm, b.arm) == ("A", "B") and (a.block, b.block) == (f"A{a.block[1:]}", f"B{a.block[1:]}") for a, b in pairs
    )
    return Row(field=f"{metric.metric}.pairs", expected="A1 B1 A2 B2 ...", found=" ".join(labels), ok=is_paired)


def _near(name: str, stated: str | None, computed: Fraction | None, tolerance_ppm: int) -> Row:
    told = Fraction(stated) if stated is not None else None
    # The stated text has six decimals, which is all there is of a small number.
    is_near = (
        told is not None
        and computed is not None
        and abs(told - computed) <= Fraction(1, MILLION) + computed * tolerance_ppm / MILLION
    )
    expected = f"{float(computed):.6f}" if computed is not None else "none"
    return Row(field=name[:200], expected=expected, found=str(stated), ok=is_near)


def _outcome_row(metric: bodies.MetricComparison, effect: Effect, slack_ppm: int, *, is_judged: bool) -> Row:
    """Whether the interval supports a claim, by the rules of ``windows.judge`` and the margin that is stated."""
    slack = Fraction(slack_ppm, MILLION)
    upper = 1 + Fraction(metric.margin_ppm, MILLION)
    found, low, high = "no interval", effect.low, effect.high
    if is_judged and low is not None and high is not None:
        is_up = effect.ratio > 1
        if 1 / upper <= low * (1 + slack) and high <= upper * (1 + slack):
            found = "EQUIVALENT_WITHIN_MARGIN"
        elif (
            (low * (1 + slack) <= upper and high >= 1 / upper * (1 + slack))
            or effect.is_reversed
            or (metric.aa_floor_ppm is not None and effect.distance_ppm <= metric.aa_floor_ppm)
        ):
            found = "INCONCLUSIVE"
        else:
            found = "BETTER" if is_up == (metric.better == "higher") else "WORSE"
    return _equal(f"{metric.metric}.outcome", metric.outcome, found)


def _equal(name: str, stated: Any, computed: Any) -> Row:
    return Row(field=name[:200], expected=str(computed), found=str(stated), ok=stated == computed)


RECOMPUTE: Final[Mapping[Kind, Recompute]] = {
    Kind.ARM: recompute_arm,
    Kind.COMPARISON: recompute_comparison,
}
"""The registry that ``coordinator.store_verify`` passes in."""
