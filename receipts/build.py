"""Make a receipt: checked values in, canonical bytes of a draft out.

A draft carries the placeholder chain link ``UNLINKED``. ``coordinator.store.Store.append`` puts the real link in, under
its lock, and returns the id of the bytes it stored; that id, not the draft's, is what children name as a parent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from receipts.canonical import statement_bytes
from receipts.errors import Code, ReceiptError
from receipts.fields import Kind, Subject
from receipts.model import PREDICATES, Predicate, Statement


def schema_error(error: ValidationError) -> ReceiptError:
    """One refusal out of pydantic's list: the first field, and how many more."""
    details = error.errors(include_url=False, include_input=False, include_context=False)
    first = details[0]
    where = ".".join(str(part) for part in first["loc"])
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return ReceiptError(Code.SCHEMA, f"{first['msg']}{more}", where)


def build_receipt(kind: Kind, predicate: Predicate | dict[str, Any], subjects: Iterable[Subject]) -> bytes:
    """Encode one receipt as a draft for the store.

    Args:
        kind: Which kind; must be the predicate's own.
        predicate: The kind's predicate object, or its fields as a dict.
        subjects: At least one thing the receipt speaks about.

    Returns:
        Canonical bytes, readable by ``receipts.reader.read_receipt`` except for the placeholder link.

    Raises:
        ReceiptError: UNKNOWN_KIND or SCHEMA, with the field.
    """
    model = PREDICATES.get((kind, 1))
    if model is None:
        raise ReceiptError(Code.UNKNOWN_KIND, f"expected one of {[k.value for k in Kind]}, found {kind!r}")
    try:
        # Validated again even when it is an object: model_construct and model_copy skip every check.
        fields = predicate.model_dump() if isinstance(predicate, Predicate) else predicate
        checked = model.model_validate(fields)
        statement = Statement.model_construct(subjects=_subjects(subjects), predicate=checked)
    except ValidationError as error:
        raise schema_error(error) from error
    return statement_bytes(statement)


def _subjects(subjects: Iterable[Subject]) -> tuple[Subject, ...]:
    checked = tuple(Subject.model_validate(subject.model_dump()) for subject in subjects)
    if not checked:
        raise ReceiptError(Code.SCHEMA, "expected at least one subject, found none", "subject")
    return checked
