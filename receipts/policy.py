"""Policies: what a gate asks for, as data with a digest.

A policy is a TOML file. It has stages (``open`` before production is touched, ``final`` after a campaign); a stage has
requirements, each about one kind of receipt, and rules about all chosen receipts together. A policy that asks for
nothing is refused when it is read: an empty gate would admit everything.

No field has a permissive default: what is left out is the strict choice.
"""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from receipts.build import schema_error
from receipts.errors import Code, ReceiptError
from receipts.fields import Block, Count, Evidence, Kind, Name, Text, _relaxed
from receipts.signing import Role

MAX_POLICY_BYTES = 256 * 1024
Positive = Annotated[int, Field(ge=1, le=1 << 40)]
EvidenceClass = Annotated[Evidence, Field(strict=False)]
ComparisonOutcome = Literal["BETTER", "WORSE", "EQUIVALENT_WITHIN_MARGIN", "INCONCLUSIVE"]
"""INVALID cannot be written: no policy accepts it."""


class Requirement(Block):
    """Receipts of one kind that must be there and sound.

    Attributes:
        name: Shown in the table.
        kind: Which kind.
        evidence: Accepted classes.
        min_count: How many; the newest ones decide, so an older good one cannot stand in for a newer bad one.
        holds: One per hold number instead of ``min_count``.
        arms: One per arm instead of ``min_count``.
        same_plan: Only receipts of the plan being decided count.
        in_closure: Only ancestors of the anchor count, and none may be newer: no mixing, no picking.
        max_age_s: Refuse what ended longer ago than this before ``now``.
        signers: Each role must have signed.
        comparison_outcomes: For comparisons: these outcomes are accepted; the rest of its verdict must still hold.
        max_total_s: For budgets: the most that steps and reserve may take together.
        measured_budget: For budgets: every step has a measured time.
        ranks: For pairs: every observation names this many GPUs of its host, one for each rank of a physical pair.
    """

    name: Name
    kind: Annotated[Kind, Field(strict=False)]
    evidence: Annotated[tuple[EvidenceClass, ...], _relaxed(3, 1)]
    min_count: Positive = 1
    holds: Annotated[tuple[Count, ...], _relaxed(64)] = ()
    arms: Annotated[tuple[Name, ...], _relaxed(64)] = ()
    same_plan: bool = True
    in_closure: bool = False
    max_age_s: Positive | None = None
    signers: Annotated[tuple[Role, ...], _relaxed(3)] = ()
    comparison_outcomes: Annotated[tuple[ComparisonOutcome, ...], _relaxed(4)] = ()
    max_total_s: Positive | None = None
    measured_budget: bool = False
    ranks: Positive | None = None

    @model_validator(mode="after")
    def _fits_kind(self) -> Self:
        if self.comparison_outcomes and self.kind is not Kind.COMPARISON:
            raise ValueError("comparison_outcomes belongs to kind comparison")
        if (self.max_total_s is not None or self.measured_budget) and self.kind is not Kind.BUDGET:
            raise ValueError("max_total_s and measured_budget belong to kind budget")
        if self.ranks is not None and self.kind not in (Kind.PAIR_QUALIFICATION, Kind.WORKER_MEASUREMENT):
            raise ValueError("ranks belongs to kinds pair-qualification and worker-measurement")
        if self.holds and self.arms:
            raise ValueError("either holds or arms")
        return self


class Stage(Block):
    """One gate.

    Attributes:
        anchor: Kind whose newest receipt decides which plan is judged, unless the caller names the plan.
        same_plan: The anchor is a receipt of the plan being decided; false before that plan has run at all.
        require: At least one requirement.
        same_source: Every chosen receipt was written by the same source tree.
        same_hardware: Kinds whose chosen receipts must name the same hosts and GPUs.
        parent_closure: Every ancestor of a chosen receipt is in the log and sound.
        high_water: The log must be compared with the furthest head that was ever accepted.
        witness: Somebody outside the store must vouch for a head: a guard, CI, or the high-water mark of a former run.
        single_attempt: The anchor is the only one of its plan: repeating a plan until it comes out well is no evidence.
        signature: ``required``: every chosen receipt and ancestor carries a signature of an allowed signer.
    """

    name: Name
    anchor: Annotated[Kind, Field(strict=False)]
    require: Annotated[tuple[Requirement, ...], _relaxed(128, 1)]
    same_plan: bool = True
    same_source: bool = True
    same_hardware: Annotated[tuple[Annotated[Kind, Field(strict=False)], ...], _relaxed(12)] = ()
    parent_closure: bool = True
    high_water: bool = True
    witness: bool = True
    single_attempt: bool = True
    signature: Literal["required", "optional"] = "required"

    @model_validator(mode="after")
    def _one_attempt_of_one_plan(self) -> Self:
        if self.single_attempt and not self.same_plan:
            raise ValueError("single_attempt counts receipts of the plan being decided, so it needs same_plan")
        return self


class PolicyDocument(Block):
    """The content of a policy file."""

    version: Literal[1]
    name: Name
    description: Text
    stage: Annotated[tuple[Stage, ...], _relaxed(16, 1)]

    @model_validator(mode="after")
    def _unique(self) -> Self:
        names = [stage.name for stage in self.stage]
        if len(set(names)) != len(names):
            raise ValueError("two stages have the same name")
        return self


@dataclass(frozen=True)
class Policy:
    """A policy and the digest of the file it came from."""

    document: PolicyDocument
    sha256: str

    def stage(self, name: str) -> Stage:
        """The stage of this name.

        Raises:
            ReceiptError: POLICY when there is none.
        """
        for stage in self.document.stage:
            if stage.name == name:
                return stage
        known = [stage.name for stage in self.document.stage]
        raise ReceiptError(Code.POLICY, f"expected one of {known}, found stage {name!r:.80}", self.document.name)


def parse_policy(content: bytes) -> Policy:
    """Read a policy file.

    Raises:
        ReceiptError: POLICY, with the field.
    """
    if len(content) > MAX_POLICY_BYTES:
        raise ReceiptError(Code.POLICY, f"expected at most {MAX_POLICY_BYTES} bytes, found {len(content)}")
    try:
        document = PolicyDocument.model_validate(tomllib.loads(content.decode("utf-8")))
    except ValidationError as error:
        raise ReceiptError(Code.POLICY, str(schema_error(error))) from error
    except (ValueError, RecursionError) as error:
        raise ReceiptError(Code.POLICY, f"not TOML: {error}") from error
    return Policy(document, hashlib.sha256(content).hexdigest())
