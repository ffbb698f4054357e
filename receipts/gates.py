"""The gate: policy and verified receipts in, a table and ADMITTED or DENIED out. Pure.

Rules: default deny. No rule evaluated denies; any row that is not true denies; any exception denies, as a row. The
verdict of a receipt is the recomputed one. Every receipt that was looked at is listed as an input.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from receipts import bodies
from receipts.errors import ReceiptError
from receipts.evidence import age_s, physical_ranks
from receipts.fields import Kind, Outcome, Row
from receipts.findings import LogReport, Verified
from receipts.policy import Policy, Requirement, Stage
from receipts.verdict import is_stronger

_VERDICT_OF: Final = {"INCONCLUSIVE": Outcome.UNKNOWN, "WORSE": Outcome.FAIL}
"""The verdict that a comparison's outcome alone leads to; every other accepted outcome must be a PASS."""


@dataclass(frozen=True, slots=True)
class Record:
    """What a gate needs of one verified receipt; small, because a log may have a hundred thousand."""

    id: str
    sequence: int
    kind: str
    plan_sha256: str | None
    hold_number: int | None
    arm: str | None
    evidence: str
    outcome: Outcome
    reason: str
    findings: int
    ended_utc: str
    source_sha256: str
    hardware: tuple[tuple[str, ...], ...]
    parents: tuple[str, ...]
    roles: frozenset[str]
    comparison: str | None = None
    budget_total_ns: int | None = None
    is_budget_measured: bool = False
    num_ranks: int = 0


def record(verified: Verified) -> Record:
    """The gate's view of a verified receipt."""
    predicate, body = verified.receipt.predicate, verified.receipt.predicate.body
    budget = body if isinstance(body, bodies.BudgetBody) else None
    hardware = tuple(
        sorted((host.name, host.machine_id, *sorted(gpu.uuid for gpu in host.gpus)) for host in predicate.hosts)
    )
    return Record(
        id=verified.receipt.id,
        sequence=predicate.chain.sequence,
        kind=sys.intern(predicate.kind),
        plan_sha256=sys.intern(predicate.plan_sha256) if predicate.plan_sha256 else None,
        hold_number=predicate.position.hold_number,
        arm=predicate.position.arm,
        evidence=predicate.evidence.value,
        outcome=verified.verdict.outcome,
        reason="; ".join(verified.verdict.reasons)[:400],
        findings=len(verified.findings),
        ended_utc=predicate.ended_utc,
        source_sha256=sys.intern(predicate.tool.source_sha256),
        hardware=hardware,
        parents=tuple(parent.sha256 for parent in predicate.parents),
        roles=frozenset(signature.role for signature in verified.signatures),
        comparison=body.outcome if isinstance(body, bodies.ComparisonBody) else None,
        budget_total_ns=budget.total_ns if budget else None,
        is_budget_measured=budget is not None
        and all(step.basis == "measured" and step.measured_ns is not None for step in budget.steps),
        num_ranks=physical_ranks(predicate),
    )


@dataclass(frozen=True)
class Facts:
    """Everything a decision depends on besides the policy.

    Attributes:
        report: The verification of the whole log.
        records: Every receipt of it, in order.
        now_utc: Explicit clock.
        plan_sha256: The plan being decided; None takes that of the newest anchor.
        num_witnesses: Heads kept elsewhere that were compared (all findings are in ``report``).
        had_high_water: Whether a high-water mark was compared.
        is_clock_given: ``now`` was typed by a person (``--now``): evaluated, never admitted.
        signers_sha256: Digest of the allowed-signers file, None without one.
        policy_pins: Policy name to the digest that the site insists on; empty where no site was named.
    """

    report: LogReport
    records: Sequence[Record]
    now_utc: str
    plan_sha256: str | None = None
    num_witnesses: int = 0
    had_high_water: bool = False
    is_clock_given: bool = False
    signers_sha256: str | None = None
    policy_pins: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """What the gate decided, and the whole table behind it."""

    policy: Policy
    stage: str
    result: Literal["ADMITTED", "DENIED"]
    rows: tuple[Row, ...]
    inputs: tuple[Record, ...]
    plan_sha256: str | None
    facts: Facts

    def body(self) -> bodies.AdmissionBody:
        """The body of the admission receipt."""
        head = self.facts.report.head
        return bodies.AdmissionBody(
            policy=self.policy.document.name,
            policy_sha256=self.policy.sha256,
            now_utc=self.facts.now_utc,
            log=head.log if head else None,
            head_sequence=head.count - 1 if head and head.count else None,
            head=head.head if head else None,
            inputs=tuple(bodies.AdmissionInput(kind=Kind(item.kind), sha256=item.id) for item in self.inputs),
            rows=self.rows,
            result=self.result,
        )


