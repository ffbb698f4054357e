"""Fixed-point and rational weights: values, bounds and refusals."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from remote_dspark.contract import WEIGHT_ONE
from remote_dspark.oracle.adversarial import adversarial_logits
from remote_dspark.oracle.errors import InvalidRowError, RowFault
from remote_dspark.oracle.weights import (
    exact_probs,
    fixed_weights,
    greedy_weights,
    rational_weights,
    require_weights,
    weight_bounds,
)

INF, NAN = np.inf, np.nan


def row(*values):
    return np.array(values, dtype=np.float32)


def test_known_weights():
    """Red if weights are rounded instead of floored, or scaled by another power."""
    halves = fixed_weights(row(0, -np.log(2), -np.inf, -27), 1.0)
    assert halves[0] == WEIGHT_ONE
    # the FP32 logarithm of 2 is not exact, so one ulp of one half is allowed here
    assert abs(int(halves[1]) - WEIGHT_ONE // 2) <= 2**14
    assert halves[2] == 0
    # exp(-27) * 2**38 = 0.516...: the floor makes it 0, rounding would make it 1
    assert halves[3] == 0


def test_the_maximum_is_exactly_one_whatever_the_row():
    """Red if the maximum is not subtracted first, which also overflows."""
    for index in range(60):
        logits, tau = adversarial_logits(3, index, 40)
        weights = fixed_weights(logits, tau)
        assert weights.max() == WEIGHT_ONE
        assert (weights[np.isneginf(logits)] == 0).all()


def test_temperature_divides():
    """Red if the row is multiplied by the temperature."""
    assert fixed_weights(row(0, -1), 0.5)[1] == fixed_weights(row(0, -2), 1.0)[1]


def test_monotone_in_the_logit():
    """Red if the exponential is not monotone on neighbouring FP32 values."""
    steps = np.nextafter(np.float32(-1), np.float32(0)) - np.float32(-1)
    logits = np.concatenate([row(0), (-1 - np.arange(2000, dtype=np.float32) * steps)]).astype(np.float32)
    assert (np.diff(fixed_weights(logits, 1.0)) <= 0).all()


def test_weights_lie_within_the_stated_bounds_of_fp64():
    """Red if the exponential is 8 ulp off, or half precision is used anywhere."""
    for index in range(200):
        logits, tau = adversarial_logits(4, index, 300)
        weights = fixed_weights(logits, tau)
        lowest, highest = weight_bounds(logits, tau)
        assert (weights >= lowest).all()
        assert (weights <= highest).all()


def test_bounds_are_tight_enough_to_see_an_error():
    """Red if the slack is made so wide that an exponential 32 ulp off would pass."""
    logits = row(0, -0.5)
    lowest, highest = weight_bounds(logits, 1.0)
    assert highest[1] - lowest[1] < 32 * 2 * (WEIGHT_ONE >> 24)


@pytest.mark.parametrize("values", [(0, -0.0), (-0.0, 0)])
def test_minus_zero_equals_zero(values):
    """Red if zeros are compared by their bits."""
    assert fixed_weights(row(*values), 0.7).tolist() == [WEIGHT_ONE, WEIGHT_ONE]
    assert greedy_weights(row(*values)).tolist() == [WEIGHT_ONE, 0]


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ((0, NAN), RowFault.NAN),
        ((-INF, NAN), RowFault.NAN),
        ((0, INF), RowFault.POSITIVE_INFINITY),
        ((-INF, -INF), RowFault.ZERO_MASS),
        ((), RowFault.SHAPE),
    ],
)
@pytest.mark.parametrize("make", [lambda r: fixed_weights(r, 0.7), greedy_weights])
def test_bad_logits_are_refused(values, fault, make):
    """Red if any of these becomes a distribution instead of its own fault."""
    with pytest.raises(InvalidRowError) as refused:
        make(row(*values))
    assert refused.value.fault is fault


@pytest.mark.parametrize("tau", [0.0, -1.0, NAN, INF, 1e-60, 1e39])
def test_bad_temperatures_are_refused(tau):
    """Red if temperature 0 or one that FP32 cannot hold divides anyway."""
    with pytest.raises(InvalidRowError):
        fixed_weights(row(0, 1), tau)


def test_other_dtypes_are_refused():
    """Red if a FP64 or two-dimensional row is cast silently: it would be another distribution."""
    for bad in (np.zeros(3), np.zeros((1, 3), dtype=np.float32)):
        with pytest.raises(InvalidRowError):
            fixed_weights(bad, 1.0)


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ([1, -1], RowFault.NEGATIVE),
        ([WEIGHT_ONE + 1], RowFault.TOO_LARGE),
        ([0, 0], RowFault.ZERO_MASS),
        ([], RowFault.SHAPE),
    ],
)
def test_bad_integer_weights_are_refused(values, fault):
    """Red if a negative, oversized or empty row passes into exact arithmetic."""
    with pytest.raises(InvalidRowError) as refused:
        require_weights(np.array(values, dtype=np.int64))
    assert refused.value.fault is fault


def test_exact_probs_sum_to_one():
    """Red if probabilities are normalised in floating point."""
    assert exact_probs(np.array([1, 2, 0], dtype=np.int64)) == (Fraction(1, 3), Fraction(2, 3), Fraction(0))


def test_rational_weights_round_first_then_normalise_exactly():
    """Red if normalisation happens before the rounding to FP32, or in FP64."""
    probs = rational_weights([0.1, 0.2, 0.3])
    rounded = [Fraction(float(np.float32(value))) for value in (0.1, 0.2, 0.3)]
    assert probs == tuple(value / sum(rounded) for value in rounded)
    assert sum(probs) == 1
    assert probs[0] != Fraction(1, 6)


def test_rational_weights_dense_equal_sparse():
    """Red if zeros of a dense row change the normalisation of the sparse one."""
    dense = rational_weights(np.array([0, 0.25, 0, 3], dtype=np.float32))
    assert (dense[1], dense[3]) == rational_weights(np.array([0.25, 3], dtype=np.float32))


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ([1, NAN], RowFault.NAN),
        ([1, INF], RowFault.POSITIVE_INFINITY),
        ([1, 1e39], RowFault.POSITIVE_INFINITY),
        ([1, -INF], RowFault.POSITIVE_INFINITY),
        ([1, -1e-3], RowFault.NEGATIVE),
        ([0, 1e-60], RowFault.ZERO_MASS),
        ([], RowFault.SHAPE),
    ],
)
def test_bad_rational_weights_are_refused(values, fault):
    """Red if a value is judged before its rounding: 1e39 is infinite and 1e-60 is zero in FP32."""
    with pytest.raises(InvalidRowError) as refused:
        rational_weights(values)
    assert refused.value.fault is fault
