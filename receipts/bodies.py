"""What each kind of receipt says beyond the common block.

One model per kind, in the order of ``Kind``. A body holds raw values and tables, never prose conclusions; a conclusion
is the common ``verdict``, which ``receipts.verify`` recomputes from these values where a rule for it is registered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from receipts.fields import (
    Block,
    ClaimClass,
    Count,
    DecimalText,
    Digest,
    Integer,
    Integers,
    Labels,
    LogId,
    Name,
    Row,
    Rows,
    Sample,
    Text,
    Texts,
    Utc,
    _relaxed,
)
from receipts.fields import Kind as ReceiptKind

OBSERVATION_FORMAT = "remote-dspark/observation/v1"
"""Schema name of the observation files this version embeds."""


class Check(Block):
    """One comparison a program on a host made. ``ok`` None: it did not run."""

    name: Text
    expected: Text
    found: Text
    ok: bool | None


Checks = Annotated[tuple[Check, ...], _relaxed()]


class Observation(Block):
    """An observation file as a host wrote it, embedded, with the digest of that file's bytes.

    ``schema`` of the file is called ``format`` here; everything else keeps its name.
    """

    host: Name
    sha256: Digest
    """Digest of ``observation.json`` as fetched."""
    format: Literal["remote-dspark/observation/v1"]
    kind: Name
    program: Name
    argv: Texts
    source_sha256: Digest
    compute: Literal["cuda", "cpu", "interpreted"]
    device: Labels
    started_utc: Utc
    elapsed_ns: Count
    hold_id: Name | None
    hold_epoch: Count | None
    checks: Checks
    values: Integers
    labels: Labels
    samples: Annotated[tuple[Sample, ...], _relaxed()]

    @classmethod
    def from_document(cls, document: Mapping[str, Any], *, host: str, sha256: str) -> Self:
        """Embed a parsed observation document. Unknown or missing fields raise ``pydantic.ValidationError``."""
        fields = {key: value for key, value in document.items() if key != "schema"}
        return cls.model_validate({**fields, "format": document.get("schema"), "host": host, "sha256": sha256})


Observations = Annotated[tuple[Observation, ...], _relaxed(64, 1)]


class FileDigest(Block):
    """One file of a source tree or overlay."""

    path: Text
    sha256: Digest
    size_bytes: Count


class SourceTree(Block):
    """One package or program as a tree digest; ``files`` may list it file by file."""

    name: Name
    version: Text
    tree_sha256: Digest
    files: Annotated[tuple[FileDigest, ...], _relaxed()] = ()


class SourceIdentityBody(Block):
    """Which sources, models and interpreters were staged, by digest."""

    trees: Annotated[tuple[SourceTree, ...], _relaxed(256, 1)]
    models: Annotated[tuple[SourceTree, ...], _relaxed(256)] = ()
    labels: Labels = Field(default_factory=dict)


class HostFactsBody(Block):
    """A read-only preflight: its checks, readings and the parity table between hosts."""

    checks: Checks
    parity: Rows = ()
    values: Integers = Field(default_factory=dict)
    labels: Labels = Field(default_factory=dict)


class PairQualificationBody(Block):
    """A physical drafter pair: two GPUs, one vocabulary shard each. A solo run cannot be written here."""

    topology: Literal["pair"] = "pair"
    observations: Observations
    gates: Rows = ()


class WorkerMeasurementBody(Block):
    """A whole drafter worker, measured: both shards on one GPU (solo) or one each (pair)."""

    topology: Literal["solo", "pair"]
    observations: Observations
    gates: Rows = ()


class StepBudget(Block):
    """One step's bound and what it really took.

    ``basis`` is ``declared`` (the plan says so, only under the first-hold policy) or ``measured`` (``measured_ns`` and
    the receipt it comes from are given).
    """

    step: Name
    bound_ns: Count
    measured_ns: Count | None = None
    basis: Literal["declared", "measured"]
    source: Digest | None = None


class BudgetBody(Block):
    """Step bounds and times. ``total_ns`` = sum of step bounds + ``restore_reserve_ns``; it must fit ``limit_ns``."""

    steps: Annotated[tuple[StepBudget, ...], _relaxed(1024, 1)]
    restore_reserve_ns: Count
    total_ns: Count
    limit_ns: Count


class Replacement(Block):
    """One reviewed source replacement; ``matches`` other than 1 never passes."""

    path: Text
    pattern_sha256: Digest
    matches: Count
    before_sha256: Digest
    after_sha256: Digest


class VerifierPreparationBody(Block):
    """An overlay for the serving engine, built from reviewed sources, hashes in and out."""

    engine: Text
    engine_version: Text
    base_sha256: Digest
    overlay_sha256: Digest
    replacements: Annotated[tuple[Replacement, ...], _relaxed(256)]
    checks: Checks
    labels: Labels = Field(default_factory=dict)


class StateChange(Block):
    """The hold entered ``state`` at ``monotonic_ns`` after it was opened; ``host`` None for the whole hold."""

    state: Name
    monotonic_ns: Count
    host: Name | None = None
    reason: Text = ""


class Witness(Block):
    """A chain head that somebody else keeps: what a guard had recorded."""

    host: Name
    log: LogId
    sequence: Count
    head: Digest


class HeldHost(Block):
    """One host of a hold: what was recorded, proven stopped, and proven restored."""

    host: Name
    guard_sha256: Digest | None = None
    guard_incarnation: Name | None = None
    epoch: Count
    snapshot_sha256: Digest | None = None
    stop_proof: Rows = ()
    restore_proof: Rows = ()
    debt: bool
    restored_by: Literal["close", "recover", "abort", "dead-man", "boot", "person", "none"] = "none"
    witness_open: Witness | None = None
    witness_close: Witness | None = None


class HoldBody(Block):
    """A bounded window from open to close."""

    hold_id: Name
    final_state: Name
    deadline_ns: Count
    """From open to the hosts' own deadline."""
    restore_reserve_ns: Count
    timeline: Annotated[tuple[StateChange, ...], _relaxed()]
    hosts: Annotated[tuple[HeldHost, ...], _relaxed(256, 1)]


