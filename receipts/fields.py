"""The words and small blocks every receipt is made of.

Rules of this file: every integer is within +-(2**53 - 1) and in base units (ns, bytes, ppm, counts); other numbers are
decimal strings; times are RFC 3339 strings in UTC with ``Z``, kept as text so that the bytes never change; map keys and
names are printable ASCII; free text is data from strangers and is bounded, not cleaned (whoever shows it escapes it).

Every model is frozen, strict and refuses unknown fields. Lists become tuples.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    model_validator,
)

MAX_INTEGER: Final = (1 << 53) - 1
"""Largest integer that every JSON reader keeps exactly (RFC 8785 and I-JSON)."""

MAX_TEXT: Final = 4096
MAX_ITEMS: Final = 4096


class Kind(StrEnum):
    """What a receipt is about."""

    SOURCE_IDENTITY = "source-identity"
    HOST_FACTS = "host-facts"
    PAIR_QUALIFICATION = "pair-qualification"
    WORKER_MEASUREMENT = "worker-measurement"
    BUDGET = "budget"
    VERIFIER_PREPARATION = "verifier-preparation"
    HOLD = "hold"
    ARM = "arm"
    COMPARISON = "comparison"
    ADMISSION = "admission"
    RECOVERY = "recovery"
    ATTEMPT = "attempt"


class Evidence(StrEnum):
    """How strong: on the hardware the claim is about, the real procedure on stand-ins, or emulated computation."""

    MEASURED = "MEASURED"
    REHEARSED = "REHEARSED"
    EMULATED = "EMULATED"

    @property
    def strength(self) -> int:
        """2, 1 or 0; a derived receipt is never stronger than its weakest parent."""
        return _STRENGTH[self.value]


_STRENGTH: Final = {"MEASURED": 2, "REHEARSED": 1, "EMULATED": 0}


class Outcome(StrEnum):
    """Three-valued verdict. Only PASS admits."""

    PASS = "PASS"  # noqa: S105 - a verdict
    FAIL = "FAIL"
    UNKNOWN = "UNKNOWN"


class ExitKind(StrEnum):
    """How a command ended. LINK_LOST says nothing about the remote side."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    LINK_LOST = "link-lost"
    TIMED_OUT = "timed-out"
    NOT_STARTED = "not-started"


def _calendar_time(text: str) -> str:
    # The pattern fixes the shape; this refuses 2026-02-30 and hour 24. A leap second is not representable here.
    datetime.fromisoformat(text[:19])
    return text


Integer: TypeAlias = Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)]
Count: TypeAlias = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
Digest: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Name: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:@/+=,-]{0,199}$")]
"""Printable ASCII without spaces, quotes or backslash: hosts, fields, metrics, map keys, roles."""
FileName: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,127}$")]
"""One path component, lower case. ``..`` cannot be written: the first character is a letter or a digit."""
Text: TypeAlias = Annotated[str, StringConstraints(max_length=MAX_TEXT)]
Utc: TypeAlias = Annotated[
    str,
    StringConstraints(pattern=r"^[0-9]{4}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?Z$"),
    AfterValidator(_calendar_time),
]
_UTC: Final = TypeAdapter(Utc)


def is_utc(text: str) -> bool:
    """Whether a text is a time as receipts have it."""
    try:
        _UTC.validate_python(text)
    except ValidationError:
        return False
    return True


DecimalText: TypeAlias = Annotated[str, StringConstraints(pattern=r"^-?(0|[1-9][0-9]{0,29})(\.[0-9]{1,30})?$")]
WindowId: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,100}/[A-Za-z0-9_.-]{1,100}$")]
"""``campaign/window``."""
LogId: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]

Integers: TypeAlias = Annotated[dict[Name, Integer], Field(max_length=MAX_ITEMS)]
Labels: TypeAlias = Annotated[dict[Name, Text], Field(max_length=MAX_ITEMS)]


