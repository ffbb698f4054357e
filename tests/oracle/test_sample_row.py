"""One row from logits to token: the parts meet in the documented order."""

from __future__ import annotations

import numpy as np
import pytest

from remote_dspark.contract import Q_FLOOR_FIRST, Q_SEMANTICS, Q_STANDARD, TICKET_TOTAL, WEIGHT_ONE
from remote_dspark.oracle.adversarial import adversarial_logits
from remote_dspark.oracle.errors import RowFault
from remote_dspark.oracle.philox import derive_key, proposal_draw
from remote_dspark.oracle.sample_row import row_from_weights, sample_row
from remote_dspark.oracle.support import top_k_support
from remote_dspark.oracle.tickets import allocate, draw_token
from remote_dspark.oracle.weights import fixed_weights

KEY = derive_key(42, 0)


@pytest.mark.parametrize("semantics", Q_SEMANTICS)
@pytest.mark.parametrize("k", [1, 16, 32, 64])
def test_rows_are_well_formed(semantics, k):
    """Red if a zero count is kept, ids are unsorted, or the total is not 2**24."""
    for index in range(60):
        logits, tau = adversarial_logits(8, index, 200)
        row = sample_row(logits, tau, k, semantics, KEY, 0, index)
        assert row.error is None
        assert (np.diff(row.ids) > 0).all()
        assert (row.tickets > 0).all()
        assert row.tickets.sum() == TICKET_TOTAL
        assert row.ids.size <= min(k, int(np.isfinite(logits).sum()))
        assert row.token in row.ids.tolist()


def test_the_parts_by_hand():
    """Red if weights are taken over the vocabulary before the selection, or the draw uses another position."""
    logits = np.random.default_rng(1).standard_normal(100).astype(np.float32)
    row = sample_row(logits, 0.7, 32, Q_FLOOR_FIRST, KEY, 3, 17)
    ids, first = top_k_support(logits, 32)
    weights = fixed_weights(logits[ids], 0.7)
    counts = allocate(weights, Q_FLOOR_FIRST, first)
    assert row.ids.tolist() == ids.tolist()
    assert row.tickets.tolist() == counts.tolist()
    assert row.weights.tolist() == weights.tolist()
    assert row.draw == proposal_draw(KEY, 3, 17)
    assert row.token == draw_token(ids, counts, row.draw)


def test_zero_count_entries_leave_the_row():
    """Red if an entry whose weight or quota floors to nothing is sent as a zero."""
    row = sample_row(np.array([0, -40, -1], dtype=np.float32), 0.7, 3, Q_STANDARD, KEY, 0, 0)
    assert row.ids.tolist() == [0, 2]


def test_a_short_row():
    """Red if masked columns fill a row up to k."""
    logits = np.full(50, -np.inf, dtype=np.float32)
    logits[[4, 30]] = 1.0
    assert sample_row(logits, 0.7, 32, Q_STANDARD, KEY, 0, 0).tickets.tolist() == [TICKET_TOTAL // 2] * 2


def test_greedy_row_has_no_entries_and_no_draw():
    """Red if temperature 0 sends a one-hot row, or breaks ties upwards."""
    row = sample_row(np.array([1, 3, 3], dtype=np.float32), 0.0, 32, Q_STANDARD, KEY, 0, 0)
    assert (row.token, row.ids.size, row.tickets.size, row.draw, row.error) == (1, 0, 0, -1, None)


@pytest.mark.parametrize("tau", [0.0, 0.7])
@pytest.mark.parametrize(
    ("bad", "fault"), [(np.nan, RowFault.NAN), (np.inf, RowFault.POSITIVE_INFINITY), (None, RowFault.ZERO_MASS)]
)
def test_a_bad_row_comes_back_as_its_fault(tau, bad, fault):
    """Red if a bad row raises, or still carries a token that a host could use."""
    logits = np.full(40, -np.inf, dtype=np.float32)
    if bad is not None:
        logits[:] = 0
        logits[-1] = bad
    row = sample_row(logits, tau, 8, Q_STANDARD, KEY, 0, 0)
    assert (row.error, row.token, row.ids.size) == (fault, -1, 0)


def test_device_weights_are_binding():
    """Red if the oracle recomputes the weights instead of taking the emitted ones."""
    ids = np.array([3, 5], dtype=np.int64)
    row = row_from_weights(ids, np.array([WEIGHT_ONE // 4, WEIGHT_ONE], dtype=np.int64), 1, Q_STANDARD, 0)
    assert row.tickets.tolist() == [3355443, 13421773]
    assert row.token == 3


def test_the_batch_row_is_not_part_of_the_draw():
    """Red if noise depends on anything but key, round and position: the same place gives the same row."""
    logits = np.random.default_rng(2).standard_normal(64).astype(np.float32)
    first = sample_row(logits, 0.7, 32, Q_STANDARD, KEY, 5, 6)
    again = sample_row(logits.copy(), 0.7, 32, Q_STANDARD, KEY, 5, 6)
    other = sample_row(logits, 0.7, 32, Q_STANDARD, KEY, 5, 7)
    assert first.draw == again.draw
    assert first.draw != other.draw
