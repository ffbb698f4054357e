"""The comparison: one outcome per situation, INVALID above all, the receipt's shape, the same digits everywhere."""

from __future__ import annotations

import itertools
import json
from fractions import Fraction
from typing import Any

import pytest
from arm_examples import arm, healthy_facts
from hypothesis import given, settings
from hypothesis import strategies as st
from windows_examples import changed, first_hold_document, plan_document

from receipts.bodies import ComparisonBody
from remote_dspark.contract import DraftMode
from windows.arm import ArmBlock
from windows.compare import compare
from windows.effect import drift_of, effect_of
from windows.errors import MeasureError
from windows.judge import ComparisonOutcome, Reason, judge
from windows.plan import ComparisonPlan, WindowPlan, parse_plan

DESIGN = {"A1": 1, "B1": 1, "B2": 2, "A2": 2}


def plan(**comparison: Any) -> WindowPlan:
    rules = {**plan_document()["comparison"], **comparison}
    return parse_plan(changed(plan_document(), "comparison", rules))


def blocks(speeds: dict[str, int], changes: dict[str, dict[str, Any]] | None = None) -> list[ArmBlock]:
    """One block per label; its speed in tokens per second is set by the elapsed time of 4000 tokens."""
    changes = changes or {}
    return [
        arm(label, DESIGN.get(label, 3), elapsed_ns=4000 * 10**9 // speed, **changes.get(label, {}))
        for label, speed in speeds.items()
    ]


CLEAR = {"A1": 400, "B1": 500, "B2": 502, "A2": 401}
EQUAL = {"A1": 4000, "B1": 4001, "B2": 4000, "A2": 4001}


def outcome(speeds: dict[str, int], changes: dict[str, dict[str, Any]] | None = None, **rules: Any) -> tuple[str, str]:
    result = compare(plan(**rules), blocks(speeds, changes))
    return result.outcome.value, " ".join(result.reasons)


def test_a_clear_difference_is_better_and_two_pairs_say_what_they_are() -> None:
    found, reasons = outcome(CLEAR)
    assert found == "BETTER"
    assert Reason.TWO_PAIRS_NOT_SIGNIFICANT in reasons
    assert Reason.NO_AA_FLOOR in reasons


def test_the_same_the_other_way_round_is_worse() -> None:
    assert outcome({"A1": 500, "B1": 400, "B2": 401, "A2": 502})[0] == "WORSE"


def test_no_difference_is_equivalent() -> None:
    found, reasons = outcome(EQUAL)
    assert found == "EQUIVALENT_WITHIN_MARGIN"
    assert Reason.INTERVAL_WITHIN_MARGIN in reasons


def test_a_reversed_pair_is_inconclusive() -> None:
    found, reasons = outcome({"A1": 400, "B1": 600, "B2": 390, "A2": 400})
    assert found == "INCONCLUSIVE"
    assert Reason.REVERSED_PAIR in reasons


def test_pairs_that_disagree_in_size_are_inconclusive() -> None:
    found, reasons = outcome({"A1": 400, "B1": 420, "B2": 600, "A2": 400})
    assert found == "INCONCLUSIVE"
    assert Reason.INTERVAL_CROSSES_MARGIN in reasons


def test_an_effect_below_the_floor_is_inconclusive() -> None:
    floor = {"aa_floor_ppm": 300_000, "aa_floor_receipt": "aa" * 32}
    found, reasons = outcome(CLEAR, **floor)
    assert found == "INCONCLUSIVE"
    assert Reason.BELOW_AA_FLOOR in reasons
    assert outcome(CLEAR, aa_floor_ppm=200_000, aa_floor_receipt="aa" * 32)[0] == "BETTER"


def test_identical_repeats_say_that_their_interval_is_empty() -> None:
    found, reasons = outcome(dict.fromkeys(DESIGN, 400), primary_metric="tokens-per-round")
    assert found == "EQUIVALENT_WITHIN_MARGIN"
    assert Reason.IDENTICAL_REPEATS in reasons


def test_latency_is_better_when_lower() -> None:
    result = compare(plan(), blocks(CLEAR))
    latency = next(m for m in result.metrics if m.name == "inter-token-p50-ns")
    assert not latency.is_higher_better
    rules = plan().comparison
    assert rules is not None
    faster = effect_of([Fraction(1, 2), Fraction(50, 101)], 950_000)
    assert judge(faster, rules, is_higher_better=False)[0] is ComparisonOutcome.BETTER
    assert judge(faster, rules, is_higher_better=True)[0] is ComparisonOutcome.WORSE


def late(metric: str, value: int) -> dict[str, int]:
    """The same reading at every point after the baseline, so that no other gate is poisoned with it."""
    return {f"{point}.{metric}": value for point in ("headline", "profiled", "final")}


POISON: dict[str, dict[str, dict[str, Any]]] = {
    "mechanism": {"B1": {"values": {"headline.dspark_sampled_rounds_total": 11}}},
    "off that sampled": {"A2": {"values": {"final.dspark_sampled_rounds_total": 1}}},
    "failed rounds": {"B2": {"values": {"final.dspark_failed_rounds_total": 3}}},
    "greedy differs": {"B2": {"labels": {"greedy_sha256": "00" * 32}}},
    "greedy missing": {"B2": {"labels": {"greedy_sha256": None}}},
    "manifest": {"A2": {"labels": {"manifest_sha256": "00" * 32}}},
    "foreign": {"A1": {"values": late("dspark_requests_total", 26)}},
    "prefix": {"A1": {"values": late("dspark_prefix_cache_hits_total", 18)}},
    "boot": {"A1": {"facts": healthy_facts(boot_ids={"local": ("1", "2")})}},
    "clock": {"A1": {"facts": healthy_facts(clock_offset_ns={"local": 10**10})}},
    "clock unknown": {"A1": {"facts": healthy_facts(clock_offset_ns={})}},
    "sources": {"A1": {"changes": {"source_sha256": "00" * 32}}},
    "no rounds": {"A1": {"values": {"headline.dspark_rounds_total": None}}},
    "swapped mode": {"A1": {"mode": DraftMode.ON}},
}


@pytest.mark.parametrize("name", POISON)
def test_poison_makes_the_clearest_result_invalid(name: str) -> None:
    found, reasons = outcome(CLEAR, POISON[name])
    assert found == "INVALID"
    assert any(code in reasons for code in (Reason.GATE_FAILED, Reason.GATE_UNKNOWN, Reason.NOT_MEASURABLE))


EXCLUDABLE = {"foreign": "foreign-requests", "prefix": "prefix-hits", "clock": "clock-offset"}


@pytest.mark.parametrize("name", EXCLUDABLE)
def test_a_declared_exclusion_drops_the_pair_and_lists_it(name: str) -> None:
    result = compare(plan(exclude_on=[EXCLUDABLE[name]]), blocks(CLEAR, POISON[name]))
    assert result.outcome is ComparisonOutcome.INCONCLUSIVE
    assert {e.label for e in result.excluded} == {"A1", "B1"}
    assert result.num_pairs == 1
    assert all(e.reason for e in result.excluded)
    document = result.to_document()
    assert {row["block"] for row in document["excluded"]} == {e.label for e in result.excluded}


def test_an_unknown_reading_is_never_a_reason_to_exclude() -> None:
    found, reasons = outcome(CLEAR, POISON["clock unknown"], exclude_on=["clock-offset"])
    assert found == "INVALID"
    assert Reason.GATE_UNKNOWN in reasons


@pytest.mark.parametrize("missing", DESIGN)
def test_a_missing_block_is_invalid(missing: str) -> None:
    found, reasons = outcome({label: speed for label, speed in CLEAR.items() if label != missing})
    assert found == "INVALID"
    assert f"{Reason.BLOCK_MISSING}: {missing}" in reasons


def test_a_block_too_many_or_in_the_wrong_hold_is_invalid() -> None:
    good = blocks(CLEAR)
    for extra in (arm("A3", 1), arm("A1", 1)):
        result = compare(plan(), [*good, extra])
        assert result.outcome is ComparisonOutcome.INVALID
        assert Reason.BLOCK_UNEXPECTED in " ".join(result.reasons)
    wrong = [arm("A1", 2), *good[1:]]
    assert compare(plan(), wrong).outcome is ComparisonOutcome.INVALID


def test_no_blocks_at_all_are_invalid() -> None:
    assert compare(plan(), []).outcome is ComparisonOutcome.INVALID


def test_a_first_hold_compares_nothing() -> None:
    with pytest.raises(MeasureError, match="no comparison"):
        compare(parse_plan(first_hold_document()), [])


def test_the_order_of_the_blocks_given_does_not_matter() -> None:
    documents = {
        json.dumps(compare(plan(), list(order)).to_document(), sort_keys=True)
        for order in itertools.islice(itertools.permutations(blocks(CLEAR)), 0, 24, 5)
    }
    assert len(documents) == 1


@pytest.mark.parametrize("speeds", [CLEAR, EQUAL, {"A1": 400}, {}])
def test_the_document_is_the_body_of_a_receipt(speeds: dict[str, int]) -> None:
    document = compare(plan(), blocks(speeds)).to_document()
    body = ComparisonBody.model_validate_json(json.dumps(document))
    assert body.claim == "CONTROLLED"
    assert body.order == "A1 B1 | B2 A2"


def test_both_paired_deltas_the_ratio_and_the_interval_are_reported() -> None:
    result = compare(plan(), blocks({"A1": 400, "B1": 500, "B2": 500, "A2": 400}))
    document = next(m for m in result.to_document()["metrics"] if m["metric"] == "tokens-per-second")
    assert [row["delta_ppm"] for row in document["paired"]] == [250_000, 250_000]
    assert document["ratio"] == "1.25"
    assert [row["block"] for row in document["blocks"]] == ["A1", "B1", "A2", "B2"]
    assert [row["value"] for row in document["blocks"]] == ["400", "500", "400", "500"]
    spread = compare(plan(), blocks(CLEAR)).to_document()["metrics"][0]
    assert spread["interval_low"] < spread["ratio"] < spread["interval_high"]
    assert "df=1" in spread["interval_method"]


def test_an_aa_plan_says_so() -> None:
    document = changed(plan_document(), "arms.B", plan_document()["arms"]["A"])
    result = compare(parse_plan(document), blocks(EQUAL, {b: {"mode": DraftMode.OFF} for b in ("B1", "B2")}))
    assert Reason.AA_PLAN in " ".join(result.reasons)
    assert result.outcome is ComparisonOutcome.EQUIVALENT


# -- effect and drift ------------------------------------------------------------------------------------------------


def test_the_interval_is_the_textbook_one() -> None:
    # ln(1.1) and ln(1.2): mean 0.1388158, sd 0.0615277, half width 12.7062 * sd / sqrt(2) = 0.5528074.
    effect = effect_of([Fraction(11, 10), Fraction(12, 10)], 950_000)
    assert abs(effect.ratio**2 - Fraction(132, 100)) < Fraction(1, 10**40)
    assert effect.low is not None
    assert effect.high is not None
    assert abs(effect.low - Fraction(661043, 10**6)) < Fraction(1, 10**4)
    assert abs(effect.high - Fraction(1996848, 10**6)) < Fraction(1, 10**4)


def test_one_pair_has_no_interval() -> None:
    effect = effect_of([Fraction(2)], 950_000)
    assert (effect.low, effect.high) == (None, None)
    rules = plan(min_pairs=1).comparison
    assert rules is not None
    assert judge(effect, rules, is_higher_better=True) == (
        ComparisonOutcome.INCONCLUSIVE,
        (Reason.ONE_PAIR_NO_INTERVAL.value,),
    )


def test_half_and_double_are_equally_far() -> None:
    assert effect_of([Fraction(1, 2)], 950_000).distance_ppm == effect_of([Fraction(2)], 950_000).distance_ppm


def drifting(order: list[str], slope: Fraction) -> Fraction:
    """The ratio B/A that an order reports when nothing differs but time, at a constant relative slope."""
    speed = {label: (1 + slope) ** position for position, label in enumerate(order)}
    ratios = [speed[f"B{n}"] / speed[f"A{n}"] for n in (1, 2)]
    return effect_of(ratios, 950_000).ratio


def test_abba_cancels_a_drift_and_abab_does_not() -> None:
    slope = Fraction(1, 100)
    assert abs(drifting(["A1", "B1", "B2", "A2"], slope) - 1) < Fraction(1, 10**40)
    assert drifting(["A1", "B1", "A2", "B2"], slope) > 1 + slope / 2


def test_drift_is_told_apart_from_the_effect() -> None:
    pairs = [(arm("A1", 1), arm("B1", 1)), (arm("A2", 2), arm("B2", 2))]
    # B is 20 % faster; running second costs 1 %; the second hold is 10 % slower.
    second, hold = Fraction(99, 100), Fraction(9, 10)
    values = [
        (Fraction(100), Fraction(120) * second),
        (Fraction(100) * second * hold, Fraction(120) * hold),
    ]
    drift = drift_of(pairs, values, [True, False]).to_values()
    assert drift == {"hold1": 0, "hold2": 0, "between": -100_000, "order": -10_000}


def test_drift_without_two_orders_or_two_holds_is_absent() -> None:
    pairs = [(arm("A1", 1), arm("B1", 1))]
    assert drift_of(pairs, [(Fraction(1), Fraction(1))], [True]).to_values() == {"hold1": 0}


RATIOS = st.lists(st.fractions(Fraction(1, 4), Fraction(4), max_denominator=1000), min_size=2, max_size=6)


@settings(max_examples=60, deadline=None)
@given(RATIOS, st.integers(1, 200_000))
def test_the_outcome_is_symmetric(ratios: list[Fraction], margin_ppm: int) -> None:
    rules = ComparisonPlan(margin_ppm=margin_ppm, min_rounds=1)
    mirror = {
        ComparisonOutcome.BETTER: ComparisonOutcome.WORSE,
        ComparisonOutcome.WORSE: ComparisonOutcome.BETTER,
    }
    up, _ = judge(effect_of(ratios, 950_000), rules, is_higher_better=True)
    down, _ = judge(effect_of([1 / r for r in ratios], 950_000), rules, is_higher_better=True)
    assert down is mirror.get(up, up)
    if up is ComparisonOutcome.BETTER:
        assert min(ratios) >= 1


@settings(max_examples=60, deadline=None)
@given(RATIOS)
def test_a_better_result_never_rests_on_a_reversed_pair(ratios: list[Fraction]) -> None:
    rules = ComparisonPlan(margin_ppm=1, min_rounds=1)
    effect = effect_of(ratios, 900_000)
    found, _ = judge(effect, rules, is_higher_better=True)
    if effect.is_reversed:
        assert found in (ComparisonOutcome.INCONCLUSIVE, ComparisonOutcome.EQUIVALENT)
