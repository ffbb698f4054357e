"""``coordinator receipts show``: what ran, on what, from which source, what was found, what is not claimed."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coordinator.clock import SystemClock
from coordinator.errors import UsageError
from coordinator.render import Reporter, print_json
from coordinator.store import Store
from receipts.canonical import statement_document
from receipts.errors import ReceiptError
from receipts.fields import Position, Row
from receipts.model import Predicate, Statement
from receipts.reader import Receipt, read_receipt
from windows.exit_codes import ExitCode

MAX_SHOWN = 120
"""Longest cell; ``--json`` has everything."""


def load_receipt(store: Path, receipt_id: str) -> Receipt:
    """One receipt of a store by the first digits of its id.

    Raises:
        UsageError: None or several fit, or it cannot be read.
    """
    try:
        return read_receipt(Store(store).find(receipt_id)[1])
    except ReceiptError as error:
        raise UsageError(
            "no such receipt", found=str(error), where=str(store), next_step="`coordinator receipts list`"
        ) from error


def receipt_document(receipt: Receipt) -> dict[str, Any]:
    """The statement as plain values, with the id beside it."""
    statement = Statement.model_construct(subjects=receipt.subjects, predicate=receipt.predicate)
    return {"id": receipt.id, "statement": json_text.loads(json_text.dumps(statement_document(statement)))}


def show_receipt(store: Path, receipt_id: str, *, json: bool) -> int:
    """Print one receipt."""
    receipt = load_receipt(store, receipt_id)
    if json:
        print_json(receipt_document(receipt))
        return int(ExitCode.DONE)
    reporter, predicate = Reporter(SystemClock().utc), receipt.predicate
    reporter.table(f"receipt {receipt.id}", ("field", "value"), list(head_rows(receipt)))
    if predicate.hosts:
        reporter.table("on what", ("host", "fact", "value"), list(host_rows(predicate)))
    for name, rows in body_tables(predicate):
        lines = [(row.field, row.expected, row.found, word(row.ok)) for row in rows]
        reporter.table(name, ("field", "expected", "found", "holds"), [tuple(map(short, line)) for line in lines])
    others = [(name, short(value)) for name, value in body_values(predicate)]
    if others:
        reporter.table("records", ("field", "value"), others)
    return int(ExitCode.DONE)


def head_rows(receipt: Receipt) -> Iterator[tuple[str, str]]:
    """The common block for a reader who has never seen one."""
    predicate = receipt.predicate
    yield "kind", f"{predicate.kind} v{predicate.version}"
    yield "verdict (stated)", f"{predicate.verdict.outcome.value} {'; '.join(predicate.verdict.reasons)}"[:MAX_SHOWN]
    yield "evidence", predicate.evidence.value
    yield "scope", predicate.scope
    yield from (("not claimed", text) for text in predicate.not_claimed)
    yield "what ran", " ".join(predicate.argv) or "nothing"
    yield (
        "ended",
        f"{predicate.exit.kind.value} {predicate.exit.code if predicate.exit.code is not None else ''}".strip(),
    )
    yield "from source", f"{predicate.tool.name} {predicate.tool.version} tree {predicate.tool.source_sha256}"
    yield "plan", predicate.plan_sha256 or "none"
    yield "position", place_of(predicate.position)
    yield "time", f"{predicate.started_utc} to {predicate.ended_utc}, {predicate.elapsed_ns} ns"
    yield from (("fence epoch", f"{fence.host}: {fence.epoch}") for fence in predicate.fences)
    yield from (("environment", f"{name}={value}") for name, value in predicate.environment.items())
    yield from (("subject", f"{subject.sha256}  {subject.name}") for subject in receipt.subjects)
    yield from (("built on", f"{p.sha256}  {p.kind.value} ({p.role})") for p in predicate.parents)
    yield from (("raw file", f"{s.sha256}  {s.name} ({s.num_samples} samples, {s.unit})") for s in predicate.samples)
    link = predicate.chain
    before = f"after {link.previous}" if link.previous else "the first"
    yield "chain", f"number {link.sequence} of log {link.log}, {before}"


def place_of(position: Position) -> str:
    """Where in a campaign it happened, by what the receipt says and nothing else."""
    said = {
        "window": position.window, "hold": position.hold_number, "hold id": position.hold_id, "arm": position.arm,
        "try": position.attempt,
    }  # fmt: skip
    return ", ".join(f"{name} {value}" for name, value in said.items() if value is not None)


def host_rows(predicate: Predicate) -> Iterator[tuple[str, str, str]]:
    """Hosts and their GPUs, one fact a line."""
    for host in predicate.hosts:
        facts = host.model_dump(exclude={"gpus", "labels", "name"}) | dict(host.labels)
        yield from ((host.name, name, str(value)) for name, value in facts.items() if value not in (None, ""))
        for gpu in host.gpus:
            listed = gpu.model_dump(exclude={"labels", "clocks_mhz"}) | dict(gpu.labels)
            yield from ((host.name, f"gpu {name}", str(value)) for name, value in listed.items() if value is not None)
            yield from ((host.name, f"gpu clock {name}", f"{mhz} MHz") for name, mhz in gpu.clocks_mhz.items())


def body_tables(predicate: Predicate) -> Iterator[tuple[str, tuple[Row, ...]]]:
    """Every expected/found table of a body."""
    for name in type(predicate.body).model_fields:
        value = getattr(predicate.body, name)
        if isinstance(value, tuple) and value and isinstance(value[0], Row):
            yield name, value
    for observation in getattr(predicate.body, "observations", ()):
        checks = tuple(
            Row.model_construct(field=c.name, expected=c.expected, found=c.found, ok=c.ok, source=None)
            for c in observation.checks
        )
        yield f"checks of {observation.program} on {observation.host} ({observation.compute})", checks


def body_values(predicate: Predicate) -> Iterator[tuple[str, str]]:
    """Everything else of a body, flat."""
    tables = {name for name, _ in body_tables(predicate)}
    document = predicate.body.model_dump(mode="json", exclude=tables | {"observations"})
    yield from flatten(document)
    for observation in getattr(predicate.body, "observations", ()):
        for name, value in observation.values.items():
            yield f"{observation.host}.{name}", str(value)


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Leaves of a document with their dotted path; empty lists and objects have none."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from flatten(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from flatten(item, f"{path}[{index}]")
    else:
        yield path, "none" if value is None else str(value)


def word(ok: bool | None) -> str:
    """How a row reads."""
    return "not evaluated" if ok is None else "yes" if ok else "NO"


def short(text: str) -> str:
    """A cell that fits a line."""
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"
