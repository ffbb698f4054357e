"""Logs that were merged into a store: where they lie, how a receipt links them, how they are verified with it.

A merged log is a whole store in ``logs/<log>/``, never written again. It counts from the receipt that links it on.
"""

from __future__ import annotations

import contextlib
import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from coordinator.store import Store
from coordinator.store_files import read_file
from coordinator.store_snapshot import RECEIPT_NAME
from receipts.bodies import AttemptBody
from receipts.canonical import canonical_bytes
from receipts.chain import Head, parse_head
from receipts.errors import Code, ReceiptError
from receipts.fields import Outcome
from receipts.findings import Finding, LogReport, Outline
from receipts.verify import LogVerifier

MERGE_COMMAND: Final = "receipts-merge"
MAX_SUMS_BYTES: Final = 1 << 30

Note = Callable[[Outline, tuple[Finding, ...]], object]
"""What is done with every entry of a walk and with what was found about it."""


def merged_store(store: Store, log: str) -> Store:
    """The store of a log that was merged."""
    return Store(store.path / "logs" / log)


def with_merged(store: Store) -> Iterator[Store]:
    """A store and every one merged into it."""
    yield store
    for name in sorted(store.names("logs")):
        yield from with_merged(merged_store(store, name))


def loader(store: Store) -> Callable[[str], bytes | None]:
    """A look-up of receipts by their whole id over one listing, merged logs included; None for what is not there."""
    # Sorted names, not a table: each process that examines a long log has its own.
    listed: list[tuple[str, list[str]]] = []

    def load(receipt_id: str) -> bytes | None:
        if not listed:
            listed.extend(_receipt_names(store))
        for folder, names in listed:
            first = bisect_left(names, receipt_id[:12], key=_digits)
            last = bisect_right(names, receipt_id[:12], lo=first, key=_digits)
            for name in names[first:last]:
                with contextlib.suppress(ReceiptError):
                    content = read_file(f"{folder}/{name}")
                    if hashlib.sha256(content).hexdigest() == receipt_id:
                        return content
        return None

    return load


def _receipt_names(store: Store) -> list[tuple[str, list[str]]]:
    """Folders with their receipts' names by the digits in them; a folder that cannot be listed is refused each time."""
    return [
        (f"{kept.path}/receipts", sorted(filter(RECEIPT_NAME.fullmatch, kept.names("receipts")), key=_digits))
        for kept in with_merged(store)
    ]


def _digits(name: str) -> str:
    return name[-17:-5]


class MergedLogs:
    """Verifies each merged log where its link stands, so that only later receipts may build on it.

    Args:
        store: The store they are merged into.
        verifier: Walks the store's own log and takes what is found.
        walk: Verifies one store, handing on every outline.
    """

    def __init__(self, store: Store, verifier: LogVerifier, walk: Callable[[Store, Note], LogReport]) -> None:
        self._store, self._verifier, self._walk = store, verifier, walk
        self._left = sorted(store.names("logs"))

    def follow(self, link: MergeLink) -> None:
        """Walk the merged log that a receipt links."""
        where, log = f"logs/{link.head.log}", merged_store(self._store, link.head.log)
        if link.head.log not in self._left:
            self._find(Code.CHAIN_GAP, where, f"a log of {link.head.count} receipts was merged here and is missing")
            return
        self._left.remove(link.head.log)
        if log.path.is_symlink():
            self._find(Code.NOT_A_FILE, where, "expected a folder, found a link")
            return
        try:
            sums = hashlib.sha256(read_file(log.path / "SHA256SUMS", MAX_SUMS_BYTES)).hexdigest()
            report = self._walk(log, self._remember)
        except ReceiptError as error:
            self._find(error.code, f"{where}/{error.where}", error.message)
            return
        for finding in report.findings:
            self._find(finding.code, f"{where}/{finding.where}", finding.message, finding.outcome)
        if report.head != link.head or sums != link.sums_sha256:
            message = f"merged with {link.head.count} receipts, head {link.head.head} and other lists"
            self._find(Code.HEAD_MISMATCH, where, f"{message}; found {report.num_receipts}")

    def finish(self) -> None:
        """What no receipt links is foreign, or a merge that was not finished."""
        for name in self._left:
            message = "no receipt links this log: merge it again if a merge died, else remove it"
            self._find(Code.FOREIGN, f"logs/{name}", message)

    def _remember(self, outline: Outline, _findings: tuple[Finding, ...]) -> None:
        if outline.facts is not None:
            self._verifier.remember(outline.facts)

    def _find(self, code: Code, where: str, message: str, outcome: Outcome = Outcome.FAIL) -> None:
        self._verifier.note(Finding(code, outcome, where, message))


@dataclass(frozen=True)
class MergeLink:
    """What a linking receipt says of the log that was merged."""

    head: Head
    sums_sha256: str


def merge_link(body: Any) -> MergeLink | None:
    """The link in a receipt's body; None in every other receipt."""
    if not isinstance(body, AttemptBody) or body.command != MERGE_COMMAND or body.exit_code != 0:
        return None
    try:
        said = body.labels
        head = parse_head(canonical_bytes({"log": said["log"], "count": int(said["count"]), "head": said["head"]}))
        return MergeLink(head, said["sums-sha256"])
    except (KeyError, ValueError, ReceiptError):
        # It links nothing, so what it may have meant is found as foreign.
        return None
