"""The chain: a removed, re-ordered, edited, duplicated, foreign or torn receipt is found, and named for what it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from receipt_kit import LOG, Log, draft, entry_name

from receipts import bodies
from receipts.chain import Head, link_draft, parse_head
from receipts.errors import Code, ReceiptError
from receipts.fields import Kind, Outcome
from receipts.findings import Entry, LogReport
from receipts.reader import read_receipt


@pytest.fixture(scope="module")
def log() -> Log:
    """Six receipts without parents."""
    made = Log()
    for number in range(6):
        made.add(Kind.HOST_FACTS, elapsed_ns=number)
    return made


def codes(report: LogReport) -> list[str]:
    return [finding.code.value for finding in report.findings]


def without_files_beside(log: Log, entries: list[Entry]) -> LogReport:
    """Verify entries with neither SHA256SUMS nor HEAD: what the links alone prove."""
    return log.verify(entries, sums=None, head=None)


def test_a_whole_log_has_no_finding(log: Log) -> None:
    report = log.verify()
    assert report.outcome is Outcome.PASS
    assert report.head == log.head
    assert report.is_integrity_only


def test_an_empty_log_is_unknown() -> None:
    """Red when nothing verified counts as verified."""
    assert Log().verify().outcome is Outcome.UNKNOWN


@pytest.mark.parametrize("place", range(6))
def test_a_removed_receipt(log: Log, place: int) -> None:
    """Red when the walk does not compare sequence numbers, or, for the last one, HEAD with what is there."""
    rest = [entry for number, entry in enumerate(log.entries) if number != place]
    report = log.verify(rest)
    assert "chain-gap" in codes(report)
    # The line in SHA256SUMS is a second witness.
    assert "sums-mismatch" in codes(report)
    expected = ["chain-gap"] if place < 5 else []
    assert codes(without_files_beside(log, rest)) == expected


def test_a_removed_tail_is_found_by_head_by_mark_and_by_witness(log: Log) -> None:
    """A cut tail is whole in itself; each of three memories alone has to find it."""
    short = log.entries[:4]
    assert codes(log.verify(short, sums=None)) == ["chain-gap"]
    assert codes(log.verify(short, sums=None, head=None, high_water=log.head)) == ["rollback"]
    assert log.head.head is not None
    kept = bodies.Witness(host="alpha", log=LOG, sequence=5, head=log.head.head)
    assert codes(log.verify(short, sums=None, head=None, witnesses=(kept,))) == ["rollback"]


def test_a_store_put_back_to_an_older_state(log: Log) -> None:
    """Everything in the folder fits together; only the mark knows better."""
    old = Log()
    for number in range(3):
        old.add(Kind.HOST_FACTS, elapsed_ns=number)
    assert codes(old.verify()) == []
    assert codes(old.verify(high_water=log.head)) == ["rollback"]


def test_a_rewritten_log_of_the_same_length(log: Log) -> None:
    """The owner rewrites everything, with new links: the mark and the witness still have the old ids."""
    forged = Log()
    for number in range(6):
        forged.add(Kind.HOST_FACTS, elapsed_ns=number + 100)
    assert codes(forged.verify()) == []
    assert codes(forged.verify(high_water=log.head)) == ["rollback"]
    kept = bodies.Witness(host="alpha", log=LOG, sequence=2, head=log.receipts[2].id)
    assert codes(forged.verify(witnesses=(kept,))) == ["rollback"]


def test_re_ordered(log: Log) -> None:
    """Red when links are only counted. Files sort by name, so a swap means swapped names."""
    swapped = list(log.entries)
    swapped[2], swapped[3] = swapped[3], swapped[2]
    assert set(codes(without_files_beside(log, swapped))) >= {"chain-gap"}
    renamed = list(log.entries)
    renamed[2] = replace(log.entries[3], name=log.entries[2].name)
    renamed[3] = replace(log.entries[2], name=log.entries[3].name)
    assert "digest-mismatch" in codes(without_files_beside(log, renamed))


@pytest.mark.parametrize("place", range(6))
def test_edited(log: Log, place: int) -> None:
    """Red when the digest in the name is not compared: the edit is a valid receipt in itself."""
    content = log.entries[place].content.replace(b'"found":"9 GiB"', b'"found":"8 GiB"')
    read_receipt(content)
    entries = [*log.entries]
    entries[place] = replace(entries[place], content=content)
    report = without_files_beside(log, entries)
    assert codes(report)[0] == "digest-mismatch"
    # Renaming it to its new digest moves the finding to the next link, or to HEAD.
    entries[place] = replace(entries[place], name=entry_name(read_receipt(content)))
    assert codes(log.verify(entries, sums=None)) == (["chain-broken"] if place < 5 else ["head-mismatch"])


def test_duplicated(log: Log) -> None:
    entries = [*log.entries[:3], log.entries[2], *log.entries[3:]]
    assert codes(without_files_beside(log, entries)) == ["chain-duplicate"]


def test_two_receipts_for_one_place(log: Log) -> None:
    """A fork: both carry sequence 3 and the same previous. The second one is named."""
    other = link_draft(read_receipt(draft(Kind.HOST_FACTS, elapsed_ns=99)), log.receipts[3].predicate.chain)
    entries = [*log.entries[:4], Entry(entry_name(other), other.content), *log.entries[4:]]
    report = without_files_beside(log, entries)
    assert codes(report)[0] == "chain-duplicate"
    assert report.findings[0].where == entry_name(other)


def test_foreign(log: Log) -> None:
    """A receipt of another log at the right place in the order."""
    stranger = Log(log="f" * 32)
    for number in range(4):
        stranger.add(Kind.HOST_FACTS, elapsed_ns=number)
    entries = [*log.entries[:3], stranger.entries[3], *log.entries[4:]]
    assert "foreign-receipt" in codes(log.verify(entries))


def test_a_draft_in_a_store_is_foreign(log: Log) -> None:
    """Red when the placeholder link counts as a place."""
    receipt = read_receipt(draft(Kind.HOST_FACTS))
    entries = [*log.entries, Entry(entry_name(receipt), receipt.content)]
    assert "foreign-receipt" in codes(without_files_beside(log, entries))


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_torn(log: Log, length: int) -> None:
    """A write that stopped half-way is named as torn, and the walk goes on behind it."""
    entries = [*log.entries]
    entries[2] = replace(entries[2], content=entries[2].content[:length])
    report = without_files_beside(log, entries)
    assert codes(report) == ["torn-write"]
    assert report.findings[0].where == entries[2].name


def test_one_cause_gives_one_finding_and_hides_no_other(log: Log) -> None:
    """Red when the walk stops at the first finding, or reports everything after it as broken."""
    entries = [log.entries[0], replace(log.entries[2], content=b"{}"), *log.entries[3:5]]
    report = without_files_beside(log, entries)
    assert codes(report).count("not-a-statement") == 1
    assert "digest-mismatch" not in codes(report)


def test_a_wrong_line_in_sha256sums(log: Log) -> None:
    sums = log.sums()
    path = f"receipts/{log.entries[1].name}"
    assert codes(log.verify(sums=sums | {path: "0" * 64})) == ["sums-mismatch"]
    assert codes(log.verify(sums={k: v for k, v in sums.items() if k != path})) == ["sums-mismatch"]
    assert codes(log.verify(sums=sums | {"receipts/00000009-hold-000000000000.json": "0" * 64})) == ["sums-mismatch"]


def test_since_continues_and_refuses_what_was_rewritten_before_it(log: Log) -> None:
    """Red when --since starts from whatever it finds instead of from the head that was given."""
    from receipts.verify import LogVerifier

    since = Head(LOG, 3, log.receipts[2].id)

    def after(head: Head, entries: list[Entry]) -> list[str]:
        verifier = LogVerifier(log.options(), head)
        for entry in entries:
            verifier.add(entry)
        return codes(verifier.finish())

    assert after(since, log.entries[3:]) == []
    assert after(replace(since, head="0" * 64), log.entries[3:]) == ["chain-broken"]
    assert after(replace(since, log="f" * 32), log.entries[3:])
    assert after(since, log.entries[4:]) == ["chain-gap"]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{}", b"[]", b'{"count":1,"head":null,"log":"%s"}' % (b"0" * 32),
        b'{"count":0,"head":"%s","log":"%s"}' % (b"0" * 64, b"0" * 32), b'{"count":-1,"head":null,"log":"x"}',
        b'{"count":true,"head":null,"log":"%s"}' % (b"0" * 32),
        b'{"count":0,"head":null,"log":"%s","x":1}' % (b"0" * 32),
        b"x" * 5000,
    ],
)  # fmt: skip
def test_a_head_that_is_none(content: bytes) -> None:
    with pytest.raises(ReceiptError):
        parse_head(content)


def test_heads_are_an_exact_inverse_pair(log: Log) -> None:
    for head in (log.head, Head(LOG, 0, None)):
        assert parse_head(head.encode()) == head


def test_only_drafts_can_be_linked(log: Log) -> None:
    """Red when a receipt of one log could be moved into another one."""
    with pytest.raises(ReceiptError) as caught:
        link_draft(log.receipts[0], Head("f" * 32, 0, None).next_link())
    assert caught.value.code is Code.CHAIN_DUPLICATE
