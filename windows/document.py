"""How a parsed file becomes a frozen model, and how a document becomes the bytes that are hashed.

Rules: unknown fields, implicit conversions, floats and times are refused; models are frozen; the bytes of a document
are RFC 8785, made in one place. Reading the file is the caller's job: this package does no I/O.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

import rfc8785
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from windows.errors import DocumentError, PlanError, describe_errors

MAX_FILE_DEPTH: Final = 16
"""Deeper nesting than any site or plan has; a limit before recursion, not after it."""


def shaped(pattern: str, words: str, max_length: int = 1024) -> AfterValidator:
    """A constraint on a string that says in words what it expects.

    Args:
        pattern: The whole string must match.
        words: Completes "expected …" in the error.
        max_length: Longest accepted string, in characters.
    """
    compiled = re.compile(pattern)

    def check(text: str) -> str:
        if len(text) > max_length or compiled.fullmatch(text) is None:
            raise ValueError(f"expected {words}")
        return text

    return AfterValidator(check)


Name = Annotated[str, shaped(r"[a-z0-9][a-z0-9._-]{0,62}", "a name of a-z, 0-9, '.', '_' and '-', at most 63 long")]
"""A name of ours: of a host, a service, a step. Safe in a file name, a unit name and a receipt."""

EnvName = Annotated[str, shaped(r"[A-Za-z_][A-Za-z0-9_]{0,127}", "the name of an environment variable")]
Sha256 = Annotated[str, shaped(r"[0-9a-f]{64}", "64 lower-case hex digits")]
AbsolutePath = Annotated[str, shaped(r"/[^\x00-\x1f]*", "an absolute path")]
Text = Annotated[str, shaped(r"[^\x00]*", "text without NUL, at most 65536 long", 65536)]
"""Free text handed on to a program: no NUL, because no argv and no environment can carry one."""


class Strict(BaseModel):
    """Base of every model here: frozen, no unknown field, no conversion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


M = TypeVar("M", bound=Strict)


def parse_document(model: type[M], document: Mapping[str, Any], what: str) -> M:
    """Validates a document that a TOML or JSON reader returned.

    Args:
        model: The model to build.
        document: Tables, lists, strings, integers and booleans.
        what: Names the file in the error.

    Raises:
        DocumentError: Lists every refused field with value and expectation.
    """
    _refuse_unhashable(document, what, "", 0)
    try:
        # JSON mode: lists become tuples and strings enum members; everything else stays strict.
        return model.model_validate_json(json.dumps(document, allow_nan=False))
    except ValidationError as cause:
        raise DocumentError(what, describe_errors(cause, _all_fields(model))) from cause


def canonical_bytes(document: Mapping[str, Any]) -> bytes:
    """The RFC 8785 bytes of a document of ours: no floats, no newline at the end.

    Raises:
        PlanError: The document holds something that has no canonical form (a float, an integer over 2**53 - 1).
    """
    _refuse_float(document, "document")
    try:
        return rfc8785.dumps(dict(document))
    except (rfc8785.CanonicalizationError, UnicodeEncodeError) as cause:
        raise PlanError(f"document has no canonical form: {cause}") from cause


def sha256_hex(data: bytes) -> str:
    """Hex SHA-256 of bytes."""
    return hashlib.sha256(data).hexdigest()


def _refuse_float(value: object, where: str) -> None:
    """Floats never reach hashed bytes: 1 and 1.0 have one canonical form."""
    if isinstance(value, float):
        raise PlanError(f"{where}: found the float {value!r}, expected an integer in base units or a decimal string")
    if isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_float(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _refuse_float(item, f"{where}[{index}]")


def _refuse_unhashable(value: object, what: str, path: str, depth: int) -> None:
    """Refuses what TOML knows and our documents do not: floats, times, and nesting without end."""
    if depth > MAX_FILE_DEPTH:
        raise DocumentError(what, [f"{path}: found nesting deeper than {MAX_FILE_DEPTH}, expected a flatter file"])
    if isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_unhashable(item, what, f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _refuse_unhashable(item, what, f"{path}[{index}]", depth + 1)
    elif isinstance(value, float):
        raise DocumentError(what, [f"{path}: found the float {value!r}, expected an integer or a decimal string"])
    elif value is not None and not isinstance(value, str | int | bool):
        raise DocumentError(
            what, [f"{path}: found a {type(value).__name__}, expected a string, integer, list or table"]
        )


def _all_fields(model: type[BaseModel], seen: frozenset[type[BaseModel]] = frozenset()) -> tuple[str, ...]:
    """Every field name in a model and in the models it nests, for the hint on a mistyped one."""
    if model in seen:
        return ()
    names: list[str] = []
    for name, info in model.model_fields.items():
        names.append(name)
        for nested in _nested_models(info.annotation):
            names.extend(_all_fields(nested, seen | {model}))
    return tuple(dict.fromkeys(names))


def _nested_models(annotation: Any) -> list[type[BaseModel]]:
    """Models named anywhere inside an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _nested_models(part)]
