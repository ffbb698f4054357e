"""Global top-k: ties, order, rank 1, masked rows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from remote_dspark.oracle.errors import InvalidRowError, RowFault
from remote_dspark.oracle.support import top_k_support

VALUES = [-np.inf, -1.0, -0.0, 0.0, 2.0]


def by_hand(values, k):
    """The definition: sort by value downwards, then by id; finite ones only."""
    finite = [(-float(value), index) for index, value in enumerate(values) if np.isfinite(value)]
    ranked = [index for _, index in sorted(finite)][:k]
    return sorted(ranked), sorted(ranked).index(ranked[0])


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_every_small_row(k):
    """Red on ties to the highest id, on -0 below +0, on descending ids, or on a masked token in the support."""
    for values in itertools.product(VALUES, repeat=4):
        logits = np.array(values, dtype=np.float32)
        if np.isneginf(logits).all():
            continue
        ids, first = top_k_support(logits, k)
        assert (ids.tolist(), first) == by_hand(values, k), values


def test_wide_rows_with_ties_at_the_edge():
    """Red if selection uses an unstable partition: which of the equal values at rank k enters would be arbitrary."""
    rng = np.random.default_rng(5)
    for _ in range(20):
        values = rng.integers(0, 6, 500).astype(np.float32)
        ids, first = top_k_support(values, 32)
        assert (ids.tolist(), first) == by_hand(values, 32)


@pytest.mark.parametrize(("bad", "fault"), [(np.nan, RowFault.NAN), (np.inf, RowFault.POSITIVE_INFINITY)])
def test_every_column_is_looked_at(bad, fault):
    """Red if only the selected columns are checked: a NaN sorts last and would never be seen."""
    for place in range(40):
        logits = np.zeros(40, dtype=np.float32)
        logits[place] = bad
        with pytest.raises(InvalidRowError) as refused:
            top_k_support(logits, 3)
        assert refused.value.fault is fault


def test_an_empty_support_is_refused():
    """Red if k = 0 returns an empty row."""
    with pytest.raises(InvalidRowError):
        top_k_support(np.zeros(3, dtype=np.float32), 0)
