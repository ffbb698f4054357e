"""The q-aware standard verifier in plain numpy: the reference that verifier kernels are compared with.

Semantics ``standard-minpq-residual-v1`` (DECISIONS 3 and 4): accept by ``u * c * S < w * 2**56``, correct from the
full-vocabulary residual, exact in integers. Inputs are int64 weights of processed target rows and sparse tickets; a
proposal that does not satisfy the contract is refused as a whole before any draw. No dense q is built. Not covered:
other acceptance rules, adaptive depth (a proposal's depth is fixed before its tokens are drawn).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from remote_dspark.contract import TICKET_BITS, TICKET_TOTAL, WEIGHT_ONE
from remote_dspark.oracle.verify import DraftRow, FinalKind, RoundOutcome
from remote_dspark.verifier.errors import ProposalError, RowError
from remote_dspark.verifier.noise import RoundNoise

ACCEPTANCE_BITS: Final = 32
WIDE_BITS: Final = 64

Weights = npt.NDArray[np.int64]


def verify_proposal(
    target: Weights, rows: Sequence[DraftRow], proposed: Sequence[int], noise: RoundNoise
) -> RoundOutcome:
    """Verify one proposal chain against the target's distribution.

    Args:
        target: int64 ``[depth + 1, V]``, weights of the processed rows; not modified.
        rows: q of each proposed position.
        proposed: ``depth`` token ids.
        noise: Draws of this round.

    Returns:
        What to commit: the accepted tokens and one more.

    Raises:
        RowError: A target row without mass.
        ProposalError: Shapes, support, counts or tokens that the contract does not allow.
    """
    totals = require_totals(target, len(proposed))
    counts = [_require_row(row, token, target.shape[1], i) for i, (row, token) in _pairs(rows, proposed)]
    draws: list[int] = []
    for index, token in enumerate(proposed):
        draws.append(noise.acceptance(index))
        threshold = int(target[index, token]) << ACCEPTANCE_BITS + TICKET_BITS
        if draws[-1] * counts[index] * totals[index] >= threshold:
            draw = noise.correction(index)
            residual = residual_weights(target[index], rows[index], totals[index])
            is_empty = not residual.any()
            final = draw_token(target[index] if is_empty else residual, draw)
            return RoundOutcome(index, (*proposed[:index], final), FinalKind.CORRECTION, is_empty, tuple(draws), draw)
    return accept_all(target, proposed, draws, noise)


def residual_weights(weights: Weights, row: DraftRow, total: int) -> Weights:
    """``max(p - q, 0)`` in units of 1/S: int64 ``[V]``, a new array.

    ``c * S`` needs up to 79 bits, so the at most 32 products are Python integers; everything else stays int64.
    """
    residual = weights.copy()
    taken = np.array([count * total >> TICKET_BITS for count in row.tickets.tolist()], dtype=np.int64)
    residual[row.ids] = np.maximum(residual[row.ids] - taken, 0)
    return residual


def draw_token(weights: Weights, draw: int) -> int:
    """The id whose cumulative weight is the first above ``draw * total >> 64``."""
    cumulative = np.cumsum(weights)
    threshold = draw * int(cumulative[-1]) >> WIDE_BITS
    return int(np.searchsorted(cumulative, threshold, side="right"))


def require_totals(target: Weights, depth: int) -> list[int]:
    """Row sums S as Python integers.

    Raises:
        RowError: Wrong shape or dtype, a weight out of range, or a row without mass.
    """
    if target.ndim != 2 or target.dtype != np.int64 or target.shape[0] != depth + 1 or target.shape[1] == 0:
        raise RowError(f"target: expected int64 [{depth + 1}, V], found {target.dtype} {list(target.shape)}")
    if int(target.min()) < 0 or int(target.max()) > WEIGHT_ONE:
        raise RowError(f"target: expected weights of 0..2^38, found {int(target.min())}..{int(target.max())}")
    totals = [int(total) for total in target.sum(axis=1)]
    if 0 in totals:
        raise RowError(f"target row {totals.index(0)}: expected mass, found none")
    return totals


def _pairs(rows: Sequence[DraftRow], proposed: Sequence[int]) -> list[tuple[int, tuple[DraftRow, int]]]:
    if len(rows) != len(proposed):
        raise ProposalError(f"proposal: expected one row per token, found {len(rows)} rows, {len(proposed)} tokens")
    return list(enumerate(zip(rows, proposed, strict=True)))


def _require_row(row: DraftRow, token: int, vocab_size: int, index: int) -> int:
    """Check one q row; returns the tickets of the proposed token."""
    where = f"proposal row {index}"
    ids, tickets = row.ids, row.tickets
    if ids.ndim != 1 or ids.shape != tickets.shape or ids.size == 0:
        raise ProposalError(f"{where}: expected as many ids as counts, found {list(ids.shape)}, {list(tickets.shape)}")
    if int(tickets.min()) < 1 or int(tickets.sum()) != TICKET_TOTAL:
        raise ProposalError(f"{where}: expected positive counts of sum 2^24, found sum {int(tickets.sum())}")
    if bool((np.diff(ids) <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise ProposalError(f"{where}: expected strictly ascending ids of 0..{vocab_size - 1}, found {ids[:4]}...")
    place = int(np.searchsorted(ids, token))
    if place == ids.size or int(ids[place]) != token:
        raise ProposalError(f"{where}: token {token} has q = 0, it was not drawn from this row")
    return int(tickets[place])


def accept_all(target: Weights, proposed: Sequence[int], draws: list[int], noise: RoundNoise) -> RoundOutcome:
    """The round in which every draft token was accepted: one bonus token from the target's last row."""
    depth = len(proposed)
    draw = noise.bonus(depth)
    tokens = (*proposed, draw_token(target[depth], draw))
    return RoundOutcome(depth, tokens, FinalKind.BONUS, False, tuple(draws), draw)
