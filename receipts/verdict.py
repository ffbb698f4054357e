"""The verdict algebra, and the verdict each kind's own records lead to.

Three values; FAIL beats UNKNOWN beats PASS; nothing evaluated is UNKNOWN. ``conclude`` is used twice: by whoever makes
a receipt, and by the verifier, which never believes the text. A stated verdict may be weaker than the recomputed one
(a person may know more); it may never be stronger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from receipts import bodies
from receipts.fields import MAX_ITEMS, ExitKind, Kind, Outcome, Row, Verdict
from receipts.model import Predicate

_PASS: Final = Verdict(outcome=Outcome.PASS)
"""Verdicts are frozen, so that everything that holds can share one; most of a long log is nothing else."""

_WEIGHT: Final = {Outcome.PASS: 0, Outcome.UNKNOWN: 1, Outcome.FAIL: 2}


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """FAIL if any, else UNKNOWN if any or if there are none, else PASS."""
    return max(outcomes, key=_WEIGHT.__getitem__, default=Outcome.UNKNOWN)


def is_stronger(stated: Outcome, computed: Outcome) -> bool:
    """Whether a statement claims more than the records give."""
    return _WEIGHT[stated] < _WEIGHT[computed]


def outcome_of(ok: bool | None) -> Outcome:
    """PASS, FAIL, or UNKNOWN for None."""
    return Outcome.UNKNOWN if ok is None else Outcome.PASS if ok else Outcome.FAIL


def conclude_rows(rows: Iterable[Row | bodies.Check]) -> Verdict:
    """The verdict of a table; an empty one is UNKNOWN."""
    reasons, outcomes = [], []
    for row in rows:
        if row.ok is True:
            outcomes.append(Outcome.PASS)
            continue
        name = row.field if isinstance(row, Row) else row.name
        outcomes.append(outcome_of(row.ok))
        verb = "was not evaluated" if row.ok is None else f"expected {row.expected:.120}, found {row.found:.120}"
        reasons.append(f"{name:.200}: {verb}")
    if not outcomes:
        reasons.append("nothing was evaluated")
    if not reasons:
        return _PASS
    return Verdict(outcome=worst(outcomes), reasons=tuple(reasons))


def combine(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst outcome with everybody's reasons; none at all is UNKNOWN."""
    listed = list(verdicts)
    if not listed:
        return Verdict(outcome=Outcome.UNKNOWN, reasons=("nothing was evaluated",))
    reasons = tuple(reason for verdict in listed for reason in verdict.reasons)
    if not reasons and all(verdict.outcome is Outcome.PASS for verdict in listed):
        return _PASS
    return Verdict(outcome=worst(verdict.outcome for verdict in listed), reasons=reasons[:MAX_ITEMS])


def _rule(is_kept: bool | None, reason: str) -> Verdict:
    return _PASS if is_kept else Verdict(outcome=outcome_of(is_kept), reasons=(reason,))


def conclude(kind: Kind, body: Any) -> Verdict:
    """The verdict a body's records lead to, without its parents and raw samples.

    Kinds whose records alone decide nothing (``source-identity`` with its trees present, ``attempt`` without rows) give
    PASS here; their stated verdict stands.
    """
    return _CONCLUSIONS[kind](body)


def conclude_exit(predicate: Predicate) -> Verdict:
    """What the exit alone allows: only exit status 0 can be a PASS, a lost link is UNKNOWN."""
    if predicate.exit.kind is ExitKind.EXITED:
        return _rule(predicate.exit.code == 0, f"exit status {predicate.exit.code}")
    if predicate.exit.kind in {ExitKind.LINK_LOST, ExitKind.NOT_STARTED}:
        return _rule(None, f"outcome not known: {predicate.exit.kind.value}")
    return _rule(False, f"ended by {predicate.exit.kind.value}")


def _observations(observed: Iterable[bodies.Observation]) -> Verdict:
    return combine(conclude_rows(observation.checks) for observation in observed)


def _host_facts(body: bodies.HostFactsBody) -> Verdict:
    return conclude_rows([*body.checks, *body.parity])


def _qualification(body: bodies.PairQualificationBody | bodies.WorkerMeasurementBody) -> Verdict:
    gates = [conclude_rows(body.gates)] if body.gates else []
    return combine([_observations(body.observations), *gates])


