"""Allocation in both semantics and the draw, exhaustively on small rows, and vectorised = scalar."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remote_dspark.contract import Q_FLOOR_FIRST, Q_SEMANTICS, Q_STANDARD, TICKET_TOTAL, WEIGHT_ONE
from remote_dspark.oracle.adversarial import adversarial_weights
from remote_dspark.oracle.errors import InvalidRowError, RowFault
from remote_dspark.oracle.tickets import add_remainder, allocate, allocate_rows, draw_token, require_tickets

EDGES = [0, 1, 2, 3, WEIGHT_ONE - 1, WEIGHT_ONE]


def array(*values):
    return np.array(values, dtype=np.int64)


def by_fractions(weights, semantics, first):
    """The definition on rationals: quotas, floors, then the leftover tickets."""
    total = sum(weights)
    quotas = [Fraction(weight * TICKET_TOTAL, total) for weight in weights]
    counts = [quota.numerator // quota.denominator for quota in quotas]
    left = TICKET_TOTAL - sum(counts)
    if semantics == Q_FLOOR_FIRST:
        counts[first] += left
        return counts
    for index in sorted(range(len(weights)), key=lambda i: (counts[i] - quotas[i], i))[:left]:
        counts[index] += 1
    return counts


def small_rows():
    """All rows of up to four weights out of EDGES with some mass."""
    for width in (1, 2, 3, 4):
        for weights in itertools.product(EDGES, repeat=width):
            if any(weights):
                yield weights


@pytest.mark.parametrize("semantics", Q_SEMANTICS)
def test_every_small_row_equals_the_definition(semantics):
    """Red on remainders in floating point, ties to the highest id, or leftovers to another rank."""
    for weights in small_rows():
        first = weights.index(max(weights))
        counts = allocate(array(*weights), semantics, first)
        assert counts.tolist() == by_fractions(weights, semantics, first), weights
        assert counts.sum() == TICKET_TOTAL
        assert all(count == 0 for count, weight in zip(counts.tolist(), weights, strict=True) if weight == 0)


def test_the_two_semantics_differ_as_named():
    """Red if the two ids are swapped, or mean the same."""
    thirds = array(1, 1, 1)
    # 2**24 = 3 * 5592405 + 1
    assert allocate(thirds, Q_STANDARD, 0).tolist() == [5592406, 5592405, 5592405]
    weights = array(5, 7, 7)
    # floors 4415056 + 2 * 6181079 leave 2; remainders 16, 11, 11 of 19
    assert allocate(weights, Q_STANDARD, 1).tolist() == [4415057, 6181080, 6181079]
    assert allocate(weights, Q_FLOOR_FIRST, 1).tolist() == [4415056, 6181081, 6181079]


def test_ties_of_the_remainder_go_to_the_lowest_id():
    """Red if ties are broken by weight or by the highest id."""
    assert allocate(array(1, 1, 1, 1, 1), Q_STANDARD, 0).tolist() == [3355444] + [3355443] * 4


def test_standard_is_within_one_ticket_of_the_quota():
    """Red if one entry gets two of the leftover tickets."""
    for index in range(150):
        weights, first = adversarial_weights(6, index, 60)
        quotas = [Fraction(int(weight) * TICKET_TOTAL, int(weights.sum())) for weight in weights]
        counts = allocate(weights, Q_STANDARD, first).tolist()
        assert all(-1 < count - quota < 1 for count, quota in zip(counts, quotas, strict=True))


@pytest.mark.parametrize("floors", [[TICKET_TOTAL + 1, 0], [TICKET_TOTAL - 2, 0], [0, 0]])
@pytest.mark.parametrize("semantics", Q_SEMANTICS)
def test_a_remainder_out_of_range_is_refused(floors, semantics):
    """Red if the remainder is clipped, or handed out regardless: it proves a broken computation."""
    with pytest.raises(InvalidRowError) as refused:
        add_remainder(floors, [0, 0], semantics, 0)
    assert refused.value.fault is RowFault.REMAINDER


@pytest.mark.parametrize(
    ("weights", "first", "fault"),
    [
        ([3, -1], 0, RowFault.NEGATIVE),
        ([WEIGHT_ONE + 1, 1], 0, RowFault.TOO_LARGE),
        ([0, 0], 0, RowFault.ZERO_MASS),
        ([1, 2], 0, RowFault.FIRST_RANK),
        ([1, 2], 2, RowFault.FIRST_RANK),
        ([1, 2], -1, RowFault.FIRST_RANK),
        ([], 0, RowFault.SHAPE),
    ],
)
@pytest.mark.parametrize("semantics", Q_SEMANTICS)
def test_refusals_are_the_same_in_both_forms(weights, first, fault, semantics):
    """Red if the vectorised form lets a row pass that the scalar one refuses, or names another fault."""
    with pytest.raises(InvalidRowError) as refused:
        allocate(array(*weights), semantics, first)
    assert refused.value.fault is fault
    tickets, faults = allocate_rows(array(*weights).reshape(1, -1), semantics, array(first))
    assert faults == (fault,)
    assert not tickets.any()


def test_an_unknown_semantics_is_refused():
    """Red if anything but the two ids has a default meaning."""
    with pytest.raises(InvalidRowError):
        allocate(array(1), "dyadic24-standard-v2", 0)
    with pytest.raises(InvalidRowError):
        allocate_rows(array(1).reshape(1, 1), "", array(0))


def test_a_refused_row_does_not_touch_its_neighbours():
    """Red if a fault stops the batch, or shifts the rows behind it."""
    weights = array(1, 2, -1, 2, 2, 1).reshape(3, 2)
    tickets, faults = allocate_rows(weights, Q_STANDARD, array(1, 1, 0))
    assert faults == (None, RowFault.NEGATIVE, None)
    assert tickets[0].tolist() == allocate(array(1, 2), Q_STANDARD, 1).tolist()
    assert tickets[1].tolist() == [0, 0]
    assert tickets[2].tolist() == allocate(array(2, 1), Q_STANDARD, 0).tolist()


@pytest.mark.parametrize("semantics", Q_SEMANTICS)
def test_vectorised_equals_scalar_on_every_small_row(semantics):
    """Red if thresholds or ties of the batch form are off by one, or padding gets a ticket."""
    rows = list(small_rows())
    weights = np.zeros((len(rows), 4), dtype=np.int64)
    for index, row in enumerate(rows):
        weights[index, : len(row)] = row
    first = weights.argmax(axis=1)
    tickets, faults = allocate_rows(weights, semantics, first)
    assert not any(faults)
    for index, row in enumerate(rows):
        assert tickets[index, : len(row)].tolist() == allocate(array(*row), semantics, int(first[index])).tolist()
        assert not tickets[index, len(row) :].any()


@pytest.mark.parametrize("semantics", Q_SEMANTICS)
@given(
    rows=st.lists(
        st.lists(st.one_of(st.integers(0, 5), st.integers(0, WEIGHT_ONE)), min_size=6, max_size=6).filter(any),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_vectorised_equals_scalar_on_any_row(semantics, rows):
    """Red if rows of one batch influence each other."""
    weights = np.array(rows, dtype=np.int64)
    first = weights.argmax(axis=1)
    tickets, _ = allocate_rows(weights, semantics, first)
    for row, index, counts in zip(weights, first, tickets, strict=True):
        assert counts.tolist() == allocate(row, semantics, int(index)).tolist()


def test_the_batch_form_leaves_its_input_alone():
    """Red if counts are accumulated in the weights' buffer."""
    weights = array(1, 2, 4).reshape(1, 3)
    before = weights.copy()
    allocate_rows(weights, Q_STANDARD, array(2))
    assert np.array_equal(weights, before)


