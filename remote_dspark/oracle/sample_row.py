"""One sampled draft row from logits to token: the whole specification in a few lines.

This is what kernels are judged against: same ids, same counts, same token, same fault. The weights in the result are
the ones everything after was computed from; a device that emits other weights (within the stated ulp) is compared
with `row_from_weights` on its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from remote_dspark.oracle.errors import InvalidRowError, RowFault
from remote_dspark.oracle.philox import Key, proposal_draw
from remote_dspark.oracle.support import top_k_support
from remote_dspark.oracle.tickets import allocate, draw_token
from remote_dspark.oracle.weights import fixed_weights, greedy_weights

_EMPTY = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class SampledRow:
    """One row of a reply.

    Attributes:
        ids: int64 [m], strictly ascending; only entries with at least one ticket. Empty for a greedy or refused row.
        tickets: int64 [m], positive, sum exactly 2**24.
        weights: int64 [m], the fixed-point weights of the same entries.
        token: The drawn token; -1 in a refused row.
        draw: The 24-bit draw; -1 where none was made (greedy or refused).
        error: None, or why the row is refused; the host then discards the whole reply.
    """

    ids: npt.NDArray[np.int64]
    tickets: npt.NDArray[np.int64]
    weights: npt.NDArray[np.int64]
    token: int
    draw: int
    error: RowFault | None


def row_from_weights(
    ids: npt.NDArray[np.int64],
    weights: npt.NDArray[np.int64],
    first_rank_index: int,
    semantics: str,
    draw24: int,
) -> SampledRow:
    """Everything after the exponential: allocate, drop zero counts, draw.

    Entries without a ticket are dropped after the allocation, before the draw and before the wire. The draw does not
    notice, because they have no width in the cumulative counts; the bytes do: a row holds positive counts only, and
    a token outside it has q = 0 exactly.

    Args:
        ids: int64 [n], strictly ascending.
        weights: int64 [n], each in [0, 2**38].
        first_rank_index: Index of rank 1.
        semantics: One of `contract.Q_SEMANTICS`.
        draw24: Integer in [0, 2**24).

    Returns:
        The row.

    Raises:
        InvalidRowError: A refused row; `sample_row` turns it into `SampledRow.error`.
    """
    tickets = allocate(weights, semantics, first_rank_index)
    kept = tickets > 0
    token = draw_token(ids[kept], tickets[kept], draw24)
    return SampledRow(ids[kept], tickets[kept], weights[kept], token, draw24, None)


def sample_row(
    logits: npt.NDArray[np.float32], tau: float, k: int, semantics: str, key: Key, round: int, position: int
) -> SampledRow:
    """Samples one draft row.

    Args:
        logits: float32 [n], the corrected row (base plus Markov bias); the index is the global token id.
        tau: Draft temperature; 0 gives a greedy row: the highest logit, no entries, no draw.
        k: Support size; at least n for a dense row.
        semantics: One of `contract.Q_SEMANTICS`.
        key: From `philox.derive_key`.
        round: Round within the generation.
        position: Absolute position of the token to be predicted.

    Returns:
        The row; a bad row is returned with its fault, never raised, as a device would.

    Raises:
        CounterRangeError: A counter that does not fit.
    """
    draw24 = proposal_draw(key, round, position)
    try:
        if tau == 0:
            return SampledRow(_EMPTY, _EMPTY, _EMPTY, int(greedy_weights(logits).argmax()), -1, None)
        ids, first_rank_index = top_k_support(logits, k)
        return row_from_weights(ids, fixed_weights(logits[ids], tau), first_rank_index, semantics, draw24)
    except InvalidRowError as fault:
        return SampledRow(_EMPTY, _EMPTY, _EMPTY, -1, -1, fault.fault)
