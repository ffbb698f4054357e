"""The dense dyadic producer: every token of the vocabulary gets its tickets, counts by largest remainder.

The reference for the sparse head: with k = V both must give the same counts, and the sparse q differs from this one by
the truncated mass only. Torch operations on whole rows, on any device; exact after one exponential per token. The
sharded form starts from per-shard masses, as ranks that own vocabulary slices would.

Not covered: speed, and any use in production: a dense q is 517 KB per position on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from remote_dspark.contract import TICKET_BITS, TICKET_TOTAL, Domain
from remote_dspark.kernels.naive import fixed_weights, philox


@dataclass(frozen=True)
class DenseRows:
    """Dense rows of one position.

    Attributes:
        tickets: int64 [B, V], sum exactly 2**24 per row.
        token: int64 [B].
        log_mass: float64 [B], global logsumexp of the tempered row: ``max / tau + log(S / 2**38)``.
        weights: int64 [B, V].
    """

    tickets: torch.Tensor
    token: torch.Tensor
    log_mass: torch.Tensor
    weights: torch.Tensor


def allocate_dense(weights: torch.Tensor) -> torch.Tensor:
    """Tickets by largest remainder, ties to the lowest id: int64 [B, V], in `Q_STANDARD`.

    Args:
        weights: int64 [B, V], each at most 2**38, positive total.
    """
    total = weights.sum(dim=1, keepdim=True)
    scaled = weights << TICKET_BITS
    counts = torch.div(scaled, total, rounding_mode="floor")
    left = TICKET_TOTAL - counts.sum(dim=1)
    # a stable sort of the negated remainders keeps equal ones in id order
    order = torch.argsort(-(scaled - counts * total), dim=1, stable=True)
    owed = torch.arange(weights.shape[1], device=weights.device)[None] < left[:, None]
    return counts.scatter_add(1, order, owed.to(torch.int64))


def draw_dense(tickets: torch.Tensor, draw: torch.Tensor, num_shards: int = 1) -> torch.Tensor:
    """The token whose cumulative count is the first above the draw; shard by mass first.

    Args:
        tickets: int64 [B, V].
        draw: int64 [B] in [0, 2**24).
        num_shards: Equal vocabulary slices; the result does not depend on it.

    Returns:
        int64 [B].
    """
    size = -(-tickets.shape[1] // num_shards)
    parts = [tickets[:, start : start + size] for start in range(0, tickets.shape[1], size)]
    masses = torch.stack([part.sum(dim=1) for part in parts], dim=1).cumsum(dim=1)
    shard = (masses <= draw[:, None]).sum(dim=1)
    before = torch.where(shard > 0, masses.gather(1, (shard - 1).clamp(min=0)[:, None])[:, 0], 0)
    local = draw - before
    index = torch.stack([(part.cumsum(dim=1) <= local[:, None]).sum(dim=1) for part in parts], dim=1)
    return shard * size + index.gather(1, shard[:, None])[:, 0]


def dense_rows(
    values: torch.Tensor,
    tau: torch.Tensor,
    keys: torch.Tensor,
    rounds: torch.Tensor,
    positions: torch.Tensor,
    num_shards: int = 1,
) -> DenseRows:
    """Dense tickets and token of each row.

    Args:
        values: float32 [B, V], corrected rows without NaN or +inf, at least one finite value each.
        tau: float32 [B], positive.
        keys: integer [B, 2].
        rounds: integer [B].
        positions: integer [B].
        num_shards: See `draw_dense`.
    """
    top = values.amax(dim=1, keepdim=True)
    weights = fixed_weights(values, top, tau[:, None])
    tickets = allocate_dense(weights)
    draw = philox((rounds, positions, Domain.PROPOSAL, 0), keys)[0] >> 8
    log_mass = (
        top[:, 0].to(torch.float64) / tau
        + torch.log2(weights.sum(dim=1).to(torch.float64)).sub(38) * 0.6931471805599453
    )
    return DenseRows(tickets, draw_dense(tickets, draw, num_shards), log_mass, weights)
