"""Why the fast parser may leave integers to the schemas: every integer of every published kind is bounded there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from receipts.errors import Code, ReceiptError
from receipts.fields import MAX_INTEGER
from receipts.model import PREDICATES
from receipts.reader import _FAST, _parse, _require_shallow


def integers(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(schema, dict):
        if schema.get("type") == "integer":
            yield path, schema
        for name, item in schema.items():
            yield from integers(item, f"{path}/{name}")
    elif isinstance(schema, list):
        for number, item in enumerate(schema):
            yield from integers(item, f"{path}/{number}")


@pytest.mark.parametrize("key", PREDICATES, ids=lambda key: f"{key[0]}-v{key[1]}")
def test_every_integer_is_bounded(key: tuple[str, int]) -> None:
    """Red when a model gets a plain ``int``: a number beyond 2**53 - 1 would then be read."""
    found = dict(integers(PREDICATES[key].model_json_schema()))
    assert found
    for path, schema in found.items():
        if "const" in schema:
            continue
        assert abs(schema["maximum"]) <= MAX_INTEGER, path
        assert abs(schema["minimum"]) <= MAX_INTEGER, path


@pytest.mark.parametrize(
    ("content", "deep"),
    [
        (b"[" * 16 + b"]" * 16, False),
        (b"[" * 17 + b"]" * 17, True),
        (b'{"a":"' + b"[" * 40 + b'"}', False),
        (b'{"a":"\\"' + b"[" * 40 + b'"}', False),
        (b'["["' + b',"]"' * 30 + b"]", False),
        (b'["",' + b"[" * 16 + b"]" * 16 + b"]", True),
        (b'["["' + b"," + b"[" * 16 + b'"]"' + b"]" * 16 + b"]", True),
        (b'["\\\\",' + b"[" * 16 + b"]" * 16 + b"]", True),
    ],
)
def test_depth_counts_structure_and_not_text(content: bytes, deep: bool) -> None:
    """Red when brackets inside strings count, or when quotes or backslashes hide real nesting."""
    if deep:
        with pytest.raises(ReceiptError) as refused:
            _require_shallow(content)
        assert refused.value.code is Code.TOO_DEEP
    else:
        _require_shallow(content)


def test_the_fast_parser_still_refuses_floats_and_constants() -> None:
    """Red when the fast parser lets through what no schema could see: 1.0 compares equal to 1."""
    for text in (b"1.0", b"1e3", b"NaN", b"Infinity", b"-Infinity", b"1e999"):
        with pytest.raises(ReceiptError) as refused:
            _parse(b"[" + text + b"]", _FAST)
        assert refused.value.code is Code.NOT_AN_INTEGER
