"""Vocabulary shards: what several ranks compute together equals what one rank computes alone, exactly.

A small emulator. Each shard only looks at its own columns; what crosses between shards is written out as a sum, a
maximum, or a merge of small candidate lists. Lists are in shard order, which is id order. The leader owns every draw.

Because the weights are integers against one global maximum, sums do not depend on the order, and sharded = unsharded
bit for bit. A shard without mass has no width in the cumulative masses, so it can never be chosen; a shard whose
columns are all masked is legal, a vocabulary without any mass is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from remote_dspark.contract import Q_FLOOR_FIRST, TICKET_BITS, TICKET_TOTAL, Domain
from remote_dspark.oracle.errors import InvalidRowError, RowFault
from remote_dspark.oracle.philox import Key, acceptance_draw, wide_draw
from remote_dspark.oracle.tickets import require_semantics
from remote_dspark.oracle.verify import (
    WIDE_BITS,
    DraftRow,
    FinalKind,
    RoundOutcome,
    accepts,
    require_draft_row,
    residual_weights_of,
)
from remote_dspark.oracle.weights import require_temperature, weights_below

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True)
class Shard:
    """Global ids [start, end) of one rank."""

    start: int
    end: int


def shard_ranges(vocab_size: int, num_shards: int) -> tuple[Shard, ...]:
    """Contiguous ranges in id order; the first ``vocab_size % num_shards`` are one longer.

    Raises:
        InvalidRowError: Fewer columns than shards.
    """
    if not 1 <= num_shards <= vocab_size:
        raise InvalidRowError(RowFault.SHAPE, f"cannot cut {vocab_size} columns into {num_shards} shards")
    size, longer = divmod(vocab_size, num_shards)
    starts = [index * size + min(index, longer) for index in range(num_shards + 1)]
    return tuple(Shard(start, end) for start, end in pairwise(starts))


def split(row: npt.NDArray[Scalar], shards: Sequence[Shard]) -> list[npt.NDArray[Scalar]]:
    """Views of one row, one per shard."""
    return [row[shard.start : shard.end] for shard in shards]


def global_maximum(parts: Sequence[Float32]) -> np.float32:
    """All-reduce max of the local maxima, after every column of every shard was looked at.

    Raises:
        InvalidRowError: NaN or plus infinity in any shard, or minus infinity in all of them.
    """
    if any(np.isnan(part).any() for part in parts):
        raise InvalidRowError(RowFault.NAN, "a shard has a NaN logit")
    if any(np.isposinf(part).any() for part in parts):
        raise InvalidRowError(RowFault.POSITIVE_INFINITY, "a shard has a +inf logit")
    maximum = max(part.max() for part in parts)
    if np.isneginf(maximum):
        raise InvalidRowError(RowFault.ZERO_MASS, "all logits of all shards are -inf")
    return np.float32(maximum)


def local_top_k(part: Float32, shard: Shard, k: int) -> list[tuple[float, int]]:
    """Up to k candidates (value, global id) of one shard, best first, ties to the lowest id."""
    ranked = np.argsort(-part, kind="stable")[:k]
    return [(float(part[index]), shard.start + int(index)) for index in ranked if np.isfinite(part[index])]


def merged_top_k(parts: Sequence[Float32], shards: Sequence[Shard], k: int) -> tuple[Int64, int]:
    """Global top-k from at most k candidates per shard; equals `support.top_k_support` of the whole row.

    Returns:
        ids int64 [m] ascending and the index of rank 1.
    """
    global_maximum(parts)
    candidates = [c for part, shard in zip(parts, shards, strict=True) for c in local_top_k(part, shard, k)]
    # -0.0 == 0.0 in the comparison of tuples as well, so equal values fall to the lower id
    ranked = sorted(candidates, key=lambda candidate: (-candidate[0], candidate[1]))[:k]
    ids = sorted(token for _, token in ranked)
    return np.array(ids, dtype=np.int64), ids.index(ranked[0][1])


def sharded_weights(parts: Sequence[Float32], tau: float) -> tuple[list[Int64], int]:
    """Dense normalisation by global max and sum.

    Returns:
        Per shard int64 weights, and S by an all-reduce sum. Equal to `weights.fixed_weights` of the whole row.
    """
    maximum, temperature = global_maximum(parts), require_temperature(tau)
    weights = [weights_below(part, maximum, temperature) for part in parts]
    return weights, sum(int(part.sum()) for part in weights)


def sharded_allocate(
    weights: Sequence[Int64], shards: Sequence[Shard], semantics: str, first_rank_id: int
) -> list[Int64]:
    """Ticket allocation with the remaining tickets coordinated globally; equals `tickets.allocate`.

    Floors need only S. Of the remainder, `Q_FLOOR_FIRST` goes to the owner of rank 1. For `Q_STANDARD` the ranks find
    the remainder's threshold by bisection (one all-reduce of a count per step); who is above it gets one, and the
    tickets left over go to those exactly at it, in id order, by a prefix sum over shards.

    Args:
        weights: Per shard int64.
        shards: Their ranges.
        semantics: One of `contract.Q_SEMANTICS`.
        first_rank_id: Global id of rank 1.

    Returns:
        Per shard int64 counts; they sum to 2**24 over all shards.
    """
    total = sum(int(part.sum()) for part in weights)
    if total == 0:
        raise InvalidRowError(RowFault.ZERO_MASS, "no shard has any mass")
    counts = [(part << TICKET_BITS) // total for part in weights]
    remainders = [(part << TICKET_BITS) % total for part in weights]
    remaining = TICKET_TOTAL - sum(int(part.sum()) for part in counts)
    if not 0 <= remaining < max(sum(part.size for part in weights), 1):
        raise InvalidRowError(RowFault.REMAINDER, f"remainder {remaining} is out of range")
    if require_semantics(semantics) == Q_FLOOR_FIRST:
        owner = owner_of(first_rank_id, shards)
        counts[owner][first_rank_id - shards[owner].start] += remaining
        return counts
    threshold = _threshold(remainders, remaining, total)
    owed = remaining - sum(int((part > threshold).sum()) for part in remainders)
    for count, part in zip(counts, remainders, strict=True):
        level = np.flatnonzero(part == threshold)[:owed]
        count[part > threshold] += 1
        count[level] += 1
        owed -= level.size
    return counts


def _threshold(remainders: Sequence[Int64], remaining: int, total: int) -> int:
    """Least t such that at most ``remaining`` remainders are greater than t."""
    low, high = -1, total
    while low + 1 < high:
        middle = (low + high) // 2
        if sum(int((part > middle).sum()) for part in remainders) <= remaining:
            high = middle
        else:
            low = middle
    return high


def owner_of(token: int, shards: Sequence[Shard]) -> int:
    """Index of the shard that owns a global id.

    Raises:
        InvalidRowError: Nobody does.
    """
    for index, shard in enumerate(shards):
        if shard.start <= token < shard.end:
            return index
    raise InvalidRowError(RowFault.ID_RANGE, f"id {token} belongs to no shard")


def choose_shard(masses: Sequence[int], index: int) -> tuple[int, int]:
    """Chooses a shard by mass: the first whose cumulative mass is above the index.

    Args:
        masses: Integer mass per shard.
        index: Integer in [0, sum of masses).

    Returns:
        The shard, which has positive mass, and the index within it.

    Raises:
        InvalidRowError: The index is outside.
    """
    below = 0
    for shard, mass in enumerate(masses):
        if 0 <= index - below < mass:
            return shard, index - below
        below += mass
    raise InvalidRowError(RowFault.ZERO_MASS, f"index {index} is outside the total mass {below}")


def sharded_pick(parts: Sequence[Int64], shards: Sequence[Shard], index: int) -> int:
    """The global id at an index of the cumulative masses: shard by mass, then the token within."""
    owner, within = choose_shard([int(part.sum()) for part in parts], index)
    return shards[owner].start + int(np.searchsorted(np.cumsum(parts[owner]), within, side="right"))


def sharded_draw_weighted(parts: Sequence[Int64], shards: Sequence[Shard], draw64: int) -> int:
    """`verify.draw_weighted` over shards: one 64-bit draw of the leader."""
    return sharded_pick(parts, shards, draw64 * sum(int(part.sum()) for part in parts) >> WIDE_BITS)


def owned_entries(row: DraftRow, shard: Shard) -> tuple[Int64, Int64]:
    """Entries of a sparse row that a shard owns: local indices and tickets."""
    owned = (row.ids >= shard.start) & (row.ids < shard.end)
    return row.ids[owned] - shard.start, row.tickets[owned]


def sharded_residual(weights: Sequence[Int64], shards: Sequence[Shard], row: DraftRow) -> list[Int64]:
    """The residual over every token each shard owns, those outside the support of q included."""
    total = sum(int(part.sum()) for part in weights)
    return [
        residual_weights_of(part, total, *owned_entries(row, shard))
        for part, shard in zip(weights, shards, strict=True)
    ]


def sharded_verify_round(
    target_rows: Sequence[Int64],
    draft_rows: Sequence[DraftRow],
    proposed: Sequence[int],
    key: Key,
    round: int,
    first_position: int,
    shards: Sequence[Shard],
) -> RoundOutcome:
    """`verify.verify_round` on shards; the owner of a proposed token decides its acceptance and broadcasts it.

    Only well-formed rounds: refusals of lengths and tokens are those of the unsharded form.
    """
    rows = [split(row, shards) for row in target_rows]
    draws: list[int] = []
    for index, (token, row) in enumerate(zip(proposed, draft_rows, strict=True)):
        require_draft_row(row, shards[-1].end)
        parts, owner = rows[index], owner_of(token, shards)
        total = sum(int(part.sum()) for part in parts)
        draws.append(acceptance_draw(key, round, first_position + index))
        weight = int(parts[owner][token - shards[owner].start])
        if not accepts(draws[-1], row.tickets_of(token), weight, total):
            residual = sharded_residual(parts, shards, row)
            is_empty = not any(part.any() for part in residual)
            final_draw = wide_draw(key, round, first_position + index, Domain.CORRECTION)
            final = sharded_draw_weighted(parts if is_empty else residual, shards, final_draw)
            tokens = (*proposed[:index], final)
            return RoundOutcome(index, tokens, FinalKind.CORRECTION, is_empty, tuple(draws), final_draw)
    final_draw = wide_draw(key, round, first_position + len(proposed), Domain.BONUS)
    tokens = (*proposed, sharded_draw_weighted(rows[-1], shards, final_draw))
    return RoundOutcome(len(proposed), tokens, FinalKind.BONUS, False, tuple(draws), final_draw)


def sharded_law(law: Sequence[Fraction], shards: Sequence[Shard]) -> tuple[Fraction, ...]:
    """The law of choosing a shard by its mass and then a token within it by its share: the two-stage form, exactly.

    Args:
        law: Non-negative masses per global id, not all 0; need not be normalised.
        shards: Ranges.

    Returns:
        Per id, P(shard) * P(id | shard); a shard without mass contributes nothing and is never divided by.
    """
    masses = [sum(law[shard.start : shard.end], Fraction(0)) for shard in shards]
    total = sum(masses, Fraction(0))
    two_stage: list[Fraction] = []
    for shard, mass in zip(shards, masses, strict=True):
        local = law[shard.start : shard.end]
        two_stage += [(mass / total) * (value / mass) if mass else Fraction(0) for value in local]
    return tuple(two_stage)


def sharded_ideal_residual(
    p: Sequence[Fraction], q: Sequence[Fraction], shards: Sequence[Shard]
) -> tuple[Fraction, ...]:
    """`verify.ideal_residual` built shard by shard: each over its own tokens, then the two-stage choice."""
    positive: list[Fraction] = []
    for shard in shards:
        owned = slice(shard.start, shard.end)
        positive += [max(target - draft, Fraction(0)) for target, draft in zip(p[owned], q[owned], strict=True)]
    return sharded_law(positive if any(positive) else p, shards)
