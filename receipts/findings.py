"""The values verification takes and gives: entries and options in, findings and reports out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from receipts import bodies
from receipts.chain import Head
from receipts.errors import Code, ReceiptError
from receipts.fields import ChainLink, Evidence, Kind, Outcome, Verdict
from receipts.model import Predicate
from receipts.reader import Receipt
from receipts.signing import AllowedSigners, Signature
from receipts.verdict import worst


@dataclass(frozen=True)
class Entry:
    """One receipt file as it was found.

    Attributes:
        name: File name.
        content: Its bytes, read once.
        envelopes: Signature envelopes beside it.
        envelope_names: Their file names, when they are to be compared with SHA256SUMS.
        refused: Why there are no bytes, when the file itself was refused.
    """

    name: str
    content: bytes
    envelopes: tuple[bytes, ...] = ()
    refused: ReceiptError | None = None
    envelope_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """Something that does not hold (FAIL) or cannot be known (UNKNOWN)."""

    code: Code
    outcome: Outcome
    where: str
    message: str


@dataclass(frozen=True)
class Verified:
    """One receipt after its steps.

    Attributes:
        receipt: The receipt.
        findings: What was found about it; empty for a sound one.
        verdict: The effective verdict: never stronger than the recomputed one, and never PASS with findings.
        signatures: Valid ones, one per key.
    """

    receipt: Receipt
    findings: tuple[Finding, ...]
    verdict: Verdict
    signatures: tuple[Signature, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """What the log as a whole needs of one receipt that was read: plain values, cheap to send between processes.

    Attributes:
        id: sha256 of its bytes, 64 hex digits.
        kind: Its kind.
        evidence: Its evidence class, as stated.
        link: The place in a log that it claims.
        built_on: Kind and id of what must have come before it: parents, and an admission's inputs.
        parents: Ids of its parents alone.
        files: Path in the store and sha256 of each file that belongs to it: itself, raw files, envelopes.
        witnesses: Heads that guards recorded in it.
        is_signed: At least one allowed signer vouches for it.
    """

    id: str
    kind: str
    evidence: Evidence
    link: ChainLink
    built_on: tuple[tuple[str, str], ...]
    parents: tuple[str, ...]
    files: tuple[tuple[str, str], ...]
    witnesses: tuple[bodies.Witness, ...]
    is_signed: bool


@dataclass(frozen=True, slots=True)
class Outline:
    """One entry after the steps that need no other receipt of the log.

    Attributes:
        name: File name.
        facts: None when it could not be read.
        findings: What those steps found.
    """

    name: str
    facts: Facts | None
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class LogReport:
    """What a log proves.

    Attributes:
        head: The head that was computed from the receipts.
        num_receipts: Files that were looked at.
        num_signed: Receipts with at least one valid signature of an allowed signer.
        findings: All of them, in log order.
        is_integrity_only: No signers were given: nobody vouches for who wrote this.
        num_witnesses: Heads kept by others that were compared: those given, and those that holds recorded.
    """

    head: Head | None
    num_receipts: int
    num_signed: int
    findings: tuple[Finding, ...]
    is_integrity_only: bool
    num_witnesses: int = 0

    @property
    def outcome(self) -> Outcome:
        """PASS only for a log that is not empty and has no finding."""
        if not self.num_receipts:
            return Outcome.UNKNOWN
        return worst(finding.outcome for finding in self.findings) if self.findings else Outcome.PASS


@dataclass(frozen=True)
class Sources:
    """What a recomputation may look at besides the receipt: its parents and its raw files."""

    parent: Callable[[str], Predicate | None]
    sample: Callable[[str], bytes | None]


Recompute = Callable[[Predicate, Sources], Verdict]
"""A pure function of one kind: the verdict that its parents and raw samples lead to."""


@dataclass(frozen=True)
class Options:
    """Everything verification depends on besides the log itself.

    Attributes:
        now_utc: Explicit clock, RFC 3339 with ``Z``; None skips the check for receipts from the future.
        signers: Who is trusted; None verifies integrity only.
        require_signature: An unsigned receipt is a finding.
        sums: SHA256SUMS as name -> digest; None when there is none to compare.
        others: Paths of the store beside receipts and lists; each must be one that a receipt accounts for.
        head: What the HEAD file says.
        high_water: The furthest head of this log that was ever accepted.
        witnesses: Heads that guards recorded.
        load: Bytes of an earlier receipt by id, for parents.
        sample: Bytes of a raw file by digest.
        recompute: Further rules per kind.
        other_logs: Ids of receipts of other logs that were verified before this one.
    """

    now_utc: str | None = None
    signers: AllowedSigners | None = None
    require_signature: bool = False
    sums: Mapping[str, str] | None = None
    others: Sequence[str] = ()
    head: Head | None = None
    high_water: Head | None = None
    witnesses: Sequence[bodies.Witness] = ()
    load: Callable[[str], bytes | None] = lambda _: None
    sample: Callable[[str], bytes | None] = lambda _: None
    recompute: Mapping[Kind, Recompute] = field(default_factory=dict)
    other_logs: Mapping[bytes, int] = field(default_factory=dict)
