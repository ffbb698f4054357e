"""The comparison's receipt: what was compared, with every gate, under the plan frozen before the first hold."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.campaign_result import HoldResult
from coordinator.evidence import EvidenceWriter, weakest
from coordinator.store import ReceiptId
from receipts import bodies
from receipts.fields import Evidence, Kind, Parent, Position, Subject
from windows.compare import Comparison
from windows.compiled import CompiledPlan


def write_comparison(
    writer: EvidenceWriter, compiled: CompiledPlan, comparison: Comparison, holds: Sequence[HoldResult]
) -> ReceiptId:
    """Write it; its evidence is that of its weakest arm."""
    started = writer.now()
    documents = [block.observation for hold in holds for block in hold.blocks]
    arms = [Parent(kind=Kind.ARM, sha256=receipt, role=label) for hold in holds for label, receipt in hold.arms]
    held = [Parent(kind=Kind.HOLD, sha256=hold.receipt, role=f"hold-{hold.number}") for hold in holds if hold.receipt]
    classes: list[Evidence] = [writer.computation_evidence([dict(document)]) for document in documents]
    return writer.write(
        Kind.COMPARISON,
        bodies.ComparisonBody.model_validate(comparison.to_document()),
        started=started,
        scope=f"OFF against ON on one common runtime, {comparison.order}, under the named plan and load",
        not_claimed=(
            "production as it runs: both arms ran on the runtime under test",
            "statistical significance: two pairs cannot have it",
            "any other load, model or device",
        ),
        evidence=weakest(*classes, writer.procedure_evidence()),
        position=Position(window=f"{writer.campaign}/comparison"),
        parents=[*arms, *held],
        subjects=[Subject(name="plan", sha256=compiled.sha256)],
    )