class Block(BaseModel):
    """Base of every part of a receipt: frozen, strict, no unknown fields."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)


# JSON has one list type, so tuples and enums are read from lists and strings; their items stay strict.
def _relaxed(max_length: int = MAX_ITEMS, min_length: int = 0) -> Any:
    return Field(strict=False, max_length=max_length, min_length=min_length)


Texts: TypeAlias = Annotated[tuple[Text, ...], _relaxed()]


class Subject(Block):
    """What the receipt speaks about, matched by digest only."""

    name: Text
    sha256: Digest


class Tool(Block):
    """The program that wrote the receipt, and the digest of its own source tree."""

    name: Name
    version: Name
    source_sha256: Digest


class Position(Block):
    """Where in a campaign this happened. All None for work outside one.

    Attributes:
        window: ``campaign/window``.
        hold_id: The hold's own id.
        hold_number: 1 or 2 (or more, if the plan asks for it).
        arm: ``A1``, ``B1``, ``B2``, ``A2`` ...
        attempt: 1 for the first try of this step.
    """

    window: WindowId | None = None
    hold_id: Name | None = None
    hold_number: Count | None = None
    arm: Name | None = None
    attempt: Annotated[int, Field(ge=1, le=MAX_INTEGER)] = 1


class Gpu(Block):
    """One GPU as the host reported it; None where the host does not say."""

    uuid: Text
    pci: Text | None = None
    name: Text | None = None
    driver: Text | None = None
    vbios: Text | None = None
    ecc: Text | None = None
    mig: Text | None = None
    compute_mode: Text | None = None
    persistence: Text | None = None
    clocks_mhz: Integers = Field(default_factory=dict)
    power_limit_mw: Count | None = None
    labels: Labels = Field(default_factory=dict)


class Host(Block):
    """One host: who it is, since which boot, and its GPUs. Present only in receipts made on hosts."""

    name: Name
    machine_id: Text
    boot_id: Text
    host_key: Text | None = None
    """Fingerprint ``SHA256:...`` of the pinned key; None for the local host."""
    kernel: Text | None = None
    clock_offset_ns: Integer | None = None
    """Host wall clock minus ours, as measured; None when not measured."""
    gpus: Annotated[tuple[Gpu, ...], _relaxed(64)] = ()
    labels: Labels = Field(default_factory=dict)


class Fence(Block):
    """The fence epoch as the host's guard reported it, never as we think it is."""

    host: Name
    epoch: Count


class Exit(Block):
    """How the thing ended."""

    kind: Annotated[ExitKind, Field(strict=False)]
    code: Integer | None = None
    """Exit status; only with ``exited``."""
    signal: Count | None = None
    """Signal number; only with ``signalled``."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.code is not None) != (self.kind is ExitKind.EXITED):
            raise ValueError(f"exit kind {self.kind.value} with code {self.code}: a code belongs to 'exited' only")
        if (self.signal is not None) != (self.kind is ExitKind.SIGNALLED):
            raise ValueError(f"exit kind {self.kind.value} with signal {self.signal}: it belongs to 'signalled' only")
        return self


class Sample(Block):
    """A raw sample file kept beside the receipt: JSON Lines of integers or flat integer objects."""

    name: FileName
    sha256: Digest
    size_bytes: Count
    num_samples: Count
    unit: Name


class Parent(Block):
    """A receipt this one builds on. ``sha256`` is that receipt's id."""

    kind: Annotated[Kind, Field(strict=False)]
    sha256: Digest
    role: Name


class Verdict(Block):
    """What follows from the raw records. A PASS may be silent; the others say why."""

    outcome: Annotated[Outcome, Field(strict=False)]
    reasons: Texts = ()

    @model_validator(mode="after")
    def _reasoned(self) -> Self:
        if self.outcome is not Outcome.PASS and not self.reasons:
            raise ValueError(f"a verdict of {self.outcome.value} needs at least one reason")
        return self


class ChainLink(Block):
    """The place in a store's log. Written by the store, never by the maker of a receipt.

    Attributes:
        log: Random id of the log; a receipt of another log is foreign.
        sequence: 0 for the first.
        previous: Id of the receipt before, None for the first.
    """

    log: LogId
    sequence: Count
    previous: Digest | None

    @model_validator(mode="after")
    def _first_has_no_previous(self) -> Self:
        if (self.previous is None) != (self.sequence == 0):
            raise ValueError(f"sequence {self.sequence} with previous {self.previous}: only sequence 0 has none")
        return self


UNLINKED: Final = ChainLink(log="0" * 32, sequence=0, previous=None)
"""The link of a draft. The store replaces it; a reader refuses it as foreign."""


class Row(Block):
    """One line of a table: what was expected, what was found. ``ok`` None means it was not evaluated: UNKNOWN."""

    field: Name
    expected: Text
    found: Text
    ok: bool | None
    source: Digest | None = None
    """Digest of the receipt or file the found value comes from."""


Rows: TypeAlias = Annotated[tuple[Row, ...], _relaxed()]
ClaimClass: TypeAlias = Literal["MEASURED", "CONTROLLED", "REHEARSED", "EMULATED", "ESTIMATED", "PUBLISHED"]
