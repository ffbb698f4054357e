"""The exact law of what a round emits, by enumeration.

`round_law` walks every proposal chain of a small vocabulary with ideal (real-valued) draws and adds up rationals;
completed by target sampling to a fixed length it must be the target's own joint law, exactly. `finite_round_law` does
the same with the real draws: 24-bit proposals, 32-bit acceptance, 64-bit corrections, by counting how many draws lead
where. It differs from the target by at most `round_bound`.

p and q may depend on the whole prefix, so history, grammar masks and temperatures need no case of their own.
Not covered: adaptive depth, which is in `selection_bias`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from remote_dspark.contract import TICKET_BITS, TICKET_TOTAL, WEIGHT_BITS
from remote_dspark.oracle.verify import (
    ACCEPTANCE_BITS,
    WIDE_BITS,
    DraftRow,
    ideal_acceptance,
    ideal_residual,
    residual_weights,
)
from remote_dspark.oracle.weights import require_weights

Prefix = tuple[int, ...]
Law = dict[Prefix, Fraction]
ProbsAfter = Callable[[Prefix], Sequence[Fraction]]
WeightsAfter = Callable[[Prefix], npt.NDArray[np.int64]]
RowAfter = Callable[[Prefix], DraftRow]
Admits = Callable[[Prefix], bool]
ResidualLaw = Callable[[Sequence[Fraction], Sequence[Fraction]], Sequence[Fraction]]


def add(law: Law, outcome: Prefix, mass: Fraction) -> None:
    """Adds mass to an outcome, in place; outcomes of mass 0 do not appear."""
    if mass:
        law[outcome] = law.get(outcome, Fraction(0)) + mass


def always(prefix: Prefix) -> bool:
    """The rule of fixed depth: every position is admitted."""
    return True


def round_law(
    p_after: ProbsAfter,
    q_after: ProbsAfter,
    depth: int,
    admits: Admits = always,
    residual_law: ResidualLaw = ideal_residual,
) -> Law:
    """Law of the tokens of one round, with ideal draws.

    Args:
        p_after: Target distribution after a prefix of this round's tokens.
        q_after: Draft distribution after a prefix of proposed tokens.
        depth: Proposed tokens, at most.
        admits: Whether one more token is proposed after a prefix; asked before that token exists. Fixed depth: always.
        residual_law: Law of the correction token from (p, q); `shards` has one built shard by shard.

    Returns:
        Mass of every emitted tuple (1 to depth + 1 tokens); the sum is exactly 1.
    """
    law: Law = {}

    def walk(prefix: Prefix, mass: Fraction) -> None:
        p = p_after(prefix)
        if len(prefix) == depth or not admits(prefix):
            for token, bonus in enumerate(p):
                add(law, (*prefix, token), mass * bonus)
            return
        q = q_after(prefix)
        rejected = Fraction(0)
        for token, proposed in enumerate(q):
            if proposed:
                accepted = ideal_acceptance(p, q, token)
                rejected += proposed * (1 - accepted)
                if accepted:
                    walk((*prefix, token), mass * proposed * accepted)
        if rejected:
            for token, corrected in enumerate(residual_law(p, q)):
                add(law, (*prefix, token), mass * rejected * corrected)

    walk((), Fraction(1))
    return law


def completed_law(law: Mapping[Prefix, Fraction], p_after: ProbsAfter, length: int) -> Law:
    """Continues every outcome by target sampling to one length, so that laws of unequal lengths compare."""
    completed: Law = {}

    def extend(prefix: Prefix, mass: Fraction) -> None:
        if len(prefix) == length:
            add(completed, prefix, mass)
            return
        for token, probability in enumerate(p_after(prefix)):
            if probability:
                extend((*prefix, token), mass * probability)

    for outcome, mass in law.items():
        extend(outcome, mass)
    return completed


def target_law(p_after: ProbsAfter, length: int) -> Law:
    """Joint law of ``length`` tokens sampled from the target alone: what every round must reproduce."""
    return completed_law({(): Fraction(1)}, p_after, length)


def total_variation(first: Mapping[Prefix, Fraction], second: Mapping[Prefix, Fraction]) -> Fraction:
    """Half the sum of absolute differences."""
    outcomes = set(first) | set(second)
    zero = Fraction(0)
    return sum((abs(first.get(o, zero) - second.get(o, zero)) for o in outcomes), zero) / 2


def accepting_draws(tickets: int, weight: int, total: int) -> int:
    """How many of the 2**32 acceptance draws accept: those below ``p/q * 2**32``."""
    return min(1 << ACCEPTANCE_BITS, -(-(weight << (ACCEPTANCE_BITS + TICKET_BITS)) // (tickets * total)))


def wide_draws(weights: npt.NDArray[np.int64]) -> list[int]:
    """How many of the 2**64 wide draws lead to each id under multiply-high; the sum is 2**64."""
    total = require_weights(weights)
    # index = draw * total >> 64 is below C exactly for draw < ceil(C * 2**64 / total)
    edges = [-(-(int(cumulative) << WIDE_BITS) // total) for cumulative in np.cumsum(weights)]
    return [edge - below for edge, below in zip(edges, [0, *edges], strict=False)]


def finite_round_law(weights_after: WeightsAfter, row_after: RowAfter, depth: int) -> Law:
    """Law of the tokens of one round with the real finite draws of `verify.verify_round`.

    Args:
        weights_after: Target weights int64 [V] after a prefix.
        row_after: q after a prefix of proposed tokens.
        depth: Proposed tokens.

    Returns:
        Mass of every emitted tuple; the sum is exactly 1.
    """
    law: Law = {}

    def spread(prefix: Prefix, weights: npt.NDArray[np.int64], mass: Fraction) -> None:
        for token, draws in enumerate(wide_draws(weights)):
            add(law, (*prefix, token), mass * Fraction(draws, 1 << WIDE_BITS))

    def walk(prefix: Prefix, mass: Fraction) -> None:
        weights = weights_after(prefix)
        if len(prefix) == depth:
            spread(prefix, weights, mass)
            return
        row, total = row_after(prefix), require_weights(weights)
        rejected = Fraction(0)
        for token, count in zip(row.ids.tolist(), row.tickets.tolist(), strict=True):
            proposed = Fraction(count, TICKET_TOTAL)
            accepted = Fraction(accepting_draws(count, int(weights[token]), total), 1 << ACCEPTANCE_BITS)
            rejected += proposed * (1 - accepted)
            if accepted:
                walk((*prefix, token), mass * proposed * accepted)
        if rejected:
            spread(prefix, residual_weights(weights, row), mass * rejected)

    walk((), Fraction(1))
    return law


def position_bound(support_size: int, vocab_size: int) -> Fraction:
    """Bound on the total variation that finite draws and the floored residual add at one proposed position.

    2**-32 for the 32-bit acceptance test, support_size * 2**-38 for the floor in the residual, vocab_size * 2**-65 for
    the 64-bit multiply-high. The 24-bit proposal adds nothing: q is what those draws do.
    """
    return (
        Fraction(1, 1 << ACCEPTANCE_BITS)
        + Fraction(support_size, 1 << WEIGHT_BITS)
        + Fraction(vocab_size, 1 << (WIDE_BITS + 1))
    )


def round_bound(depth: int, support_size: int, vocab_size: int) -> Fraction:
    """Bound for a whole round: its positions and the bonus draw."""
    return depth * position_bound(support_size, vocab_size) + Fraction(vocab_size, 1 << (WIDE_BITS + 1))
