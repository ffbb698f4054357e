"""The strict reader: every rule has bytes that break only it, and each is refused with its own code."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import rfc8785
from receipt_kit import EXAMPLES, draft, every_kind, predicate_fields

from receipts.build import build_receipt
from receipts.canonical import canonical_bytes, receipt_id, statement_bytes
from receipts.errors import Code, ReceiptError
from receipts.fields import MAX_INTEGER, Kind, Subject
from receipts.model import PREDICATES, Statement
from receipts.reader import MAX_BYTES, MAX_CONTAINERS, MAX_DEPTH, read_document, read_receipt

GOOD = draft(Kind.HOST_FACTS)


def refusal(content: bytes) -> Code:
    with pytest.raises(ReceiptError) as caught:
        read_receipt(content)
    return caught.value.code


def edited(change: Callable[[dict[str, Any]], None], source: bytes = GOOD) -> bytes:
    """The document with one change, canonical again: only the model can refuse it."""
    document = json.loads(source)
    change(document)
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8")


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_reads_back_as_its_own_bytes(kind: Kind) -> None:
    """Red when a field is lost, defaulted away or reordered on the way through the model."""
    content = draft(kind)
    receipt = read_receipt(content)
    statement = Statement.model_construct(subjects=receipt.subjects, predicate=receipt.predicate)
    assert statement_bytes(statement) == content
    assert receipt.content is content
    assert receipt.predicate.kind == kind.value


@pytest.mark.parametrize("kind", list(Kind))
def test_the_bytes_are_rfc_8785(kind: Kind) -> None:
    """Red when the fast encoder and the reference package differ on any receipt."""
    content = draft(kind)
    assert rfc8785.dumps(json.loads(content)) == content
    assert not content.endswith(b"\n")


def test_rfc_8785_vectors_with_numbers_and_characters_beyond_the_first_plane() -> None:
    """Red when sorting or escaping changes: string-only vectors would not notice."""
    document = {"b": [MAX_INTEGER, -MAX_INTEGER, 0], "a": '\u20ac \U0001d11e \x0f "\\ \n \u2028', "Z": {"": None}}
    expected = (
        '{"Z":{"":null},"a":"\u20ac \U0001d11e \\u000f \\"\\\\ \\n \u2028","b":[9007199254740991,-9007199254740991,0]}'
    )
    assert canonical_bytes(document) == expected.encode() == rfc8785.dumps(document)


def test_the_digest_is_of_the_file() -> None:
    assert read_receipt(GOOD, expected_id=receipt_id(GOOD)).id == receipt_id(GOOD)
    with pytest.raises(ReceiptError) as caught:
        read_receipt(GOOD, expected_id="0" * 64)
    assert caught.value.code is Code.DIGEST_MISMATCH


LEAF = b'"disk_free_bytes":9663676416'


@pytest.mark.parametrize(
    ("fragment", "code"),
    [
        (b'"disk_free_bytes":NaN', Code.NOT_AN_INTEGER),
        (b'"disk_free_bytes":Infinity', Code.NOT_AN_INTEGER),
        (b'"disk_free_bytes":-Infinity', Code.NOT_AN_INTEGER),
        (b'"disk_free_bytes":1.0', Code.NOT_AN_INTEGER),
        (b'"disk_free_bytes":1e3', Code.NOT_AN_INTEGER),
        (b'"disk_free_bytes":1e999', Code.NOT_AN_INTEGER),
        (b'"disk_free_bytes":9007199254740992', Code.INTEGER_RANGE),
        (b'"disk_free_bytes":-9007199254740992', Code.INTEGER_RANGE),
        (b'"disk_free_bytes":' + b"9" * 5000, Code.INTEGER_RANGE),
        (b'"disk_free_bytes":-0', Code.NOT_CANONICAL),
        (b'"disk_free_bytes":01', Code.NOT_JSON),
        (b'"disk_free_bytes":"9"', Code.SCHEMA),
        (b'"disk_free_bytes":true', Code.SCHEMA),
        (b'"disk_free_bytes":9,"disk_free_bytes":9', Code.DUPLICATE_KEY),
        (b'"disk_free_bytes":9,"disk_free_b\\u0079tes":9', Code.DUPLICATE_KEY),
        (b'"disk_free_b\\u0079tes":9', Code.NOT_CANONICAL),
        (b'"d\xc3\xa9":9', Code.BAD_KEY),
        (b'"\\ud800":9', Code.BAD_KEY),
        (b'"disk\\nfree":9', Code.BAD_KEY),
        (b'"disk\\u001bfree":9', Code.BAD_KEY),
        (b'"disk\\u202efree":9', Code.BAD_KEY),
        (b'"disk free":9', Code.SCHEMA),
        (b'"disk_free_bytes": 9', Code.NOT_CANONICAL),
    ],
)
def test_one_bad_value_or_key(fragment: bytes, code: Code) -> None:
    """Red when the rule is dropped: each fragment breaks one rule of JSON, of integers or of keys."""
    assert LEAF in GOOD
    assert refusal(GOOD.replace(LEAF, fragment)) is code


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", Code.NOT_JSON),
        (b"null", Code.NOT_A_STATEMENT),
        (b"[]", Code.NOT_A_STATEMENT),
        (b"{}", Code.NOT_A_STATEMENT),
        (b"{", Code.TOO_DEEP),
        (GOOD + b"\n", Code.NOT_CANONICAL),
        (b" " + GOOD, Code.NOT_CANONICAL),
        (b"\xef\xbb\xbf" + GOOD, Code.NOT_JSON),
        (GOOD + GOOD, Code.NOT_JSON),
        (GOOD[:-1], Code.TOO_DEEP),
        (GOOD.decode().encode("utf-16"), Code.NOT_UTF8),
        (GOOD.replace(b"this step, once", b"this \xff step"), Code.NOT_UTF8),
        (GOOD.replace(b"this step, once", b"\xed\xa0\x80"), Code.NOT_UTF8),
        (GOOD.replace(b"this step, once", b"\\ud800"), Code.LONE_SURROGATE),
        (GOOD.replace(b"this step, once", b"\\udc00\\ud800"), Code.LONE_SURROGATE),
        (GOOD.replace(b"this step, once", b"\\u0041"), Code.NOT_CANONICAL),
        (b"x" * (MAX_BYTES + 1), Code.TOO_LARGE),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), Code.TOO_DEEP),
        (b"[" * 60_000, Code.TOO_DEEP),
        (b"[" + b"[]," * MAX_CONTAINERS + b"[]]", Code.TOO_MANY),
        (b'"' + b"[" * 100 + b'"', Code.NOT_A_STATEMENT),
        (b'"\\"' + b"[" * 100 + b'"', Code.NOT_A_STATEMENT),
    ],
)
def test_one_bad_file(content: bytes, code: Code) -> None:
    """Red when a limit, the encoding rule or the one canonical form is given up."""
    assert refusal(content) is code


def statement_type(d: dict[str, Any]) -> None:
    d["_type"] = "https://in-toto.io/Statement/v0.1"


def unknown_kind(d: dict[str, Any]) -> None:
    d["predicateType"] = "urn:dspark-coordinator:receipt:verdict:v1"


def unknown_version(d: dict[str, Any]) -> None:
    d["predicateType"] = "urn:dspark-coordinator:receipt:host-facts:v2"


def other_kind(d: dict[str, Any]) -> None:
    d["predicateType"] = "urn:dspark-coordinator:receipt:budget:v1"


def set_in(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        holder: Any = document
        for step in path[:-1]:
            holder = holder[step]
        holder[path[-1]] = to

    return change


P = "predicate"
SAMPLE = {"name": "a", "sha256": "0" * 64, "size_bytes": 1, "num_samples": 1, "unit": "ns"}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (statement_type, Code.NOT_A_STATEMENT),
        (set_in("more", to=1), Code.NOT_A_STATEMENT),
        (unknown_kind, Code.UNKNOWN_KIND),
        (unknown_version, Code.UNKNOWN_KIND),
        (other_kind, Code.SCHEMA),
        (set_in("predicateType", to=7), Code.UNKNOWN_KIND),
        (set_in("subject", to=[]), Code.SCHEMA),
        (set_in("subject", 0, "digest", to={"sha256": "0" * 64, "md5": "0"}), Code.SCHEMA),
        (set_in("subject", 0, "digest", "sha256", to="0" * 63), Code.SCHEMA),
        (set_in("subject", 0, "digest", "sha256", to="A" * 64), Code.SCHEMA),
        (set_in(P, "version", to=2), Code.SCHEMA),
        (set_in(P, "kind", to="budget"), Code.SCHEMA),
        (set_in(P, "extra", to=1), Code.SCHEMA),
        (set_in(P, "body", "extra", to=1), Code.SCHEMA),
        (set_in(P, "evidence", to="measured"), Code.SCHEMA),
        (set_in(P, "evidence", to="BELIEVED"), Code.SCHEMA),
        (set_in(P, "verdict", to={"outcome": "FAIL", "reasons": []}), Code.SCHEMA),
        (set_in(P, "verdict", "outcome", to="SKIPPED"), Code.SCHEMA),
        (set_in(P, "started_utc", to="2026-06-01T11:00:00.000"), Code.SCHEMA),
        (set_in(P, "started_utc", to="2026-06-01T11:00:00+00:00"), Code.SCHEMA),
        (set_in(P, "started_utc", to="2026-02-30T11:00:00Z"), Code.SCHEMA),
        (set_in(P, "started_utc", to="2026-06-01T24:00:00Z"), Code.SCHEMA),
        (set_in(P, "started_utc", to="2026-06-01T11:00:60Z"), Code.SCHEMA),
        (set_in(P, "started_utc", to="2026-06-01 11:00:00Z"), Code.SCHEMA),
        (set_in(P, "elapsed_ns", to=-1), Code.SCHEMA),
        (set_in(P, "exit", to={"kind": "exited", "code": None, "signal": None}), Code.SCHEMA),
        (set_in(P, "exit", to={"kind": "link-lost", "code": 0, "signal": None}), Code.SCHEMA),
        (set_in(P, "exit", to={"kind": "exited", "code": 0, "signal": 9}), Code.SCHEMA),
        (set_in(P, "hosts", 0, "name", to="al\x1bpha"), Code.SCHEMA),
        (set_in(P, "hosts", 0, "name", to="../alpha"), Code.SCHEMA),
        (set_in(P, "hosts", 0, "name", to="a\u202eb"), Code.SCHEMA),
        (set_in(P, "position", "window", to="no-slash"), Code.SCHEMA),
        (set_in(P, "position", "attempt", to=0), Code.SCHEMA),
        (set_in(P, "scope", to="x" * 4097), Code.SCHEMA),
        (set_in(P, "scope", to=None), Code.SCHEMA),
        (set_in(P, "samples", to=[SAMPLE | {"name": "../x"}]), Code.SCHEMA),
        (set_in(P, "samples", to=[SAMPLE, SAMPLE]), Code.SCHEMA),
        (set_in(P, "parents", to=[{"kind": "hold", "sha256": "0" * 64, "role": "r"}] * 2), Code.SCHEMA),
        (set_in(P, "parents", to=[{"kind": "hold", "sha256": "0" * 64, "role": "r"}] * 5000), Code.SCHEMA),
        (set_in(P, "chain", "previous", to="0" * 64), Code.SCHEMA),
        (set_in(P, "chain", "sequence", to=1), Code.SCHEMA),
        (set_in(P, "chain", "log", to="Z" * 32), Code.SCHEMA),
        (set_in(P, "body", "checks", 0, "ok", to=1), Code.SCHEMA),
        (set_in(P, "body", "checks", 0, "ok", to="true"), Code.SCHEMA),
        (lambda d: d[P].pop("scope"), Code.SCHEMA),
        (lambda d: d[P].pop("not_claimed"), Code.SCHEMA),
        (lambda d: d[P].pop("evidence"), Code.SCHEMA),
        (lambda d: d[P].pop("version"), Code.NOT_CANONICAL),
        (lambda d: d[P].pop("parents"), Code.NOT_CANONICAL),
    ],
)  # fmt: skip
def test_one_bad_field(change: Callable[[dict[str, Any]], None], code: Code) -> None:
    """Red when a field's rule, the allow-list or the refusal of unknown fields is given up."""
    assert refusal(edited(change)) is code


