"""Verification steps 5 to 10 and 14: parents, evidence, times, raw files, verdicts, signatures, witnesses."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from receipt_kit import (
    EXAMPLES,
    LOG,
    NOW,
    Log,
    allowed,
    arm,
    comparison,
    digest,
    every_kind,
    gpu_host,
    held,
    observation,
    parent,
    raw_sample,
    rows,
    signer,
)

from receipts import bodies
from receipts.errors import Code
from receipts.fields import Evidence, Kind, Outcome, Verdict
from receipts.findings import LogReport, Sources
from receipts.model import Predicate
from receipts.sums import parse_sums
from receipts.verdict import combine, conclude, conclude_rows, worst

PASS = Verdict(outcome=Outcome.PASS)
FAIL = Verdict(outcome=Outcome.FAIL, reasons=("measured",))


def codes(report: LogReport) -> list[str]:
    return [finding.code.value for finding in report.findings]


def one(kind: Kind, body: Any | None = None, **changes: Any) -> list[str]:
    """The findings on a log of one receipt."""
    log = Log()
    log.add(kind, body, **changes)
    return codes(log.verify())


def test_one_of_every_kind_verifies() -> None:
    report = every_kind().verify()
    assert (codes(report), report.num_receipts) == ([], len(Kind))


# -- parents (step 5) ------------------------------------------------------------------------------------------------


def test_a_parent_must_be_there_earlier_and_of_its_kind() -> None:
    """Red when parents are not looked up, or only by digest."""
    assert one(Kind.ARM, parents=(parent(Kind.HOLD, digest("nobody")),)) == ["missing-parent"]
    log = Log()
    hold = log.add(Kind.HOLD)
    log.add(Kind.ARM, parents=(parent(Kind.BUDGET, hold),))
    assert codes(log.verify()) == ["missing-parent"]


def test_an_admission_may_only_list_inputs_that_are_there() -> None:
    body = EXAMPLES[Kind.ADMISSION].model_copy(
        update={"inputs": (bodies.AdmissionInput(kind=Kind.ARM, sha256=digest("nobody")),)}
    )
    assert one(Kind.ADMISSION, body) == ["missing-parent"]


def test_parents_of_another_verified_log_count_when_given() -> None:
    """Merged stores keep their own chains; ids of a log that was verified before may be parents."""
    first = Log()
    hold = first.add(Kind.HOLD)
    from receipts.verify import LogVerifier

    walked = LogVerifier(first.options())
    for entry in first.entries:
        walked.add(entry)
    second = Log(log="a" * 32)
    second.add(Kind.ARM, parents=(parent(Kind.HOLD, hold),))
    assert codes(second.verify()) == ["missing-parent"]
    assert codes(second.verify(other_logs=walked.seen)) == []


# -- evidence (step 6) -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "body", "hosts"),
    [
        (Kind.HOLD, None, ()),
        (Kind.HOST_FACTS, None, ()),
        (Kind.RECOVERY, None, ()),
        (Kind.ARM, None, (gpu_host(num_gpus=0),)),
        (Kind.PAIR_QUALIFICATION, None, (gpu_host(num_gpus=1),)),
        (Kind.PAIR_QUALIFICATION, bodies.PairQualificationBody(observations=(observation(compute="cpu"),)),
         (gpu_host(),)),
        (Kind.WORKER_MEASUREMENT, bodies.WorkerMeasurementBody(topology="pair", observations=(observation(),)),
         (gpu_host(num_gpus=1),)),
        (Kind.ARM, arm("greedy-v1", observations=(observation(compute="interpreted"),)), (gpu_host(),)),
    ],
)  # fmt: skip
def test_measured_needs_the_hardware_it_is_about(kind: Kind, body: Any, hosts: Any) -> None:
    """Red when the word MEASURED is believed."""
    assert "evidence-overclaim" in one(kind, body, hosts=hosts)
    assert one(kind, body, hosts=hosts, evidence="REHEARSED") == []


def test_two_gpus_with_one_uuid_are_one_gpu() -> None:
    twice = gpu_host().gpus[0]
    host = gpu_host().model_copy(update={"gpus": (twice, twice)})
    assert "evidence-overclaim" in one(Kind.PAIR_QUALIFICATION, hosts=(host,))


def test_a_comparison_is_as_strong_as_its_weakest_parent() -> None:
    """Red when a chain of derivations launders rehearsed numbers."""
    log = Log()
    strong, weak = log.add(Kind.ARM), log.add(Kind.ARM, evidence="EMULATED")
    parents = (parent(Kind.ARM, strong, "A1"), parent(Kind.ARM, weak, "B1"))
    log.add(Kind.COMPARISON, parents=parents)
    assert codes(log.verify()) == ["evidence-overclaim"]
    assert Evidence.MEASURED.strength > Evidence.REHEARSED.strength > Evidence.EMULATED.strength


# -- times (step 7) --------------------------------------------------------------------------------------------------


def test_a_receipt_from_the_future_is_found_only_with_a_clock() -> None:
    log = Log()
    log.add(Kind.HOST_FACTS, started_utc="2026-06-01T12:06:00Z", ended_utc="2026-06-01T12:07:00Z")
    assert codes(log.verify()) == ["clock"]
    assert codes(log.verify(now_utc=None)) == []
    assert codes(log.verify(now_utc="2026-06-01T12:02:00Z")) == []


def test_an_end_before_the_start_is_unknown_off_hosts() -> None:
    log = Log()
    log.add(Kind.COMPARISON, started_utc=NOW, ended_utc="2026-06-01T11:00:00Z")
    assert [(f.code, f.outcome) for f in log.verify().findings] == [(Code.CLOCK, Outcome.UNKNOWN)]


# -- raw files (step 8) ----------------------------------------------------------------------------------------------

RAW = b"3\n1\n2\n10\n"


def with_raw(content: bytes, values: dict[str, int]) -> Log:
    log = Log()
    log.samples[hashlib.sha256(content).hexdigest()] = content
    log.add(Kind.ARM, arm("greedy-v1", values=values), samples=(raw_sample("rounds.jsonl", content),))
    return log


def test_figures_are_computed_again_from_the_raw_file() -> None:
    """Red when a summary is believed."""
    good = {"raw.rounds.jsonl.count": 4, "raw.rounds.jsonl.p50": 2, "raw.rounds.jsonl.p99": 10}
    assert codes(with_raw(RAW, good).verify()) == []
    for name, value in good.items():
        assert codes(with_raw(RAW, good | {name: value + 1}).verify()) == ["recompute-differs"], name
    assert codes(with_raw(RAW, {"raw.other.jsonl.p50": 2}).verify()) == ["recompute-differs"]
    assert codes(with_raw(RAW, {"raw.rounds.jsonl.p12": 2}).verify()) == ["recompute-differs"]


def test_columns_of_objects() -> None:
    content = b'{"a":1,"b":5}\n{"a":3,"b":6}\n'
    assert codes(with_raw(content, {"raw.rounds.jsonl.a.max": 3, "raw.rounds.jsonl.b.sum": 11}).verify()) == []


def test_a_missing_raw_file_is_unknown() -> None:
    """Red when a figure that nobody can check counts as checked, or as wrong."""
    log = with_raw(RAW, {"raw.rounds.jsonl.p50": 2})
    report = log.verify(sample=lambda _: None)
    assert [(f.code, f.outcome) for f in report.findings] == [
        (Code.MISSING_SAMPLE, Outcome.UNKNOWN),
        (Code.RECOMPUTE, Outcome.UNKNOWN),
    ]
    assert report.outcome is Outcome.UNKNOWN


@pytest.mark.parametrize("content", [b"3\n1\n2\n11\n", b"3\n1\n2\n10", b"", b"3\n1\n2\n10\n10\n"])
def test_another_raw_file(content: bytes) -> None:
    log = with_raw(RAW, {})
    assert codes(log.verify(sample=lambda _: content)) == ["digest-mismatch"]


@pytest.mark.parametrize("content", [b"1.5\n", b"true\n", b'"x"\n', b"1\n2", b"[1]\n", b'{"a":{"b":1}}\n', b"NaN\n"])
def test_a_raw_file_that_holds_no_integers(content: bytes) -> None:
    """The digest fits: the file itself is not what raw files are."""
    assert codes(with_raw(content, {}).verify()) == ["digest-mismatch"]


# -- verdicts (step 9) -----------------------------------------------------------------------------------------------

FALSE_PASSES: list[tuple[Kind, Any, dict[str, Any]]] = [
    (Kind.HOST_FACTS, bodies.HostFactsBody(checks=()), {}),
    (Kind.HOST_FACTS, bodies.HostFactsBody(checks=EXAMPLES[Kind.HOST_FACTS].checks, parity=rows("x", ok=None)), {}),
    (Kind.PAIR_QUALIFICATION, bodies.PairQualificationBody(observations=(observation(ok=False),)), {}),
    (Kind.PAIR_QUALIFICATION, bodies.PairQualificationBody(observations=(observation(ok=None),)), {}),
    (Kind.WORKER_MEASUREMENT,
     bodies.WorkerMeasurementBody(topology="solo", observations=(observation(),), gates=rows("g", ok=False)), {}),
    (Kind.BUDGET, EXAMPLES[Kind.BUDGET].model_copy(update={"total_ns": 1}), {}),
    (Kind.BUDGET, EXAMPLES[Kind.BUDGET].model_copy(update={"limit_ns": 10**9}), {}),
    (Kind.BUDGET, bodies.BudgetBody(
        steps=(bodies.StepBudget(step="stop", bound_ns=5, measured_ns=6, basis="measured"),),
        restore_reserve_ns=0, total_ns=5, limit_ns=9), {}),
    (Kind.BUDGET, bodies.BudgetBody(
        steps=(bodies.StepBudget(step="stop", bound_ns=5, basis="measured"),),
        restore_reserve_ns=0, total_ns=5, limit_ns=9), {}),
    (Kind.VERIFIER_PREPARATION, EXAMPLES[Kind.VERIFIER_PREPARATION].model_copy(update={"replacements": tuple(
        r.model_copy(update={"matches": 2}) for r in EXAMPLES[Kind.VERIFIER_PREPARATION].replacements)}), {}),
    (Kind.HOLD, EXAMPLES[Kind.HOLD].model_copy(update={"final_state": "DEGRADED"}), {}),
    (Kind.HOLD, EXAMPLES[Kind.HOLD].model_copy(update={"hosts": (held(debt=True),)}), {}),
    (Kind.HOLD, EXAMPLES[Kind.HOLD].model_copy(update={"hosts": (held(restore_proof=()),)}), {}),
    (Kind.HOLD, EXAMPLES[Kind.HOLD].model_copy(update={"hosts": (held(restore_proof=rows("r", ok=False)),)}), {}),
    (Kind.HOLD, EXAMPLES[Kind.HOLD].model_copy(update={"hosts": (held(stop_proof=rows("s", ok=None)),)}), {}),
    (Kind.ARM, arm("greedy-v1", gates=()), {}),
    (Kind.ARM, arm("greedy-v1", gates=rows("failed-rounds", ok=False)), {}),
    (Kind.COMPARISON, comparison(outcome="WORSE"), {}),
    (Kind.COMPARISON, comparison(outcome="INCONCLUSIVE"), {}),
    (Kind.COMPARISON, comparison(metrics=()), {}),
    (Kind.COMPARISON, comparison(mechanism=rows("B1.mechanism", ok=False)), {}),
    (Kind.ADMISSION, EXAMPLES[Kind.ADMISSION].model_copy(update={"rows": ()}), {}),
    (Kind.ADMISSION, EXAMPLES[Kind.ADMISSION].model_copy(update={"result": "DENIED"}), {}),
    (Kind.RECOVERY, EXAMPLES[Kind.RECOVERY].model_copy(update={"hosts": ()}), {}),
    (Kind.ATTEMPT, EXAMPLES[Kind.ATTEMPT], {}),
    (Kind.HOST_FACTS, None, {"exit": {"kind": "exited", "code": 1}}),
    (Kind.HOST_FACTS, None, {"exit": {"kind": "signalled", "signal": 9}}),
    (Kind.HOST_FACTS, None, {"exit": {"kind": "link-lost"}}),
    (Kind.HOST_FACTS, None, {"exit": {"kind": "timed-out"}}),
    (Kind.HOST_FACTS, None, {"exit": {"kind": "not-started"}}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "body", "changes"), FALSE_PASSES)
def test_a_pass_that_its_own_records_do_not_give(kind: Kind, body: Any, changes: dict[str, Any]) -> None:
    """Red when the stated verdict is believed, or a rule of the kind's conclusion is dropped."""
    log = Log()
    log.add(kind, body, verdict=PASS, **changes)
    report, verified = log.walk()
    assert codes(report) == ["recompute-differs"]
    assert verified[0].verdict.outcome is not Outcome.PASS


