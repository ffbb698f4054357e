"""The real 24-, 32- and 64-bit draws: counted, not sampled, against their stated bounds."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from remote_dspark.contract import Q_FLOOR_FIRST, Q_STANDARD, TICKET_TOTAL, WEIGHT_ONE
from remote_dspark.oracle.enumerate import (
    accepting_draws,
    completed_law,
    finite_round_law,
    position_bound,
    round_bound,
    target_law,
    total_variation,
    wide_draws,
)
from remote_dspark.oracle.sample_row import row_from_weights
from remote_dspark.oracle.support import top_k_support
from remote_dspark.oracle.tickets import draw_token
from remote_dspark.oracle.verify import DraftRow, draw_weighted
from remote_dspark.oracle.weights import exact_probs, fixed_weights


def array(*values):
    return np.array(values, dtype=np.int64)


def test_proposal_draws_follow_the_tickets_exactly():
    """Red if any token is drawn by more or fewer of the 2**24 draws than it has tickets.

    The draw is monotone in its argument, so both ends of every interval decide all of it.
    """
    counts = array(3, TICKET_TOTAL // 3, 1, TICKET_TOTAL - TICKET_TOTAL // 3 - 4)
    ids, below = array(1, 5, 6, 7), 0
    for token, count in zip(ids.tolist(), counts.tolist(), strict=True):
        assert {draw_token(ids, counts, draw) for draw in (below, below + count - 1)} == {token}
        below += count
    assert below == TICKET_TOTAL


def test_wide_draws_partition_the_range():
    """Red if the count formula and the draw disagree at any edge, or draws are lost."""
    for weights in (array(1, 1, 1), array(0, 5, 0, 7), array(WEIGHT_ONE, 1, WEIGHT_ONE - 3)):
        counts = wide_draws(weights)
        assert sum(counts) == 1 << 64
        below = 0
        for token, count in enumerate(counts):
            assert (count > 0) == (weights[token] > 0)
            if count:
                assert draw_weighted(weights, below) == token
                assert draw_weighted(weights, below + count - 1) == token
            below += count
            exact = Fraction(int(weights[token]) << 64, int(weights.sum()))
            assert abs(count - exact) < 1


def test_accepting_draws_exceed_the_ratio_by_less_than_one():
    """Red if the number of accepting draws is floored: acceptance would be biased down instead of up."""
    rng = np.random.default_rng(3)
    for _ in range(500):
        weight, total = int(rng.integers(0, WEIGHT_ONE)), int(rng.integers(WEIGHT_ONE, 50 * WEIGHT_ONE))
        count = int(rng.integers(1, TICKET_TOTAL + 1))
        exact = min(Fraction(1), Fraction(weight, total) / Fraction(count, TICKET_TOTAL)) * (1 << 32)
        assert 0 <= accepting_draws(count, weight, total) - exact < 1


def rounds_of(seed, vocab_size, k, scale, semantics):
    def logits(kind, prefix):
        rng = np.random.default_rng((seed, kind, *prefix))
        return (rng.standard_normal(vocab_size) * scale).astype(np.float32)

    def weights_after(prefix):
        return fixed_weights(logits(1, prefix), 1.0)

    def row_after(prefix):
        row = logits(0, prefix)
        ids, first = top_k_support(row, k)
        sampled = row_from_weights(ids, fixed_weights(row[ids], 0.7), first, semantics, 0)
        return DraftRow(sampled.ids, sampled.tickets)

    return weights_after, row_after


@pytest.mark.parametrize("semantics", [Q_STANDARD, Q_FLOOR_FIRST])
@pytest.mark.parametrize(("vocab_size", "k", "depth"), [(3, 2, 2), (4, 4, 2), (6, 3, 1), (2, 1, 3)])
@pytest.mark.parametrize("scale", [0.5, 3.0, 12.0])
def test_finite_rounds_stay_within_the_bound(vocab_size, k, depth, scale, semantics):
    """Red if the acceptance draw has 24 bits, the correction 32, or the residual is scaled to 2**24."""
    for seed in range(4):
        weights_after, row_after = rounds_of(seed, vocab_size, k, scale, semantics)
        law = finite_round_law(weights_after, row_after, depth)
        assert sum(law.values()) == 1

        def p_after(prefix, weights_after=weights_after):
            return exact_probs(weights_after(prefix))

        distance = total_variation(completed_law(law, p_after, depth + 1), target_law(p_after, depth + 1))
        assert distance <= round_bound(depth, k, vocab_size)


def test_the_bound_is_what_the_documentation_says():
    """Red if the bound is loosened: at production size it stays below 2**-31 per position."""
    assert position_bound(32, 129280) < Fraction(1, 1 << 31)
    assert position_bound(32, 129280) == Fraction(1, 1 << 32) + Fraction(32, 1 << 38) + Fraction(129280, 1 << 65)


def test_dyadic_rounds_are_exact_even_with_finite_draws():
    """Red if any rounding happens where none is needed: p and q are dyadic, so the law is p itself."""
    weights, half = array(*[WEIGHT_ONE] * 4), TICKET_TOTAL // 2
    row = DraftRow(array(0, 2), array(half, half))
    p = exact_probs(weights)
    law = finite_round_law(lambda _: weights, lambda _: row, 2)
    assert completed_law(law, lambda _: p, 3) == target_law(lambda _: p, 3)


def test_fixed_point_target_is_close_to_the_real_one():
    """Red if weights lose bits: total variation to the FP64 softmax is at most V * 2**-38 plus FP32 rounding."""
    logits = (np.random.default_rng(9).standard_normal(20000) * 3).astype(np.float32)
    fixed = fixed_weights(logits, 1.0)
    softmax = np.exp(logits.astype(np.float64) - logits.max())
    distance = np.abs(fixed / fixed.sum() - softmax / softmax.sum()).sum() / 2
    assert distance < 20000 / WEIGHT_ONE + 40 * 2.0**-24
