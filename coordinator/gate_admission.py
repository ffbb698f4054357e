"""Verifies a store, evaluates a policy over it, writes the admission receipt. ``receipts`` does the judging."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coordinator.clock import Clock, SystemClock
from coordinator.data import policy_path
from coordinator.errors import AdmissionRefused, UsageError
from coordinator.evidence import EvidenceWriter
from coordinator.identity import source_digests
from coordinator.keys import signer_from
from coordinator.render import Reporter, print_json
from coordinator.store import ReceiptId, Signer, Store
from coordinator.store_files import read_file
from coordinator.store_marks import Marks
from coordinator.store_verify import (
    StoreVerdict,
    read_anchor,
    read_signers,
    remember,
    unreadable,
    verify_store,
)
from coordinator.store_walk import Trust, walk
from receipts.errors import Code, ReceiptError
from receipts.fields import Evidence, Kind, Parent, Position, Subject, is_utc
from receipts.gates import Decision, Facts, Record, decide, record
from receipts.policy import Policy, parse_policy
from windows.exit_codes import ExitCode
from windows.site import Site

_DIGEST = re.compile("[0-9a-f]{64}")
OPEN_STAGE, FINAL_STAGE = "open", "final"

__all__ = ["Admission", "AdmitRequest", "StoreVerdict", "admit_store", "run_admit", "verify_store"]


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
            "stage": self.decision.stage,
            "plan_sha256": self.decision.plan_sha256,
            "result": self.decision.result,
            "receipt": self.receipt,
            "inputs": [{"kind": item.kind, "sha256": item.id} for item in self.decision.inputs],
            "rows": rows,
        }

    def render(self, reporter: Reporter, *, explain: bool = False) -> None:
        """The result and every rule that did not hold; with ``explain``, every rule and every input."""
        name = self.decision.policy.document.name
        title = f"admission by policy {name}: {self.decision.result}  {self.receipt}"
        wrong = [row for row in self.decision.rows if row.ok is not True]
        if explain:
            words = {True: "yes", False: "NO", None: "not evaluated"}
            table = [
                (row.field, row.expected, row.found, words[row.ok], row.source or "") for row in self.decision.rows
            ]
            reporter.table(title, ("rule", "expected", "found", "holds", "receipt"), table)
            inputs = [(item.kind, item.id, item.outcome.value, item.evidence) for item in self.decision.inputs]
            reporter.table("inputs", ("kind", "receipt", "verdict", "evidence"), inputs)
            return
        rows = [(row.field, row.expected, row.found) for row in wrong] or [("every rule", "holds", "holds")]
        reporter.table(title, ("rule", "expected", "found"), rows)


@dataclass(frozen=True)
class AdmitRequest:
    """What ``coordinator admit`` was asked; everything a decision depends on is in it."""

    policy: str
    store: Path
    stage: str = FINAL_STAGE
    plan: str | None = None
    signers: Path | None = None
    key: Path | None = None
    anchor: Path | None = None
    now: str | None = None
    state: Path | None = None
    pins: Mapping[str, str] = field(default_factory=dict)

    def on(self, site: Site) -> AdmitRequest:
        """The same request with what the site file pins: its policies, and its signers unless others are named."""
        signers = self.signers or (Path(site.signers) if site.signers else None)
        return replace(self, signers=signers, pins=dict(site.policy_pins))


def run_admit(request: AdmitRequest, *, explain: bool, json: bool) -> int:
    """The command: evaluate, append the admission receipt, print."""
    clock = SystemClock()
    if request.now is not None and not is_utc(request.now):
        raise UsageError("--now is not a time", expected="2026-06-01T12:00:00Z", found=request.now[:80])
    if request.plan is not None and not _DIGEST.fullmatch(request.plan):
        raise UsageError("--plan is not a digest", expected="64 hex digits", found=request.plan[:80])
    if not (request.store / "HEAD").exists():
        raise UsageError("there is no receipt store", where=str(request.store), next_step="name it with --store")
    try:
        Store(request.store).snapshot()
    except ReceiptError as error:
        return unreadable(error, request.store, json=json)
    try:
        writer = plain_writer(request.store, clock, signer_from(request.key))
        admission = admit_store(writer, policy_path(request.policy), request=request)
    except ReceiptError as error:
        verb = "the decision cannot be recorded" if error.code is Code.NOT_WRITTEN else "cannot evaluate"
        raise UsageError(f"{verb}, so nothing is admitted: {error}", where=str(request.store)) from error
    if json:
        print_json(admission.to_document())
    else:
        admission.render(Reporter(clock.utc), explain=explain)
    if admission.is_admitted:
        return int(ExitCode.DONE)
    # A store that is not whole comes first: whatever its receipts say, it is not evidence.
    is_whole = not admission.decision.facts.report.findings
    return int(ExitCode.ADMISSION_REFUSED if is_whole else ExitCode.RECEIPTS_INVALID)


def plain_writer(store: Path, clock: Clock, signer: Signer | None) -> EvidenceWriter:
    """A writer of receipts that belong to no plan."""
    return EvidenceWriter(
        store=Store(store),
        source_sha256=source_digests()["coordinator"],
        clock=clock,
        campaign="admit",
        is_rehearsal=False,
        signer=signer,
    )


def admit_store(writer: EvidenceWriter, policy_file: Path, *, request: AdmitRequest | None = None) -> Admission:
    """Evaluate one stage of a policy over the writer's store and append the admission receipt.

    Args:
        writer: Where the receipt goes; its plan is the one decided about unless ``request`` names another.
        policy_file: Policy, read once: the digest in the receipt is of those bytes.
        request: Signers, anchor, state folder; None for none of them.
    """
    started = writer.now()
    asked = request or AdmitRequest(policy=str(policy_file), store=writer.store.path)
    policy = read_policy(policy_file)
    marks = Marks(asked.state)
    decision = decide(policy, asked.stage, _facts(writer, asked, marks))
    receipt = _write(writer, policy, decision, started)
    if decision.result == "ADMITTED" and decision.facts.report.head is not None:
        remember(marks, decision.facts.report.head)
    return Admission(decision, receipt)


def require_admissible(request: AdmitRequest) -> Policy:
    """Refuse, before any host is contacted, what this request's policy could never admit at the end.

    Returns:
        The policy.

    Raises:
        AdmissionRefused: The policy is not the pinned one, or wants signatures that this run would not leave.
        UsageError: A file that the request names cannot be read.
    """
    path = policy_path(request.policy)
    signer = signer_from(request.key)
    policy, signers = read_policy(path), read_signers(request.signers)
    read_anchor(request.anchor)
    name = policy.document.name
    pin = request.pins.get(name)
    if request.pins and policy.sha256 != pin:
        raise AdmissionRefused(
            f"policy {name} is not the one that the site file pins", expected=pin or "a pin of this name",
            found=policy.sha256, where=str(path), next_step="review the policy, then pin its digest in policy_pins",
        )  # fmt: skip
    if all(stage.signature != "required" for stage in policy.document.stage):
        return policy
    if signer is None or signers is None or signers.get(signer.keyid) is None:
        found = "no --key" if signer is None else "no allowed signers" if signers is None else f"key {signer.keyid}"
        raise AdmissionRefused(
            f"policy {name} admits signed receipts only, and this run would leave others",
            expected="--key of a signer in the allowed-signers file (`signers` in the site file, or --signers)",
            found=found, next_step="`coordinator keys new NAME --out KEY` makes a key and prints its entry",
        )  # fmt: skip
    return policy


def require_stage(writer: EvidenceWriter, request: AdmitRequest, stage: str, reporter: Reporter) -> Admission:
    """Evaluate a stage that must admit before anything goes on; leaves the admission receipt either way.

    Raises:
        AdmissionRefused: It denies; every rule that does not hold was printed.
    """
    admission = admit_store(writer, policy_path(request.policy), request=replace(request, stage=stage))
    if not admission.is_admitted:
        admission.render(reporter)
        wrong = [row for row in admission.decision.rows if row.ok is not True]
        raise AdmissionRefused(
            f"policy {admission.decision.policy.document.name} does not admit stage {stage}; no host was contacted",
            expected=f"{wrong[0].field}: {wrong[0].expected}" if wrong else "a rule that was evaluated",
            found=wrong[0].found if wrong else "none", where=f"receipt {admission.receipt}",
            next_step=f"`coordinator admit {request.policy} --stage {stage} --explain` shows every rule",
        )  # fmt: skip
    return admission


def read_policy(path: Path) -> Policy:
    """A policy file, read once.

    Raises:
        UsageError: It is not one.
    """
    try:
        return parse_policy(read_file(path))
    except ReceiptError as error:
        raise UsageError(f"not a policy: {error}", where=str(path)) from error


def _facts(writer: EvidenceWriter, asked: AdmitRequest, marks: Marks) -> Facts:
    records: list[Record] = []
    now = asked.now or writer.clock.utc()
    mark = marks.get(writer.store.head().log)
    signers = read_signers(asked.signers)
    trust = Trust(now_utc=now, signers=signers, high_water=mark, witnesses=read_anchor(asked.anchor))
    report = walk(
        writer.store,
        trust,
        keep=lambda _entry, verified: records.append(record(verified)) if verified is not None else None,
    )
    return Facts(
        report=report,
        records=records,
        now_utc=now,
        plan_sha256=asked.plan or writer.plan_sha256,
        num_witnesses=report.num_witnesses,
        # The first time there is no mark yet; then a head that a guard or CI kept has to stand in for it.
        had_high_water=mark is not None or report.num_witnesses > 0,
        is_clock_given=asked.now is not None,
        signers_sha256=signers.sha256 if signers is not None else None,
        policy_pins=asked.pins,
    )


def _write(writer: EvidenceWriter, policy: Policy, decision: Decision, started: Any) -> ReceiptId:
    classes = [Evidence(item.evidence) for item in decision.inputs] or [Evidence.EMULATED]
    return writer.write(
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
