"""Verification of a whole log: bytes in, findings out. Pure: no files, no clock, no environment.

Every receipt passes the numbered steps below in the order of the log; only digests of what was seen are kept, so memory
grows by about two hundred bytes per receipt. A finding never stops the walk: an auditor wants all of them.

Steps per receipt::

    (1) the file: regular, well named            (6) its evidence is not stronger than its hosts and parents allow
    (2) the bytes: strict reader, name = digest  (7) its times
    (3) the chain                                (8) its raw samples
    (4) SHA256SUMS                               (9) its verdict, computed again
    (5) its parents came before it               (10) its signatures

and at the end (11) HEAD, (12) SHA256SUMS and the folder have nothing else, (13) the high-water mark, (14) what
witnesses recorded. What needs one receipt alone is in ``receipts.examine``; this file has what needs the order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from receipts.chain import Head
from receipts.errors import Code, ReceiptError
from receipts.examine import examine
from receipts.fields import Evidence, Kind, Outcome, Verdict
from receipts.findings import Entry, Facts, Finding, LogReport, Options, Outline, Verified
from receipts.reader import read_receipt
from receipts.verdict import combine, worst

_KINDS: Final = tuple(Kind)
_PLACES: Final = {kind.value: place for place, kind in enumerate(_KINDS)}
_DERIVED: Final = frozenset({"comparison", "admission", "budget"})


class LogVerifier:
    """Walks one log. Give it every entry in order, then ``finish``."""

    def __init__(self, options: Options, since: Head | None = None) -> None:
        self.options = options
        self._head = since
        self._since = since
        self._is_linked = True
        self._first = self._next = since.count if since else 0
        self._ids: dict[int, bytes] = {}
        """By sequence; not a list, because a hostile receipt may claim any place."""
        self.seen: dict[bytes, int] = dict(options.other_logs)
        """Digest -> kind and evidence of every receipt so far."""
        self._named: set[str] = set()
        self._findings: list[Finding] = []
        self._num_receipts = self._num_signed = 0
        self._witnesses = list(options.witnesses)

    # -- one receipt ---------------------------------------------------------------------------------------------

    def add(self, entry: Entry) -> Verified | None:
        """Steps 1 to 10 for one entry; None when it could not even be read."""
        examined = examine(entry, self.options)
        findings, verdict = self.place(examined.outline), examined.verdict
        if examined.receipt is None:
            return None
        if findings:
            stated = tuple(f"{finding.code.value}: {finding.message}" for finding in findings)
            verdict = combine([verdict, Verdict(outcome=worst(f.outcome for f in findings), reasons=stated)])
        return Verified(examined.receipt, findings, verdict, examined.signatures)

    def place(self, outline: Outline) -> tuple[Finding, ...]:
        """Take an entry that was examined, as the next one of the log; everything that was found about it."""
        self._num_receipts += 1
        start = len(self._findings)
        facts = outline.facts
        if facts is None:
            self._findings += outline.findings
            # Its place in the log is taken, but by what nobody can say: the next link cannot be compared.
            self._skip_one()
            return tuple(self._findings[start:])
        if outline.name != f"{facts.link.sequence:08d}-{facts.kind}-{facts.id[:12]}.json":
            message = f"the content is number {facts.link.sequence}, {facts.kind}, {facts.id}"
            self._find(Code.DIGEST_MISMATCH, outline.name, message)
        self._check_chain(facts, outline.name)
        self._check_sums(facts, outline.name)
        self._check_parents(facts)
        self._findings += outline.findings
        self._num_signed += facts.is_signed
        self.remember(facts)
        self._witnesses += facts.witnesses
        return tuple(self._findings[start:])

    def note(self, finding: Finding) -> None:
        """Take a finding of whoever walks, about something that is no receipt of this log."""
        self._findings.append(finding)

    def _find(self, code: Code, where: str, message: str, outcome: Outcome = Outcome.FAIL) -> None:
        self._findings.append(Finding(code, outcome, where, message))

    def _skip_one(self) -> None:
        self._is_linked = False
        self._next += 1
        if self._head is not None:
            self._head = Head(self._head.log, self._head.count + 1, self._head.head)

    def _check_chain(self, facts: Facts, name: str) -> None:
        # (3) The chain. After a break the walk goes on from what is there, so that one cause gives one finding.
        if self._head is None:
            # The first receipt names the log, unless HEAD does.
            self._head = Head(self.options.head.log if self.options.head else facts.link.log, self._next, None)
        expected = self._head if self._is_linked else Head(self._head.log, self._head.count, facts.link.previous)
        try:
            self._head = expected.follow(facts.id, facts.link)
            self._place(facts)
            self._is_linked = True
        except ReceiptError as error:
            self._find(error.code, name, error.message)
            if error.code is Code.FOREIGN:
                return
            if facts.link.sequence >= self._head.count:
                self._place(facts)
                self._head = Head(self._head.log, facts.link.sequence + 1, facts.id)
            self._is_linked = facts.link.sequence + 1 == self._head.count

    def _place(self, facts: Facts) -> None:
        self._ids[facts.link.sequence], self._next = bytes.fromhex(facts.id), facts.link.sequence + 1

    def _check_sums(self, facts: Facts, name: str) -> None:
        # (4) SHA256SUMS names exactly what is here.
        if self.options.sums is None:
            return
        for path, expected in facts.files:
            found = self.options.sums.get(path)
            if found != expected:
                message = f"expected a line {expected}  {path}, found {found or 'none'}"
                self._find(Code.SUMS_MISMATCH, name, message)
            self._named.add(path)

    def _check_parents(self, facts: Facts) -> None:
        # (5) Parents, and an admission's inputs, came before it and are of the kind it says.
        for kind, digest in facts.built_on:
            found = self._known(digest)
            if found is None:
                self._find(Code.MISSING_PARENT, facts.id, f"no earlier receipt {digest} ({kind})")
            elif found >> 2 != _PLACES[kind]:
                self._find(Code.MISSING_PARENT, facts.id, f"{digest} is a {_KINDS[found >> 2]}, not a {kind}")
        # (6) A derived receipt is as strong as its weakest parent.
        if facts.kind in _DERIVED:
            strengths = [known & 3 for digest in facts.parents if (known := self._known(digest)) is not None]
            if strengths and facts.evidence.strength > min(strengths):
                self._find(Code.OVERCLAIM, facts.id, f"{facts.evidence.value}, with a weaker parent")

    def _known(self, digest: str) -> int | None:
        known = self.seen.get(bytes.fromhex(digest))
        if known is None and self._since is not None:
            content = self.options.load(digest)
            if content is not None:
                try:
                    predicate = read_receipt(content, expected_id=digest).predicate
                except ReceiptError:
                    return None
                known = _summary(predicate.kind, predicate.evidence)
                self.seen[bytes.fromhex(digest)] = known
        return known

    def remember(self, facts: Facts) -> None:
        """Later receipts may build on this one; also for a receipt of another log that was merged."""
        self.seen[bytes.fromhex(facts.id)] = _summary(facts.kind, facts.evidence)

    # -- the log as a whole --------------------------------------------------------------------------------------

    def finish(self) -> LogReport:
        """Steps 11 to 14."""
        self._check_head()
        if self.options.sums is not None and self._since is None:
            # (12) A line for a file that is not here: something was removed.
            for path in sorted(self.options.sums.keys() - self._named):
                self._find(Code.SUMS_MISMATCH, path, "SHA256SUMS names it and no receipt accounts for it")
        for path in sorted(set(self.options.others) - self._named):
            self._find(Code.FOREIGN, path, "it lies in the store and no receipt accounts for it")
        # (13) What was accepted before must still be there.
        if self.options.high_water is not None:
            mark = self.options.high_water
            self._check_contains(mark.log, mark.count - 1, mark.head, "the high-water mark")
        # (14) And so must what the guards recorded.
        for witness in self._witnesses:
            self._check_contains(witness.log, witness.sequence, witness.head, f"the witness {witness.host}")
        return LogReport(
            self._head,
            self._num_receipts,
            self._num_signed,
            tuple(self._findings),
            self.options.signers is None,
            len(self._witnesses),
        )

    def _check_head(self) -> None:
        # (11) HEAD is the end of what is here.
        told, found = self.options.head, self._head
        if told is None or (self._num_receipts == 0 and told.count == self._first):
            return
        if found is None or (told.log, told.count, told.head) != (found.log, found.count, found.head):
            is_cut = found is None or told.count > found.count
            message = f"HEAD says {told.count} receipt(s) ending in {told.head}, found {found.count if found else 0}"
            self._find(Code.CHAIN_GAP if is_cut else Code.HEAD_MISMATCH, "HEAD", message)

    def _check_contains(self, log: str, sequence: int, digest: str | None, who: str) -> None:
        if self._head is None or log != self._head.log or digest is None:
            self._find(Code.FOREIGN, "HEAD", f"{who} speaks of log {log[:12]}, this is another")
            return
        if sequence < self._first:
            return
        known = self._ids.get(sequence)
        found = known.hex() if known else "another" if sequence < self._next else "the log ends before it"
        if found != digest:
            self._find(Code.ROLLBACK, "HEAD", f"{who} has number {sequence} as {digest}, found {found}")


def _summary(kind: str, evidence: Evidence) -> int:
    return _PLACES[kind] << 2 | evidence.strength


def verify_log(entries: Iterable[Entry], options: Options, since: Head | None = None) -> LogReport:
    """Verify a log in one call."""
    verifier = LogVerifier(options, since)
    for entry in entries:
        verifier.add(entry)
    return verifier.finish()
