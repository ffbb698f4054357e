"""Fuzz: whatever comes in, ``ReceiptError`` or an exact receipt comes out. The million is ``make soak``."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from receipt_kit import LOG, Log, allowed, draft, every_kind, signer, signers_toml
from receipt_mutants import judge, mutants

from receipts.chain import parse_head
from receipts.errors import Code, ReceiptError
from receipts.fields import Kind
from receipts.findings import Entry
from receipts.policy import parse_policy
from receipts.raw import figures, parse_samples
from receipts.reader import read_document, read_receipt
from receipts.signing import load_signer, parse_allowed_signers, verify_envelope
from receipts.sums import parse_sums
from receipts.verify import verify_log

ORIGINALS = [entry.content for entry in every_kind().entries]

# Hypothesis draws lone surrogates, infinities and huge integers by itself: what no strict reader may let through.
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=12,
)


def test_mutants_are_refused_with_the_one_error_or_are_receipts_of_exactly_their_bytes() -> None:
    """Red when any other exception leaves the reader, or a mutant is accepted under the recorded digest."""
    outcomes = Counter(judge(*pair) for pair in itertools.islice(mutants(ORIGINALS, 7), 6000))
    assert sum(outcomes.values()) == 6000
    # The mutator reaches the rules it is for; otherwise it proves nothing.
    wanted = {"same", "schema", "not-canonical", "duplicate-key", "integer-range", "not-json", "not-utf8", "too-deep",
              "unknown-kind", "not-an-integer", "lone-surrogate", "not-a-statement", "bad-key"}  # fmt: skip
    assert wanted <= outcomes.keys()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes(content: bytes) -> None:
    """Red when another exception than ReceiptError leaves any of the package's readers."""
    for read in (read_receipt, read_document, parse_head, parse_sums, parse_samples, parse_policy,
                 parse_allowed_signers, load_signer):  # fmt: skip
        try:
            read(content)
        except ReceiptError:
            continue


@settings(max_examples=200, deadline=None)
@given(values)
def test_any_document_in_any_place(value: Any) -> None:
    """A value of any shape at any place of a statement."""
    document = json.loads(ORIGINALS[0])
    for holder, key in ((document, "predicate"), (document, "subject"), (document, "predicateType"),
                        (document["predicate"], "body"), (document["predicate"], "verdict"),
                        (document["predicate"], "hosts"), (document["predicate"], "chain")):  # fmt: skip
        kept = holder[key]
        holder[key] = value
        content = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        with contextlib.suppress(ReceiptError):
            read_receipt(content.encode("utf-8", "surrogatepass"))
        holder[key] = kept


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=4), st.text(max_size=60))
def test_a_log_of_any_files(contents: list[bytes], name: str) -> None:
    """Verification of anything ends with a report, never with an exception, and never with a PASS."""
    entries = [Entry(name=f"{name}{number}", content=content) for number, content in enumerate(contents)]
    log = Log()
    report = verify_log(entries, log.options(head=None, sums={}))
    assert report.outcome.value != "PASS"


ENVELOPE = signer().sign(draft(Kind.HOLD))


@pytest.mark.parametrize("seed", [1])
def test_mutants_of_an_envelope(seed: int) -> None:
    """Red when a damaged envelope yields a signature or another exception."""
    signers, content = allowed(), draft(Kind.HOLD)
    good = verify_envelope(ENVELOPE, content, signers, log=LOG, sequence=0)
    assert len(good) == 1
    accepted = 0
    for _, mutant in itertools.islice(mutants([ENVELOPE], seed), 1500):
        try:
            found = verify_envelope(mutant, content, signers, log=LOG, sequence=0)
        except ReceiptError:
            continue
        # What is left are other spellings of the same envelope and unknown key ids: never a signature of another key.
        assert found in ((), good)
        accepted += 1
    assert accepted < 500


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(min_value=-(2**53) + 1, max_value=2**53 - 1), min_size=1, max_size=40))
def test_figures_are_members_and_ordered(numbers: list[int]) -> None:
    """Percentiles are nearest rank: every one is a value that was measured."""
    content = "".join(f"{number}\n" for number in numbers).encode()
    found = figures(parse_samples(content))
    assert found["count"] == len(numbers)
    assert found["sum"] == sum(numbers)
    ranks = [found[name] for name in ("min", "p50", "p90", "p95", "p99", "max")]
    assert ranks == sorted(ranks)
    assert set(ranks) <= set(numbers)


def test_a_code_is_stable_text() -> None:
    """CI matches on codes: a renamed one would silently stop matching."""
    assert len({code.value for code in Code}) == len(Code)
    assert all(code.value == code.value.lower() and " " not in code.value for code in Code)


def test_toml_of_strangers() -> None:
    for content in (signers_toml()[:-3], b"version = 2\n", b"[[signer]]\n", b"\xff", b"a=" + b"[" * 999):
        with pytest.raises(ReceiptError) as caught:
            parse_allowed_signers(content)
        assert caught.value.code is Code.BAD_KEY_FILE
