"""Arms and comparisons computed again: a number that its raw files or its arms do not give refuses the store."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "receipts"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "windows"))

import arm_examples
from receipt_kit import Log, digest, observation, parent, raw_sample, rows

from coordinator.store_recompute import RECOMPUTE
from receipts import bodies
from receipts.fields import Kind
from windows.arm import POINTS
from windows.effect import effect_of
from windows.measures import decimal_text, measure

Change = Any


def add_arm(log: Log, label: str, *, tokens: int = 4000, spoil: Change = None, raw: Change = None) -> str:
    """One arm as the campaign writes it; ``spoil`` changes the body's fields, ``raw`` the requests."""
    block = arm_examples.arm(label, 1 if label.endswith("1") else 2, tokens=tokens)
    requests = arm_examples.raw_requests(tokens, 10**10, 1000)
    if raw is not None:
        raw(requests)
    files = {
        "requests.jsonl": "".join(json.dumps(row) + "\n" for row in requests).encode(),
        "inter_token.jsonl": b"".join(b"%d\n" % value for value in block.inter_token_ns),
    }
    for content in files.values():
        log.samples[hashlib.sha256(content).hexdigest()] = content
    document = block.observation
    seen = observation().model_copy(
        update={
            "format": document["schema"], "kind": document["kind"], "compute": "cuda", "values": document["values"],
            "labels": {name: value for name, value in document["labels"].items() if isinstance(value, str)},
        }
    )  # fmt: skip
    fields: dict[str, Any] = {
        "mode": document["labels"]["mode"], "values": measure(block).to_values(), "gates": rows("mechanism"),
        "observations": (seen,),
    }  # fmt: skip
    for point in POINTS:
        prefix = f"{point}."
        fields[point] = {k.removeprefix(prefix): v for k, v in document["values"].items() if k.startswith(prefix)}
    if spoil is not None:
        spoil(fields)
    place = {"window": f"c/hold-{block.hold}", "hold_number": block.hold, "arm": label}
    samples = tuple(raw_sample(name, content) for name, content in files.items())
    return log.add(Kind.ARM, bodies.ArmBody(**fields), position=place, samples=samples)


def found(log: Log, **changes: Any) -> list[str]:
    return [finding.code.value for finding in log.verify(recompute=RECOMPUTE, **changes).findings]


def test_an_honest_arm_holds() -> None:
    log = Log()
    add_arm(log, "A1")
    assert found(log) == []


@pytest.mark.parametrize("name", ["tokens-per-second-micro", "inter-token-p99-ns", "acceptance-at-0-ppm", "tokens"])
def test_a_summary_that_the_raw_files_do_not_give(name: str) -> None:
    """Red when any of an arm's numbers is believed."""
    log = Log()
    add_arm(log, "B1", spoil=lambda fields: fields["values"].update({name: fields["values"][name] + 1}))
    assert found(log) == ["recompute-differs"]


def test_a_number_that_is_left_out_or_made_up() -> None:
    for change in (lambda f: f["values"].pop("rounds"), lambda f: f["values"].update({"speedup-ppm": 5})):
        log = Log()
        add_arm(log, "B1", spoil=change)
        assert found(log) == ["recompute-differs"]


def test_counters_that_are_not_those_of_the_observation() -> None:
    log = Log()
    add_arm(log, "B1", spoil=lambda fields: fields["baseline"].update(dspark_failed_rounds_total=900))
    assert found(log) == ["recompute-differs"]


def test_other_raw_files_give_other_numbers() -> None:
    """The digests fit, the numbers are those of another load."""
    log = Log()
    add_arm(log, "B1", raw=lambda requests: requests[-1].update(num_tokens=9000))
    assert found(log) == ["recompute-differs"]


def test_a_raw_file_that_cannot_be_measured_is_a_failure_and_none_is_unknown() -> None:
    log = Log()
    add_arm(log, "B1", raw=lambda requests: requests[-1].update(end_ns=0))
    assert found(log) == ["recompute-differs"]
    log = Log()
    add_arm(log, "B1")
    report = log.verify(recompute=RECOMPUTE, sample=lambda _: None)
    assert {finding.outcome.value for finding in report.findings} == {"UNKNOWN"}


# -- comparisons -------------------------------------------------------------------------------------------------------

ZERO = Fraction(0)
TOKENS = {"A1": 4000, "B1": 4400, "B2": 4480, "A2": 4080}


def delta(pair: str, ppm: int) -> bodies.PairedDelta:
    return bodies.PairedDelta(pair=pair, delta_ppm=ppm)


