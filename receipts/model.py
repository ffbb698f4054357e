"""The receipt: an in-toto Statement whose predicate is one of twelve kinds.

How to make one (see ``receipts.build`` for bytes and ``coordinator.store`` for keeping them)::

    predicate = ArmPredicate(
        tool=Tool(name="coordinator", version="0.1.0", source_sha256=...),
        position=Position(window="campaign-1/hold-1", hold_number=1, arm="A1"),
        ...,
        body=ArmBody(mode="greedy-v1", ...),
    )
    draft = build_receipt(Kind.ARM, predicate, [Subject(name="plan", sha256=plan_digest)])
    receipt_id = store.append(draft, samples={"rounds.jsonl": Path(...)})

Rules of this file: a version that was published never changes; a new field is a new version beside the old one, and the
allow-list ``PREDICATES`` decides what can be read. The common block is the same for every kind of version 1.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from receipts import bodies
from receipts.fields import (
    UNLINKED,
    Block,
    ChainLink,
    Count,
    Digest,
    Evidence,
    Exit,
    Fence,
    Host,
    Kind,
    Labels,
    Parent,
    Position,
    Sample,
    Subject,
    Text,
    Texts,
    Tool,
    Utc,
    Verdict,
    _relaxed,
)

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE_PREFIX: Final = "urn:dspark-coordinator:receipt:"
"""Followed by ``kind:vN``. A URN, because nothing has to be fetched to read a receipt."""


class Predicate(Block):
    """The common block. Use the class of the kind, never this one.

    Attributes:
        tool: What wrote this, from which source tree.
        plan_sha256: Digest of the frozen plan, None outside one.
        position: Window, hold, arm, attempt.
        hosts: Facts of every host it ran on; empty for work that touched none.
        fences: Fence epoch per host, as the host saw it.
        argv: The command as run, secrets removed at the source.
        environment: The allow-listed variables, secrets removed at the source.
        started_utc: RFC 3339 with ``Z``.
        ended_utc: The same; for people. Durations are ``elapsed_ns``.
        elapsed_ns: Monotonic duration.
        exit: How it ended.
        samples: Raw files kept beside the receipt.
        parents: Receipts this one builds on.
        evidence: Computed from host facts, never typed by a person.
        scope: What the claim covers, one sentence.
        not_claimed: What a reader might think it covers and it does not.
        verdict: PASS, FAIL or UNKNOWN with reasons.
        chain: Written by the store.
    """

    kind: Any
    version: Literal[1] = 1
    tool: Tool
    plan_sha256: Digest | None = None
    position: Position = Position()
    hosts: Annotated[tuple[Host, ...], _relaxed(256)] = ()
    fences: Annotated[tuple[Fence, ...], _relaxed(256)] = ()
    argv: Texts = ()
    environment: Labels = Field(default_factory=dict)
    started_utc: Utc
    ended_utc: Utc
    elapsed_ns: Count
    exit: Exit
    samples: Annotated[tuple[Sample, ...], _relaxed()] = ()
    parents: Annotated[tuple[Parent, ...], _relaxed()] = ()
    evidence: Annotated[Evidence, Field(strict=False)]
    scope: Text
    not_claimed: Texts
    verdict: Verdict
    chain: ChainLink = UNLINKED
    body: Any

    @model_validator(mode="after")
    def _unique_names(self) -> Self:
        # Two files of one name could hide each other; one parent twice could be counted twice.
        names = [sample.name for sample in self.samples]
        if len(set(names)) != len(names):
            raise ValueError(f"sample names must be unique, found {names}")
        parents = [(parent.sha256, parent.role) for parent in self.parents]
        if len(set(parents)) != len(parents):
            raise ValueError("a parent is named twice in the same role")
        return self


class SourceIdentityPredicate(Predicate):
    """Which sources were staged."""

    kind: Literal["source-identity"] = "source-identity"
    body: bodies.SourceIdentityBody


class HostFactsPredicate(Predicate):
    """What a preflight found."""

    kind: Literal["host-facts"] = "host-facts"
    body: bodies.HostFactsBody


class PairQualificationPredicate(Predicate):
    """A physical pair was qualified, or was not."""

    kind: Literal["pair-qualification"] = "pair-qualification"
    body: bodies.PairQualificationBody


class WorkerMeasurementPredicate(Predicate):
    """A drafter worker was measured."""

    kind: Literal["worker-measurement"] = "worker-measurement"
    body: bodies.WorkerMeasurementBody


class BudgetPredicate(Predicate):
    """How long steps take and may take."""

    kind: Literal["budget"] = "budget"
    body: bodies.BudgetBody


class VerifierPreparationPredicate(Predicate):
    """An overlay was prepared."""

    kind: Literal["verifier-preparation"] = "verifier-preparation"
    body: bodies.VerifierPreparationBody


class HoldPredicate(Predicate):
    """A hold was opened and ended."""

    kind: Literal["hold"] = "hold"
    body: bodies.HoldBody


class ArmPredicate(Predicate):
    """An arm was run."""

    kind: Literal["arm"] = "arm"
    body: bodies.ArmBody


class ComparisonPredicate(Predicate):
    """OFF and ON were compared."""

    kind: Literal["comparison"] = "comparison"
    body: bodies.ComparisonBody


class AdmissionPredicate(Predicate):
    """A gate decided."""

    kind: Literal["admission"] = "admission"
    body: bodies.AdmissionBody


class RecoveryPredicate(Predicate):
    """A hold was recovered."""

    kind: Literal["recovery"] = "recovery"
    body: bodies.RecoveryBody


class AttemptPredicate(Predicate):
    """A command was refused or failed."""

    kind: Literal["attempt"] = "attempt"
    body: bodies.AttemptBody


PREDICATES: Final[dict[tuple[str, int], type[Predicate]]] = {
    (Kind.SOURCE_IDENTITY, 1): SourceIdentityPredicate,
    (Kind.HOST_FACTS, 1): HostFactsPredicate,
    (Kind.PAIR_QUALIFICATION, 1): PairQualificationPredicate,
    (Kind.WORKER_MEASUREMENT, 1): WorkerMeasurementPredicate,
    (Kind.BUDGET, 1): BudgetPredicate,
    (Kind.VERIFIER_PREPARATION, 1): VerifierPreparationPredicate,
    (Kind.HOLD, 1): HoldPredicate,
    (Kind.ARM, 1): ArmPredicate,
    (Kind.COMPARISON, 1): ComparisonPredicate,
    (Kind.ADMISSION, 1): AdmissionPredicate,
    (Kind.RECOVERY, 1): RecoveryPredicate,
    (Kind.ATTEMPT, 1): AttemptPredicate,
}
"""The allow-list: (kind, version). What is not here cannot be read."""

Subjects = Annotated[tuple[Subject, ...], _relaxed(256, 1)]


class Statement(Block):
    """The statement without its wire names: subjects and predicate."""

    subjects: Subjects
    predicate: Predicate


def predicate_type(kind: str, version: int) -> str:
    """The statement's ``predicateType`` for a kind and version."""
    return f"{PREDICATE_TYPE_PREFIX}{kind}:v{version}"