def _budget(body: bodies.BudgetBody) -> Verdict:
    total = sum(step.bound_ns for step in body.steps) + body.restore_reserve_ns
    rules = [
        _rule(total == body.total_ns, f"total_ns: expected {total}, found {body.total_ns}"),
        _rule(total <= body.limit_ns, f"expected at most {body.limit_ns} ns in all, found {total}"),
    ]
    for step in body.steps:
        is_backed = step.basis == "declared" or step.measured_ns is not None
        rules.append(_rule(True if is_backed else None, f"{step.step}: no measured time behind the bound"))
        if step.measured_ns is not None:
            over = f"{step.step}: took {step.measured_ns} ns, bound is {step.bound_ns}"
            rules.append(_rule(step.measured_ns <= step.bound_ns, over))
    return combine(rules)


def _preparation(body: bodies.VerifierPreparationBody) -> Verdict:
    matched = [
        _rule(item.matches == 1, f"{item.path:.200}: expected exactly 1 match, found {item.matches}")
        for item in body.replacements
    ]
    return combine([conclude_rows(body.checks), *matched])


def _restored(hosts: Iterable[bodies.HeldHost], final_state: str) -> Verdict:
    verdicts = [_rule(final_state == "CLOSED", f"expected final state CLOSED, found {final_state}")]
    for host in hosts:
        verdicts.append(_rule(not host.debt, f"{host.host}: restore debt"))
        proof = conclude_rows(host.restore_proof)
        if proof is not _PASS:
            proof = Verdict(outcome=proof.outcome, reasons=tuple(f"{host.host}: {r}" for r in proof.reasons))
        verdicts.append(proof)
        if host.stop_proof:
            verdicts.append(conclude_rows(host.stop_proof))
    return combine(verdicts)


def _arm(body: bodies.ArmBody) -> Verdict:
    observed = [_observations(body.observations)] if body.observations else []
    return combine([conclude_rows(body.gates), *observed])


def _comparison(body: bodies.ComparisonBody) -> Verdict:
    is_good: dict[str, bool | None] = {
        "BETTER": True, "EQUIVALENT_WITHIN_MARGIN": True, "WORSE": False, "INCONCLUSIVE": None, "INVALID": False,
    }  # fmt: skip
    parts = [_rule(is_good[body.outcome], f"outcome {body.outcome}: {', '.join(body.reasons)[:400]}")]
    parts.append(_rule(True if body.metrics else None, "no metric was compared"))
    for metric in body.metrics:
        if metric.outcome == "INVALID" and body.outcome != "INVALID":
            parts.append(_rule(False, f"{metric.metric} is INVALID, the comparison says {body.outcome}"))
    if body.outcome == "BETTER" and not any(metric.outcome == "BETTER" for metric in body.metrics):
        parts.append(_rule(False, "BETTER, and no metric is"))
    if body.mechanism:
        parts.append(conclude_rows(body.mechanism))
    return combine(parts)


def _admission(body: bodies.AdmissionBody) -> Verdict:
    table = conclude_rows(body.rows)
    if body.result == "ADMITTED":
        return table
    return combine([table, _rule(False, "denied")])


def _recovery(body: bodies.RecoveryBody) -> Verdict:
    proven = _rule(True if body.hosts else None, "no host's restore is recorded")
    return combine([_restored(body.hosts, body.final_state), proven])


def _attempt(body: bodies.AttemptBody) -> Verdict:
    done = _rule(body.exit_code == 0, f"{body.stage}: {body.message:.200}")
    return combine([done, conclude_rows(body.rows)] if body.rows else [done])


_CONCLUSIONS: Final[Mapping[Kind, Callable[[Any], Verdict]]] = {
    Kind.SOURCE_IDENTITY: lambda body: _rule(bool(body.trees), "no source tree"),
    Kind.HOST_FACTS: _host_facts,
    Kind.PAIR_QUALIFICATION: _qualification,
    Kind.WORKER_MEASUREMENT: _qualification,
    Kind.BUDGET: _budget,
    Kind.VERIFIER_PREPARATION: _preparation,
    Kind.HOLD: lambda body: _restored(body.hosts, body.final_state),
    Kind.ARM: _arm,
    Kind.COMPARISON: _comparison,
    Kind.ADMISSION: _admission,
    Kind.RECOVERY: _recovery,
    Kind.ATTEMPT: _attempt,
}
