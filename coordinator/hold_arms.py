"""What happens inside a hold of a campaign: pair_qualify first, then the arms in the plan's order.

Each arm boots its own services, is measured once, and leaves its receipt before its services are ended. A failed gate
goes straight to restore; nothing is tried twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from coordinator.arm_facts import read_arm_facts
from coordinator.arm_values import arm_values
from coordinator.campaign_result import HoldResult
from coordinator.errors import GateFailed
from coordinator.evidence import PASS, Clockings, verdict
from coordinator.guard_client import Json
from coordinator.hold_programs import HoldPrograms, describe_end, embed, not_claimed
from coordinator.hold_receipts import hold_position
from coordinator.programs import ProgramRecord
from coordinator.session import HostSession
from coordinator.store import ReceiptId
from coordinator.window import Window
from receipts import bodies
from receipts.fields import Kind, Outcome, Parent, Row, Subject
from remote_dspark.contract import DraftMode
from windows.arm import BASELINE, FINAL, HEADLINE, PROFILED, ArmBlock, ArmFacts
from windows.commands import Program
from windows.gates import arm_findings
from windows.hold_table import HoldEvent
from windows.measures import measure
from windows.plan import ARM_STEPS, StepKind
from windows.verdicts import Finding
from windows.verdicts import verdict as findings_verdict

if TYPE_CHECKING:
    from coordinator.campaign import Campaign

_PROGRAM_STEPS = (
    StepKind.BOOT,
    StepKind.IDENTITY,
    StepKind.WARM_UP,
    StepKind.GREEDY_CHECK,
    StepKind.BASELINE,
    StepKind.HEADLINE,
    StepKind.PROFILED,
    StepKind.FINAL,
)
"""Steps of an arm that its load program goes through, waiting for the boot included."""


class HoldBody(HoldPrograms):
    """One pass through the inside of a campaign's hold."""

    def __init__(self, campaign: Campaign, window: Window, result: HoldResult) -> None:
        super().__init__(campaign, window, result)
        assert self._plan.load is not None
        self._load = self._plan.load

    def run(self) -> None:
        """Qualify, then measure every arm.

        Raises:
            GateFailed: Qualification or an arm's gate did not pass; restore follows.
        """
        pair = self._qualify()
        for label in self._plan.arm_order(self._window.number):
            self._campaign.interrupt.check()
            self._require_time(sum(self._plan.step_bounds_s[kind] for kind in ARM_STEPS), "the next arm")
            self._arm(label, pair)

    # -- pair_qualify ------------------------------------------------------------------------------------------

    def _qualify(self) -> ReceiptId:
        assert self._plan.pair_qualify is not None
        self._window.note(HoldEvent.QUALIFY_STARTED)
        receipt = self._qualify_with(self._plan.pair_qualify, "pair-qualify", StepKind.PAIR_QUALIFY, "pair")
        self._result.qualification = receipt
        self._window.note(HoldEvent.QUALIFIED)
        return receipt

    # -- arms --------------------------------------------------------------------------------------------------

    def _arm(self, label: str, pair: ReceiptId) -> None:
        reporter, window = self._campaign.reporter, self._window
        assert self._plan.arms is not None
        arm = self._plan.arms.A if label.startswith("A") else self._plan.arms.B
        session = self._leader(self._load.program.role)
        window.note(HoldEvent.ARM_STARTED, arm=label)
        reporter.step(f"arm {label} ({arm.mode.value}): boot", host=session.name, left_s=window.remaining_s())
        values = {
            **arm_values(self._campaign.compiled, self._campaign.manifest, session, label, arm.mode),
            **arm.settings,
        }
        started = self._campaign.writer.now()
        before = {s.name: s.guard.call("facts") for s in window.sessions}
        runs = self._boot(label, values)
        reporter.step(f"arm {label}: load", host=session.name, left_s=window.remaining_s())
        program = self._bounded(self._load.program)
        record = self._timed(
            StepKind.HEADLINE, lambda: self._runner.run(session, program, f"{label.lower()}-load", values)
        )
        facts = read_arm_facts(window.sessions, before, self._campaign.clock, self._campaign.compiled.site)
        block, findings = self._judge(label, arm.mode, record, facts)
        receipt = self._write_arm(label, arm.mode, session, record, block, findings, pair, started)
        for running, run in reversed(runs):
            self._runner.end(running, run)
        if block is not None:
            self._result.blocks.append(replace(block, receipt=receipt))
        self._result.arms.append((label, receipt))
        if findings_verdict(findings) is Outcome.FAIL or block is None:
            wrong = [finding.reason for finding in findings if finding.ok is False]
            raise GateFailed(
                f"arm {label} failed its gates",
                where=session.name,
                found="; ".join(wrong) or describe_end(record),
                next_step=f"read {self._runner.keep / f'{label}-load'}",
            )
        window.note(HoldEvent.ARM_FINISHED, arm=label)

    def _boot(self, label: str, values: Mapping[str, str | int]) -> list[tuple[HostSession, str]]:
        """Start the arm's services on every host of their role; the load program waits until they serve."""
        life_s = sum(self._plan.step_bounds_s[kind] for kind in ARM_STEPS)
        runs = []
        for service in sorted(self._plan.services, key=lambda entry: entry.boot_order):
            for session in self._window.sessions:
                if service.role in session.spec.roles:
                    name = f"{label.lower()}-{service.name}"
                    runs.append((session, self._runner.start(session, service, name, values, life_s)))
        return runs

    def _judge(
        self, label: str, mode: DraftMode, record: ProgramRecord, facts: ArmFacts
    ) -> tuple[ArmBlock | None, tuple[Finding, ...]]:
        from windows.errors import MeasureError

        assert self._plan.comparison is not None
        if not record.is_success or record.observation is None:
            return None, (Finding("program", label, "exited 0 with an observation", describe_end(record), ok=False),)
        try:
            block = ArmBlock.from_files(
                label,
                self._window.number,
                record.observation,
                {name: path.read_bytes() for name, (_, path) in record.samples.items()},
                facts,
            )
        except MeasureError as error:
            return None, (Finding("raw-samples", label, "readable raw samples", str(error), ok=False),)
        findings = arm_findings(
            block,
            mode=mode,
            manifest_sha256=self._load.manifest_sha256,
            min_rounds=self._plan.comparison.min_rounds,
        )
        return block, findings

    def _write_arm(
        self,
        label: str,
        mode: DraftMode,
        session: HostSession,
        record: ProgramRecord,
        block: ArmBlock | None,
        findings: tuple[Finding, ...],
        pair: ReceiptId,
        started: Clockings,
    ) -> ReceiptId:
        writer = self._campaign.writer
        if block is None or record.observation is None:
            return self._write_failed_program(f"arm {label}", record, session, started)
        outcome = findings_verdict(findings)
        reasons = [finding.reason for finding in findings if finding.ok is not True]
        labels = {name: text for name, text in record.observation["labels"].items() if isinstance(text, str)}
        return writer.write(
            Kind.ARM,
            bodies.ArmBody(
                mode=mode.value,
                baseline=point_counters(record.observation, BASELINE),
                headline=point_counters(record.observation, HEADLINE),
                profiled=point_counters(record.observation, PROFILED),
                final=point_counters(record.observation, FINAL),
                values=measure(block).to_values(),
                labels=labels,
                gates=tuple(Row.model_validate(finding.to_row()) for finding in findings),
                observations=(embed(record),),
            ),
            started=started,
            scope=f"arm {label}: one boot of the services in mode {mode.value} under the plan's load",
            not_claimed=not_claimed(record),
            also=PASS if outcome is Outcome.PASS else verdict(outcome, *reasons),
            evidence=writer.computation_evidence([record.observation]),
            sessions=self._window.sessions,
            position=hold_position(writer, self._window, label),
            parents=[
                *self._campaign.evidence_parents(),
                Parent(kind=Kind.PAIR_QUALIFICATION, sha256=pair, role="qualification"),
            ],
            subjects=[Subject(name="plan", sha256=self._campaign.compiled.sha256)],
            samples=record.samples,
            exit=record.exit,
        )

    def _bounded(self, program: Program) -> Program:
        """The program with the sum of the steps it goes through as its bound, if that is shorter than its own."""
        bound = sum(self._plan.step_bounds_s[kind] for kind in _PROGRAM_STEPS)
        return program.model_copy(update={"timeout_s": min(program.timeout_s, bound)})


def point_counters(observation: Json, point: str) -> dict[str, int]:
    """Counters of one point, without the point's name in front."""
    prefix = f"{point}."
    return {name[len(prefix) :]: value for name, value in observation["values"].items() if name.startswith(prefix)}
