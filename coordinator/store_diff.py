"""``coordinator receipts diff``: what differs between two receipts, by source, environment, hosts and numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coordinator.clock import SystemClock
from coordinator.render import Reporter, print_json
from coordinator.store_show import flatten, load_receipt, receipt_document, short
from receipts.reader import Receipt
from windows.exit_codes import ExitCode

_GROUPS = (
    ("source", ("tool", "plan_sha256", "version", "kind")),
    ("environment", ("environment", "argv", "exit")),
    ("hosts", ("hosts", "fences")),
    ("claim", ("verdict", "evidence", "scope", "not_claimed", "position", "parents", "samples")),
    ("numbers", ("body", "elapsed_ns")),
)
"""Title of a table and the fields of the predicate in it. Times and the chain always differ and are left out."""

Difference = tuple[str, str, str, str]
"""Field, in A, in B, change in percent of A (for integers)."""


def diff_receipts(store: Path, first: str, second: str, *, json: bool) -> int:
    """Print the differences; exit 0 either way, a difference is no fault."""
    a, b = load_receipt(store, first), load_receipt(store, second)
    tables = {title: list(rows) for title, rows in differences(a, b)}
    if json:
        print_json(
            {"a": a.id, "b": b.id, "differences": {t: [list(row) for row in rows] for t, rows in tables.items()}}
        )
        return int(ExitCode.DONE)
    reporter = Reporter(SystemClock().utc)
    reporter.table("compared", ("", "id", "kind"), [("A", a.id, a.predicate.kind), ("B", b.id, b.predicate.kind)])
    for title, rows in tables.items():
        cells = [(name, short(left), short(right), change) for name, left, right, change in rows]
        reporter.table(title, ("field", "A", "B", "change"), cells or [("all fields", "same", "same", "")])
    return int(ExitCode.DONE)


def differences(a: Receipt, b: Receipt) -> Iterator[tuple[str, Iterator[Difference]]]:
    """One title and its differing leaves per group."""
    left, right = (receipt_document(receipt)["statement"]["predicate"] for receipt in (a, b))
    for title, names in _GROUPS:
        yield title, _leaves({n: left.get(n) for n in names}, {n: right.get(n) for n in names})


def _leaves(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[Difference]:
    a, b = dict(flatten(left)), dict(flatten(right))
    for name in [*a, *(name for name in b if name not in a)]:
        before, after = a.get(name, "absent"), b.get(name, "absent")
        if before != after:
            yield name, before, after, change(before, after)


def change(before: str, after: str) -> str:
    """The relative change of two integers in percent; empty when there is none to speak of."""
    try:
        old, new = int(before), int(after)
    except ValueError:
        return ""
    return f"{(new - old) / old:+.2%}" if old else ""
