"""The published schemas are those of the models, accept every example and refuse what the models refuse."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from receipt_kit import draft

from receipts.fields import Kind
from receipts.model import PREDICATES
from receipts.schema import FOLDER, published


def test_the_files_are_what_the_models_generate() -> None:
    """Red when a model changed and `python -m receipts.schema` was not run, or a file is left over."""
    found = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
    assert found == published()
    assert len(found) == len(PREDICATES)


def validator(kind: Kind) -> Draft202012Validator:
    schema = json.loads((FOLDER / f"{kind}.v1.schema.json").read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


@pytest.mark.parametrize("kind", list(Kind))
def test_a_schema_accepts_its_example_and_needs_every_field(kind: Kind) -> None:
    """Red when a field is optional in the schema, or unknown ones pass."""
    check, document = validator(kind), json.loads(draft(kind))
    assert list(check.iter_errors(document)) == []
    for holder in (document, document["predicate"], document["predicate"]["body"]):
        for name in list(holder):
            value = holder.pop(name)
            assert not check.is_valid(document), name
            holder[name] = value
        holder["extra"] = 1
        assert not check.is_valid(document)
        del holder["extra"]
    assert check.is_valid(document)


def test_a_schema_of_one_kind_refuses_every_other() -> None:
    check = validator(Kind.BUDGET)
    assert [kind for kind in Kind if check.is_valid(json.loads(draft(kind)))] == [Kind.BUDGET]


@pytest.mark.parametrize("value", [1.5, 2**53, -1, "1", True, None])
def test_a_schema_refuses_other_numbers(value: Any) -> None:
    document = json.loads(draft(Kind.BUDGET))
    document["predicate"]["elapsed_ns"] = value
    assert not validator(Kind.BUDGET).is_valid(document)
