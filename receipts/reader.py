"""The one strict reader: bytes in, a validated receipt or one named refusal out.

Rules: limits before work; one buffer is hashed and parsed, once, by one parser; a receipt is accepted only if encoding
the validated model again gives exactly the bytes that were read. That last step alone refuses white space, key order,
duplicate keys, ``1.0`` for ``1``, escapes that need not be there, and fields left out because they have a default. The
slower search for *why* runs only after a refusal.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from pydantic import ValidationError

from receipts.build import schema_error
from receipts.canonical import receipt_id, statement_bytes
from receipts.errors import Code, ReceiptError
from receipts.fields import MAX_INTEGER, Subject
from receipts.model import PREDICATE_TYPE_PREFIX, PREDICATES, STATEMENT_TYPE, Predicate, Statement, predicate_type

MAX_BYTES: Final = 1 << 20
"""A receipt is a summary; raw samples live beside it. One MiB is hundreds of times an ordinary one."""

MAX_DEPTH: Final = 16
"""The deepest published schema uses 9."""

MAX_CONTAINERS: Final = 1 << 16
"""Objects and arrays in one receipt."""

_STATEMENT_KEYS: Final = {"_type", "subject", "predicateType", "predicate"}
_MODELS: Final = {predicate_type(kind, version): model for (kind, version), model in PREDICATES.items()}
_NOT_STRUCTURE: Final = bytes(set(range(256)) - set(b'"[]{}'))
_ONE_BRACKET: Final = bytes.maketrans(b"{}", b"[]")
_STRINGS: Final = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)


@dataclass(frozen=True)
class Receipt:
    """A receipt that was read: valid, canonical, and still with the bytes it came from.

    Attributes:
        id: sha256 of ``content``.
        content: The very buffer that was parsed.
        subjects: What it speaks about.
        predicate: One of the twelve kinds.
    """

    id: str
    content: bytes
    subjects: tuple[Subject, ...]
    predicate: Predicate


def read_receipt(content: bytes, expected_id: str | None = None) -> Receipt:
    """Read one receipt.

    Args:
        content: The whole file, read once.
        expected_id: Refuse anything whose sha256 is not this.

    Raises:
        ReceiptError: With the code of the first rule broken.
    """
    # (1) Limits, before any work that grows with the content.
    if len(content) > MAX_BYTES:
        raise ReceiptError(Code.TOO_LARGE, f"expected at most {MAX_BYTES} bytes, found {len(content)}")
    # (2) The digest of this buffer.
    digest = receipt_id(content)
    if expected_id is not None and digest != expected_id:
        raise ReceiptError(Code.DIGEST_MISMATCH, f"expected sha256 {expected_id}, found {digest}")
    _require_shallow(content)
    try:
        # (3) One parser, (4) the statement's shape and the allow-list, (5) the strict model.
        statement = _statement(_parse(content))
        # (6) Encoding it again gives the bytes that were read.
        if statement_bytes(statement) != content:
            raise ReceiptError(Code.NOT_CANONICAL, "the bytes are not the canonical form of what they say")
    except ReceiptError as error:
        _explain(content, error)
    return Receipt(digest, content, statement.subjects, statement.predicate)


def read_document(content: bytes, max_bytes: int = MAX_BYTES) -> Any:
    """Parse any other JSON file of ours (heads, envelopes): the same limits and parser, no canonical form.

    Raises:
        ReceiptError: As ``read_receipt``, without SCHEMA and NOT_CANONICAL.
    """
    if len(content) > max_bytes:
        raise ReceiptError(Code.TOO_LARGE, f"expected at most {max_bytes} bytes, found {len(content)}")
    _require_shallow(content)
    return _parse(content, _EXPLAINING)


def _require_shallow(content: bytes) -> None:
    # Strings may hold brackets. Without a backslash a string ends at the next quote, so dropping everything that is
    # not structure first is exact and much faster; with one, strings are removed from the whole text.
    if b"\\" in content:
        brackets = _STRINGS.sub(b"", content).translate(_ONE_BRACKET, _NOT_STRUCTURE)
    else:
        # Most strings have no bracket in them and are now two quotes; the expression is for the few that do.
        brackets = content.translate(_ONE_BRACKET, _NOT_STRUCTURE).replace(b'""', b"")
        if b'"' in brackets:
            brackets = _STRINGS.sub(b"", content.translate(_ONE_BRACKET, _NOT_STRUCTURE))
    if brackets.count(b"[") > MAX_CONTAINERS:
        raise ReceiptError(Code.TOO_MANY, f"expected at most {MAX_CONTAINERS} objects and arrays")
    # One pass removes exactly the innermost level, so the number of passes is the depth.
    for _ in range(MAX_DEPTH):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise ReceiptError(Code.TOO_DEEP, f"expected balanced nesting of at most {MAX_DEPTH} levels")


def _refuse_float(text: str) -> NoReturn:
    raise ReceiptError(Code.NOT_AN_INTEGER, f"expected an integer, found the number {text[:40]!r}")


def _refuse_constant(text: str) -> NoReturn:
    raise ReceiptError(Code.NOT_AN_INTEGER, f"expected an integer, found {text}")


def _integer(text: str) -> int:
    # 16 digits hold every allowed integer; longer text is not even converted.
    if len(text) > 17 or not -MAX_INTEGER <= (value := int(text)) <= MAX_INTEGER:
        raise ReceiptError(Code.INTEGER_RANGE, f"expected an integer within +-(2**53 - 1), found {text[:40]}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise ReceiptError(Code.DUPLICATE_KEY, f"the key {key[:80]!r} appears twice in one object")
        if not key.isascii() or not key.isprintable():
            raise ReceiptError(Code.BAD_KEY, f"expected printable ASCII keys, found {key[:80]!r}")
        fields[key] = value
    return fields


_FAST: Final = json.JSONDecoder(parse_float=_refuse_float, parse_constant=_refuse_constant)
"""Without a call per integer: every integer of every schema has bounds, and ``_explain`` names what broke them."""
_EXPLAINING: Final = json.JSONDecoder(
    parse_float=_refuse_float, parse_int=_integer, parse_constant=_refuse_constant, object_pairs_hook=_unique
)


def _parse(content: bytes, decoder: json.JSONDecoder = _FAST) -> Any:
    try:
        return decoder.decode(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ReceiptError(Code.NOT_UTF8, f"not UTF-8 at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise ReceiptError(Code.NOT_JSON, f"not one JSON document: {error}") from error


def _statement(document: Any) -> Statement:
    if not isinstance(document, dict) or document.keys() != _STATEMENT_KEYS:
        found = sorted(document)[:8] if isinstance(document, dict) else type(document).__name__
        raise ReceiptError(Code.NOT_A_STATEMENT, f"expected an object of {sorted(_STATEMENT_KEYS)}, found {found}")
    if document["_type"] != STATEMENT_TYPE:
        raise ReceiptError(Code.NOT_A_STATEMENT, f"expected _type {STATEMENT_TYPE}, found {document['_type']!r:.80}")
    named = document["predicateType"]
    model = _MODELS.get(named) if isinstance(named, str) else None
    if model is None:
        raise ReceiptError(
            Code.UNKNOWN_KIND,
            f"expected {PREDICATE_TYPE_PREFIX}<kind>:v<version> of a published one, found {named!r:.120}",
        )
    try:
        predicate = model.model_validate(document["predicate"])
        return Statement.model_construct(subjects=_subjects(document["subject"]), predicate=predicate)
    except ValidationError as error:
        raise schema_error(error) from error


def _subjects(listed: Any) -> tuple[Subject, ...]:
    if not isinstance(listed, list) or not 1 <= len(listed) <= 256:
        raise ReceiptError(Code.SCHEMA, "expected a list of 1 to 256 subjects", "subject")
    subjects = []
    for item in listed:
        digest = item.get("digest") if isinstance(item, dict) else None
        if not isinstance(digest, dict) or item.keys() != {"name", "digest"} or digest.keys() != {"sha256"}:
            raise ReceiptError(Code.SCHEMA, "expected {name, digest: {sha256}}, exactly", "subject")
        subjects.append(Subject.model_validate({"name": item["name"], "sha256": digest["sha256"]}))
    return tuple(subjects)


def _explain(content: bytes, error: ReceiptError) -> NoReturn:
    """Raise the cause behind a refusal: a duplicate key hides behind whichever rule it broke first."""
    if error.code in {Code.NOT_JSON, Code.NOT_CANONICAL, Code.SCHEMA, Code.NOT_A_STATEMENT, Code.UNKNOWN_KIND}:
        document = _parse(content, _EXPLAINING)
        if _has_surrogate(document):
            raise ReceiptError(Code.LONE_SURROGATE, "text with a lone surrogate is not Unicode") from error
    raise error


def _has_surrogate(value: Any) -> bool:
    # Depth was bounded before parsing, so this recursion is bounded too.
    if isinstance(value, str):
        return any("\ud800" <= char <= "\udfff" for char in value)
    if isinstance(value, dict):
        return any(_has_surrogate(key) or _has_surrogate(item) for key, item in value.items())
    return isinstance(value, list) and any(_has_surrogate(item) for item in value)
