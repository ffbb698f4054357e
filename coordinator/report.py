"""``coordinator receipts report``: verifies a store and writes one self-contained HTML page about it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from coordinator import report_sections as sections
from coordinator.clock import SystemClock
from coordinator.errors import UsageError
from coordinator.render import Reporter, print_json
from coordinator.report_html import page
from coordinator.store import Store
from coordinator.store_verify import read_signers
from coordinator.store_walk import Trust, walk
from receipts.errors import ReceiptError
from receipts.fields import Outcome
from receipts.findings import Verified
from windows.exit_codes import ExitCode

CONTENTS = (
    ("summary", "Does it hold?"),
    ("comparison", "Comparison"),
    ("holds", "HOLD windows"),
    ("arms", "Arms"),
    ("clocks", "Clocks and temperatures"),
    ("gates", "Gates"),
    ("receipts", "Receipts"),
    ("limits", "Not claimed"),
)


def write_report(store: Path, out: Path, *, signers: Path | None, json: bool) -> int:
    """Write the page; exit 0, or 60 when the store does not verify (the page says why)."""
    clock = SystemClock()
    try:
        facts = gather(Store(store), Trust(now_utc=clock.utc(), signers=read_signers(signers)))
    except ReceiptError as error:
        raise UsageError("no store could be read", found=str(error), where=str(store)) from error
    content = render(facts, store.name, clock.utc()).encode("utf-8")
    try:
        out.write_bytes(content)
    except OSError as error:
        raise UsageError(f"the page cannot be written: {error.strerror}", where=str(out)) from error
    outcome = facts.report.outcome
    sha256 = hashlib.sha256(content).hexdigest()
    if json:
        print_json({"file": str(out), "sha256": sha256, "result": outcome.value})
    else:
        rows = [(str(out), f"{len(content)}", outcome.value, sha256)]
        Reporter(clock.utc).table("report", ("file", "bytes", "verification", "sha256"), rows)
    return int(ExitCode.DONE if outcome is Outcome.PASS else ExitCode.RECEIPTS_INVALID)


def gather(store: Store, trust: Trust) -> sections.Facts:
    """Verify and keep everything that can be read."""
    kept: list[Verified] = []
    report = walk(store, trust, keep=lambda _, verified: kept.append(verified) if verified is not None else None)
    return sections.Facts(report, kept, store.read_sample)


def render(facts: sections.Facts, name: str, written_utc: str) -> str:
    """The page."""
    parts = (
        sections.summary(facts, name, written_utc),
        sections.comparisons(facts),
        sections.holds(facts),
        sections.arms(facts),
        sections.clocks(facts),
        sections.gates(facts),
        sections.receipts(facts),
        sections.limits(facts),
    )
    return page("Receipt report", parts, CONTENTS)