@pytest.mark.parametrize("kind", list(Kind))
def test_every_field_of_every_kind_is_needed_in_the_bytes(kind: Kind) -> None:
    """Red when a reader fills in what was not written: leaving any field out must be refused."""
    source = draft(kind)
    document = json.loads(source)
    for name in document["predicate"]:
        assert refusal(edited(lambda d, n=name: d["predicate"].pop(n), source)), name
    for name in document["predicate"]["body"]:
        assert refusal(edited(lambda d, n=name: d["predicate"]["body"].pop(n), source)), name


def test_model_construct_and_copies_cannot_smuggle_values_past_the_builder() -> None:
    """Red when the builder trusts an object because of its class."""
    model = PREDICATES[(Kind.HOST_FACTS, 1)]
    good = model.model_validate(predicate_fields(Kind.HOST_FACTS) | {"verdict": {"outcome": "PASS", "reasons": ()}})
    forged = good.model_copy(update={"elapsed_ns": -5})
    with pytest.raises(ReceiptError) as caught:
        build_receipt(Kind.HOST_FACTS, forged, [Subject(name="x", sha256="0" * 64)])
    assert caught.value.code is Code.SCHEMA
    with pytest.raises(ReceiptError):
        build_receipt(Kind.HOST_FACTS, good, [Subject.model_construct(name="x", sha256="short")])
    with pytest.raises(ReceiptError):
        build_receipt(Kind.HOST_FACTS, good, [])
    with pytest.raises(ReceiptError):
        build_receipt(Kind.BUDGET, good, [Subject(name="x", sha256="0" * 64)])


def test_documents_of_ours_have_the_same_limits() -> None:
    """Heads and envelopes go through the same parser: duplicate keys and floats are refused there too."""
    for content in (b'{"a":1,"a":1}', b'{"a":1.5}', b"[" * 99 + b"]" * 99, b"\xff", b"{"):
        with pytest.raises(ReceiptError):
            read_document(content)


def test_an_error_names_its_place() -> None:
    with pytest.raises(ReceiptError) as caught:
        read_receipt(edited(set_in("predicate", "body", "values", to={"x": "y"})))
    assert "body.values.x" in caught.value.where
    assert str(caught.value).startswith("schema: ")


def test_the_examples_cover_every_kind() -> None:
    assert set(EXAMPLES) == set(Kind)
    assert len(every_kind().entries) == len(Kind)