def test_draw_at_every_boundary():
    """Red if "greater" becomes "greater or equal", or a zero-width entry can be drawn."""
    for counts in itertools.product([0, 1, 2, TICKET_TOTAL - 3], repeat=4):
        if sum(counts) != TICKET_TOTAL:
            continue
        ids, below = array(3, 4, 8, 20), 0
        for token, count in zip(ids.tolist(), counts, strict=True):
            if count:
                assert draw_token(ids, array(*counts), below) == token
                assert draw_token(ids, array(*counts), below + count - 1) == token
            below += count


def test_zero_counts_do_not_change_the_draw():
    """Red if dropping entries without tickets moves any draw."""
    ids, counts = array(1, 2, 3, 9), array(0, 5, 0, TICKET_TOTAL - 5)
    for draw in (0, 4, 5, TICKET_TOTAL - 1):
        assert draw_token(ids, counts, draw) == draw_token(ids[counts > 0], counts[counts > 0], draw)


@pytest.mark.parametrize("draw", [-1, TICKET_TOTAL])
def test_draws_out_of_range_are_refused(draw):
    """Red if a 32-bit word is passed without its shift and falls off the end silently."""
    with pytest.raises(InvalidRowError):
        draw_token(array(0), array(TICKET_TOTAL), draw)


@pytest.mark.parametrize(
    ("counts", "fault"),
    [
        ([TICKET_TOTAL - 1], RowFault.WRONG_TOTAL),
        ([TICKET_TOTAL, 1], RowFault.WRONG_TOTAL),
        ([TICKET_TOTAL + 1, -1], RowFault.NEGATIVE),
        ([], RowFault.SHAPE),
        ([(1 << 62), (1 << 62), (1 << 62), (1 << 62) + TICKET_TOTAL], RowFault.WRONG_TOTAL),
    ],
)
def test_bad_counts_are_refused(counts, fault):
    """Red if the total is not checked, is renormalised, or wraps around in 64 bits (last case)."""
    with pytest.raises(InvalidRowError) as refused:
        require_tickets(array(*counts))
    assert refused.value.fault is fault


@pytest.mark.parametrize("ids", [[1, 1], [2, 1]])
def test_unordered_or_duplicate_ids_are_refused(ids):
    """Red if the order of the cumulative counts is left to the sender."""
    with pytest.raises(InvalidRowError) as refused:
        draw_token(array(*ids), array(1, TICKET_TOTAL - 1), 0)
    assert refused.value.fault is RowFault.SUPPORT_ORDER
