"""The generator equals its published answers; key, counter and widths are laid out as documented."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from remote_dspark.contract import Domain
from remote_dspark.oracle.errors import CounterRangeError
from remote_dspark.oracle.philox import (
    acceptance_draw,
    counter_of,
    derive_key,
    philox4x32,
    philox4x32_array,
    proposal_draw,
    wide_draw,
)

ONES = 0xFFFFFFFF

# Random123 distribution, kat_vectors, philox4x32 with 10 rounds
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_scalar_equals_the_published_answers(counter, key, expected):
    """Red with nine rounds, swapped multipliers, or a key that is bumped before the first round."""
    assert philox4x32(counter, key) == expected


def test_array_equals_the_published_answers():
    """Red if the array form loses the high half of a product."""
    counters = np.array([case[0] for case in KNOWN_ANSWERS], dtype=np.uint32)
    keys = np.array([case[1] for case in KNOWN_ANSWERS], dtype=np.uint32)
    assert philox4x32_array(counters, keys).tolist() == [list(case[2]) for case in KNOWN_ANSWERS]


def test_array_equals_scalar_on_random_and_extreme_words():
    """Red if the two forms differ in any word, for example in the wrap-around of the key schedule."""
    rng = np.random.default_rng(11)
    counters = rng.integers(0, 1 << 32, (400, 4), dtype=np.uint32)
    keys = rng.integers(0, 1 << 32, (400, 2), dtype=np.uint32)
    edges = np.array([0, 1, 0x7FFFFFFF, 0x80000000, ONES - 1, ONES], dtype=np.uint32)
    counters[:200] = rng.choice(edges, (200, 4))
    keys[:100] = rng.choice(edges, (100, 2))
    expected = [philox4x32(tuple(c), tuple(k)) for c, k in zip(counters.tolist(), keys.tolist(), strict=True)]
    assert philox4x32_array(counters, keys).tolist() == [list(words) for words in expected]


def test_array_broadcasts_one_key_and_leaves_its_inputs_alone():
    """Red if the key is bumped in place, which would give the second call another answer."""
    counters = np.arange(24, dtype=np.uint32).reshape(2, 3, 4)
    keys = np.array([5, 6], dtype=np.uint32)
    first = philox4x32_array(counters, keys)
    assert first.shape == (2, 3, 4)
    assert np.array_equal(first, philox4x32_array(counters, keys))
    assert tuple(first[1, 2].tolist()) == philox4x32((20, 21, 22, 23), (5, 6))


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int32])
def test_array_refuses_other_dtypes(dtype):
    """Red if the dtype check goes: a 64-bit round would be cut to its low half silently."""
    with pytest.raises(CounterRangeError):
        philox4x32_array(np.zeros((1, 4), dtype=dtype), np.zeros(2, dtype=np.uint32))


def test_key_is_the_documented_hash():
    """Red on big-endian integers, another tag, or seed and generation swapped."""
    raw = b"dspark-rng-key-v1" + (7).to_bytes(8, "little") + (9).to_bytes(8, "little")
    digest = hashlib.sha256(raw).digest()
    expected = (int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little"))
    assert derive_key(7, 9) == expected
    assert derive_key(7, 9) != derive_key(9, 7)
    assert derive_key(7, 9) != derive_key(7, 10)


@pytest.mark.parametrize(("seed", "generation"), [(-1, 0), (0, -1), (1 << 64, 0), (0, 1 << 64)])
def test_key_refuses_what_does_not_fit(seed, generation):
    """Red if a seed or generation is reduced modulo 2**64."""
    with pytest.raises(CounterRangeError):
        derive_key(seed, generation)


@pytest.mark.parametrize(("round", "position", "draw"), [(1 << 32, 0, 0), (0, 1 << 32, 0), (0, 0, 1 << 32), (-1, 0, 0)])
def test_exhaustion_refuses_instead_of_wrapping(round, position, draw):
    """Red if a counter field is masked to 32 bits: round 2**32 would redraw round 0."""
    with pytest.raises(CounterRangeError):
        counter_of(round, position, Domain.PROPOSAL, draw)


def test_last_round_and_position_are_usable():
    """Red if the limit is off by one."""
    assert counter_of(ONES, ONES, Domain.BONUS, ONES) == (ONES, ONES, 4, ONES)


def test_widths_and_word_order():
    """Red if the proposal keeps the low 24 bits, or the wide draw swaps its words."""
    key, place = (1, 2), (3, 4)
    words = {domain: philox4x32((*place, int(domain), 0), key) for domain in Domain}
    assert proposal_draw(key, *place) == words[Domain.PROPOSAL][0] >> 8
    assert acceptance_draw(key, *place) == words[Domain.ACCEPTANCE][0]
    for domain in (Domain.CORRECTION, Domain.BONUS):
        assert wide_draw(key, *place, domain) == words[domain][0] + (words[domain][1] << 32)


@pytest.mark.parametrize("domain", [Domain.PROPOSAL, Domain.ACCEPTANCE])
def test_wide_draws_are_refused_where_the_draw_is_narrow(domain):
    """Red if one domain can be drawn at two widths: the second would reuse the first one's word."""
    with pytest.raises(CounterRangeError):
        wide_draw((0, 0), 0, 0, domain)


def test_every_field_changes_every_word():
    """Red if a field is dropped from the counter (for example the draw number, or the domain)."""
    base = philox4x32(counter_of(1, 1, Domain.ACCEPTANCE, 0), (1, 1))
    others = [
        counter_of(2, 1, Domain.ACCEPTANCE, 0),
        counter_of(1, 2, Domain.ACCEPTANCE, 0),
        counter_of(1, 1, Domain.CORRECTION, 0),
        counter_of(1, 1, Domain.ACCEPTANCE, 1),
    ]
    assert len(set(others)) == len(others)
    for counter in others:
        assert all(a != b for a, b in zip(base, philox4x32(counter, (1, 1)), strict=True))
