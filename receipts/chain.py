"""The chain: which receipt follows which. Pure.

A log is a sequence 0, 1, 2, ... in which every receipt names the id of the one before. What breaks is named for what it
is: a gap (removed), a duplicate, a broken link (edited or re-ordered), a foreign receipt (of another log), a rollback
(the log ends before something that was already seen).

``link_draft`` is the only place that writes a link.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from receipts.canonical import canonical_bytes, receipt_id, statement_bytes
from receipts.errors import Code, ReceiptError
from receipts.fields import UNLINKED, ChainLink
from receipts.model import Statement
from receipts.reader import Receipt, read_document


@dataclass(frozen=True)
class Head:
    """The end of a log: how many receipts it has and the id of the last.

    Attributes:
        log: The log's random id.
        count: Number of receipts; 0 for an empty log.
        head: Id of the last receipt, None for an empty log.
    """

    log: str
    count: int
    head: str | None

    def encode(self) -> bytes:
        """The content of a HEAD file, with a newline so that people can ``cat`` it."""
        return canonical_bytes({"count": self.count, "head": self.head, "log": self.log}) + b"\n"

    def next_link(self) -> ChainLink:
        """The link the next receipt must carry."""
        return ChainLink(log=self.log, sequence=self.count, previous=self.head)

    def follow(self, receipt_id: str, link: ChainLink) -> Head:
        """The head after a receipt, whose link must be exactly ``next_link``.

        Raises:
            ReceiptError: FOREIGN, CHAIN_DUPLICATE, CHAIN_GAP or CHAIN_BROKEN.
        """
        if link.log != self.log:
            raise ReceiptError(Code.FOREIGN, f"expected log {self.log}, found {link.log}", receipt_id)
        if link.sequence < self.count:
            raise ReceiptError(
                Code.CHAIN_DUPLICATE, f"expected sequence {self.count}, found {link.sequence} again", receipt_id
            )
        if link.sequence > self.count:
            raise ReceiptError(
                Code.CHAIN_GAP,
                f"expected sequence {self.count}, found {link.sequence}: receipts are missing between",
                receipt_id,
            )
        if link.previous != self.head:
            raise ReceiptError(Code.CHAIN_BROKEN, f"expected previous {self.head}, found {link.previous}", receipt_id)
        return replace(self, count=self.count + 1, head=receipt_id)


def parse_head(content: bytes, where: str = "HEAD") -> Head:
    """Read a HEAD file; ``where`` is its name in a refusal.

    Raises:
        ReceiptError: TORN for an empty file or half a one, HEAD_MISMATCH when it does not have the three fields with
            the right types, or what ``read_document`` refuses.
    """
    try:
        document = read_document(content, 4096)
    except ReceiptError as error:
        if content.endswith(b"}\n") or error.code not in {Code.NOT_JSON, Code.NOT_UTF8, Code.TOO_DEEP}:
            raise error.at(where) from error
        message = f"expected {{count, head, log}} and a newline, found {len(content)} bytes that end before that"
        raise ReceiptError(Code.TORN, message, where) from error
    if not isinstance(document, dict) or document.keys() != {"count", "head", "log"}:
        raise ReceiptError(Code.HEAD_MISMATCH, "expected {count, head, log}", where)
    count, head, log = document["count"], document["head"], document["log"]
    is_digest = isinstance(head, str) and len(head) == 64 and set(head) <= set("0123456789abcdef")
    is_count = isinstance(count, int) and not isinstance(count, bool) and count >= 0
    is_log = isinstance(log, str) and len(log) == 32 and set(log) <= set("0123456789abcdef")
    if not is_count or not is_log or not (is_digest if count else head is None):
        raise ReceiptError(Code.HEAD_MISMATCH, f"not a head: count {count!r:.40}, head {head!r:.80}", where)
    return Head(log=log, count=count, head=head)


def link_draft(draft: Receipt, link: ChainLink) -> Receipt:
    """Put a draft at its place in a log.

    Raises:
        ReceiptError: CHAIN_DUPLICATE when it carries a link already.
    """
    if draft.predicate.chain != UNLINKED:
        raise ReceiptError(Code.CHAIN_DUPLICATE, "expected a draft, found a receipt that is in a log already", draft.id)
    predicate = draft.predicate.model_copy(update={"chain": link})
    content = statement_bytes(Statement.model_construct(subjects=draft.subjects, predicate=predicate))
    return Receipt(receipt_id(content), content, draft.subjects, predicate)
