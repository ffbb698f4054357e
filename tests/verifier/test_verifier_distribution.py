"""The verifier's output distribution, enumerated exactly through its own code on small vocabularies.

Every acceptance threshold and every interval of the 64-bit draw is found by bisection on what the verifier really
decides, so that the probabilities are exact fractions. Turns red when: a rejected draft is drawn from p instead of the
residual, the residual forgets tokens outside the support, or acceptance uses another q than the one that was sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from remote_dspark.contract import TICKET_TOTAL
from remote_dspark.oracle.verify import DraftRow, FinalKind, RoundOutcome
from remote_dspark.verifier.greedy import verify_one_hot
from remote_dspark.verifier.naive import verify_proposal
from remote_dspark.verifier.noise import RoundNoise
from remote_dspark.verifier.processed import target_weights

TOLERANCE = Fraction(1, 2**31)
"""An acceptance draw has 32 bits, a ticket product is floored to 1/S with S >= 2**38: together below 2**-31."""


class ChosenNoise(RoundNoise):
    """Draws chosen by the enumeration instead of Philox."""

    def __init__(self, acceptance: int, wide: int) -> None:
        super().__init__((0, 0), 0, 0)
        object.__setattr__(self, "_acceptance", acceptance)
        object.__setattr__(self, "_wide", wide)

    def acceptance(self, index: int) -> int:
        return int(self._acceptance)  # type: ignore[attr-defined]

    def correction(self, index: int) -> int:
        return int(self._wide)  # type: ignore[attr-defined]

    def bonus(self, depth: int) -> int:
        return int(self._wide)  # type: ignore[attr-defined]


Play = Callable[[int, RoundNoise], RoundOutcome]


def first_true(predicate: Callable[[int], bool], end: int) -> int:
    """Smallest n in [0, end] with predicate(n), which is monotone; end if none."""
    low, high = 0, end
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if predicate(middle) else (middle + 1, high)
    return low


def final_distribution(play: Callable[[int], int], vocab_size: int) -> list[Fraction]:
    """Probability of each final token over all 2**64 draws; the token grows with the draw."""
    edges = [first_true(lambda draw, v=v: play(draw) > v, 1 << 64) for v in range(vocab_size)]
    return [Fraction(edge - previous, 1 << 64) for previous, edge in zip([0, *edges], edges, strict=False)]


def first_token_distribution(play: Play, q: dict[int, Fraction], vocab_size: int) -> list[Fraction]:
    """Exact distribution of the first committed token of a depth-1 round."""
    output = [Fraction(0)] * vocab_size
    for draft, mass in q.items():
        threshold = first_true(lambda u, d=draft: play(d, ChosenNoise(u, 0)).num_accepted == 0, 1 << 32)
        accepted = Fraction(threshold, 1 << 32)
        output[draft] += mass * accepted
        if threshold == 1 << 32:
            continue
        assert play(draft, ChosenNoise((1 << 32) - 1, 0)).final_kind is FinalKind.CORRECTION
        final = final_distribution(
            lambda wide, d=draft: play(d, ChosenNoise((1 << 32) - 1, wide)).tokens[0], vocab_size
        )
        for token, share in enumerate(final):
            output[token] += mass * (1 - accepted) * share
    return output


CASES = [
    # (target logits, support, tickets)
    ([0.0, 1.0, -1.0, 0.5], [0, 1, 3], [TICKET_TOTAL // 2, TICKET_TOTAL // 4, TICKET_TOTAL // 4]),
    ([3.0, -2.0, 0.1, 0.2, -5.0], [1, 4], [TICKET_TOTAL - 1, 1]),
    ([0.0, 0.0, 0.0], [2], [TICKET_TOTAL]),
    ([0.0, -np.inf, 0.0, 1.0], [0, 1, 2], [7, TICKET_TOTAL - 12, 5]),
    ([1.0, 2.0], [0, 1], [TICKET_TOTAL // 3, TICKET_TOTAL - TICKET_TOTAL // 3]),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_sampled_drafts_leave_the_target_distribution_unchanged(case: int) -> None:
    logits, ids, tickets = CASES[case]
    target = np.repeat(target_weights(np.array([logits], dtype=np.float32)), 2, axis=0)
    row = DraftRow(np.array(ids, dtype=np.int64), np.array(tickets, dtype=np.int64))
    q = {token: Fraction(count, TICKET_TOTAL) for token, count in zip(ids, tickets, strict=True)}
    output = first_token_distribution(
        lambda draft, noise: verify_proposal(target, [row], [draft], noise), q, len(logits)
    )
    require_equal(output, target[0])


@pytest.mark.parametrize("case", range(len(CASES)))
def test_greedy_drafts_leave_the_target_distribution_unchanged(case: int) -> None:
    logits, ids, _ = CASES[case]
    target = np.repeat(target_weights(np.array([logits], dtype=np.float32)), 2, axis=0)
    for draft in ids:
        output = first_token_distribution(
            lambda token, noise: verify_one_hot(target, [token], noise), {draft: Fraction(1)}, len(logits)
        )
        require_equal(output, target[0])


def test_the_bonus_token_has_the_target_distribution() -> None:
    target = target_weights(np.array([[0.3, -0.4, 1.7, 0.0]], dtype=np.float32))
    output = final_distribution(lambda wide: verify_one_hot(target, (), ChosenNoise(0, wide)).tokens[0], 4)
    require_equal(output, target[0])


def require_equal(output: list[Fraction], weights: np.ndarray) -> None:
    assert sum(output) == 1
    total = int(weights.sum())
    for token, found in enumerate(output):
        expected = Fraction(int(weights[token]), total)
        assert abs(found - expected) <= TOLERANCE, f"token {token}: expected {float(expected)}, found {float(found)}"
        assert (found == 0) == (expected == 0)


def test_p_equal_to_q_is_never_rejected_so_that_the_residual_is_never_empty() -> None:
    # With floors the residual is empty only if w = c * S / 2**24 everywhere, and then the ratio is exactly 1.
    tickets = np.array([TICKET_TOTAL // 4, TICKET_TOTAL - TICKET_TOTAL // 4], dtype=np.int64)
    row = DraftRow(np.array([0, 2], dtype=np.int64), tickets)
    target = np.zeros((2, 3), dtype=np.int64)
    target[:, [0, 2]] = tickets << 13
    for token in (0, 2):
        outcome = verify_proposal(target, [row], [token], ChosenNoise((1 << 32) - 1, 0))
        assert (outcome.num_accepted, outcome.zero_residual) == (1, False)


@pytest.mark.parametrize(("draw", "is_accepted"), [(0, True), ((1 << 31) - 1, True), (1 << 31, False)])
def test_the_boundary_draw_of_a_ratio_of_one_half_is_rejected(draw: int, is_accepted: bool) -> None:
    target = np.full((2, 2), 1 << 38, dtype=np.int64)
    row = DraftRow(np.array([1], dtype=np.int64), np.array([TICKET_TOTAL], dtype=np.int64))
    noise = ChosenNoise(draw, 0)
    assert verify_proposal(target, [row], [1], noise).num_accepted == int(is_accepted)
    assert verify_one_hot(target, [1], noise).num_accepted == int(is_accepted)