def decide(policy: Policy, stage: str, facts: Facts) -> Decision:
    """Evaluate one stage. Never raises for what it judges: what cannot be evaluated is a row that denies."""
    table = _Table(facts)
    try:
        table.pinned(policy)
        table.run(policy.stage(stage))
    except ReceiptError as error:
        table.row("evaluation", "no error", str(error)[:400], False)
    # A defect of the gate itself must deny as well, and must be seen as what it is.
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        table.row("evaluation", "no error", f"{type(error).__name__}: {error}"[:400], False)
    rows = tuple(table.rows)
    is_admitted = bool(rows) and bool(table.inputs) and all(row.ok is True for row in rows)
    inputs = tuple(sorted(table.inputs.values(), key=lambda item: item.sequence))
    return Decision(policy, stage, "ADMITTED" if is_admitted else "DENIED", rows, inputs, table.plan, facts)


@dataclass
class _Table:
    """One evaluation: the rows so far and what was looked at."""

    facts: Facts
    rows: list[Row] = field(default_factory=list)
    inputs: dict[str, Record] = field(default_factory=dict)
    plan: str | None = None
    chosen: list[Record] = field(default_factory=list)

    def row(self, name: str, expected: str, found: str, ok: bool | None, source: str | None = None) -> None:
        self.rows.append(Row(field=name, expected=expected[:4000], found=found[:4000], ok=ok, source=source))

    def pinned(self, policy: Policy) -> None:
        """A site that pins policies accepts those bytes and no others, under that name and no other."""
        pins = self.facts.policy_pins
        if pins:
            expected = pins.get(policy.document.name, f"one of {', '.join(sorted(pins))}")
            self.row("policy.pin", expected, policy.sha256, policy.sha256 == expected)

    def run(self, stage: Stage) -> None:
        self._log(stage)
        by_id = {item.id: item for item in self.facts.records}
        anchor = self._anchor(stage)
        ancestors = _ancestors([anchor] if anchor else [], by_id)
        for requirement in stage.require:
            self._requirement(requirement, ancestors, anchor)
        self._together(stage, by_id)

    def _log(self, stage: Stage) -> None:
        report, facts = self.facts.report, self.facts
        first = next(iter(report.findings), None)
        found = f"{len(report.findings)} finding(s)" + (f", first {first.code.value}: {first.message}" if first else "")
        self.row("log.whole", "no finding", found, report.outcome is Outcome.PASS)
        self.row("clock.own", "the clock of this machine", "--now was given" if facts.is_clock_given else "it is",
                 not facts.is_clock_given)  # fmt: skip
        if stage.high_water:
            self.row(
                "log.high-water", "compared", "compared" if facts.had_high_water else "none given", facts.had_high_water
            )
        if stage.witness:
            self.row("log.witness", "a head kept outside the store", str(facts.num_witnesses), facts.num_witnesses > 0)
        if stage.signature == "required":
            given = f"given: {facts.signers_sha256}" if facts.signers_sha256 else "given"
            found = "INTEGRITY ONLY: no allowed signers given" if report.is_integrity_only else given
            self.row("log.signers", "given", found, not report.is_integrity_only)

    def _anchor(self, stage: Stage) -> Record | None:
        plan = self.facts.plan_sha256
        fitting = [
            item for item in self.facts.records
            if item.kind == stage.anchor.value and (plan is None or not stage.same_plan or item.plan_sha256 == plan)
        ]  # fmt: skip
        anchor = fitting[-1] if fitting else None
        self.plan = plan or (anchor.plan_sha256 if anchor else None)
        found = anchor.id if anchor else "none"
        self.row("anchor", f"a {stage.anchor.value} receipt", found, anchor is not None, anchor.id if anchor else None)
        if stage.same_plan:
            self.row("plan", "one plan", self.plan or "none", self.plan is not None)
        if stage.single_attempt:
            attempts = [item.id for item in fitting if item.plan_sha256 == self.plan]
            self.row("attempts", "one of this plan", str(len(attempts)), len(attempts) == 1)
        return anchor

    def _requirement(self, rule: Requirement, ancestors: Mapping[str, Record], anchor: Record | None) -> None:
        fitting = [
            item for item in self.facts.records
            if item.kind == rule.kind.value and (not rule.same_plan or item.plan_sha256 == self.plan)
        ]  # fmt: skip
        if rule.in_closure:
            newer = [
                item for item in fitting if item.id not in ancestors and anchor and item.sequence > anchor.sequence
            ]
            self.row(f"{rule.name}.newer", "none outside the anchor's set", str(len(newer)), not newer)
            fitting = [item for item in fitting if item.id in ancestors]
        for label, group in _groups(rule, fitting):
            wanted = 1 if label else rule.min_count
            newest = group[-wanted:]
            name = f"{rule.name}.{label}" if label else rule.name
            self.row(f"{name}.count", f"at least {wanted} {rule.kind.value}", str(len(group)), len(group) >= wanted)
            for item in newest:
                self._receipt(rule, name, item)

    def _receipt(self, rule: Requirement, name: str, item: Record) -> None:
        self.inputs[item.id] = item
        self.chosen.append(item)
        if rule.comparison_outcomes:
            accepted = " or ".join(rule.comparison_outcomes)
            is_accepted = item.comparison in rule.comparison_outcomes and not item.findings
            self.row(f"{name}.outcome", accepted, item.comparison or "none", is_accepted, item.id)
            # An outcome that is accepted excuses its own part of the verdict and nothing else.
            bound = _VERDICT_OF.get(item.comparison or "", Outcome.PASS)
            found = f"{item.outcome.value} {item.reason}".strip()
            is_sound = not is_stronger(bound, item.outcome)
            self.row(f"{name}.verdict", f"{bound.value} or better", found, is_sound, item.id)
        else:
            found = f"{item.outcome.value} {item.reason}".strip()
            self.row(f"{name}.verdict", "PASS", found, item.outcome is Outcome.PASS, item.id)
        classes = [evidence.value for evidence in rule.evidence]
        self.row(f"{name}.evidence", " or ".join(classes), item.evidence, item.evidence in classes, item.id)
        if rule.max_age_s is not None:
            age = age_s(item.ended_utc, self.facts.now_utc)
            self.row(f"{name}.age", f"0 to {rule.max_age_s} s", f"{age} s", 0 <= age <= rule.max_age_s, item.id)
        for role in rule.signers:
            found = ", ".join(sorted(item.roles)) or "nobody"
            self.row(f"{name}.signer", f"signed by {role}", found, role in item.roles, item.id)
        if rule.max_total_s is not None:
            total = item.budget_total_ns
            is_within = total is not None and total <= rule.max_total_s * 10**9
            self.row(f"{name}.total", f"at most {rule.max_total_s} s", f"{total} ns", is_within, item.id)
        if rule.measured_budget:
            found = "all measured" if item.is_budget_measured else "a step without a measured time"
            self.row(f"{name}.measured", "all measured", found, item.is_budget_measured, item.id)

        if rule.ranks is not None:
            found = f"{item.num_ranks} GPU(s) of its host named"
            self.row(f"{name}.ranks", f"{rule.ranks} ranks, a GPU each", found, item.num_ranks == rule.ranks, item.id)

    def _together(self, stage: Stage, by_id: Mapping[str, Record]) -> None:
        if stage.same_source:
            sources = sorted({item.source_sha256 for item in self.chosen})
            self.row("same-source", "one source tree", ", ".join(sources) or "none", len(sources) == 1)
        if stage.same_hardware:
            self._hardware({kind.value for kind in stage.same_hardware})
        ancestors = _ancestors(self.chosen, by_id)
        if stage.parent_closure:
            self._closure(ancestors)
        if stage.signature == "required":
            unsigned = [item.id for item in ancestors.values() if not item.roles]
            self.row(
                "signatures",
                f"all of {len(ancestors)}",
                f"{len(unsigned)} unsigned {' '.join(unsigned[:3])}",
                not unsigned,
            )

    def _hardware(self, kinds: set[str]) -> None:
        # Kinds may be about some of the hosts only; each host must be the same everywhere, and receipts of one kind
        # must be about the same hosts: a second hold elsewhere is another experiment.
        described: dict[str, set[tuple[str, ...]]] = {}
        hosts_of_kind: dict[str, set[tuple[str, ...]]] = {}
        items = [item for item in self.chosen if item.kind in kinds]
        for item in items:
            hosts_of_kind.setdefault(item.kind, set()).add(tuple(name for name, *_ in item.hardware))
            for name, *facts in item.hardware:
                described.setdefault(name, set()).add(tuple(facts))
        differing = sorted(name for name, facts in described.items() if len(facts) != 1)
        mixed = sorted(kind for kind, sets in hosts_of_kind.items() if len(sets) != 1)
        bare = [item.id[:12] for item in items if not item.hardware]
        found = f"{len(described)} host(s), differing: {differing or 'none'}, on different hosts: {mixed or 'none'}"
        found += f", receipts without hosts: {bare or 'none'}"
        is_same = bool(described) and not differing and not mixed and not bare
        self.row("same-hardware", "the same hosts, each with one identity and one set of GPUs", found, is_same)

    def _closure(self, ancestors: Mapping[str, Record]) -> None:
        self.inputs.update(ancestors)
        missing = {parent for item in ancestors.values() for parent in item.parents} - ancestors.keys()
        self.row(
            "parents.present", "none missing", f"{len(missing)} missing {' '.join(sorted(missing)[:3])}", not missing
        )
        accepted = {item.id for item in self.chosen}
        bad = [item for item in ancestors.values() if item.id not in accepted and item.outcome is not Outcome.PASS]
        found = "; ".join(f"{item.kind} {item.id[:12]} {item.outcome.value}" for item in bad[:5]) or "all"
        self.row("parents.sound", "all PASS", found, not bad)


def _groups(rule: Requirement, fitting: Sequence[Record]) -> Iterable[tuple[str, list[Record]]]:
    if rule.holds:
        return [(f"hold-{number}", [i for i in fitting if i.hold_number == number]) for number in rule.holds]
    if rule.arms:
        return [(arm, [i for i in fitting if i.arm == arm]) for arm in rule.arms]
    return [("", list(fitting))]


def _ancestors(items: Sequence[Record], by_id: Mapping[str, Record]) -> dict[str, Record]:
    """The items and everything they build on, as far as the log has it."""
    found: dict[str, Record] = {}
    waiting = list(items)
    while waiting:
        item = waiting.pop()
        if item.id not in found:
            found[item.id] = item
            waiting += [by_id[parent] for parent in item.parents if parent in by_id]
    return found
