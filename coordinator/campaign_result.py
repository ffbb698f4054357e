"""What a campaign left: its holds, its comparison, its admissions, and the one final table."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.errors import CoordinatorError
from coordinator.gate_admission import Admission, StoreVerdict
from coordinator.render import Reporter
from coordinator.store import ReceiptId
from coordinator.window import Window
from windows.arm import ArmBlock
from windows.compare import Comparison
from windows.compiled import CompiledPlan
from windows.exit_codes import ExitCode, combine
from windows.judge import ComparisonOutcome
from windows.measures import Measures, decimal_text

_OUTCOME_CODES = {
    ComparisonOutcome.BETTER: ExitCode.DONE,
    ComparisonOutcome.EQUIVALENT: ExitCode.DONE,
    ComparisonOutcome.WORSE: ExitCode.WORSE,
    ComparisonOutcome.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
    ComparisonOutcome.INVALID: ExitCode.INVALID,
}


@dataclass
class HoldResult:
    """One hold of a campaign.

    Attributes:
        receipt: Its hold receipt; None when nothing was leased (an attempt receipt stands for it).
        arms: Label and receipt of every arm that was run.
        blocks: The arms that can be compared.
        error: What ended it early.
    """

    number: int
    window: Window
    receipt: ReceiptId | None = None
    qualification: ReceiptId | None = None
    arms: list[tuple[str, ReceiptId]] = field(default_factory=list)
    blocks: list[ArmBlock] = field(default_factory=list)
    error: CoordinatorError | None = None

    @property
    def state(self) -> str:
        """The phase it ended in; of a hold that we lost, whether its hosts have proven production back meanwhile."""
        state = self.window.journal.state
        return "ended-by-hosts" if state.is_degraded and not state.hosts_in_debt() else state.phase.value

    @property
    def exit_code(self) -> ExitCode:
        """Of this hold alone."""
        codes = [self.window.exit_code]
        if self.error is not None:
            codes.append(self.error.exit_code)
        return combine(codes)


@dataclass
class CampaignResult:
    """The whole campaign."""

    compiled: CompiledPlan
    store: Path
    holds: list[HoldResult] = field(default_factory=list)
    comparison: Comparison | None = None
    comparison_receipt: ReceiptId | None = None
    admissions: list[Admission] = field(default_factory=list)
    verified: StoreVerdict | None = None

    @property
    def exit_code(self) -> ExitCode:
        """The one that says most about the hardware (DECISIONS 16)."""
        codes = [ExitCode.DONE, *(hold.exit_code for hold in self.holds)]
        if self.comparison is not None:
            codes.append(_OUTCOME_CODES[self.comparison.outcome])
        if self.verified is not None and not self.verified.is_whole:
            codes.append(ExitCode.RECEIPTS_INVALID)
        return combine(codes)

    def to_document(self) -> dict[str, Any]:
        """Plain values for ``--json``."""
        return {
            "plan_sha256": self.compiled.sha256,
            "store": str(self.store),
            "exit_code": int(self.exit_code),
            "meaning": self.exit_code.meaning,
            "holds": [
                {
                    "number": hold.number,
                    "hold_id": hold.window.hold_id,
                    "state": hold.state,
                    "receipt": hold.receipt,
                    "qualification": hold.qualification,
                    "arms": dict(hold.arms),
                    "overhead_ns": overhead_ns(hold.window),
                }
                for hold in self.holds
            ],
            "comparison": self.comparison.to_document() if self.comparison else None,
            "comparison_receipt": self.comparison_receipt,
            "admissions": [admission.to_document() for admission in self.admissions],
            "receipts": self.verified.to_document() if self.verified else None,
        }

    def render(self, reporter: Reporter) -> None:
        """One final table: arms, tokens per round, acceptance, rounds/s, verdict, receipts."""
        if self.comparison is not None:
            arms = [arm_row(label, measures) for label, measures in self.comparison.measures.items()]
            columns = ("arm", "tokens/round", "acceptance by position", "rounds/s", "tokens/s", "first token p50")
            reporter.table("arms", columns, arms)
            primary = self.comparison.primary
            rows = [("outcome", self.comparison.outcome.value), ("order", self.comparison.order)]
            if primary is not None and primary.effect is not None:
                rows += effect_rows(self.comparison)
            rows += [("reason", reason) for reason in self.comparison.reasons]
            reporter.table("comparison", ("", ""), rows)
        holds = [
            (
                str(hold.number),
                hold.window.hold_id,
                hold.state,
                f"{overhead_ns(hold.window) / 1e9:.2f} s",
                hold.receipt or "attempt",
            )
            for hold in self.holds
        ]
        reporter.table("holds", ("hold", "id", "state", "overhead without services", "receipt"), holds)
        for admission in self.admissions:
            admission.render(reporter)
        if self.verified is not None:
            reporter.table("receipts", ("", ""), [("store", str(self.store)), *self.verified.rows()])


def arm_row(label: str, measures: Measures) -> tuple[str, ...]:
    """One line of the arms table."""
    rates = measures.rates
    acceptance = " ".join(decimal_text(share, 2) for _, share in sorted(measures.acceptance.items()))
    first = rates.get("first-token-p50-ns")
    return (
        label,
        decimal_text(rates["tokens-per-round"], 3),
        acceptance or "none reached",
        decimal_text(rates["rounds-per-second"], 1),
        decimal_text(rates["tokens-per-second"], 1),
        f"{decimal_text(first / 1_000_000, 1)} ms" if first is not None else "",
    )


def effect_rows(comparison: Comparison) -> list[tuple[str, str]]:
    """Ratio, interval and paired deltas of the primary metric."""
    primary = comparison.primary
    assert primary is not None
    assert primary.effect is not None
    effect = primary.effect
    interval = "none: one pair"
    if effect.low is not None and effect.high is not None:
        interval = f"{decimal_text(effect.low, 4)} to {decimal_text(effect.high, 4)} ({effect.method})"
    deltas = ", ".join(f"{delta / 10_000:+.2f} %" for delta in effect.deltas_ppm)
    return [
        ("metric", primary.name),
        ("ratio ON/OFF", decimal_text(effect.ratio, 4)),
        ("interval", interval),
        ("paired deltas", deltas),
    ]


def overhead_ns(window: Window) -> int:
    """Time from open to HELD and from RESTORING to CLOSED, the services' own stop and start excluded."""
    from windows.plan import StepKind

    kinds = (StepKind.LEASE, StepKind.SNAPSHOT, StepKind.ARM_DEAD_MAN, StepKind.STOP, StepKind.RESTORE, StepKind.CLOSE)
    services = max((record.service_ns for record in window.records.values()), default=0)
    return max(sum(window.step_ns.get(kind, 0) for kind in kinds) - services, 0)
