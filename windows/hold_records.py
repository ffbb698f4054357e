"""What the journal of a hold consists of: four kinds of record, and their JSON form.

Rules: a record is written (fsync) before a remote action (`Intent`) and after it (`Outcome`); everything else that
moves the hold is a `Note`; a hold begins with one `Opened`. ``parse_record`` and ``to_document`` are exact inverses.
The journal's file, its hash chain and its clock are the caller's: ``utc`` is data for people and decides nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, StringConstraints, TypeAdapter, ValidationError

from windows.document import Name, Sha256, Strict, shaped
from windows.errors import JournalError, describe_errors
from windows.hold_table import Action, HoldEvent, HostFact, HostPhase, Moment

RECORD_SCHEMA: Final = "coordinator/hold-record/v1"

HoldId = Annotated[str, shaped(r"[a-z0-9][a-z0-9-]{7,63}", "a hold id")]
OperationId = Annotated[str, shaped(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,199}", "an operation id")]
Utc = Annotated[str, shaped(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{8,18}Z", "a UTC time with Z")]
MAX_DETAIL: Final = 2000


def _cut(text: object) -> object:
    """Cuts what a record says in words: a long error message must not be able to stop a restore."""
    if isinstance(text, str) and len(text) > MAX_DETAIL:
        return text[: MAX_DETAIL - 3] + "..."
    return text


Detail = Annotated[str, BeforeValidator(_cut), StringConstraints(max_length=MAX_DETAIL)]
Epoch = Annotated[int, Field(ge=1, le=(1 << 53) - 1)]


class _Record(Strict):
    """What all records carry: their place, and when, for people."""

    seq: Annotated[int, Field(ge=0)]
    utc: Utc
    hold_id: HoldId

    def to_document(self) -> dict[str, Any]:
        """Plain values for one line of JSON."""
        return self.model_dump(mode="json")


class AdoptedHost(Strict):
    """A host as its guard describes it to a recoverer that has no journal (DECISIONS 38)."""

    phase: HostPhase
    epoch: Epoch | None


class Opened(_Record):
    """The first record.

    Attributes:
        hosts: Names, in the order leases are taken.
        adopted: What the guards said, when the hold is taken over without its journal; empty otherwise.
    """

    type: Literal["opened"] = "opened"
    hold_number: Annotated[int, Field(ge=1, le=99)]
    plan_sha256: Sha256
    hosts: Annotated[tuple[Name, ...], Field(min_length=1)]
    adopted: dict[Name, AdoptedHost] = Field(default_factory=dict)


class Note(_Record):
    """An event of the hold as a whole.

    Attributes:
        reason: Why, for the receipt; a person's own words for ``cleared`` and ``aborted``.
        arm: Which arm, for the arm events.
    """

    type: Literal["note"] = "note"
    event: HoldEvent
    reason: Detail = ""
    arm: str | None = None


class Intent(_Record):
    """Written before an action on a host.

    Attributes:
        op: Operation id, unique in the hold: the guard is asked by it.
        step: Id of the plan's step.
    """

    type: Literal["intent"] = "intent"
    op: OperationId
    host: Name
    action: Action
    step: str = ""


class Outcome(_Record):
    """Written after an action: done, failed, or not known (link lost, timed out).

    Attributes:
        epoch: Fence epoch the host answered with; None when it did not answer.
        detail: For people and for the receipt.
    """

    type: Literal["outcome"] = "outcome"
    op: OperationId
    result: Moment
    epoch: Epoch | None = None
    detail: Detail = ""


class Found(_Record):
    """What a host said about itself when asked."""

    type: Literal["found"] = "found"
    host: Name
    fact: HostFact
    epoch: Epoch | None = None
    detail: Detail = ""


Record = Opened | Note | Intent | Outcome | Found

_ADAPTER: Final[TypeAdapter[Record]] = TypeAdapter(Annotated[Record, Field(discriminator="type")])


def parse_record(line: bytes | str) -> Record:
    """Parses one line of a journal.

    Raises:
        JournalError: Names the refused fields.
    """
    try:
        record = _ADAPTER.validate_json(line)
    except ValidationError as cause:
        raise JournalError("journal line refused: " + "; ".join(describe_errors(cause))) from cause
    if isinstance(record, Outcome) and record.result is Moment.INTENT:
        raise JournalError(f"journal line refused: outcome of {record.op} says 'intent', expected what came of it")
    return record


def record_from_document(document: Mapping[str, Any]) -> Record:
    """Parses a record that was read as JSON already."""
    return parse_record(json.dumps(dict(document)))