def compared(spoil: Change = None, tokens: Mapping[str, int] = TOKENS) -> Log:
    log = Log()
    ids = {label: add_arm(log, label, tokens=n) for label, n in tokens.items()}
    speeds = {
        label: measure(arm_examples.arm(label, 1, tokens=n)).rates["tokens-per-second"] for label, n in tokens.items()
    }
    effect = effect_of([speeds["B1"] / speeds["A1"], speeds["B2"] / speeds["A2"]], 950_000)
    fields: dict[str, Any] = {
        "metric": "tokens-per-second", "unit": "tokens/s", "better": "higher", "ratio": "1.09902", "margin_ppm": 20000,
        "blocks": tuple(
            bodies.BlockValue(hold_number=int(label[1]), arm=label[0], block=label, value=decimal_text(speeds[label]),
                              receipt=ids[label])
            for label in ("A1", "B1", "A2", "B2")
        ),
        "paired": (delta("B1/A1", 100000), delta("B2/A2", 98039)), "interval_low": decimal_text(effect.low or ZERO),
        "interval_high": decimal_text(effect.high or ZERO), "interval_method": effect.method, "outcome": "BETTER",
    }  # fmt: skip
    if spoil is not None:
        spoil(fields)
    outcome = fields.pop("body", "BETTER")
    body = bodies.ComparisonBody(order="A1 B1 | B2 A2", num_pairs=2, mechanism=rows("x"), outcome=outcome,
                                 metrics=(bodies.MetricComparison(**fields),))  # fmt: skip
    parents = tuple(parent(Kind.ARM, sha256, label) for label, sha256 in ids.items())
    log.add(Kind.COMPARISON, body, parents=parents)
    return log


def test_an_honest_comparison_holds() -> None:
    assert found(compared()) == []


def block(number: int, **changes: Any) -> Change:
    def spoil(fields: dict[str, Any]) -> None:
        blocks = list(fields["blocks"])
        blocks[number] = blocks[number].model_copy(update=changes)
        fields["blocks"] = tuple(blocks)

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        block(1, value="450"), block(1, receipt=digest("no arm")), block(1, block="B2"), block(0, hold_number=2),
        lambda f: f.update(ratio="1.2"), lambda f: f.update(ratio=None), lambda f: f.update(paired=()),
        lambda f: f.update(paired=tuple(replace_delta(p, 120000) for p in f["paired"])),
        lambda f: f.update(interval_low="1.1"), lambda f: f.update(interval_high=None),
        lambda f: f.update(interval_method="", interval_low=None, interval_high=None),
        lambda f: f.update(interval_method=f["interval_method"].replace("950000", "100000")),
        lambda f: f.update(margin_ppm=150000), lambda f: f.update(aa_floor_ppm=120000),
        lambda f: f.update(outcome="EQUIVALENT_WITHIN_MARGIN", body="EQUIVALENT_WITHIN_MARGIN"),
        lambda f: f.update(outcome="INCONCLUSIVE", body="EQUIVALENT_WITHIN_MARGIN"),
        lambda f: f.update(blocks=f["blocks"] * 2), lambda f: f.update(better="lower"),
        lambda f: f.update(blocks=f["blocks"][:3]), lambda f: f.update(blocks=()),
    ],
)  # fmt: skip
def test_a_comparison_that_its_arms_do_not_give(spoil: Change) -> None:
    """Red when blocks, deltas, ratio or direction of a comparison are believed."""
    assert found(compared(spoil)) == ["recompute-differs"]


def test_a_worse_comparison_with_its_arms_swapped_is_found() -> None:
    """Red when a ratio is believed the wrong way round: OFF in the place of ON turns WORSE into BETTER."""

    def swap(fields: dict[str, Any]) -> None:
        a1, b1, a2, b2 = fields["blocks"]
        effect = effect_of([Fraction(a.value) / Fraction(b.value) for a, b in ((a1, b1), (a2, b2))], 950_000)
        deltas = tuple(delta(name, ppm) for name, ppm in zip(("A1/B1", "A2/B2"), effect.deltas_ppm, strict=True))
        low, high = decimal_text(effect.low or ZERO), decimal_text(effect.high or ZERO)
        fields.update(blocks=(b1, a1, b2, a2), paired=deltas, ratio=decimal_text(effect.ratio),
                      interval_low=low, interval_high=high)  # fmt: skip

    worse = {"A1": 4400, "B1": 4000, "B2": 4080, "A2": 4480}
    assert found(compared(swap, worse)) == ["recompute-differs"]


def replace_delta(pair: bodies.PairedDelta, delta_ppm: int) -> bodies.PairedDelta:
    return pair.model_copy(update={"delta_ppm": delta_ppm})


def test_the_tolerance_is_what_rounding_needs_and_no_more() -> None:
    """Six decimals of two values move a delta by at most 2 ppm."""
    near, far = (replace_delta(bodies.PairedDelta(pair="B1/A1", delta_ppm=0), 100000 + n) for n in (2, 3))
    second = bodies.PairedDelta(pair="B2/A2", delta_ppm=98039)
    assert found(compared(lambda f: f.update(paired=(near, second)))) == []
    assert found(compared(lambda f: f.update(paired=(far, second)))) == ["recompute-differs"]
