"""Exact bytes: RFC 8785 for documents without floats, and the id of a receipt.

The fast encoder is Python's own C encoder with sorted keys. It gives RFC 8785 output only because a receipt has no
floats, no integer beyond 2**53 - 1 and only ASCII keys (code point order equals UTF-16 order); a test compares it with
the ``rfc8785`` package, which is used wherever a document may hold anything else.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from receipts.errors import Code, ReceiptError
from receipts.model import STATEMENT_TYPE, Predicate, Statement, predicate_type

_ENCODE = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, sort_keys=True, separators=(",", ":")
).encode


def canonical_bytes(document: Any) -> bytes:
    """Encode a document of dicts with ASCII keys, lists, strings, integers, booleans and None.

    Raises:
        ReceiptError: LONE_SURROGATE for text that is not Unicode, NOT_AN_INTEGER for NaN, NOT_JSON for other types.
    """
    try:
        return _ENCODE(document).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ReceiptError(Code.LONE_SURROGATE, "text with a lone surrogate cannot be encoded as UTF-8") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ReceiptError(Code.NOT_JSON, f"not a plain JSON document: {error}") from error


def statement_document(statement: Statement) -> dict[str, Any]:
    """The in-toto document of a statement."""
    predicate: Predicate = statement.predicate
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": s.name, "digest": {"sha256": s.sha256}} for s in statement.subjects],
        "predicateType": predicate_type(predicate.kind, predicate.version),
        "predicate": predicate.model_dump(),
    }


def statement_bytes(statement: Statement) -> bytes:
    """The receipt's file content: canonical, no newline at the end."""
    return canonical_bytes(statement_document(statement))


def receipt_id(content: bytes) -> str:
    """The id of a receipt: what ``sha256sum`` prints for its file."""
    return hashlib.sha256(content).hexdigest()