def test_a_weaker_statement_stands() -> None:
    """A person may know more: FAIL over good records is no finding, and stays FAIL."""
    log = Log()
    log.add(Kind.HOST_FACTS, verdict=FAIL)
    report, verified = log.walk()
    assert codes(report) == []
    assert verified[0].verdict.outcome is Outcome.FAIL


def test_recomputation_rules_are_passed_in() -> None:
    def rule(predicate: Predicate, sources: Sources) -> Verdict:
        assert sources.parent(predicate.parents[0].sha256) is not None
        return FAIL

    log = Log()
    made = log.add(Kind.ARM)
    log.add(Kind.COMPARISON, parents=(parent(Kind.ARM, made, "A1"),))
    assert codes(log.verify(recompute={Kind.COMPARISON: rule})) == ["recompute-differs"]


@pytest.mark.parametrize("error", [ValueError, TypeError, ZeroDivisionError, KeyError, AttributeError, RecursionError])
def test_a_rule_that_trips_refuses_the_receipt_and_the_walk_goes_on(error: type[Exception]) -> None:
    def rule(predicate: Predicate, sources: Sources) -> Verdict:
        raise error("tripped")

    log = Log()
    log.add(Kind.ARM)
    log.add(Kind.HOLD)
    report = log.verify(recompute={Kind.ARM: rule})
    assert (codes(report), report.num_receipts) == (["recompute-differs"], 2)


