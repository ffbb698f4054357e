"""Published JSON Schemas of every kind and version, generated from the models.

They are for readers in other languages; our own reader is stricter (canonical bytes, duplicate keys, sizes), and a
document that a schema accepts may still be refused. Run ``python -m receipts.schema`` to write them; a test compares.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from receipts.model import PREDICATES, STATEMENT_TYPE, predicate_type

DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"
FOLDER: Final = Path(__file__).parent / "schemas"

_SUBJECT: Final[dict[str, Any]] = {
    "type": "array",
    "minItems": 1,
    "maxItems": 256,
    "items": {
        "type": "object",
        "additionalProperties": False,
        "required": ["digest", "name"],
        "properties": {
            "name": {"type": "string", "maxLength": 4096},
            "digest": {
                "type": "object",
                "additionalProperties": False,
                "required": ["sha256"],
                "properties": {"sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$"}},
            },
        },
    },
}


def statement_schema(kind: str, version: int) -> dict[str, Any]:
    """The schema of a whole receipt of one kind. Every field is required: nothing is filled in by a reader."""
    predicate = _exact(PREDICATES[kind, version].model_json_schema())
    definitions = predicate.pop("$defs", {})
    return {
        "$schema": DRAFT,
        "$id": predicate_type(kind, version),
        "title": f"receipt {kind} version {version}",
        "type": "object",
        "additionalProperties": False,
        "required": ["_type", "predicate", "predicateType", "subject"],
        "properties": {
            "_type": {"const": STATEMENT_TYPE},
            "predicateType": {"const": predicate_type(kind, version)},
            "subject": _SUBJECT,
            "predicate": predicate,
        },
        "$defs": definitions,
    }


def _exact(schema: Any) -> Any:
    """The same schema with every property required and no defaults."""
    if isinstance(schema, list):
        return [_exact(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    exact = {name: _exact(item) for name, item in schema.items() if name != "default"}
    if isinstance(exact.get("properties"), dict):
        exact["required"] = sorted(exact["properties"])
    return exact


def published() -> dict[str, str]:
    """File name and content of every schema."""
    return {
        f"{kind}.v{version}.schema.json": json.dumps(statement_schema(kind, version), indent=1, sort_keys=True) + "\n"
        for kind, version in PREDICATES
    }


def main() -> None:
    """Write the schemas beside this module."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in published().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
