"""A campaign: HOLD 1 (pair-qualify, A1, B1), HOLD 2 (pair-qualify, B2, A2), comparison, admission.

It orders, it does not judge: gates and comparison are pure functions of ``windows`` over what was fetched, the policy
is data, and every stage leaves a receipt before the next one starts. A hold that ends badly ends the campaign;
production is back before anything else happens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator import __version__
from coordinator.campaign_result import CampaignResult, HoldResult
from coordinator.clock import Clock
from coordinator.compare_receipt import write_comparison
from coordinator.data import policy_path
from coordinator.doctor import host_checks, parity_rows, write_facts_receipt
from coordinator.errors import AdmissionRefused, CoordinatorError, GateFailed
from coordinator.evidence import Clockings, EvidenceWriter
from coordinator.gate_admission import Admission, AdmitRequest, admit_store, verify_store
from coordinator.guard_client import GuardRefusal, as_coordinator_error
from coordinator.hold_arms import HoldBody
from coordinator.hold_measurements import MeasurementBody
from coordinator.hold_receipts import (
    is_untouched,
    refusals_kept,
    write_attempt,
    write_budget,
    write_hold,
    write_steps_budget,
)
from coordinator.identity import source_digests
from coordinator.production import recover_command
from coordinator.render import Reporter
from coordinator.session import HostSession
from coordinator.signals import InterruptFlag
from coordinator.store import ReceiptId, Signer, Store
from coordinator.store_verify import read_signers
from coordinator.trial import measure_steps
from coordinator.window import Window
from receipts import bodies
from receipts.errors import ReceiptError
from receipts.fields import Kind, Parent, Subject
from windows.budget import BudgetEvidence, require_budget
from windows.compare import compare
from windows.compiled import CompiledPlan
from windows.errors import BudgetError
from windows.exit_codes import ExitCode
from windows.plan import StepKind


@dataclass
class Campaign:
    """Everything one campaign shares.

    Attributes:
        compiled: The frozen plan.
        sessions: Connected hosts with programs staged.
        writer: Appends its receipts.
        journals: Folder of the holds' journals.
        keep: Folder of fetched raw files.
        manifest: The load manifest, staged onto the hosts by digest.
        site: The site file, for the commands that a person is told to run.
    """

    compiled: CompiledPlan
    sessions: Sequence[HostSession]
    writer: EvidenceWriter
    journals: Path
    keep: Path
    manifest: Path
    site: Path
    reporter: Reporter
    interrupt: InterruptFlag
    clock: Clock
    source: ReceiptId | None = None
    budgets: list[ReceiptId] = field(default_factory=list)
    evidence: list[BudgetEvidence] = field(default_factory=list)
    holds: list[HoldResult] = field(default_factory=list)

    def write_sources(self) -> None:
        """The source-identity receipt: what will run, by digest, before anything runs."""
        started = self.writer.now()
        trees = [
            bodies.SourceTree(name=name, version=__version__, tree_sha256=digest)
            for name, digest in sorted(self.compiled.document["sources"].items())
            if name != "manifest"
        ]
        guards = {session.guard_sha256 for session in self.sessions}
        trees += [bodies.SourceTree(name="guard", version=__version__, tree_sha256=digest) for digest in sorted(guards)]
        labels = {"manifest.sha256": hashlib.sha256(self.manifest.read_bytes()).hexdigest()}
        labels |= {f"model.{model.name}.sha256": model.sha256 for model in self.compiled.plan.models}
        self.source = self.writer.write(
            Kind.SOURCE_IDENTITY,
            bodies.SourceIdentityBody(trees=tuple(trees), labels=labels),
            started=started,
            scope="the source trees that this campaign staged and ran",
            not_claimed=("the bytes of the interpreter, of torch and of the driver",),
            evidence=self.writer.procedure_evidence(),
            subjects=[Subject(name="plan", sha256=self.compiled.sha256)],
        )

    def measure_budget(self, first: CompiledPlan) -> None:
        """A first hold: stop and restore only, on declared bounds; leaves the first budget receipt (DECISIONS 12)."""
        plan_sha256, self.writer.plan_sha256 = self.writer.plan_sha256, first.sha256
        try:
            self._only_hold(first, None, reason="first hold: measure stop and restore")
        finally:
            self.writer.plan_sha256 = plan_sha256

    def measure(self) -> None:
        """A measurement hold: its programs, their receipts, and what stop, programs and restore took."""
        self._require_budget(1)
        self._only_hold(self.compiled, self._measurements, reason=f"measure: {self.writer.campaign}")

    def _only_hold(
        self, compiled: CompiledPlan, body: Callable[[Window, HoldResult], None] | None, *, reason: str
    ) -> None:
        """The one hold of a plan without arms, and its budget receipt.

        Raises:
            CoordinatorError: It did not end well; its receipt says how.
        """
        started = self.writer.now()
        result = self._hold(compiled, 1, body=body, reason=reason)
        self.holds.append(result)
        if result.error is not None:
            raise result.error
        if result.receipt is not None:
            self._back(write_budget(self.writer, result.window, started, result.receipt), result.window.step_ns)

    def measure_steps(self, session: HostSession) -> None:
        """Time the plan's programs once outside a hold (rehearsals only); leaves their budget receipt."""
        self.interrupt.check()
        started = self.writer.now()
        self.reporter.step("trial: time the plan's programs once, outside a hold", host=session.name)
        measured = measure_steps(self, session)
        self._back(write_steps_budget(self.writer, self.compiled, measured, started, session), measured)

    def adopt_budget(self, receipt: ReceiptId, body: bodies.BudgetBody) -> None:
        """Count an earlier budget receipt of this store, if it was measured."""
        kinds = {kind.value: kind for kind in StepKind}
        measured = {kinds[s.step]: s.measured_ns for s in body.steps if s.step in kinds and s.measured_ns is not None}
        self._back(receipt, measured)

    def _back(self, receipt: ReceiptId, measured: Mapping[StepKind, int]) -> None:
        self.budgets.append(receipt)
        self.evidence.append(BudgetEvidence(receipt, dict(measured)))

    def run(self) -> CampaignResult:
        """Both holds, then the comparison when both ended well."""
        result = CampaignResult(self.compiled, self.writer.store.path)
        for number in self.compiled.plan.hold_numbers():
            self._require_budget(number)
            hold = self._hold(self.compiled, number, body=self._body, reason=f"campaign {self.writer.campaign}")
            self.holds.append(hold)
            result.holds.append(hold)
            if hold.exit_code is not ExitCode.DONE:
                return result
        blocks = [block for hold in result.holds for block in hold.blocks]
        comparison = compare(self.compiled.plan, blocks)
        result.comparison = comparison
        result.comparison_receipt = write_comparison(self.writer, self.compiled, comparison, result.holds)
        return result

    def admit(self, request: AdmitRequest) -> Admission:
        """Evaluate the final stage of a policy over the store and write the admission receipt."""
        return admit_store(self.writer, policy_path(request.policy), request=request)

    def verify_store(self, result: CampaignResult, signers: Path | None = None) -> None:
        """Verify what was written, as a stranger would who knows the allowed signers."""
        result.verified = verify_store(self.writer.store.path, read_signers(signers))

    def hold_open(self, number: int, reason: str) -> HoldResult:
        """One hold by hand: held until a signal, the deadline or a loss."""

        def wait(window: Window, _result: HoldResult) -> None:
            self.reporter.step(f"HELD as {window.hold_id}; Ctrl-C restores production", left_s=window.remaining_s())
            while window.remaining_s() > 0:
                self.interrupt.check()
                window.check_ownership()
                self.clock.sleep(0.2)

        return self._hold(self.compiled, number, body=wait, reason=reason)

    def evidence_parents(self) -> list[Parent]:
        """The receipts that everything inside this campaign's holds builds on: its sources and its budgets."""
        sources = [Parent(kind=Kind.SOURCE_IDENTITY, sha256=self.source, role="sources")] if self.source else []
        return sources + [Parent(kind=Kind.BUDGET, sha256=budget, role="budget") for budget in self.budgets]

    def _preflight(self, window: Window) -> None:
        """Read-only look at every host before its lease; leaves a host-facts receipt.

        Raises:
            AdmissionRefused: A host is not fit for a hold; nothing was changed.
        """
        started = self.writer.now()
        for session in self.sessions:
            session.facts = session.guard.call("facts")
        checks = {s.name: host_checks(self.compiled.site, s, self.clock) for s in self.sessions}
        parity = parity_rows(self.sessions)
        write_facts_receipt(self.writer, self.sessions, checks, parity, started)
        window.step_ns[StepKind.PREFLIGHT] = self.clock.monotonic_ns() - started.monotonic_ns
        wrong = [f"{name}: {c.name}: {c.found}" for name, rows in checks.items() for c in rows if c.ok is False]
        wrong += [f"{row.field}: {row.found}" for row in parity if row.ok is False]
        if wrong:
            raise AdmissionRefused(
                "the preflight refuses; nothing was touched",
                found="; ".join(wrong),
                next_step="`coordinator doctor` shows every check with a hint",
            )

    def _chain_head(self) -> dict[str, Any] | None:
        head = self.writer.store.head()
        return {"log": head.log, "head": head.head, "sequence": head.count - 1} if head.count else None

    def _body(self, window: Window, result: HoldResult) -> None:
        HoldBody(self, window, result).run()

    def _measurements(self, window: Window, result: HoldResult) -> None:
        MeasurementBody(self, window, result).run()

    def _require_budget(self, number: int) -> None:
        """Every bound of the hold has a measurement behind it, and the sum fits; a refusal leaves an attempt receipt.

        Raises:
            AdmissionRefused: Names the bound and what is missing or contradicted.
        """
        with refusals_kept(self.writer, "campaign", "budget"):
            try:
                require_budget(self.compiled, number, self.evidence)
            except BudgetError as error:
                raise AdmissionRefused(
                    str(error),
                    where=f"plan {self.compiled.plan.name}, hold {number}",
                    next_step="run a plan of purpose first-hold, or a rehearsal, and keep its receipts in this store",
                ) from error

    def _hold(
        self, compiled: CompiledPlan, number: int, *, body: Callable[[Window, HoldResult], None] | None, reason: str
    ) -> HoldResult:
        """One hold from lease to close, its receipts written whatever happened."""
        started = self.writer.now()
        window = Window(
            compiled,
            number,
            self.sessions,
            self.journals,
            clock=self.clock,
            reporter=self.reporter,
            reason=reason,
            head=self._chain_head,
            recover=recover_command(self.site, self.writer.store.path),
        )
        result = HoldResult(number, window)
        self.reporter.step(f"hold {window.hold_id}: plan {compiled.sha256[:16]}")
        try:
            with window:
                self.interrupt.check()
                self._preflight(window)
                window.open()
                if body is not None:
                    body(window, result)
        except GuardRefusal as refusal:
            result.error = as_coordinator_error(refusal)
        except CoordinatorError as error:
            result.error = error
        except ReceiptError as error:
            result.error = _without_receipt(error)
        finally:
            self._leave_receipt(result, started)
        if result.error is not None:
            self.reporter.error(result.error.lines())
        return result

    def _leave_receipt(self, result: HoldResult, started: Clockings) -> None:
        """The hold's receipt, or the attempt's; a store that takes none changes nothing about the hold itself."""
        try:
            if result.error is not None and is_untouched(result.window):
                write_attempt(self.writer, "hold", "open", result.error, started)
            else:
                result.receipt = write_hold(self.writer, result.window, started, self.evidence_parents())
        except ReceiptError as error:
            result.error = result.error or _without_receipt(error)


def _without_receipt(error: ReceiptError) -> GateFailed:
    return GateFailed(
        "a receipt cannot be written, and a hold without receipts proves nothing",
        found=str(error),
        next_step="make room or name another --store; `coordinator receipts verify` says what the store has",
    )


def open_campaign(
    compiled: CompiledPlan,
    sessions: Sequence[HostSession],
    *,
    store: Path,
    journals: Path,
    keep: Path,
    reporter: Reporter,
    interrupt: InterruptFlag,
    clock: Clock,
    is_rehearsal: bool,
    manifest: Path,
    site: Path,
    signer: Signer | None = None,
) -> Campaign:
    """A campaign with its store; the source-identity receipt is written here."""
    writer = EvidenceWriter(
        Store(store),
        source_digests()["coordinator"],
        clock,
        compiled.plan.name,
        is_rehearsal,
        plan_sha256=compiled.sha256,
        signer=signer,
    )
    campaign = Campaign(compiled, sessions, writer, journals, keep, manifest, site, reporter, interrupt, clock)
    campaign.write_sources()
    return campaign
