"""Verification of a proposal: min(1, p/q), the residual, the correction and the bonus token, in exact integers.

With integer target weights (p = w/S) and integer tickets (q = c/2**24), the test ``u / 2**32 < p/q`` is
``u * c * S < w * 2**56``: 111 bits at most (DECISIONS 4). The residual of a token is ``w`` outside the support and
``max(w - floor(c * S / 2**24), 0)`` inside; flooring changes the law of a whole position by less than k/S <= k * 2**-38
in total variation (docs/numerics.md has the proof and the other bounds), and never its support.

A rejected token has p < q, so some other token has p > q and an integer residual of at least 1: after a rejection the
residual is never empty. The branch for it exists because other implementations may round otherwise; its counter has to
stay 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from remote_dspark.contract import TICKET_BITS, TICKET_TOTAL, Domain
from remote_dspark.oracle.errors import InvalidProposalError, InvalidRowError, ProposalFault, RowFault
from remote_dspark.oracle.philox import Key, acceptance_draw, wide_draw
from remote_dspark.oracle.tickets import require_tickets
from remote_dspark.oracle.weights import require_weights

ACCEPTANCE_BITS = 32
WIDE_BITS = 64


@dataclass(frozen=True)
class DraftRow:
    """q of one position: tickets at global ids, zero everywhere else.

    Attributes:
        ids: int64 [m], strictly ascending.
        tickets: int64 [m], positive, sum exactly 2**24.
    """

    ids: npt.NDArray[np.int64]
    tickets: npt.NDArray[np.int64]

    def tickets_of(self, token: int) -> int:
        """Tickets of a global id; 0 outside the support."""
        index = int(np.searchsorted(self.ids, token))
        return int(self.tickets[index]) if index < self.ids.size and self.ids[index] == token else 0


class FinalKind(StrEnum):
    """Where the last token of a round comes from."""

    CORRECTION = "correction"
    BONUS = "bonus"


@dataclass(frozen=True)
class RoundOutcome:
    """What one round commits.

    Attributes:
        num_accepted: Draft tokens accepted, 0..depth.
        tokens: Committed tokens: the accepted ones and one more (``num_accepted + 1``).
        final_kind: Whether the last one is a correction or a bonus token.
        zero_residual: The residual was empty after a rejection and p was sampled instead; counted, expected never.
        acceptance_draws: 32-bit draws used, one per tested token.
        final_draw: 64-bit draw of the last token.
    """

    num_accepted: int
    tokens: tuple[int, ...]
    final_kind: FinalKind
    zero_residual: bool
    acceptance_draws: tuple[int, ...]
    final_draw: int


def one_hot_row(token: int) -> DraftRow:
    """The q of a greedy row: every ticket at the token."""
    return DraftRow(np.array([token], dtype=np.int64), np.array([TICKET_TOTAL], dtype=np.int64))


def dense_row(counts: npt.NDArray[np.int64]) -> DraftRow:
    """The q of a dense row: tickets of every id, zeros allowed on the way in and dropped here.

    Args:
        counts: int64 [V], sum exactly 2**24.

    Raises:
        InvalidRowError: Counts negative or with another total.
    """
    require_tickets(counts)
    ids = np.flatnonzero(counts).astype(np.int64)
    return DraftRow(ids, counts[ids])


def require_draft_row(row: DraftRow, vocab_size: int) -> DraftRow:
    """Checks a draft row against the vocabulary.

    Raises:
        InvalidRowError: Counts not positive or not summing to 2**24, ids not strictly ascending, or ids outside
            [0, vocab_size).
    """
    require_tickets(row.tickets)
    if int(row.tickets.min()) == 0:
        raise InvalidRowError(RowFault.ZERO_MASS, "an entry without tickets must be dropped, not sent")
    if row.ids.shape != row.tickets.shape or (np.diff(row.ids) <= 0).any():
        raise InvalidRowError(RowFault.SUPPORT_ORDER, "ids must be strictly ascending, one per count")
    if int(row.ids[0]) < 0 or int(row.ids[-1]) >= vocab_size:
        raise InvalidRowError(RowFault.ID_RANGE, f"ids must be in [0, {vocab_size}), found {row.ids[0]}..{row.ids[-1]}")
    return row


def accepts(draw32: int, tickets: int, weight: int, total: int) -> bool:
    """Whether a proposed token is accepted: ``u * c * S < w * 2**56``.

    p = 0 never accepts; p >= q always does.

    Args:
        draw32: u in [0, 2**32).
        tickets: c of the token, 1..2**24.
        weight: w of the token.
        total: S of the target row.
    """
    return draw32 * tickets * total < weight << (ACCEPTANCE_BITS + TICKET_BITS)


def residual_weights(weights: npt.NDArray[np.int64], row: DraftRow) -> npt.NDArray[np.int64]:
    """``max(p - q, 0)`` in units of 1/S over the whole vocabulary.

    Args:
        weights: int64 [V], target weights of the position.
        row: q of the position.

    Returns:
        A new int64 [V].
    """
    return residual_weights_of(weights, require_weights(weights), row.ids, row.tickets)


def residual_weights_of(
    weights: npt.NDArray[np.int64], total: int, indices: npt.NDArray[np.int64], tickets: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """`residual_weights` of a whole row or of one vocabulary shard.

    Args:
        weights: int64 [n].
        total: S of the whole row.
        indices: int64 [m], positions within ``weights`` of the entries of q.
        tickets: int64 [m].

    Returns:
        A new int64 [n].
    """
    residual = weights.copy()
    for index, count in zip(indices.tolist(), tickets.tolist(), strict=True):
        residual[index] = max(int(weights[index]) - (count * total >> TICKET_BITS), 0)
    return residual


def draw_weighted(weights: npt.NDArray[np.int64], draw64: int) -> int:
    """Draws an id by integer weight: ``index = draw * total >> 64``, then the first cumulative weight above it.

    Args:
        weights: int64 [V], positive total.
        draw64: Integer in [0, 2**64).

    Returns:
        An id with positive weight.
    """
    if not 0 <= draw64 < 1 << WIDE_BITS:
        raise InvalidRowError(RowFault.WRONG_TOTAL, f"draw must be in [0, 2**64), found {draw64}")
    index = draw64 * require_weights(weights) >> WIDE_BITS
    return int(np.searchsorted(np.cumsum(weights), index, side="right"))


def draw_correction(weights: npt.NDArray[np.int64], row: DraftRow, draw64: int) -> tuple[int, bool]:
    """The token after a rejection.

    Returns:
        The token, and whether the residual was empty so that p itself was sampled (DECISIONS 4).
    """
    residual = residual_weights(weights, row)
    if not residual.any():
        return draw_weighted(weights, draw64), True
    return draw_weighted(residual, draw64), False


def verify_round(
    target_rows: Sequence[npt.NDArray[np.int64]],
    draft_rows: Sequence[DraftRow],
    proposed: Sequence[int],
    key: Key,
    round: int,
    first_position: int,
) -> RoundOutcome:
    """Verifies one proposal chain.

    Args:
        target_rows: depth + 1 arrays int64 [V]: weights of the processed target row at each proposed position, each
            conditioned on the proposed tokens before it, and of the bonus position.
        draft_rows: depth rows, q of each proposed position.
        proposed: depth token ids.
        key: From `philox.derive_key`.
        round: Round within the generation.
        first_position: Absolute position of ``proposed[0]``; the bonus token is at ``first_position + depth``.

    Returns:
        The committed tokens.

    Raises:
        InvalidProposalError: Lengths differ, or a proposed token is outside the vocabulary or has q = 0.
        InvalidRowError: A target or draft row that defines no distribution. All rows are checked before any draw.
        CounterRangeError: A counter that does not fit.
    """
    totals = _require_round(target_rows, draft_rows, proposed)
    draws: list[int] = []
    for index, token in enumerate(proposed):
        position = first_position + index
        weights, row = target_rows[index], draft_rows[index]
        draws.append(acceptance_draw(key, round, position))
        if not accepts(draws[-1], row.tickets_of(token), int(weights[token]), totals[index]):
            final_draw = wide_draw(key, round, position, Domain.CORRECTION)
            final, is_empty = draw_correction(weights, row, final_draw)
            tokens = (*proposed[:index], final)
            return RoundOutcome(index, tokens, FinalKind.CORRECTION, is_empty, tuple(draws), final_draw)
    depth = len(proposed)
    final_draw = wide_draw(key, round, first_position + depth, Domain.BONUS)
    tokens = (*proposed, draw_weighted(target_rows[depth], final_draw))
    return RoundOutcome(depth, tokens, FinalKind.BONUS, False, tuple(draws), final_draw)


def _require_round(
    target_rows: Sequence[npt.NDArray[np.int64]], draft_rows: Sequence[DraftRow], proposed: Sequence[int]
) -> list[int]:
    """Checks a whole round and returns the totals of the target rows."""
    depth = len(proposed)
    if len(draft_rows) != depth or len(target_rows) != depth + 1:
        raise InvalidProposalError(
            ProposalFault.LENGTH,
            f"{depth} tokens need {depth} draft rows and {depth + 1} target rows, "
            f"found {len(draft_rows)} and {len(target_rows)}",
        )
    totals = [require_weights(weights) for weights in target_rows]
    for index, (token, row) in enumerate(zip(proposed, draft_rows, strict=True)):
        vocab_size = target_rows[index].size
        require_draft_row(row, vocab_size)
        if not 0 <= token < vocab_size:
            raise InvalidProposalError(ProposalFault.PROPOSED_RANGE, f"token {token} is outside [0, {vocab_size})")
        if row.tickets_of(token) == 0:
            raise InvalidProposalError(
                ProposalFault.PROPOSED_WITHOUT_MASS,
                f"token {token} at index {index} has q = 0: not drawn from this row",
            )
    return totals


def ideal_acceptance(p: Sequence[Fraction], q: Sequence[Fraction], token: int) -> Fraction:
    """``min(1, p/q)`` of a token with q > 0, as a rational."""
    return min(Fraction(1), p[token] / q[token])


def ideal_residual(p: Sequence[Fraction], q: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """Normalised ``max(p - q, 0)``; p itself where it is empty (p = q)."""
    positive = [max(target - draft, Fraction(0)) for target, draft in zip(p, q, strict=True)]
    mass = sum(positive, Fraction(0))
    return tuple(value / mass for value in positive) if mass else tuple(p)
