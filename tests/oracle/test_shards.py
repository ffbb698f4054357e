"""Sharded equals unsharded, exactly, for 1, 2, 3 and 8 shards."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from remote_dspark.contract import Q_SEMANTICS, Q_STANDARD, TICKET_TOTAL, WEIGHT_ONE
from remote_dspark.oracle.adversarial import LOGIT_FAMILIES, TEMPERATURES, adversarial_logits
from remote_dspark.oracle.errors import InvalidRowError, RowFault
from remote_dspark.oracle.philox import derive_key
from remote_dspark.oracle.sample_row import sample_row
from remote_dspark.oracle.shards import (
    Shard,
    choose_shard,
    merged_top_k,
    owner_of,
    shard_ranges,
    sharded_allocate,
    sharded_draw_weighted,
    sharded_pick,
    sharded_residual,
    sharded_verify_round,
    sharded_weights,
    split,
)
from remote_dspark.oracle.support import top_k_support
from remote_dspark.oracle.tickets import allocate, draw_token
from remote_dspark.oracle.verify import DraftRow, draw_weighted, residual_weights, verify_round
from remote_dspark.oracle.weights import fixed_weights

COUNTS = [1, 2, 3, 8]
KEY = derive_key(8, 8)


def rows(num_rows, width):
    """Adversarial rows of at least eight columns."""
    for index in range(num_rows):
        rng = np.random.default_rng((21, index))
        family = LOGIT_FAMILIES[index % len(LOGIT_FAMILIES)]
        yield family(rng, int(rng.integers(8, width))), float(rng.choice(TEMPERATURES))


def joined(parts):
    return np.concatenate(parts)


@pytest.mark.parametrize("num_shards", COUNTS)
def test_ranges_cover_the_vocabulary_once(num_shards):
    """Red if a column belongs to two shards or to none."""
    for vocab_size in (8, 9, 15, 129280):
        shards = shard_ranges(vocab_size, num_shards)
        assert shards[0].start == 0
        assert shards[-1].end == vocab_size
        assert all(left.end == right.start for left, right in itertools.pairwise(shards))
        assert len({shard.end - shard.start for shard in shards}) <= 2
    with pytest.raises(InvalidRowError):
        shard_ranges(3, 8)


@pytest.mark.parametrize("num_shards", COUNTS)
@pytest.mark.parametrize("k", [1, 5, 32])
def test_merged_top_k_equals_global_top_k(num_shards, k):
    """Red if shards send fewer than k candidates, local ids, or break ties by shard in the wrong order."""
    for logits, _ in rows(60, 120):
        shards = shard_ranges(logits.size, num_shards)
        ids, first = merged_top_k(split(logits, shards), shards, k)
        expected_ids, expected_first = top_k_support(logits, k)
        assert (ids.tolist(), first) == (expected_ids.tolist(), expected_first)


@pytest.mark.parametrize("num_shards", COUNTS)
def test_merged_top_k_on_every_small_row(num_shards):
    """Red on any tie between shards: all rows of eight columns out of three values, one of them masked."""
    shards = shard_ranges(8, num_shards)
    for values in itertools.product([-np.inf, 0.0, 1.0], repeat=8):
        logits = np.array(values, dtype=np.float32)
        if np.isneginf(logits).all():
            continue
        ids, first = merged_top_k(split(logits, shards), shards, 3)
        expected_ids, expected_first = top_k_support(logits, 3)
        assert (ids.tolist(), first) == (expected_ids.tolist(), expected_first)


@pytest.mark.parametrize("num_shards", COUNTS)
def test_weights_by_max_and_sum(num_shards):
    """Red if a shard normalises by its own maximum or its own sum."""
    for logits, tau in rows(60, 120):
        shards = shard_ranges(logits.size, num_shards)
        weights, total = sharded_weights(split(logits, shards), tau)
        assert joined(weights).tolist() == fixed_weights(logits, tau).tolist()
        assert total == int(fixed_weights(logits, tau).sum())


@pytest.mark.parametrize("num_shards", COUNTS)
@pytest.mark.parametrize("semantics", Q_SEMANTICS)
def test_tickets_are_coordinated_globally(num_shards, semantics):
    """Red if each shard hands out its own remainder, or ties at the threshold ignore the order of shards."""
    for logits, tau in rows(60, 120):
        weights, shards = fixed_weights(logits, tau), shard_ranges(logits.size, num_shards)
        first = int(weights.argmax())
        counts = sharded_allocate(split(weights, shards), shards, semantics, first)
        assert joined(counts).tolist() == allocate(weights, semantics, first).tolist()


@pytest.mark.parametrize("num_shards", COUNTS)
def test_tickets_with_equal_remainders_across_shards(num_shards):
    """Red if the shard with the most ties, not the lowest ids, gets the leftover tickets."""
    shards = shard_ranges(8, num_shards)
    for values in itertools.chain(*(itertools.product(pair, repeat=8) for pair in ((0, 1), (1, WEIGHT_ONE)))):
        if any(values):
            weights = np.array(values, dtype=np.int64)
            first = int(weights.argmax())
            counts = sharded_allocate(split(weights, shards), shards, Q_STANDARD, first)
            assert joined(counts).tolist() == allocate(weights, Q_STANDARD, first).tolist()


@pytest.mark.parametrize("num_shards", COUNTS)
def test_one_integer_draw_chooses_shard_and_token(num_shards):
    """Red if the index within a shard is drawn again, or a boundary belongs to the wrong side."""
    for logits, tau in rows(30, 60):
        weights, shards = fixed_weights(logits, tau), shard_ranges(logits.size, num_shards)
        counts = allocate(weights, Q_STANDARD, int(weights.argmax()))
        ids = np.arange(logits.size, dtype=np.int64)
        edges = np.cumsum(counts)
        for draw in {0, TICKET_TOTAL - 1, *(edges[:-1] - 1).tolist(), *edges[:-1].tolist()}:
            if 0 <= draw < TICKET_TOTAL:
                assert sharded_pick(split(counts, shards), shards, draw) == draw_token(ids, counts, draw)


def test_a_shard_without_mass_cannot_be_chosen():
    """Red if the comparison at a zero-width shard is "greater or equal": every index of every small mass vector."""
    for masses in itertools.product(range(3), repeat=5):
        seen = [choose_shard(masses, index) for index in range(sum(masses))]
        assert seen == [(shard, within) for shard, mass in enumerate(masses) for within in range(mass)]
        for outside in (-1, sum(masses)):
            with pytest.raises(InvalidRowError):
                choose_shard(masses, outside)


@pytest.mark.parametrize("num_shards", COUNTS)
def test_residual_and_correction(num_shards):
    """Red if a shard leaves out tokens outside q's support, or uses its local total for floor(c * S / 2**24)."""
    rng = np.random.default_rng(31)
    for index, (logits, tau) in enumerate(rows(60, 120)):
        weights, shards = fixed_weights(logits, tau), shard_ranges(logits.size, num_shards)
        sampled = sample_row(rng.standard_normal(logits.size).astype(np.float32), 0.7, 5, Q_STANDARD, KEY, 0, index)
        row = DraftRow(sampled.ids, sampled.tickets)
        residual = residual_weights(weights, row)
        parts = sharded_residual(split(weights, shards), shards, row)
        assert joined(parts).tolist() == residual.tolist()
        for draw in (0, 1 << 63, (1 << 64) - 1, *rng.integers(0, 1 << 64, 5, dtype=np.uint64).tolist()):
            assert sharded_draw_weighted(parts, shards, draw) == draw_weighted(residual, draw)


