"""Acceptance, residual, correction and bonus: exact boundaries, exact residuals, every refusal."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

from remote_dspark.contract import Q_STANDARD, TICKET_TOTAL, WEIGHT_ONE, Domain
from remote_dspark.oracle.enumerate import accepting_draws
from remote_dspark.oracle.errors import InvalidProposalError, InvalidRowError, ProposalFault, RowFault
from remote_dspark.oracle.philox import acceptance_draw, derive_key, wide_draw
from remote_dspark.oracle.sample_row import sample_row
from remote_dspark.oracle.verify import (
    DraftRow,
    FinalKind,
    accepts,
    dense_row,
    draw_correction,
    draw_weighted,
    ideal_residual,
    one_hot_row,
    residual_weights,
    verify_round,
)
from remote_dspark.oracle.weights import exact_probs, fixed_weights, greedy_weights

TOP32, TOP64 = (1 << 32) - 1, (1 << 64) - 1
KEY = derive_key(3, 1)


def array(*values):
    return np.array(values, dtype=np.int64)


def draft_row(*counts):
    """A row over ids 0..n-1 without its zero counts."""
    return dense_row(array(*counts))


def test_acceptance_boundary_equals_the_rational_one():
    """Red if the comparison is "less or equal", is done in FP64, or loses bits above 64."""
    weights = [0, 1, 2, WEIGHT_ONE // 3, WEIGHT_ONE - 1, WEIGHT_ONE]
    totals = [WEIGHT_ONE, WEIGHT_ONE + 1, 3 * WEIGHT_ONE - 5, 129280 * WEIGHT_ONE]
    counts = [1, 2, 3, TICKET_TOTAL // 3, TICKET_TOTAL - 1, TICKET_TOTAL]
    for weight, total, count in itertools.product(weights, totals, counts):
        edge = accepting_draws(count, weight, total)
        ratio = Fraction(weight, total) / Fraction(count, TICKET_TOTAL)
        for draw in {0, max(edge - 1, 0), min(edge, TOP32), TOP32}:
            assert accepts(draw, count, weight, total) == (Fraction(draw, 1 << 32) < ratio)
            assert accepts(draw, count, weight, total) == (draw < edge)


def test_zero_target_never_accepts_and_more_than_q_always_does():
    """Red at u = 0 with "less or equal", or at u = 2**32 - 1 with a draw that can reach one."""
    assert not accepts(0, 1, 0, WEIGHT_ONE)
    assert accepts(TOP32, TICKET_TOTAL // 2, WEIGHT_ONE, 2 * WEIGHT_ONE)
    assert not accepts(TOP32, TICKET_TOTAL // 2 + 1, WEIGHT_ONE, 2 * WEIGHT_ONE)


def test_held_weight_in_64_bits():
    """Red if the documented int64 form of floor(c * S / 2**24) loses a carry or exceeds 63 bits."""
    totals = [WEIGHT_ONE, WEIGHT_ONE + 12345, 3 * WEIGHT_ONE - 1, 129280 * WEIGHT_ONE - 7, (1 << 62) - 1]
    for total, count in itertools.product(totals, [1, 2, TICKET_TOTAL // 3, TICKET_TOTAL - 1, TICKET_TOTAL]):
        high, low = divmod(total, 1 << 24)
        assert count * high + (count * low >> 24) == count * total >> 24
        assert count * high + (count * low >> 24) < 1 << 63


def small_rounds():
    """Target weights and draft counts of four tokens, dense, sparse and nearly equal ones."""
    weights = [0, 1, 5, WEIGHT_ONE // 3, WEIGHT_ONE]
    half, quarter = TICKET_TOTAL // 2, TICKET_TOTAL // 4
    rows = [
        (TICKET_TOTAL, 0, 0, 0),
        (half, 0, half, 0),
        (quarter,) * 4,
        (1, half - 1, half, 0),
        (0, quarter + 1, quarter - 1, half),
    ]
    for target in itertools.product(weights, repeat=4):
        if any(target):
            for row in rows:
                yield array(*target), draft_row(*row)


def test_residual_is_the_floored_exact_one_with_the_same_support():
    """Red if the floor is a rounding, if tokens outside q are left out, or a token with p <= q gets mass."""
    for weights, row in small_rounds():
        total = int(weights.sum())
        residual = residual_weights(weights, row)
        for token in range(4):
            exact = weights[token] - Fraction(row.tickets_of(token) * total, TICKET_TOTAL)
            assert 0 <= residual[token] - max(exact, 0) < 1
            assert (residual[token] > 0) == (exact > 0)


def test_the_residual_is_never_empty_after_a_possible_rejection():
    """Red if flooring could swallow the whole residual: zero_residual would then happen in sound rounds."""
    for weights, row in small_rounds():
        total = int(weights.sum())
        rejects = any(
            not accepts(TOP32, count, int(weights[token]), total)
            for token, count in zip(row.ids.tolist(), row.tickets.tolist(), strict=True)
        )
        assert not rejects or residual_weights(weights, row).any()


def test_empty_residual_samples_the_target_and_says_so():
    """Red if p = q falls back to token 0, or is not reported."""
    weights, row = array(0, WEIGHT_ONE, WEIGHT_ONE), draft_row(0, TICKET_TOTAL // 2, TICKET_TOTAL // 2)
    assert draw_correction(weights, row, 0) == (1, True)
    assert draw_correction(weights, row, TOP64) == (2, True)
    assert draw_correction(array(1, 1, 0), row, 0) == (0, False)


def test_weighted_draw_at_every_boundary():
    """Red on a modulo instead of multiply-high, a closed interval, or a zero-weight token."""
    for weights in itertools.product([0, 1, 3, WEIGHT_ONE], repeat=3):
        total = sum(weights)
        if not total:
            continue
        below = 0
        for token, weight in enumerate(weights):
            first = -(-(below << 64) // total)
            last = -(-((below + weight) << 64) // total) - 1
            if weight:
                assert draw_weighted(array(*weights), first) == token
                assert draw_weighted(array(*weights), last) == token
            below += weight
        assert weights[draw_weighted(array(*weights), TOP64)] > 0


@pytest.mark.parametrize("draw", [-1, 1 << 64])
def test_wide_draws_out_of_range_are_refused(draw):
    """Red if an index beyond the total returns the vocabulary size as a token."""
    with pytest.raises(InvalidRowError):
        draw_weighted(array(1, 1), draw)


def uniform(vocab_size):
    return np.full(vocab_size, WEIGHT_ONE, dtype=np.int64)


def test_all_accepted_gives_a_bonus_token():
    """Red if the bonus is drawn at another position or domain, or is missing when everything is accepted."""
    targets = [greedy_weights(np.array(row, dtype=np.float32)) for row in ((0, 1, 0), (2, 0, 0))] + [uniform(3)]
    outcome = verify_round(targets, [one_hot_row(1), one_hot_row(0)], [1, 0], KEY, 7, 100)
    final = wide_draw(KEY, 7, 102, Domain.BONUS)
    assert outcome.tokens == (1, 0, draw_weighted(uniform(3), final))
    assert (outcome.num_accepted, outcome.final_kind, outcome.final_draw) == (2, FinalKind.BONUS, final)
    assert outcome.acceptance_draws == (acceptance_draw(KEY, 7, 100), acceptance_draw(KEY, 7, 101))
    assert not outcome.zero_residual


def test_the_first_rejection_ends_the_round():
    """Red if a later token is still tested, or the correction reuses the proposal's noise or position."""
    targets = [greedy_weights(np.array([0, 1, 0], dtype=np.float32)), array(5, 0, 5), uniform(3), uniform(3)]
    rows = [one_hot_row(1), one_hot_row(1), one_hot_row(0)]
    outcome = verify_round(targets, rows, [1, 1, 0], KEY, 0, 50)
    final = wide_draw(KEY, 0, 51, Domain.CORRECTION)
    assert outcome.tokens == (1, draw_weighted(array(5, 0, 5), final))
    assert (outcome.num_accepted, outcome.final_kind) == (1, FinalKind.CORRECTION)
    assert len(outcome.acceptance_draws) == 2


