"""Torch reference of the verifier: acceptance by min(1, p/q), residual over all tokens, bonus, on FP32 target rows.

Target weights are made here (one exponential per token); everything after them is exact: int64 sums, Python integers
where 64 bits do not suffice. `verify_weights` starts from given weights, which is how a device is judged: on what it
emitted. The sharded form chooses the shard by mass first, as ranks that own vocabulary slices have to.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from remote_dspark.contract import TICKET_BITS, TICKET_TOTAL, Domain
from remote_dspark.kernels.naive import fixed_weights, philox
from remote_dspark.kernels.rows import Control, RowError, VerifiedRounds, stamp_of

_WIDE = 64


def target_weights(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Fixed-point weights of processed target rows (`contract.TARGET_SEMANTICS`).

    Args:
        rows: float32 [n, V], after every processor; -inf masks a token.

    Returns:
        int64 [n, V] weights, 0 in refused rows, and int32 [n] `RowError` flags.
    """
    error = torch.where((rows == -torch.inf).all(dim=1), int(RowError.ZERO_MASS), 0)
    error = torch.where((rows == torch.inf).any(dim=1), int(RowError.POSITIVE_INFINITY), error)
    error = torch.where(rows.isnan().any(dim=1), int(RowError.NAN), error).to(torch.int32)
    usable = torch.where((error == 0)[:, None], rows, 0.0)
    one = torch.ones((rows.shape[0], 1), dtype=torch.float32)
    weights = fixed_weights(usable, usable.amax(dim=1, keepdim=True), one)
    return torch.where((error == 0)[:, None], weights, 0), error


def _draw(control: torch.Tensor, request: int, index: int, domain: Domain) -> tuple[int, int]:
    """First two Philox words for one position of one request."""
    line = control[request : request + 1].to(torch.int64)
    position = line[:, Control.POSITION] + index
    words = philox((line[:, Control.ROUND_LOW], position, domain, 0), line[:, Control.KEY0 : Control.KEY1 + 1])
    return int(words[0]), int(words[1])


def residual(weights: torch.Tensor, ids: list[int], tickets: list[int]) -> torch.Tensor:
    """``max(p - q, 0)`` in units of 1/S: int64 [V]; ``weights`` is not modified."""
    total = int(weights.sum())
    left = weights.clone()
    for token, count in zip(ids, tickets, strict=True):
        left[token] = max(int(weights[token]) - (count * total >> TICKET_BITS), 0)
    return left


