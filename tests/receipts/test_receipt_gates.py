"""Gates: the poison corpus is refused by the shipped policies as they are, each set for exactly its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import make_poison
import pytest
from receipt_kit import NOW, every_kind

from receipts.errors import Code, ReceiptError
from receipts.fields import Kind, Outcome
from receipts.findings import LogReport
from receipts.gates import Facts, decide
from receipts.policy import parse_policy

POISON = Path(make_poison.__file__).parent
POLICIES = make_poison.POLICIES
SETS = sorted(path.name for path in POISON.glob("*.json"))


def _document(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((POISON / name).read_text(encoding="utf-8"))
    return document


@pytest.mark.parametrize("name", SETS)
def test_a_poisoned_set_is_refused_for_its_reason(name: str) -> None:
    """Red when a rule of a shipped policy or of the gate stops biting, or begins to bite elsewhere."""
    document = _document(name)
    result, failed = make_poison.judge(document)
    assert failed == document["rows"]
    assert result == ("ADMITTED" if name.startswith("good") else "DENIED")
    assert len(document["reason"]) > 10


def test_the_corpus_is_what_its_script_makes() -> None:
    """Red when the files or the formats they are made of were changed by hand."""
    assert {name: (POISON / name).read_text(encoding="utf-8") for name in SETS} == make_poison.corpus()


def test_every_rule_that_a_shipped_policy_can_evaluate_has_a_poison() -> None:
    """Red when a gate gains a rule that nothing in the corpus breaks."""
    broken = {row.rpartition(".")[2] for name in SETS for row in json.loads((POISON / name).read_text())["rows"]}
    rules = {"whole", "own", "high-water", "witness", "signers", "anchor", "plan", "attempts", "newer", "count",
             "verdict", "outcome", "evidence", "age", "signer", "total", "measured", "ranks", "same-source",
             "same-hardware", "signatures", "present", "sound", "pin"}  # fmt: skip
    assert broken == rules
    judged = {(d["policy"], d["stage"]) for d in map(_document, SETS) if d["rows"]}
    shipped = {path.stem: parse_policy(path.read_bytes()).document for path in POLICIES.glob("*.toml")}
    assert judged == {(name, stage.name) for name, document in shipped.items() for stage in document.stage}
    source = Path(make_poison.__file__).parents[3] / "receipts" / "gates.py"
    for rule in rules:
        assert rule in source.read_text(encoding="utf-8")


def test_the_gate_of_everything_wrong_says_so_and_never_raises() -> None:
    """Any exception denies, as a row."""
    report = LogReport(None, 0, 0, (), True)
    policy = parse_policy((POLICIES / "live.toml").read_bytes())
    facts = Facts(report=report, records=[object()], now_utc="not a time")  # type: ignore[list-item]
    decision = decide(policy, "final", facts)
    assert decision.result == "DENIED"
    assert decision.rows[-1].field == "evaluation"
    assert decide(policy, "no such stage", facts).result == "DENIED"


def test_the_admission_lists_every_input_and_the_policy_s_digest() -> None:
    world = make_poison.build(make_poison.campaign())
    names = {entry["name"].split("-", 1)[1].rsplit("-", 1)[0] for entry in world["entries"]}
    document = json.loads((POISON / "good.json").read_text())
    assert make_poison.judge(document) == ("ADMITTED", [])
    assert names == {"source-identity", "hold", "budget", "host-facts", "pair-qualification", "arm", "comparison"}


@pytest.mark.parametrize("name", ["live", "rehearsal", "first-hold"])
def test_a_shipped_policy_reads_and_its_digest_is_of_the_file(name: str) -> None:
    import hashlib

    content = (POLICIES / f"{name}.toml").read_bytes()
    policy = parse_policy(content)
    assert policy.document.name == name
    assert policy.sha256 == hashlib.sha256(content).hexdigest()
    assert policy.stage("final").require


def test_live_is_the_strict_choice_everywhere() -> None:
    """Red when the live policy is loosened: what it must never accept is written here a second time."""
    policy = parse_policy((POLICIES / "live.toml").read_bytes())
    for stage in policy.document.stage:
        assert stage.signature == "required"
        assert stage.witness
        assert stage.high_water
        assert stage.parent_closure
        assert stage.same_source
        # Only before a plan has run is there no receipt of it to be the one attempt.
        assert (stage.same_plan, stage.single_attempt) == (stage.name != "open", stage.name != "open")
        for rule in stage.require:
            assert [evidence.value for evidence in rule.evidence] == ["MEASURED"]
            assert "INCONCLUSIVE" not in rule.comparison_outcomes
            assert "WORSE" not in rule.comparison_outcomes


STAGE = '[[stage]]\nname = "final"\nanchor = "hold"\n'
RULE = '[[stage.require]]\nname = "hold"\nkind = "hold"\nevidence = ["MEASURED"]\n'
HEAD = 'version = 1\nname = "x"\ndescription = "x"\n'


@pytest.mark.parametrize(
    "text",
    [
        "", HEAD, HEAD + STAGE, HEAD + STAGE + RULE.replace("evidence", "evidences"),
        HEAD.replace("1", "2") + STAGE + RULE, HEAD + STAGE + RULE + "extra = 1\n",
        HEAD + STAGE + RULE.replace('"MEASURED"', ""), HEAD + STAGE + RULE.replace("MEASURED", "BELIEVED"),
        HEAD + STAGE + RULE + "min_count = 0\n", HEAD + STAGE + RULE + 'comparison_outcomes = ["BETTER"]\n',
        HEAD + STAGE + RULE.replace('"hold"\nev', '"comparison"\nev') + 'comparison_outcomes = ["INVALID"]\n',
        HEAD + STAGE + "same_plan = false\n" + RULE,
        HEAD + STAGE + RULE + "max_total_s = 5\n", HEAD + STAGE + RULE + 'holds = [1]\narms = ["A1"]\n',
        HEAD + STAGE + RULE + STAGE + RULE, HEAD + STAGE + 'signature = "none"\n' + RULE, "x" * 300_000, "\x00",
        HEAD + STAGE + RULE.replace('kind = "hold"', 'kind = "verdict"'), HEAD + STAGE + RULE + "max_age_s = -1\n",
    ],
)  # fmt: skip
def test_a_policy_that_asks_for_nothing_or_for_what_cannot_be_is_refused(text: str) -> None:
    """Red when an empty or loosely read policy can exist: it would admit everything."""
    with pytest.raises(ReceiptError) as caught:
        parse_policy(text.encode())
    assert caught.value.code is Code.POLICY


def test_the_smallest_policy_denies_by_default() -> None:
    """Left-out fields are the strict choice: one hold alone, unsigned and unwitnessed, is not enough."""
    policy = parse_policy((HEAD + STAGE + RULE).encode())
    log = every_kind()
    report, verified = log.walk()
    from receipts.gates import record

    facts = Facts(report=report, records=[record(item) for item in verified], now_utc=NOW)
    decision = decide(policy, "final", facts)
    failed = [row.field for row in decision.rows if row.ok is not True]
    assert decision.result == "DENIED"
    assert failed == ["log.high-water", "log.witness", "log.signers", "signatures"]
    assert report.outcome is Outcome.PASS
    assert decision.body().result == "DENIED"
    assert {item.kind for item in decision.body().inputs} == {Kind.HOLD}