def test_the_algebra() -> None:
    """FAIL beats UNKNOWN beats PASS, and nothing at all is UNKNOWN."""
    order = [Outcome.PASS, Outcome.UNKNOWN, Outcome.FAIL]
    for a in order:
        for b in order:
            assert worst([a, b]) is max(a, b, key=order.index)
    assert worst([]) is Outcome.UNKNOWN
    assert combine([]).outcome is Outcome.UNKNOWN
    assert conclude_rows([]).outcome is Outcome.UNKNOWN
    assert all(conclude(kind, EXAMPLES[kind]).outcome is Outcome.PASS for kind in Kind if kind is not Kind.ATTEMPT)


# -- signatures (step 10) and witnesses (step 14) ---------------------------------------------------------------------


def test_signatures_count_only_for_allowed_signers() -> None:
    log = Log(signer=signer("operator"))
    log.add(Kind.HOST_FACTS)
    assert log.verify().is_integrity_only
    report = log.verify(signers=allowed("operator"), require_signature=True)
    assert (codes(report), report.num_signed, report.is_integrity_only) == ([], 1, False)
    report = log.verify(signers=allowed("auditor"), require_signature=True)
    assert (codes(report), report.num_signed) == (["unsigned"], 0)


def test_the_heads_that_a_hold_recorded_must_be_in_the_log() -> None:
    """Red when a hold's witnesses are only data: a log that was rewritten after the hold must not fit them."""

    def log_with(head: str) -> Log:
        log = Log()
        log.add(Kind.HOST_FACTS)
        kept = bodies.Witness(host="alpha", log=LOG, sequence=0, head=head)
        log.add(Kind.HOLD, EXAMPLES[Kind.HOLD].model_copy(update={"hosts": (held(witness_open=kept),)}))
        return log

    true = Log()
    report = log_with(true.add(Kind.HOST_FACTS)).verify()
    assert (codes(report), report.num_witnesses) == ([], 1)
    assert codes(log_with(digest("another history")).verify()) == ["rollback"]


@pytest.mark.parametrize(
    "content",
    [b"abc", b"0" * 64 + b" one-space\n", b"0" * 63 + b"  x\n", b"\xff\n", b"0" * 64 + b"  \n",
     b"0" * 64 + b"  x\n" + b"1" * 64 + b"  x\n"],
)  # fmt: skip
def test_sums_that_are_none(content: bytes) -> None:
    from receipts.errors import ReceiptError

    with pytest.raises(ReceiptError):
        parse_sums(content)
