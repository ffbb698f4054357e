"""Verdicts computed again from raw files and parents: the rules of ``windows`` handed to ``receipts.verify``.

An arm's numbers follow from its raw samples and counters; a comparison's follow from its arms. A receipt that states
more than its own raw records give is a finding, whatever its text says. What is not there to compute from is UNKNOWN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, Final

from receipts import bodies
from receipts.fields import Kind, Row, Verdict
from receipts.findings import Recompute, Sources
from receipts.model import Predicate
from receipts.verdict import conclude_rows
from windows.arm import INTER_TOKEN_FILE, POINTS, REQUESTS_FILE, ArmBlock
from windows.effect import effect_of
from windows.errors import MeasureError
from windows.measures import MILLION, measure, to_integer

ROUNDING_PPM: Final = 2
"""Block values are written with six decimals: a delta of two of them may differ by this much from the exact one."""

_CONFIDENCE_PPM: Final = 950_000
"""Needed to call ``effect_of``; only its ratio is compared, which does not depend on it."""


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
    ratios = [b / a for a, b in zip(values[::2], values[1::2], strict=True)]
    deltas = [to_integer((ratio - 1) * MILLION) for ratio in ratios]
    stated = [pair.delta_ppm for pair in metric.paired]
    is_close = len(stated) == len(deltas) and all(
        abs(a - b) <= ROUNDING_PPM for a, b in zip(stated, deltas, strict=True)
    )
    yield Row(field=f"{metric.metric}.paired", expected=str(deltas), found=str(stated), ok=is_close)
    ratio = effect_of(ratios, _CONFIDENCE_PPM).ratio
    told = Fraction(metric.ratio) if metric.ratio is not None else None
    is_ratio = told is not None and abs(told / ratio - 1) * MILLION <= ROUNDING_PPM
    yield Row(field=f"{metric.metric}.ratio", expected=f"{float(ratio):.6f}", found=str(metric.ratio), ok=is_ratio)
    is_better = (ratio > 1) == (metric.better == "higher")
    if metric.outcome in ("BETTER", "WORSE"):
        expected = "BETTER" if is_better else "WORSE"
        found = metric.outcome
        yield Row(field=f"{metric.metric}.direction", expected=expected, found=found, ok=found == expected)


def _equal(name: str, stated: Any, computed: Any) -> Row:
    return Row(field=name[:200], expected=str(computed), found=str(stated), ok=stated == computed)


RECOMPUTE: Final[Mapping[Kind, Recompute]] = {
    Kind.ARM: recompute_arm,
    Kind.COMPARISON: recompute_comparison,
}
"""The registry that ``coordinator.store_verify`` passes in."""
