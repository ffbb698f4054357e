"""``coordinator receipts verify``: compares a store with what is remembered elsewhere, and prints the findings.

The walk is ``store_walk``, the judging ``receipts.verify``; this file reads what is trusted, and renders. Nothing but
the arguments decides what is checked: no configuration of the working directory, no environment.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from coordinator.clock import SystemClock
from coordinator.errors import UsageError
from coordinator.render import Reporter, print_json
from coordinator.store import Store
from coordinator.store_files import read_file
from coordinator.store_marks import Marks
from coordinator.store_merged import Note
from coordinator.store_walk import Trust, walk
from receipts.bodies import Witness
from receipts.chain import Head, parse_head
from receipts.errors import ReceiptError
from receipts.fields import Outcome
from receipts.findings import Finding, LogReport, Outline
from receipts.reader import read_receipt
from receipts.signing import AllowedSigners, parse_allowed_signers
from windows.exit_codes import ExitCode


@dataclass(frozen=True)
class StoreVerdict:
    """What verifying the whole store found."""

    report: LogReport
    since: Head | None = None

    @property
    def is_whole(self) -> bool:
        """No finding at all, and something was looked at (or nothing is new since a head that was accepted before)."""
        is_unchanged = self.since is not None and self.report.head == self.since
        return (bool(self.report.num_receipts) or is_unchanged) and not self.report.findings

    def rows(self) -> list[tuple[str, str]]:
        """Lines of the final table."""
        head = self.report.head
        word = "INTEGRITY ONLY" if self.report.is_integrity_only else f"{self.report.num_signed} signed"
        found = [("finding", describe(finding)) for finding in self.report.findings]
        holds = "every hash, parent and verdict holds" if self.is_whole else "nothing to verify"
        return [
            ("receipts", f"{self.report.num_receipts}, {word}"),
            ("head", str(head.head) if head else "none"),
            ("verify", f"{len(found)} findings" if found else holds),
            *found,
        ]

    def to_document(self) -> dict[str, Any]:
        """Plain values for ``--json``."""
        head = self.report.head
        return {
            "result": "PASS" if self.is_whole else self.report.outcome.value,
            "integrity_only": self.report.is_integrity_only,
            "num_receipts": self.report.num_receipts,
            "num_signed": self.report.num_signed,
            "log": head.log if head else None,
            "head": head.head if head else None,
            "count": head.count if head else 0,
            "since": self.since.head if self.since else None,
            "findings": [finding_document(finding) for finding in self.report.findings],
        }


def describe(finding: Finding) -> str:
    """One finding as a line."""
    return f"{finding.outcome.value} {finding.code.value} {finding.where}: {finding.message}"


def finding_document(finding: Finding) -> dict[str, str]:
    """One finding as plain values."""
    return {
        "code": finding.code.value,
        "outcome": finding.outcome.value,
        "where": finding.where,
        "message": finding.message,
    }


def verify_store(path: Path, signers: AllowedSigners | None = None, jobs: int | None = 1) -> StoreVerdict:
    """Verify as a stranger would: bytes, chain, sums, parents, raw samples, verdicts; no clock, signatures if told."""
    return StoreVerdict(walk(Store(path), Trust(signers=signers), jobs=jobs))


def run_verify(
    path: Path,
    *,
    junit: Path | None,
    json: bool,
    since: str | None,
    signers: Path | None,
    anchor: Path | None,
    state: Path | None,
    jobs: int | None = None,
) -> int:
    """The command. A store that is whole moves the mark; one that is not never does."""
    store, marks, clock = Store(path), Marks(state), SystemClock()
    start = clock.monotonic_ns()
    try:
        head = store.head()
        trust = Trust(
            now_utc=clock.utc(),
            signers=read_signers(signers),
            high_water=marks.get(head.log),
            witnesses=read_anchor(anchor),
        )
        base = read_since(store, since) if since else None
        cases: list[Case] = []
        note: Note = (lambda *found: cases.append(Case(*found))) if junit else (lambda *_: None)
        verdict = StoreVerdict(walk(store, trust, note=note, since=base, jobs=jobs), base)
    except ReceiptError as error:
        return unreadable(error, path, json=json)
    if junit:
        from coordinator.store_junit import write_junit

        write_junit(junit, verdict.report, cases, elapsed_ns=clock.monotonic_ns() - start)
    if verdict.is_whole and verdict.report.head is not None:
        remember(marks, verdict.report.head)
    if json:
        print_json(verdict.to_document())
    else:
        Reporter(clock.utc).table(f"receipts of {path}", ("what", "found"), verdict.rows())
    return int(ExitCode.DONE if verdict.is_whole else ExitCode.RECEIPTS_INVALID)


def remember(marks: Marks, head: Head) -> None:
    """Move the mark; a home that cannot be written is said, and changes no verdict."""
    try:
        marks.advance(head)
    except OSError as error:
        lines = [f"the accepted head could not be remembered: {error}", "  next: name a folder with --state"]
        Reporter(SystemClock().utc).error(lines)


class Case(NamedTuple):
    """One receipt's line in a JUnit report."""

    outline: Outline
    findings: tuple[Finding, ...]


def read_signers(path: Path | None) -> AllowedSigners | None:
    """The allowed-signers file that was named, if one was.

    Raises:
        UsageError: It is not one: the store is not what is wrong.
    """
    if path is None:
        return None
    try:
        return parse_allowed_signers(read_file(path))
    except ReceiptError as error:
        raise UsageError(f"not an allowed-signers file: {error}", where=str(path)) from error


def read_anchor(path: Path | None) -> tuple[Witness, ...]:
    """A HEAD file that was kept elsewhere (a CI log, a commit), as a witness.

    Raises:
        UsageError: It is not one.
    """
    if path is None:
        return ()
    try:
        head = parse_head(read_file(path, 4096), str(path))
    except ReceiptError as error:
        raise UsageError(f"not a HEAD file: {error}", where=str(path)) from error
    if head.head is None:
        return ()
    return (Witness(host="anchor", log=head.log, sequence=head.count - 1, head=head.head),)


def read_since(store: Store, since: str) -> Head:
    """The head that ``--since`` names: a receipt of this store by its id, or a HEAD file.

    Raises:
        receipts.errors.ReceiptError: It is neither.
        UsageError: A file that does not exist.
    """
    if len(since) >= 6 and set(since) <= set("0123456789abcdef"):
        receipt = read_receipt(store.find(since)[1])
        link = receipt.predicate.chain
        return Head(log=link.log, count=link.sequence + 1, head=receipt.id)
    if not Path(since).exists():
        raise UsageError("--since names neither a receipt id nor a file", found=since[:80])
    return parse_head(read_file(Path(since), 4096), since)


def unreadable(error: ReceiptError, path: Path, *, json: bool) -> int:
    """Say that there is nothing to walk, with the one finding; the exit code of receipts that do not verify."""
    if json:
        finding = Finding(error.code, Outcome.FAIL, error.where, error.message)
        print_json({"result": "FAIL", "findings": [finding_document(finding)]})
    else:
        Reporter(SystemClock().utc).error([f"the store cannot be verified: {error}", f"  where: {path}"])
    return int(ExitCode.RECEIPTS_INVALID)
