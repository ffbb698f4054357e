"""Tickets: integer counts that sum to exactly 2**24, and the draw from them.

``c = floor(w * 2**24 / S)``; what is missing to 2**24 is the remainder R. `Q_STANDARD` gives one ticket each to the R
largest remainders ``w * 2**24 mod S``, ties to the lowest id; `Q_FLOOR_FIRST` gives all R to the candidate of rank 1.
Since every remainder is less than S, R is less than the number of entries that have one, so an entry of weight 0 never
gets a ticket in either semantics; R outside [0, n) can only be a broken computation and is refused.

Weights are at most 2**38, so ``w * 2**24`` is at most 2**62 and int64 division is exact; `allocate` still works on
Python integers, as the witness for `allocate_rows`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from remote_dspark.contract import Q_FLOOR_FIRST, Q_SEMANTICS, Q_STANDARD, TICKET_BITS, TICKET_TOTAL, WEIGHT_ONE
from remote_dspark.oracle.errors import InvalidRowError, RowFault
from remote_dspark.oracle.weights import require_weights


def require_semantics(semantics: str) -> str:
    """The semantic id, if it is one of the two that exist.

    Raises:
        InvalidRowError: An unknown id: a third semantics needs a third id, never a default.
    """
    if semantics not in Q_SEMANTICS:
        raise InvalidRowError(RowFault.SHAPE, f"expected one of {Q_SEMANTICS}, found {semantics!r}")
    return semantics


def add_remainder(floors: list[int], remainders: list[int], semantics: str, first_rank_index: int) -> list[int]:
    """Hands out the tickets that flooring left over.

    Args:
        floors: Floored counts in ascending id.
        remainders: ``w * 2**24 mod S`` of the same entries.
        semantics: One of `contract.Q_SEMANTICS`.
        first_rank_index: Index of rank 1.

    Returns:
        Counts that sum to 2**24.

    Raises:
        InvalidRowError: The remainder is outside [0, n): refused, never clipped.
    """
    remaining = TICKET_TOTAL - sum(floors)
    if not 0 <= remaining < max(len(floors), 1):
        raise InvalidRowError(RowFault.REMAINDER, f"remainder {remaining} is outside [0, {len(floors)})")
    counts = list(floors)
    if require_semantics(semantics) == Q_FLOOR_FIRST:
        counts[first_rank_index] += remaining
    else:
        by_remainder = sorted(range(len(floors)), key=lambda index: (-remainders[index], index))
        for index in by_remainder[:remaining]:
            counts[index] += 1
    return counts


def allocate(weights: npt.NDArray[np.int64], semantics: str, first_rank_index: int) -> npt.NDArray[np.int64]:
    """Allocates the tickets of one row, entry by entry on Python integers.

    Args:
        weights: int64 [n] in ascending id, each in [0, 2**38].
        semantics: One of `contract.Q_SEMANTICS`.
        first_rank_index: Index of rank 1, which must hold the greatest weight.

    Returns:
        int64 [n], sum exactly 2**24; zero counts are still in it (`sample_row.row_from_weights` drops them).

    Raises:
        InvalidRowError: Bad weights, an unknown semantics, a wrong rank 1, or a remainder outside [0, n).
    """
    total = require_weights(weights)
    if not 0 <= first_rank_index < weights.size or weights[first_rank_index] != weights.max():
        raise InvalidRowError(RowFault.FIRST_RANK, f"index {first_rank_index} does not hold the greatest weight")
    divided = [divmod(int(weight) << TICKET_BITS, total) for weight in weights]
    floors = [quotient for quotient, _ in divided]
    remainders = [remainder for _, remainder in divided]
    return np.array(add_remainder(floors, remainders, semantics, first_rank_index), dtype=np.int64)


def allocate_rows(
    weights: npt.NDArray[np.int64], semantics: str, first_rank_indices: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], tuple[RowFault | None, ...]]:
    """`allocate` on many rows at once; equal to it bit for bit.

    A row shorter than n is padded with weight 0, which never gets a ticket.

    Args:
        weights: int64 [rows, n].
        semantics: One of `contract.Q_SEMANTICS`.
        first_rank_indices: int64 [rows].

    Returns:
        tickets: int64 [rows, n]; a refused row is all 0.
        faults: Per row, None or the fault that `allocate` raises.

    Raises:
        InvalidRowError: The arguments as a whole are malformed.
    """
    if weights.ndim != 2 or weights.dtype != np.int64 or first_rank_indices.shape != weights.shape[:1]:
        raise InvalidRowError(
            RowFault.SHAPE,
            f"expected int64 [rows, n] and [rows], found {weights.dtype} {weights.shape}, {first_rank_indices.shape}",
        )
    require_semantics(semantics)
    faults = _row_faults(weights, first_rank_indices)
    good = np.array([fault is None for fault in faults], dtype=bool)
    tickets = np.zeros_like(weights)
    if good.any():
        tickets[good] = _allocate_good(weights[good], semantics, first_rank_indices[good])
    return tickets, faults


def _row_faults(
    weights: npt.NDArray[np.int64], first_rank_indices: npt.NDArray[np.int64]
) -> tuple[RowFault | None, ...]:
    """The first fault of each row, in the order in which `allocate` looks for them."""
    num_rows, width = weights.shape
    if not 0 < width < 1 << 24:
        return tuple(RowFault.SHAPE for _ in range(num_rows))
    greatest = weights.max(axis=1)
    in_range = (first_rank_indices >= 0) & (first_rank_indices < width)
    at_first = weights[np.arange(num_rows), np.where(in_range, first_rank_indices, 0)]
    checks = (
        (RowFault.NEGATIVE, weights.min(axis=1) < 0),
        (RowFault.TOO_LARGE, greatest > WEIGHT_ONE),
        (RowFault.ZERO_MASS, greatest == 0),
        (RowFault.FIRST_RANK, ~in_range | (at_first != greatest)),
    )
    return tuple(next((fault for fault, bad in checks if bad[row]), None) for row in range(num_rows))


def _allocate_good(
    weights: npt.NDArray[np.int64], semantics: str, first_rank_indices: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Rows that passed `_row_faults`; int64 throughout, no value above 2**62."""
    totals = weights.sum(axis=1, keepdims=True)
    scaled = weights << TICKET_BITS
    counts: npt.NDArray[np.int64] = scaled // totals
    remaining = TICKET_TOTAL - counts.sum(axis=1)
    rows = np.arange(weights.shape[0])
    if semantics == Q_FLOOR_FIRST:
        counts[rows, first_rank_indices] += remaining
        return counts
    assert semantics == Q_STANDARD
    remainders = scaled - counts * totals
    # the remaining-th largest remainder of each row; with none remaining, a value that nothing reaches
    kth = weights.shape[1] - np.maximum(remaining, 1)
    selected = [np.partition(row, index)[index] for row, index in zip(remainders, kth, strict=True)]
    threshold = np.where(remaining > 0, np.array(selected, dtype=np.int64), totals[:, 0])
    above = remainders > threshold[:, None]
    level = remainders == threshold[:, None]
    owed = remaining - above.sum(axis=1)
    counts += above
    counts += level & (np.cumsum(level, axis=1) <= owed[:, None])
    return counts