def test_greedy_target_accepts_only_its_own_token():
    """Red if temperature 0 is anything but an exact comparison of tokens."""
    targets = [greedy_weights(np.array([0, 9, 1], dtype=np.float32)), uniform(3)]
    assert verify_round(targets, [one_hot_row(1)], [1], KEY, 0, 0).num_accepted == 1
    assert verify_round(targets, [draft_row(1, TICKET_TOTAL - 1, 0)], [0], KEY, 0, 0).tokens == (1,)


def test_depth_zero_is_target_only():
    """Red if an empty proposal is refused or needs a draft row."""
    outcome = verify_round([uniform(4)], [], [], KEY, 0, 9)
    assert outcome.tokens == (draw_weighted(uniform(4), wide_draw(KEY, 0, 9, Domain.BONUS)),)


@pytest.mark.parametrize(
    ("num_targets", "num_rows", "proposed", "fault"),
    [
        (1, 1, [0], ProposalFault.LENGTH),
        (3, 1, [0], ProposalFault.LENGTH),
        (2, 0, [0], ProposalFault.LENGTH),
        (2, 1, [0, 0], ProposalFault.LENGTH),
        (2, 1, [1], ProposalFault.PROPOSED_WITHOUT_MASS),
        (2, 1, [3], ProposalFault.PROPOSED_RANGE),
        (2, 1, [-1], ProposalFault.PROPOSED_RANGE),
    ],
)
def test_rounds_that_cannot_belong_together_are_refused(num_targets, num_rows, proposed, fault):
    """Red if a missing q row, a token with q = 0, or a negative id (which would index from the end) is consumed."""
    with pytest.raises(InvalidProposalError) as refused:
        verify_round([uniform(3)] * num_targets, [one_hot_row(0)] * num_rows, proposed, KEY, 0, 0)
    assert refused.value.fault is fault


