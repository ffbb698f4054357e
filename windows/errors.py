"""What this package raises, and how a refused file is told to a person.

::

    WindowsError
    ├── DocumentError        a site or plan file is not what it says it is (one line per field)
    ├── PlanError            the files are fine one by one, but they do not make a plan together
    │   └── BudgetError      the plan does not fit its bound, or a bound has no evidence behind it
    ├── HoldError            a journal or an event that the hold machine cannot accept
    │   └── JournalError     a journal that contradicts itself
    └── MeasureError         raw samples or counters from which the asked number cannot be computed

Rules: a message says which field, what was found and what is expected; values of fields that may hold a secret are
never printed; unknown fields are named without their value, because a mistyped field may hold one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, Final

from pydantic import ValidationError

SHOWN_CHARS: Final = 80
"""A found value is cut here: an error line has to fit a terminal and a log."""

HIDDEN_FIELDS: Final = frozenset({"env", "secret_env", "body", "argv", "start", "url"})
"""Fields whose values may carry a credential: an error names them and never quotes them."""


class WindowsError(Exception):
    """Everything this package raises on purpose."""


class DocumentError(WindowsError):
    """A file was refused field by field.

    Attributes:
        what: What the file is, e.g. ``site file /etc/coordinator/site.toml``.
        lines: One line per refused field: ``field: found …, expected …``.
    """

    def __init__(self, what: str, lines: Sequence[str]) -> None:
        self.what = what
        self.lines = tuple(lines)
        super().__init__(f"{what} refused:\n" + "\n".join(f"  {line}" for line in self.lines))


class FieldsError(ValueError):
    """A validator's refusal of fields that do not fit each other; the line names each of them, with its value.

    Attributes:
        fields: Their paths below the model, e.g. ``("orphan_after_s", "step_bounds_s.lease")``.
    """

    def __init__(self, fields: Sequence[str], expectation: str) -> None:
        self.fields = tuple(fields)
        super().__init__(expectation)


class PlanError(WindowsError):
    """Site and window plan do not make a plan together."""


class BudgetError(PlanError):
    """The steps do not fit the bound, or a bound is not backed by evidence."""


class HoldError(WindowsError):
    """An event or record the hold machine cannot accept."""


class JournalError(HoldError):
    """A journal contradicts itself: it is kept as it is, and a person looks."""


class MeasureError(WindowsError):
    """A number cannot be computed from the raw records given."""


_EXPECTATION: Final[dict[str, str]] = {
    "missing": "this field is required",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "string_type": "a string",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
}


def describe_errors(error: ValidationError, known_fields: Iterable[str] = ()) -> list[str]:
    """Turns a pydantic error into lines of field, value and expectation.

    Args:
        error: The validation error.
        known_fields: Names a mistyped field is compared with.

    Returns:
        One line per refused field, in the file's order.
    """
    known = tuple(known_fields)
    items = error.errors(include_url=False)
    # A part that was refused also makes its list too short: only the part is worth a line.
    faulty = [item["loc"] for item in items]
    own = [
        item for item in items if item["type"] != "too_short" or not any(_is_inside(loc, item["loc"]) for loc in faulty)
    ]
    return [_describe(item, known) for item in own]


def _is_inside(inner: Sequence[int | str], outer: Sequence[int | str]) -> bool:
    """Whether a location lies strictly inside another one."""
    return len(inner) > len(outer) and tuple(inner[: len(outer)]) == tuple(outer)


def _describe(item: Any, known: Sequence[str]) -> str:
    """One line of `describe_errors`."""
    field = _field_path(item["loc"])
    kind = item["type"]
    if kind == "extra_forbidden":
        close = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"{field}: unknown field, expected only the documented ones{hint}"
    expectation = _expectation(item)
    cause = (item.get("ctx") or {}).get("error")
    if isinstance(cause, FieldsError):
        prefix = f"{field}." if item["loc"] else ""
        found = [_shown((*item["loc"], *name.split(".")), _value_at(item["input"], name)) for name in cause.fields]
        named = ", ".join(prefix + name for name in cause.fields)
        return f"{named}: found {', '.join(found)}, expected {expectation}"
    if kind == "missing":
        return f"{field}: found nothing, expected {expectation}"
    return f"{field}: found {_shown(item['loc'], item['input'])}, expected {expectation}"


def _value_at(value: object, path: str) -> object:
    """The value at a dotted path of the refused input; None where a default stands."""
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _expectation(item: Any) -> str:
    """What would have been accepted, in words."""
    kind = item["type"]
    if kind == "value_error":
        return str(item["ctx"]["error"]).removeprefix("expected ")
    if kind in {"literal_error", "enum"}:
        return f"one of {item['ctx']['expected']}"
    if kind in _EXPECTATION:
        return _EXPECTATION[kind]
    message = str(item["msg"])
    return message[:1].lower() + message[1:]


def _field_path(location: Sequence[int | str]) -> str:
    """``hosts[0].services[1].port`` for pydantic's location tuple."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path or "(whole file)"


def _shown(location: Sequence[int | str], value: object) -> str:
    """The found value as inert, short text; hidden where it may be a secret."""
    if any(part in HIDDEN_FIELDS for part in location):
        return "a value that is not shown"
    if isinstance(value, dict):
        # A table may hold any of the hidden fields: its names tell enough.
        return "a table with " + (", ".join(sorted(ascii(str(key))[1:-1] for key in value)[:8]) or "no fields")
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    text = ascii(value)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."