def require_tickets(tickets: npt.NDArray[np.int64]) -> None:
    """Checks that counts are non-negative and sum to exactly 2**24.

    Raises:
        InvalidRowError: They do not.
    """
    if tickets.ndim != 1 or tickets.dtype != np.int64 or tickets.size == 0:
        raise InvalidRowError(RowFault.SHAPE, f"expected int64 [n > 0], found {tickets.dtype} {tickets.shape}")
    if int(tickets.min()) < 0:
        raise InvalidRowError(RowFault.NEGATIVE, f"count {int(tickets.argmin())} is {int(tickets.min())}")
    # counts beyond 2**24 are refused first, so that the sum cannot wrap around
    if int(tickets.max()) > TICKET_TOTAL or int(tickets.sum()) != TICKET_TOTAL:
        raise InvalidRowError(RowFault.WRONG_TOTAL, f"counts sum to {int(tickets.sum())}, expected {TICKET_TOTAL}")


def draw_token(ids: npt.NDArray[np.int64], tickets: npt.NDArray[np.int64], draw24: int) -> int:
    """The token whose cumulative count is the first strictly greater than the draw.

    Args:
        ids: int64 [n], strictly ascending global token ids.
        tickets: int64 [n], sum exactly 2**24.
        draw24: Integer in [0, 2**24).

    Returns:
        A global token id with at least one ticket.

    Raises:
        InvalidRowError: Shapes, order of ids, total, or a draw out of range.
    """
    require_tickets(tickets)
    if ids.shape != tickets.shape or (np.diff(ids) <= 0).any():
        raise InvalidRowError(RowFault.SUPPORT_ORDER, "ids must be strictly ascending, one per count")
    if not 0 <= draw24 < TICKET_TOTAL:
        raise InvalidRowError(RowFault.WRONG_TOTAL, f"draw must be in [0, 2**24), found {draw24}")
    cumulative = 0
    for token, count in zip(ids.tolist(), tickets.tolist(), strict=True):
        cumulative += count
        if cumulative > draw24:
            return int(token)
    raise AssertionError("a total of 2**24 exceeds every 24-bit draw")