@pytest.mark.parametrize(
    ("ids", "counts", "fault"),
    [
        ([0, 1], [TICKET_TOTAL, 0], RowFault.ZERO_MASS),
        ([0, 0], [1, TICKET_TOTAL - 1], RowFault.SUPPORT_ORDER),
        ([1, 0], [1, TICKET_TOTAL - 1], RowFault.SUPPORT_ORDER),
        ([0, 1, 2], [1, TICKET_TOTAL - 1], RowFault.SUPPORT_ORDER),
        ([0, 3], [1, TICKET_TOTAL - 1], RowFault.ID_RANGE),
        ([-1, 0], [1, TICKET_TOTAL - 1], RowFault.ID_RANGE),
        ([0, 1], [1, TICKET_TOTAL - 2], RowFault.WRONG_TOTAL),
        ([0, 1], [-1, TICKET_TOTAL + 1], RowFault.NEGATIVE),
    ],
)
def test_bad_draft_rows_are_refused_before_any_draw(ids, counts, fault):
    """Red if any of these rows is repaired, or only the rows before the first rejection are checked."""
    bad = DraftRow(array(*ids), array(*counts))
    never = [greedy_weights(np.array([0, 1, 0], dtype=np.float32)), uniform(3), uniform(3)]
    with pytest.raises(InvalidRowError) as refused:
        # the first token is rejected for certain; the bad row is the second
        verify_round(never, [one_hot_row(0), bad], [0, 0], KEY, 0, 0)
    assert refused.value.fault is fault


def test_output_frequencies_follow_the_target():
    """Red if acceptance or correction reuses the proposal's word (domain), or the residual is p itself.

    Chi-square with 5 degrees of freedom at a false-alarm rate of 1e-6 (critical value 35.9), fixed seed.
    """
    draft_logits = np.array([1.0, 0.4, -0.3, 2.0, -np.inf, 0.0], dtype=np.float32)
    target = fixed_weights(np.array([0.2, 1.0, 0.7, 1.1, 0.3, -2.0], dtype=np.float32), 1.0)
    key, num_rounds = derive_key(2024, 0), 12000
    counts = np.zeros(6)
    for round in range(num_rounds):
        row = sample_row(draft_logits, 0.7, 3, Q_STANDARD, key, round, 5)
        outcome = verify_round([target, target], [DraftRow(row.ids, row.tickets)], [row.token], key, round, 5)
        counts[outcome.tokens[0]] += 1
    expected = np.array([float(value) for value in exact_probs(target)]) * num_rounds
    assert ((counts - expected) ** 2 / expected).sum() < 35.9


def test_dense_rows_drop_zeros_and_nothing_else():
    """Red if a dense row keeps zeros, loses an id, or is renormalised."""
    row = draft_row(0, 3, 0, TICKET_TOTAL - 3)
    assert (row.ids.tolist(), row.tickets.tolist()) == ([1, 3], [3, TICKET_TOTAL - 3])
    for bad in ((0, 0), (TICKET_TOTAL, 1), (TICKET_TOTAL + 1, -1)):
        with pytest.raises(InvalidRowError):
            draft_row(*bad)


def test_ideal_residual_by_hand():
    """Red if the ideal residual is not normalised, or p = q has none."""
    third, half = Fraction(1, 3), Fraction(1, 2)
    assert ideal_residual((half, half, 0 * half), (third, third, third)) == (half, half, 0)
    assert ideal_residual((half, half), (half, half)) == (half, half)