def draw_weighted(weights: torch.Tensor, draw64: int, num_shards: int = 1) -> int:
    """Draws an id by integer weight; with shards, first the shard by its mass, then the token within it.

    Args:
        weights: int64 [V], positive total.
        draw64: Integer in [0, 2**64).
        num_shards: Equal slices of the vocabulary, the last one may be shorter. The result does not depend on it.
    """
    index = draw64 * int(weights.sum()) >> _WIDE
    size = -(-weights.shape[0] // num_shards)
    for shard in range(num_shards):
        part = weights[shard * size : (shard + 1) * size]
        mass = int(part.sum())
        if index < mass:
            return shard * size + int((part.cumsum(0) <= index).sum())
        index -= mass
    raise AssertionError("an index below the total lies in some shard")


def _proposal_is_valid(ids: list[int], tickets: list[int], token: int, vocab_size: int) -> bool:
    """Whether the token can have been drawn from this row."""
    ascending = all(a < b for a, b in pairwise(ids))
    in_range = bool(ids) and ids[0] >= 0 and ids[-1] < vocab_size
    drawn = dict(zip(ids, tickets, strict=True)).get(token, 0) > 0
    return ascending and in_range and drawn and min(tickets) >= 0 and sum(tickets) == TICKET_TOTAL


def verify_weights(
    weights: torch.Tensor,
    row_error: torch.Tensor,
    control: torch.Tensor,
    proposed: torch.Tensor,
    ids: torch.Tensor,
    q: torch.Tensor,
    count: torch.Tensor,
    num_shards: int = 1,
) -> VerifiedRounds:
    """Verifies R requests on given target weights.

    Args:
        weights: int64 [n, V]; request r owns rows FIRST_ROW .. FIRST_ROW + NUM_DRAFT.
        row_error: int32 [n] flags of those rows.
        control: int32 [R, 16].
        proposed: int32 [R, D] draft tokens.
        ids: int32 [R, D, k] support, ascending in the first ``count`` entries.
        q: float32 [R, D, k], multiples of 2**-24.
        count: int32 [R, D]; 0 means a greedy row (all tickets at the token), legal only for a GREEDY request.
        num_shards: See `draw_weighted`.
    """
    num_requests, depth = proposed.shape
    out = VerifiedRounds(
        num_accepted=torch.zeros(num_requests, dtype=torch.int32),
        tokens=torch.zeros((num_requests, depth + 1), dtype=torch.int32),
        zero_residual=torch.zeros(num_requests, dtype=torch.int32),
        error=torch.zeros(num_requests, dtype=torch.int32),
        totals=torch.zeros((num_requests, depth + 1), dtype=torch.int64),
        stamp=stamp_of(control),
    )
    for request in range(num_requests):
        first, drafts = (int(control[request, field]) for field in (Control.FIRST_ROW, Control.NUM_DRAFT))
        own = weights[first : first + drafts + 1]
        rows = [_draft_row(ids, q, count, proposed, control, request, i) for i in range(drafts)]
        out.totals[request, : drafts + 1] = own.sum(dim=1)
        flags = 0
        for error in row_error[first : first + drafts + 1].tolist():
            flags |= error
        tokens = proposed[request, :drafts].tolist()
        valid = [_proposal_is_valid(*row, token, weights.shape[1]) for row, token in zip(rows, tokens, strict=True)]
        if not all(valid):
            flags |= int(RowError.PROPOSAL)
        out.error[request] = flags
        if flags == 0:
            accepted, final, is_zero = _verify_one(own, rows, tokens, control, request, num_shards)
            out.num_accepted[request] = accepted
            out.tokens[request, :accepted] = proposed[request, :accepted]
            out.tokens[request, accepted] = final
            out.zero_residual[request] = int(is_zero)
    return out


def _draft_row(
    ids: torch.Tensor,
    q: torch.Tensor,
    count: torch.Tensor,
    proposed: torch.Tensor,
    control: torch.Tensor,
    request: int,
    index: int,
) -> tuple[list[int], list[int]]:
    """Ids and tickets of one draft row; a greedy row is one-hot at its token, anywhere else an empty row is invalid."""
    entries = int(count[request, index])
    if entries == 0:
        is_greedy = bool(control[request, Control.GREEDY])
        return ([int(proposed[request, index])], [TICKET_TOTAL]) if is_greedy else ([], [])
    tickets = (q[request, index, :entries].to(torch.float64) * TICKET_TOTAL).to(torch.int64).tolist()
    return ids[request, index, :entries].tolist(), tickets


def _verify_one(
    own: torch.Tensor,
    rows: list[tuple[list[int], list[int]]],
    tokens: list[int],
    control: torch.Tensor,
    request: int,
    num_shards: int,
) -> tuple[int, int, bool]:
    """Accepted draft tokens, the final token, and whether the residual was empty."""
    for index, (token, (ids, tickets)) in enumerate(zip(tokens, rows, strict=True)):
        draw, _ = _draw(control, request, index, Domain.ACCEPTANCE)
        total, weight = int(own[index].sum()), int(own[index, token])
        if draw * tickets[ids.index(token)] * total >= weight << 56:
            low, high = _draw(control, request, index, Domain.CORRECTION)
            left = residual(own[index], ids, tickets)
            is_zero = not bool(left.any())
            chosen = own[index] if is_zero else left
            return index, draw_weighted(chosen, low | high << 32, num_shards), is_zero
    low, high = _draw(control, request, len(tokens), Domain.BONUS)
    return len(tokens), draw_weighted(own[len(tokens)], low | high << 32, num_shards), False


def verify_rows(
    target: torch.Tensor,
    control: torch.Tensor,
    proposed: torch.Tensor,
    ids: torch.Tensor,
    q: torch.Tensor,
    count: torch.Tensor,
) -> VerifiedRounds:
    """`verify_weights` on FP32 target rows: same arguments, with float32 [n, V] rows instead of weights."""
    weights, row_error = target_weights(target)
    return verify_weights(weights, row_error, control, proposed, ids, q, count)
