"""``coordinator receipts list``: one line per receipt. Shows what is stated; ``verify`` says whether it holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.clock import SystemClock
from coordinator.errors import UsageError
from coordinator.render import Reporter, print_json
from coordinator.store import Store
from receipts.errors import ReceiptError
from receipts.fields import Evidence, Kind, Outcome
from receipts.findings import Entry
from receipts.reader import Receipt, read_receipt
from windows.exit_codes import ExitCode


@dataclass(frozen=True)
class Filter:
    """Which receipts to list; None accepts all."""

    kind: str | None = None
    verdict: str | None = None
    evidence: str | None = None
    hold: int | None = None
    arm: str | None = None
    plan: str | None = None
    host: str | None = None

    def __post_init__(self) -> None:
        # A typing error must not read as "there are none".
        for word, known in ((self.kind, Kind), (self.verdict, Outcome), (self.evidence, Evidence)):
            if word is not None and word not in {member.value for member in known}:
                raise UsageError(
                    "no such word in a filter", expected=", ".join(member.value for member in known), found=word[:80]
                )

    def accepts(self, receipt: Receipt) -> bool:
        """Whether a receipt is wanted."""
        predicate = receipt.predicate
        return (
            self.kind in (None, predicate.kind)
            and self.verdict in (None, predicate.verdict.outcome.value)
            and self.evidence in (None, predicate.evidence.value)
            and self.hold in (None, predicate.position.hold_number)
            and self.arm in (None, predicate.position.arm)
            and (self.plan is None or (predicate.plan_sha256 or "").startswith(self.plan.lower()))
            and (self.host is None or self.host in {host.name for host in predicate.hosts})
        )


def readable(store: Store) -> Iterator[tuple[Entry, Receipt | ReceiptError]]:
    """Every entry with its receipt, or with why there is none."""
    for entry in store.entries():
        if entry.refused is not None:
            yield entry, entry.refused
            continue
        try:
            yield entry, read_receipt(entry.content)
        except ReceiptError as error:
            yield entry, error


def list_store(path: Path, wanted: Filter, *, json: bool) -> int:
    """Print the receipts of a store; one that cannot be read is always listed and makes the exit code 60."""
    rows: list[dict[str, Any]] = []
    broken = 0
    try:
        for entry, receipt in readable(Store(path)):
            if isinstance(receipt, ReceiptError):
                broken += 1
                rows.append({"name": entry.name, "unreadable": str(receipt)})
            elif wanted.accepts(receipt):
                rows.append(summary(receipt))
    except ReceiptError as error:
        raise UsageError("no store could be read", found=str(error), where=str(path)) from error
    if json:
        print_json(rows)
    else:
        columns = ("no", "id", "kind", "hold", "arm", "verdict", "evidence", "ended")
        Reporter(SystemClock().utc).table(f"{len(rows)} receipts of {path}", columns, [_line(row) for row in rows])
    return int(ExitCode.RECEIPTS_INVALID if broken else ExitCode.DONE)


def summary(receipt: Receipt) -> dict[str, Any]:
    """The fields of a line."""
    predicate = receipt.predicate
    return {
        "sequence": predicate.chain.sequence,
        "id": receipt.id,
        "kind": predicate.kind,
        "window": predicate.position.window,
        "hold_number": predicate.position.hold_number,
        "arm": predicate.position.arm,
        "verdict": predicate.verdict.outcome.value,
        "reasons": list(predicate.verdict.reasons),
        "evidence": predicate.evidence.value,
        "plan_sha256": predicate.plan_sha256,
        "hosts": [host.name for host in predicate.hosts],
        "started_utc": predicate.started_utc,
        "ended_utc": predicate.ended_utc,
        "elapsed_ns": predicate.elapsed_ns,
    }


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    if "unreadable" in row:
        return ("?", "?", row["name"], "", "", "UNREADABLE", row["unreadable"], "")
    hold = "" if row["hold_number"] is None else str(row["hold_number"])
    return (
        str(row["sequence"]), row["id"][:16], row["kind"], hold, row["arm"] or "", row["verdict"], row["evidence"],
        row["ended_utc"],
    )  # fmt: skip