@pytest.mark.parametrize("num_shards", COUNTS)
def test_whole_rounds(num_shards):
    """Red if any step of a sharded round uses another draw, position or total than the unsharded one."""
    rng = np.random.default_rng(41)
    kinds = set()
    for round in range(120):
        vocab_size, depth = int(rng.integers(8, 40)), int(rng.integers(0, 4))
        shards = shard_ranges(vocab_size, num_shards)
        drafts = rng.standard_normal((depth, vocab_size)).astype(np.float32)
        sampled = [sample_row(row, 0.7, 6, Q_STANDARD, KEY, round, 10 + i) for i, row in enumerate(drafts)]
        targets = [
            fixed_weights((row + rng.standard_normal(vocab_size) / 2).astype(np.float32), 1.0)
            for row in (*drafts, np.zeros(vocab_size))
        ]
        draft_rows = [DraftRow(row.ids, row.tickets) for row in sampled]
        proposed = [row.token for row in sampled]
        expected = verify_round(targets, draft_rows, proposed, KEY, round, 10)
        assert sharded_verify_round(targets, draft_rows, proposed, KEY, round, 10, shards) == expected
        kinds.add((expected.final_kind, expected.num_accepted))
    # the case is only worth something if corrections and bonuses of several depths occurred
    assert len(kinds) >= 6


@pytest.mark.parametrize(
    ("bad", "fault"), [(np.nan, RowFault.NAN), (np.inf, RowFault.POSITIVE_INFINITY), (None, RowFault.ZERO_MASS)]
)
def test_refusals_are_global(bad, fault):
    """Red if a bad value on one shard is only seen there, or a masked shard is refused although others have mass."""
    logits = np.full(9, -np.inf, dtype=np.float32)
    if bad is not None:
        logits[:3] = 0
        logits[8] = bad
    shards = shard_ranges(9, 3)
    for call in (lambda parts: sharded_weights(parts, 1.0), lambda parts: merged_top_k(parts, shards, 2)):
        with pytest.raises(InvalidRowError) as refused:
            call(split(logits, shards))
        assert refused.value.fault is fault
    if bad is None:
        with pytest.raises(InvalidRowError):
            sharded_allocate([np.zeros(3, dtype=np.int64)] * 3, shards, Q_STANDARD, 0)
    logits[:] = -np.inf
    logits[4] = 1.0
    weights, _ = sharded_weights(split(logits, shards), 1.0)
    assert [int(part.sum()) for part in weights] == [0, WEIGHT_ONE, 0]


def test_ids_nobody_owns_are_refused():
    """Red if an id beyond the vocabulary falls to the last shard."""
    with pytest.raises(InvalidRowError):
        owner_of(9, (Shard(0, 4), Shard(4, 9)))


def test_adversarial_rows_are_valid_and_reproducible():
    """Red if a family makes rows that must be refused, or depends on hidden state."""
    for index in range(40):
        logits, tau = adversarial_logits(1, index, 50)
        again, _ = adversarial_logits(1, index, 50)
        assert logits.tobytes() == again.tobytes()
        fixed_weights(logits, tau)
