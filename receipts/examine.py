"""What can be said of one receipt alone: its bytes, its raw files, its verdict computed again, its signatures.

Steps 1 and 2 and 7 to 10 of ``receipts.verify``, and the half of step 6 that needs no other receipt. Nothing here
depends on the order of the log, so entries may be examined in any order and in several processes; ``LogVerifier`` then
takes the outlines in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from receipts import bodies
from receipts.canonical import receipt_id
from receipts.errors import Code, ReceiptError
from receipts.evidence import age_s, overclaims, values_of
from receipts.fields import Evidence, Kind, Outcome, Verdict
from receipts.findings import Entry, Facts, Finding, Options, Outline, Sources
from receipts.model import Predicate
from receipts.raw import check_figures, check_sample
from receipts.reader import Receipt, read_receipt
from receipts.signing import Signature, verify_envelope
from receipts.verdict import combine, conclude, conclude_exit, conclude_rows, is_stronger

_CLOCK_SLACK: Final = 300
"""Seconds a receipt may be ahead of the verifier's clock."""


@dataclass(frozen=True)
class Examined:
    """One entry, with the receipt itself where it could be read.

    Attributes:
        outline: What the log as a whole needs of it.
        receipt: The receipt, None when it could not be read.
        verdict: Never stronger than the recomputed one; UNKNOWN when it could not be read.
        signatures: Valid ones, one per key.
    """

    outline: Outline
    receipt: Receipt | None
    verdict: Verdict
    signatures: tuple[Signature, ...]


def examine(entry: Entry, options: Options) -> Examined:
    """Every step that needs nothing but this entry, its raw files and the bytes of its parents."""
    return _Examiner(entry.name, options).examine(entry)


class _Examiner:
    def __init__(self, name: str, options: Options) -> None:
        self.name, self.options = name, options
        self._findings: list[Finding] = []

    def examine(self, entry: Entry) -> Examined:
        receipt = self._read(entry)
        if receipt is None:
            unread = Verdict(outcome=Outcome.UNKNOWN, reasons=("it could not be read",))
            return Examined(Outline(self.name, None, tuple(self._findings)), None, unread, ())
        predicate = receipt.predicate
        if predicate.evidence is Evidence.MEASURED:
            # (6) A measured receipt shows the hardware it was on.
            for message in overclaims(predicate):
                self._find(Code.OVERCLAIM, receipt.id, message)
        self._check_times(receipt)
        verdict = self._check_verdict(receipt, self._check_samples(receipt))
        signatures = self._check_signatures(receipt, entry.envelopes)
        facts = _facts_of(receipt, entry, is_signed=bool(signatures))
        return Examined(Outline(self.name, facts, tuple(self._findings)), receipt, verdict, signatures)

    def _find(self, code: Code, where: str, message: str, outcome: Outcome = Outcome.FAIL) -> None:
        self._findings.append(Finding(code, outcome, where, message))

    def _read(self, entry: Entry) -> Receipt | None:
        # (1) The file.
        if entry.refused is not None:
            self._find(entry.refused.code, entry.name, entry.refused.message)
            return None
        # (2) The bytes. Whether the name says the same is asked by whoever has the log's order.
        try:
            return read_receipt(entry.content)
        except ReceiptError as error:
            is_torn = error.code in {Code.NOT_JSON, Code.NOT_UTF8, Code.TOO_DEEP} and not entry.content.endswith(b"}")
            self._find(Code.TORN if is_torn else error.code, entry.name, f"{error.message} {error.where}".strip())
            return None

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
        if not valid and self.options.require_signature:
            self._find(Code.UNSIGNED, receipt.id, "no valid signature of an allowed signer")
        return tuple(valid.values())


def _facts_of(receipt: Receipt, entry: Entry, *, is_signed: bool) -> Facts:
    """What the log as a whole needs of a receipt and the files beside it."""
    predicate = receipt.predicate
    built_on = [(parent.kind.value, parent.sha256) for parent in predicate.parents]
    if isinstance(predicate.body, bodies.AdmissionBody):
        built_on += [(item.kind.value, item.sha256) for item in predicate.body.inputs]
    files = [(f"receipts/{entry.name}", receipt.id)]
    files += [(f"samples/{sample.sha256}", sample.sha256) for sample in predicate.samples]
    for name, envelope in zip(entry.envelope_names, entry.envelopes, strict=False):
        files.append((f"receipts/{name}", receipt_id(envelope)))
    witnesses: list[bodies.Witness] = []
    for host in getattr(predicate.body, "hosts", ()):
        if isinstance(host, bodies.HeldHost):
            witnesses += [w for w in (host.witness_open, host.witness_close) if w is not None]
    return Facts(
        id=receipt.id, kind=predicate.kind, evidence=predicate.evidence,
        link=predicate.chain, built_on=tuple(built_on), parents=tuple(parent.sha256 for parent in predicate.parents),
        files=tuple(files), witnesses=tuple(witnesses), is_signed=is_signed,
    )  # fmt: skip
