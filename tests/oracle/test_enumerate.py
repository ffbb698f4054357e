"""A whole round emits exactly the target's joint law: rational equality on every small grid."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

from remote_dspark.contract import Q_SEMANTICS, TICKET_TOTAL
from remote_dspark.oracle.enumerate import completed_law, round_law, target_law, total_variation
from remote_dspark.oracle.sample_row import row_from_weights
from remote_dspark.oracle.shards import shard_ranges, sharded_ideal_residual, sharded_law
from remote_dspark.oracle.support import top_k_support
from remote_dspark.oracle.verify import ideal_residual
from remote_dspark.oracle.weights import exact_probs, fixed_weights, greedy_weights, rational_weights


def grid(vocab_size, parts):
    """All distributions over vocab_size tokens in multiples of 1/parts, zeros included."""
    for cut in itertools.product(range(parts + 1), repeat=vocab_size):
        if sum(cut) == parts:
            yield tuple(Fraction(value, parts) for value in cut)


def assert_exact(p_after, q_after, depth, **options):
    law = round_law(p_after, q_after, depth, **options)
    assert sum(law.values()) == 1
    assert completed_law(law, p_after, depth + 1) == target_law(p_after, depth + 1)


@pytest.mark.parametrize(("vocab_size", "parts"), [(2, 6), (3, 4), (4, 3)])
def test_every_pair_of_distributions_at_depth_one(vocab_size, parts):
    """Red if acceptance is p/q without its minimum, or the residual is p, |p - q| or unnormalised.

    Zeros make q sparse (including off the target's support) and p grammar-masked.
    """
    for p, q in itertools.product(grid(vocab_size, parts), repeat=2):
        assert_exact(lambda _, p=p: p, lambda _, q=q: q, 1)


def history_of(grid_rows, salt):
    """A deterministic choice of a distribution per prefix: p and q that depend on the whole history."""

    def after(prefix):
        index = salt
        for token in prefix:
            index = index * 31 + token * 7 + 13
        return grid_rows[index % len(grid_rows)]

    return after


@pytest.mark.parametrize(("vocab_size", "parts", "depth"), [(2, 3, 3), (2, 4, 4), (3, 3, 2), (3, 4, 3)])
def test_joint_prefixes_with_history(vocab_size, parts, depth):
    """Red if a position's residual or acceptance uses the distribution of another prefix."""
    rows = list(grid(vocab_size, parts))
    for salt in range(25):
        assert_exact(history_of(rows, salt), history_of(rows, 3 * salt + 1), depth)


def test_all_first_order_histories_of_two_tokens():
    """Red on any error in how a rejection at position two depends on token one: all 3**6 tables of halves.

    p and q at position two both depend on the first token.
    """
    values = [(Fraction(i, 2), 1 - Fraction(i, 2)) for i in range(3)]
    for tables in itertools.product(values, repeat=6):
        p0, pa, pb, q0, qa, qb = tables
        p = {(): p0, (0,): pa, (1,): pb}
        q = {(): q0, (0,): qa, (1,): qb}
        law = round_law(lambda prefix, p=p: p[prefix[:1]], lambda prefix, q=q: q[prefix[:1]], 2)
        for first, second in itertools.product((0, 1), repeat=2):
            exact = p0[first] * p[(first,)][second]
            shorter = law.get((first,), Fraction(0)) * p[(first,)][second]
            longer = sum((mass for out, mass in law.items() if out[:2] == (first, second)), Fraction(0))
            assert shorter + longer == exact


def rows_of(seed, semantics, k):
    """Draft rows from logits at temperature 0.7, target rows at 1.3: exact tickets and exact weights per prefix."""

    def logits(kind, prefix):
        rng = np.random.default_rng((seed, kind, *prefix))
        return (rng.standard_normal(4) * 2).astype(np.float32)

    def q_after(prefix):
        row = logits(0, prefix)
        ids, first = top_k_support(row, k)
        sampled = row_from_weights(ids, fixed_weights(row[ids], 0.7), first, semantics, 0)
        probs = [Fraction(0)] * 4
        for token, count in zip(sampled.ids.tolist(), sampled.tickets.tolist(), strict=True):
            probs[token] = Fraction(count, TICKET_TOTAL)
        return probs

    return lambda prefix: exact_probs(fixed_weights(logits(1, prefix), 1.3)), q_after


@pytest.mark.parametrize("semantics", Q_SEMANTICS)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_real_rows_with_different_temperatures(semantics, k):
    """Red if q is anything but the tickets that were drawn from, for example the softmax before the allocation."""
    for seed in range(6):
        assert_exact(*rows_of(seed, semantics, k), 2)


def test_softmax_instead_of_tickets_is_not_exact():
    """Red if the exactness tests could not see a q that differs from the sampled one by a single ticket."""
    p_after, q_after = rows_of(1, Q_SEMANTICS[0], 4)

    def moved(prefix):
        probs = q_after(prefix)
        probs[0] += Fraction(1, TICKET_TOTAL)
        probs[1] -= Fraction(1, TICKET_TOTAL)
        return probs

    p, sampled, verified = p_after(()), q_after(()), moved(())
    emitted = [Fraction(0)] * 4
    for token in range(4):
        accepted = min(Fraction(1), p[token] / verified[token])
        emitted[token] += sampled[token] * accepted
        for other, mass in enumerate(ideal_residual(p, verified)):
            emitted[other] += sampled[token] * (1 - accepted) * mass
    assert tuple(emitted) != tuple(p)


def test_greedy_draft_or_greedy_target():
    """Red if temperature 0 on either side needs another rule than min(1, p/q)."""
    one_hot = (Fraction(0), Fraction(1), Fraction(0))
    for p in grid(3, 4):
        assert_exact(lambda _, p=p: p, lambda _: one_hot, 2)
    greedy = exact_probs(greedy_weights(np.array([0, 1, 1], dtype=np.float32)))
    for q in grid(3, 4):
        assert_exact(lambda _: greedy, lambda _, q=q: q, 2)


def test_grammar_mask_that_depends_on_the_prefix():
    """Red if a masked token is ever emitted, or the mask of another prefix is used."""
    base = (Fraction(1, 2), Fraction(1, 4), Fraction(1, 4))

    def p_after(prefix):
        allowed = [token != (prefix[-1] if prefix else 2) for token in range(3)]
        mass = sum(value for value, ok in zip(base, allowed, strict=True) if ok)
        return [value / mass if ok else Fraction(0) for value, ok in zip(base, allowed, strict=True)]

    for q in grid(3, 4):
        assert_exact(p_after, lambda _, q=q: q, 3)
        law = round_law(p_after, lambda _, q=q: q, 3)
        assert not any(out[0] == 2 or any(a == b for a, b in itertools.pairwise(out)) for out in law)


def test_dense_rational_weights():
    """Red if FP32 weights are normalised before they are rounded: p would differ on the two sides."""
    p = rational_weights([0.3, 0.2, 0.1, 1e-30])
    q = rational_weights([0.1, 0.7, 0.05, 0.2])
    assert_exact(lambda _: p, lambda _: q, 2)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
def test_sharded_rounds(num_shards):
    """Red if residual mass outside q's support is left out on a shard, or an empty shard is divided by."""
    shards = shard_ranges(8, num_shards)
    rng = np.random.default_rng(num_shards)
    for _ in range(12):
        draws = rng.integers(0, 4, (2, 8)) * (rng.random((2, 8)) < 0.6)
        draws[:, rng.integers(8)] += 1
        p = rational_weights(draws[0].astype(np.float32))
        q = rational_weights(draws[1].astype(np.float32))
        assert_exact(
            lambda _, p=p: sharded_law(p, shards),
            lambda _, q=q: sharded_law(q, shards),
            1,
            residual_law=lambda p, q: sharded_ideal_residual(p, q, shards),
        )
        assert sharded_law(p, shards) == p


def test_total_variation():
    """Red if outcomes of only one law are forgotten."""
    half = Fraction(1, 2)
    assert total_variation({(0,): half, (1,): half}, {(0,): half, (2,): half}) == half
    assert total_variation({(0,): Fraction(1)}, {(0,): Fraction(1)}) == 0
