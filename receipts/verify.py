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
witnesses recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from receipts import bodies
from receipts.canonical import receipt_id
from receipts.chain import Head
from receipts.errors import Code, ReceiptError
from receipts.evidence import age_s, overclaims, values_of
from receipts.fields import Evidence, Kind, Outcome, Verdict
from receipts.findings import Entry, Finding, LogReport, Options, Sources, Verified
from receipts.model import Predicate
from receipts.raw import check_figures, check_sample
from receipts.reader import Receipt, read_receipt
from receipts.signing import Signature, verify_envelope
from receipts.verdict import combine, conclude, conclude_exit, conclude_rows, is_stronger, worst

_KINDS: Final = tuple(Kind)
_DERIVED: Final = frozenset({"comparison", "admission", "budget"})
_CLOCK_SLACK: Final = 300
"""Seconds a receipt may be ahead of the verifier's clock."""


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
        self._num_receipts += 1
        start = len(self._findings)
        receipt = self._read(entry)
        if receipt is None:
            # Its place in the log is taken, but by what nobody can say: the next link cannot be compared.
            self._skip_one()
            return None
        self._check_chain(receipt, entry)
        self._check_sums(entry, receipt)
        self._check_parents(receipt)
        self._check_evidence(receipt)
        self._check_times(receipt)
        verdict = self._check_verdict(receipt, self._check_samples(receipt))
        signatures = self._check_signatures(receipt, entry.envelopes)
        self.remember(receipt)
        self._take_witnesses(receipt)
        findings = tuple(self._findings[start:])
        if findings:
            stated = tuple(f"{finding.code.value}: {finding.message}" for finding in findings)
            verdict = combine([verdict, Verdict(outcome=worst(f.outcome for f in findings), reasons=stated)])
        return Verified(receipt, findings, verdict, signatures)

    def note(self, finding: Finding) -> None:
        """Take a finding of whoever walks, about something that is no receipt of this log."""
        self._findings.append(finding)

    def _find(self, code: Code, where: str, message: str, outcome: Outcome = Outcome.FAIL) -> None:
        self._findings.append(Finding(code, outcome, where, message))

    def _read(self, entry: Entry) -> Receipt | None:
        # (1) The file.
        if entry.refused is not None:
            self._find(entry.refused.code, entry.name, entry.refused.message)
            return None
        # (2) The bytes, and the digest in the name.
        try:
            receipt = read_receipt(entry.content)
        except ReceiptError as error:
            is_torn = error.code in {Code.NOT_JSON, Code.NOT_UTF8, Code.TOO_DEEP} and not entry.content.endswith(b"}")
            self._find(Code.TORN if is_torn else error.code, entry.name, f"{error.message} {error.where}".strip())
            return None
        link, kind = receipt.predicate.chain, receipt.predicate.kind
        if entry.name != f"{link.sequence:08d}-{kind}-{receipt.id[:12]}.json":
            self._find(Code.DIGEST_MISMATCH, entry.name, f"the content is number {link.sequence}, {kind}, {receipt.id}")
        return receipt

    def _skip_one(self) -> None:
        self._is_linked = False
        self._next += 1
        if self._head is not None:
            self._head = Head(self._head.log, self._head.count + 1, self._head.head)

    def _check_chain(self, receipt: Receipt, entry: Entry) -> None:
        # (3) The chain. After a break the walk goes on from what is there, so that one cause gives one finding.
        link = receipt.predicate.chain
        if self._head is None:
            # The first receipt names the log, unless HEAD does.
            self._head = Head(self.options.head.log if self.options.head else link.log, self._next, None)
        expected = self._head if self._is_linked else Head(self._head.log, self._head.count, link.previous)
        try:
            self._head = expected.follow(receipt)
            self._place(link.sequence, receipt)
            self._is_linked = True
        except ReceiptError as error:
            self._find(error.code, entry.name, error.message)
            if error.code is Code.FOREIGN:
                return
            if link.sequence >= self._head.count:
                self._place(link.sequence, receipt)
                self._head = Head(self._head.log, link.sequence + 1, receipt.id)
            self._is_linked = link.sequence + 1 == self._head.count

    def _place(self, sequence: int, receipt: Receipt) -> None:
        self._ids[sequence], self._next = bytes.fromhex(receipt.id), sequence + 1

    def _check_sums(self, entry: Entry, receipt: Receipt) -> None:
        # (4) SHA256SUMS names exactly what is here.
        if self.options.sums is None:
            return
        listed = [(f"receipts/{entry.name}", receipt.id)]
        listed += [(f"samples/{sample.sha256}", sample.sha256) for sample in receipt.predicate.samples]
        for name, envelope in zip(entry.envelope_names, entry.envelopes, strict=False):
            listed.append((f"receipts/{name}", receipt_id(envelope)))
        for path, expected in listed:
            found = self.options.sums.get(path)
            if found != expected:
                message = f"expected a line {expected}  {path}, found {found or 'none'}"
                self._find(Code.SUMS_MISMATCH, entry.name, message)
            self._named.add(path)

    def _check_parents(self, receipt: Receipt) -> None:
        # (5) Parents, and an admission's inputs, came before it and are of the kind it says.
        named = [(parent.kind, parent.sha256) for parent in receipt.predicate.parents]
        if isinstance(receipt.predicate.body, bodies.AdmissionBody):
            named += [(item.kind, item.sha256) for item in receipt.predicate.body.inputs]
        for kind, digest in named:
            found = self._known(digest)
            if found is None:
                self._find(Code.MISSING_PARENT, receipt.id, f"no earlier receipt {digest} ({kind.value})")
            elif _KINDS[found >> 2] is not kind:
                self._find(Code.MISSING_PARENT, receipt.id, f"{digest} is a {_KINDS[found >> 2]}, not a {kind.value}")

    def _known(self, digest: str) -> int | None:
        known = self.seen.get(bytes.fromhex(digest))
        if known is None and self._since is not None:
            content = self.options.load(digest)
            if content is not None:
                try:
                    known = _summary(read_receipt(content, expected_id=digest).predicate)
                except ReceiptError:
                    return None
                self.seen[bytes.fromhex(digest)] = known
        return known

    def _check_evidence(self, receipt: Receipt) -> None:
        # (6) A derived receipt is as strong as its weakest parent; a measured one shows the hardware it was on.
        predicate = receipt.predicate
        strengths = [known & 3 for p in predicate.parents if (known := self._known(p.sha256)) is not None]
        if predicate.kind in _DERIVED and strengths and predicate.evidence.strength > min(strengths):
            self._find(Code.OVERCLAIM, receipt.id, f"{predicate.evidence.value}, with a weaker parent")
        if predicate.evidence is Evidence.MEASURED:
            for message in overclaims(predicate):
                self._find(Code.OVERCLAIM, receipt.id, message)

    def _check_times(self, receipt: Receipt) -> None:
        # (7) RFC 3339 with Z and whole seconds first: text order is time order down to the second.
        predicate, now = receipt.predicate, self.options.now_utc
        if predicate.ended_utc[:19] < predicate.started_utc[:19] and not predicate.hosts:
            self._find(Code.CLOCK, receipt.id, f"ended {predicate.ended_utc} before it started", Outcome.UNKNOWN)
        if (
            now is not None
            and predicate.started_utc[:19] > now[:19]
            and age_s(predicate.started_utc, now) < -_CLOCK_SLACK
        ):
            self._find(Code.CLOCK, receipt.id, f"started {predicate.started_utc}, after now ({now})")

    def _check_samples(self, receipt: Receipt) -> dict[str, bytes]:
        # (8) Raw files: digest, size, number of lines. A missing one is UNKNOWN, not broken.
        contents: dict[str, bytes] = {}
        for sample in receipt.predicate.samples:
            try:
                content = self.options.sample(sample.sha256)
            except ReceiptError as error:
                self._find(error.code, receipt.id, f"raw file {sample.name}: {error.message}")
                continue
            if content is None:
                self._find(Code.MISSING_SAMPLE, receipt.id, f"raw file {sample.name} is not here", Outcome.UNKNOWN)
                continue
            message = check_sample(sample, content)
            if message:
                self._find(Code.DIGEST_MISMATCH, receipt.id, f"raw file {sample.name}: {message}")
            else:
                contents[sample.name] = content
        return contents

    def _check_verdict(self, receipt: Receipt, contents: Mapping[str, bytes]) -> Verdict:
        # (9) The verdict from the records; its text is never input.
        predicate = receipt.predicate
        try:
            computed = self._recompute(predicate, contents)
        except ReceiptError as error:
            computed = Verdict(outcome=Outcome.FAIL, reasons=(str(error)[:400],))
        # A rule that was passed in may trip over hostile values: that refuses the receipt, never the walk.
        except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
            reason = f"cannot be computed again: {type(error).__name__}: {error}"[:400]
            computed = Verdict(outcome=Outcome.FAIL, reasons=(reason,))
        if not is_stronger(predicate.verdict.outcome, computed.outcome):
            return predicate.verdict
        reasons = "; ".join(computed.reasons)[:400]
        stated = predicate.verdict.outcome.value
        # What only a missing raw file leaves open is UNKNOWN; a contradiction is a failure.
        self._find(
            Code.RECOMPUTE, receipt.id, f"states {stated}, its records give {computed.outcome.value}: {reasons}",
            computed.outcome if len(contents) < len(predicate.samples) else Outcome.FAIL,
        )  # fmt: skip
        return computed

    def _recompute(self, predicate: Predicate, contents: Mapping[str, bytes]) -> Verdict:
        kind = Kind(predicate.kind)
        verdicts = [conclude(kind, predicate.body), conclude_exit(predicate)]
        tables = [check_figures(values, predicate.samples, contents) for values in values_of(predicate)]
        verdicts += [conclude_rows(rows) for rows in tables if rows]
        rule = self.options.recompute.get(kind)
        if rule is not None:
            verdicts.append(rule(predicate, Sources(self._parent, contents.get)))
        return combine(verdicts)

    def _parent(self, digest: str) -> Predicate | None:
        content = self.options.load(digest)
        return None if content is None else read_receipt(content, expected_id=digest).predicate

    def _check_signatures(self, receipt: Receipt, envelopes: tuple[bytes, ...]) -> tuple[Signature, ...]:
        # (10) Unique keys count once, over all envelopes.
        if self.options.signers is None:
            return ()
        link = receipt.predicate.chain
        valid: dict[str, Signature] = {}
        for envelope in envelopes:
            try:
                found = verify_envelope(
                    envelope, receipt.content, self.options.signers, log=link.log, sequence=link.sequence
                )
                valid.update({signature.keyid: signature for signature in found})
            except ReceiptError as error:
                self._find(error.code, receipt.id, error.message)
        self._num_signed += bool(valid)
        if not valid and self.options.require_signature:
            self._find(Code.UNSIGNED, receipt.id, "no valid signature of an allowed signer")
        return tuple(valid.values())

    def remember(self, receipt: Receipt) -> None:
        """Later receipts may build on this one; also for a receipt of another log that was merged."""
        self.seen[bytes.fromhex(receipt.id)] = _summary(receipt.predicate)

    def _take_witnesses(self, receipt: Receipt) -> None:
        # A hold says which heads its guards keep; those guards can be asked, so what they have must be in this log.
        for host in getattr(receipt.predicate.body, "hosts", ()):
            if isinstance(host, bodies.HeldHost):
                self._witnesses += [w for w in (host.witness_open, host.witness_close) if w is not None]

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


def _summary(predicate: Predicate) -> int:
    return _KINDS.index(Kind(predicate.kind)) << 2 | predicate.evidence.strength


def verify_log(entries: Iterable[Entry], options: Options, since: Head | None = None) -> LogReport:
    """Verify a log in one call."""
    verifier = LogVerifier(options, since)
    for entry in entries:
        verifier.add(entry)
    return verifier.finish()
