"""The numbers of one arm, against values worked out by hand."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest
from arm_examples import PHASES, arm, raw_requests
from hypothesis import given
from hypothesis import strategies as st

from windows.arm import ArmBlock, parse_integers, parse_requests
from windows.errors import MeasureError
from windows.measures import decimal_text, half_drift, measure, percentile


def test_rates_exclude_the_warm_up_and_count_from_the_baseline() -> None:
    numbers = measure(arm("B1", 1, tokens=4000, elapsed_ns=10**10, rounds=1000, accepted=2500))
    assert numbers.rates["tokens-per-second"] == 400
    assert numbers.rates["rounds-per-second"] == 100
    assert numbers.rates["tokens-per-round"] == Fraction(7, 2)
    assert (numbers.num_requests, numbers.num_tokens, numbers.num_rounds) == (8, 4000, 1000)


def test_acceptance_is_conditional_on_reaching_the_position() -> None:
    numbers = measure(arm("B1", 1, rounds=1000))
    assert numbers.acceptance == {0: Fraction(3, 4), 1: Fraction(562, 750), 2: Fraction(421, 562)}


def test_a_position_never_reached_has_no_acceptance() -> None:
    values: dict[str, int | None] = {
        f"headline.dspark_{kind}_at_position_total.2": 5 for kind in ("proposed", "accepted")
    }
    assert set(measure(arm("B1", 1, values=values)).acceptance) == {0, 1}


def test_more_accepted_than_reached_is_refused() -> None:
    values: dict[str, int | None] = {"headline.dspark_accepted_at_position_total.1": 10_000}
    with pytest.raises(MeasureError, match="position 1"):
        measure(arm("B1", 1, values=values))


def test_latencies_are_nearest_rank() -> None:
    numbers = measure(arm("B1", 1))
    assert numbers.rates["first-token-p50-ns"] == 1003
    assert numbers.rates["first-token-p99-ns"] == 1007
    assert numbers.rates["inter-token-p50-ns"] == 1049
    assert numbers.rates["inter-token-p90-ns"] == 1089


def test_outputs_are_integers_only() -> None:
    values = measure(arm("B1", 1, accepted=2503)).to_values()
    assert all(type(value) is int for value in values.values())
    assert values["tokens-per-round-micro"] == 3_503_000
    assert values["acceptance-at-0-ppm"] == 750_000
    assert values["inter-token-p50-ns"] == 1049


@given(st.lists(st.integers(0, 1000), min_size=1), st.integers(1, 100))
def test_a_percentile_is_the_smallest_sample_that_covers_its_share(samples: list[int], share: int) -> None:
    value = percentile(samples, share)
    covered = sum(sample <= value for sample in samples)
    below = sum(sample < value for sample in samples)
    assert value in samples
    assert covered * 100 >= share * len(samples)
    assert below * 100 < share * len(samples)


def test_a_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(MeasureError):
        percentile([], 50)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"values": {"headline.dspark_rounds_total": None}}, "dspark_rounds_total was not read"),
        ({"values": {"headline.dspark_rounds_total": 17}}, "nothing was measured"),
        ({"values": {"headline.dspark_accepted_tokens_total": 3}}, "nothing was measured"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(MeasureError, match=match):
        measure(arm("A1", 1, **changes))


def test_drift_inside_an_arm() -> None:
    assert half_drift(arm("A1", 1)) == 1
    rows = raw_requests(4000, 10**10, 1000)
    for row in rows[5:]:
        row["end_ns"] += (row["end_ns"] - row["start_ns"]) // 4
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    base = arm("A1", 1)
    slower = ArmBlock("A1", 1, base.observation, parse_requests(data, NAMES), (), base.facts)
    assert half_drift(slower) == Fraction(4, 5)
    assert half_drift(ArmBlock("A1", 1, base.observation, parse_requests(data, NAMES)[:4], (), base.facts)) is None


NAMES = dict(enumerate(PHASES))
GOOD = raw_requests(80, 10**9, 8)[1]


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"[1]",
        json.dumps({**GOOD, "extra": 1}).encode(),
        json.dumps({k: v for k, v in GOOD.items() if k != "phase"}).encode(),
        json.dumps({**GOOD, "num_tokens": -1}).encode(),
        json.dumps({**GOOD, "num_tokens": 1.5}).encode(),
        json.dumps({**GOOD, "num_tokens": True}).encode(),
        json.dumps({**GOOD, "phase": "headline"}).encode(),
        json.dumps({**GOOD, "phase": 9}).encode(),
        json.dumps({**GOOD, "end_ns": 0}).encode(),
        json.dumps(GOOD).replace('"index": 0', '"index": 0, "index": 1').encode(),
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_a_malformed_raw_line_is_refused_with_our_error(line: bytes) -> None:
    with pytest.raises(MeasureError, match="line 2"):
        parse_requests(json.dumps(GOOD).encode() + b"\n" + line + b"\n", NAMES)


@pytest.mark.parametrize("line", [b"1.0", b"-1", b"true", b"null", b"x", b""])
def test_a_malformed_integer_is_refused(line: bytes) -> None:
    with pytest.raises(MeasureError, match="line 2"):
        parse_integers(b"5\n" + line + b"\n6\n")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction(1), "1"),
        (Fraction(0), "0"),
        (Fraction(1, 3), "0.333333"),
        (Fraction(-1, 3), "-0.333333"),
        (Fraction(5, 2), "2.5"),
        (Fraction(-1, 10**9), "0"),
        (Fraction(1, 2 * 10**6), "0"),
        (Fraction(3, 2 * 10**6), "0.000002"),
        (Fraction(10**12), "1000000000000"),
    ],
)
def test_decimal_text(value: Fraction, text: str) -> None:
    assert decimal_text(value) == text


def test_from_files_refuses_what_is_no_arm() -> None:
    good = arm("A1", 1)
    with pytest.raises(MeasureError, match="arm label"):
        ArmBlock.from_files("C1", 1, good.observation, {})
    with pytest.raises(MeasureError, match="expected"):
        ArmBlock.from_files("A1", 1, {**good.observation, "kind": "pair"}, {})
    with pytest.raises(MeasureError, match=r"requests\.jsonl is missing"):
        ArmBlock.from_files("A1", 1, good.observation, {})
