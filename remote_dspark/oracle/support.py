"""Which tokens a sparse draft row may contain.

The support is chosen globally, on the values of the corrected row, before anything is normalised. Ranking by value is
used to select and to name rank 1; from then on everything is in ascending global token id (DECISIONS 2).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from remote_dspark.oracle.errors import InvalidRowError, RowFault
from remote_dspark.oracle.weights import require_logits


def top_k_support(logits: npt.NDArray[np.float32], k: int) -> tuple[npt.NDArray[np.int64], int]:
    """The k highest logits, ties to the lowest id, in ascending id.

    Args:
        logits: float32 [n]; the index is the global token id.
        k: Wanted entries, at least 1.

    Returns:
        ids: int64 [m], strictly ascending, m = min(k, number of finite logits).
        first_rank_index: Index into ids of rank 1: the highest logit, ties to the lowest id. -0 equals +0.

    Raises:
        InvalidRowError: See `weights.require_logits`; also k < 1.
    """
    require_logits(logits)
    if k < 1:
        raise InvalidRowError(RowFault.SHAPE, f"support size must be at least 1, found {k}")
    # a stable sort of the negated values keeps equal ones in id order
    ranked = np.argsort(-logits, kind="stable")[:k].astype(np.int64)
    ranked = ranked[np.isfinite(logits[ranked])]
    ids = np.sort(ranked)
    return ids, int(np.searchsorted(ids, ranked[0]))
