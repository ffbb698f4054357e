"""Verifies a store, evaluates a policy over it, writes the admission receipt. ``receipts`` does the judging."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.evidence import EvidenceWriter
from coordinator.render import Reporter
from coordinator.store import ReceiptId, Store
from receipts.errors import ReceiptError
from receipts.fields import Evidence, Kind, Parent, Position, Subject
from receipts.findings import Finding, LogReport, Options, Verified
from receipts.gates import Decision, Facts, Record, decide, record
from receipts.policy import parse_policy
from receipts.sums import parse_sums
from receipts.verify import LogVerifier

FINAL_STAGE = "final"


@dataclass(frozen=True)
class Admission:
    """One policy's decision and its receipt."""

    decision: Decision
    receipt: ReceiptId

    @property
    def is_admitted(self) -> bool:
        """Whether every rule held."""
        return self.decision.result == "ADMITTED"

    def to_document(self) -> dict[str, Any]:
        """Plain values for ``--json``."""
        rows = [row.model_dump(mode="json") for row in self.decision.rows]
        return {
            "policy": self.decision.policy.document.name,
            "policy_sha256": self.decision.policy.sha256,
            "result": self.decision.result,
            "receipt": self.receipt,
            "rows": rows,
        }

    def render(self, reporter: Reporter) -> None:
        """The result, and every rule that did not hold."""
        name = self.decision.policy.document.name
        wrong = [row for row in self.decision.rows if row.ok is not True]
        rows = [(row.field, row.expected, row.found) for row in wrong] or [("every rule", "holds", "holds")]
        title = f"admission by policy {name}: {self.decision.result}  {self.receipt}"
        reporter.table(title, ("rule", "expected", "found"), rows)


@dataclass(frozen=True)
class StoreVerdict:
    """What verifying the whole store found."""

    report: LogReport

    @property
    def is_whole(self) -> bool:
        """No finding at all."""
        return bool(self.report.num_receipts) and not self.report.findings

    def rows(self) -> list[tuple[str, str]]:
        """Lines of the final table."""
        head = self.report.head
        word = "INTEGRITY ONLY" if self.report.is_integrity_only else f"{self.report.num_signed} signed"
        found = [("finding", describe(finding)) for finding in self.report.findings]
        return [
            ("receipts", f"{self.report.num_receipts}, {word}"),
            ("head", str(head.head) if head else "none"),
            ("verify", f"{len(found)} findings" if found else "every hash, parent and verdict holds"),
            *found,
        ]

    def to_document(self) -> dict[str, Any]:
        """Plain values for ``--json``."""
        return {
            "num_receipts": self.report.num_receipts,
            "head": self.report.head.head if self.report.head else None,
            "findings": [describe(finding) for finding in self.report.findings],
        }


def describe(finding: Finding) -> str:
    """One finding as a line."""
    return f"{finding.code.value} {finding.where}: {finding.message}"


def verify_store(path: Path) -> StoreVerdict:
    """Verify as a stranger would: bytes, chain, sums, parents, raw samples, verdicts; no clock, no keys."""
    report, _ = walk(Store(path), None, keep=lambda _: None)
    return StoreVerdict(report)


def admit_store(writer: EvidenceWriter, policy_path: Path) -> Admission:
    """Evaluate a policy's final stage over the writer's store and append the admission receipt."""
    started = writer.now()
    policy = parse_policy(policy_path.read_bytes())
    records: list[Record] = []
    now = writer.clock.utc()
    report, _ = walk(writer.store, now, keep=lambda verified: records.append(record(verified)))
    facts = Facts(report=report, records=records, now_utc=now, plan_sha256=writer.plan_sha256)
    decision = decide(policy, FINAL_STAGE, facts)
    classes = [Evidence(item.evidence) for item in decision.inputs] or [Evidence.EMULATED]
    receipt = writer.write(
        Kind.ADMISSION,
        decision.body(),
        started=started,
        scope=f"what policy {policy.document.name} says of this plan's receipts at that time",
        not_claimed=("anything the policy does not ask for",),
        evidence=min(classes, key=lambda evidence: evidence.strength),
        position=Position(window=f"{writer.campaign}/admission"),
        parents=[Parent(kind=Kind(item.kind), sha256=item.id, role="input") for item in decision.inputs],
        subjects=[Subject(name=policy.document.name, sha256=policy.sha256)],
    )
    return Admission(decision, receipt)


def walk(store: Store, now_utc: str | None, *, keep: Callable[[Verified], object]) -> tuple[LogReport, LogVerifier]:
    """Verify every entry of a store, handing each readable receipt on."""

    def load(receipt_id: str) -> bytes | None:
        try:
            return store.find(receipt_id)[1]
        except ReceiptError:
            return None

    options = Options(
        now_utc=now_utc, sums=parse_sums(store.sums()), head=store.head(), load=load, sample=store.read_sample
    )
    verifier = LogVerifier(options)
    for entry in store.entries():
        verified = verifier.add(entry)
        if verified is not None:
            keep(verified)
    return verifier.finish(), verifier