class ArmBlock(Block):
    """One measured block inside an arm; a subsample, the boot of the service is the unit."""

    index: Count
    values: Integers
    excluded: bool = False
    reason: Text = ""


class ArmBody(Block):
    """One arm: one boot of the service, its counters at the four points, its gates."""

    mode: Name
    baseline: Integers
    headline: Integers
    profiled: Integers
    final: Integers
    values: Integers = Field(default_factory=dict)
    """Everything else that is a number: latencies by percentile in ns, clocks in MHz, temperatures in milli-degrees."""
    labels: Labels = Field(default_factory=dict)
    gates: Rows
    blocks: Annotated[tuple[ArmBlock, ...], _relaxed()] = ()
    observations: Annotated[tuple[Observation, ...], _relaxed(64)] = ()


class BlockValue(Block):
    """One unit of replication in a comparison. ``value`` is a decimal string in the metric's unit."""

    hold_number: Count
    arm: Name
    block: Name
    value: DecimalText
    receipt: Digest
    """The arm receipt it was computed from."""


class PairedDelta(Block):
    """ON against OFF within one hold: (on / off - 1) in parts per million, rounded half to even."""

    pair: Name
    delta_ppm: Integer


class MetricComparison(Block):
    """One metric of a comparison. Ratios are decimal strings, differences are ppm."""

    metric: Name
    unit: Name
    better: Literal["higher", "lower"]
    blocks: Annotated[tuple[BlockValue, ...], _relaxed()]
    paired: Annotated[tuple[PairedDelta, ...], _relaxed()]
    ratio: DecimalText | None = None
    interval_low: DecimalText | None = None
    interval_high: DecimalText | None = None
    interval_method: Text = ""
    drift_ppm: Integers = Field(default_factory=dict)
    """Per hold (``hold1``, ``hold2``) and ``between``."""
    aa_floor_ppm: Count | None = None
    margin_ppm: Count
    outcome: Literal["BETTER", "WORSE", "EQUIVALENT_WITHIN_MARGIN", "INCONCLUSIVE", "INVALID"]
    reasons: Texts = ()


class ExcludedBlock(Block):
    """A block that was left out, never silently."""

    arm: Name
    block: Name
    reason: Text


class ComparisonBody(Block):
    """OFF against ON over all holds. Two pairs are never "significant"."""

    order: Text
    num_pairs: Count
    metrics: Annotated[tuple[MetricComparison, ...], _relaxed(256)]
    mechanism: Rows = ()
    excluded: Annotated[tuple[ExcludedBlock, ...], _relaxed()] = ()
    outcome: Literal["BETTER", "WORSE", "EQUIVALENT_WITHIN_MARGIN", "INCONCLUSIVE", "INVALID"]
    reasons: Texts = ()
    claim: ClaimClass = "CONTROLLED"


class AdmissionInput(Block):
    """One receipt the gate looked at; the list is complete or the receipt is refused."""

    kind: Annotated[ReceiptKind, Field(strict=False)]
    sha256: Digest


class AdmissionBody(Block):
    """What a gate decided: policy, every input, a row per field, the result."""

    policy: Name
    policy_sha256: Digest
    now_utc: Utc
    log: LogId | None
    head_sequence: Count | None
    head: Digest | None
    inputs: Annotated[tuple[AdmissionInput, ...], _relaxed()]
    rows: Rows
    result: Literal["ADMITTED", "DENIED"]


class GuardOperation(Block):
    """One operation a guard says it did, by its id."""

    operation_id: Name
    host: Name
    outcome: Text
    monotonic_ns: Count | None = None


class RecoveryBody(Block):
    """How a hold that lost its coordinator ended, as the guards recorded it."""

    hold_id: Name
    final_state: Name
    journal_found: bool
    guard_records: Annotated[tuple[FileDigest, ...], _relaxed(256)] = ()
    operations: Annotated[tuple[GuardOperation, ...], _relaxed()] = ()
    timeline: Annotated[tuple[StateChange, ...], _relaxed()] = ()
    hosts: Annotated[tuple[HeldHost, ...], _relaxed(256)] = ()
    reason: Text = ""


class AttemptBody(Block):
    """A command that was refused, failed, or needs a person's reason on record (``hold clear``, ``lease break``)."""

    command: Name
    stage: Name
    exit_code: Count
    error_code: Name
    message: Text
    reason: Text = ""
    """What the person gave, for commands that ask for one."""
    rows: Rows = ()
    labels: Labels = Field(default_factory=dict)


__all__ = [
    "AdmissionBody",
    "AdmissionInput",
    "ArmBlock",
    "ArmBody",
    "AttemptBody",
    "BlockValue",
    "BudgetBody",
    "Check",
    "ComparisonBody",
    "ExcludedBlock",
    "FileDigest",
    "GuardOperation",
    "HeldHost",
    "HoldBody",
    "HostFactsBody",
    "MetricComparison",
    "Observation",
    "PairQualificationBody",
    "PairedDelta",
    "RecoveryBody",
    "Replacement",
    "Row",
    "SourceIdentityBody",
    "SourceTree",
    "StateChange",
    "StepBudget",
    "VerifierPreparationBody",
    "Witness",
    "WorkerMeasurementBody",
]
