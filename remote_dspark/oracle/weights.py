"""From logits, or from given FP32 weights, to an exact distribution.

`fixed_weights` is the one place of the oracle where a rounding happens: an FP32 exponential, then a floor to integers
(DECISIONS 1, `contract.WEIGHT_BITS`). Everything after it is exact. `rational_weights` is the other entry: weights
that somebody hands over are rounded to FP32 first, and the distribution is their exact rational normalisation, at
both ends the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from remote_dspark.contract import WEIGHT_BITS, WEIGHT_ONE
from remote_dspark.oracle.errors import InvalidRowError, RowFault


def require_logits(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Checks one row of logits: every column is looked at (DECISIONS 5).

    Args:
        logits: float32 [n], real vocabulary columns only; minus infinity marks a masked token.

    Returns:
        The same array.

    Raises:
        InvalidRowError: Another shape or dtype, an empty row, a NaN, plus infinity, or minus infinity everywhere.
    """
    if logits.ndim != 1 or logits.dtype != np.float32 or logits.size == 0:
        raise InvalidRowError(RowFault.SHAPE, f"expected float32 [n > 0], found {logits.dtype} {logits.shape}")
    if np.isnan(logits).any():
        raise InvalidRowError(RowFault.NAN, f"logit {int(np.isnan(logits).argmax())} of {logits.size} is NaN")
    if np.isposinf(logits).any():
        raise InvalidRowError(RowFault.POSITIVE_INFINITY, f"logit {int(np.isposinf(logits).argmax())} is +inf")
    if np.isneginf(logits).all():
        raise InvalidRowError(RowFault.ZERO_MASS, f"all {logits.size} logits are -inf: no token is allowed")
    return logits


def require_temperature(tau: float) -> np.float32:
    """The temperature in FP32.

    Raises:
        InvalidRowError: Not a positive finite FP32 number. Temperature 0 has its own row kind: `greedy_weights`.
    """
    if not 0.0 < tau <= float(np.finfo(np.float32).max):
        raise InvalidRowError(
            RowFault.SHAPE, f"temperature must be positive and finite, found {tau}; 0 is a greedy row"
        )
    rounded = np.float32(tau)
    if rounded == 0.0:
        raise InvalidRowError(RowFault.SHAPE, f"temperature {tau} rounds to 0 in FP32; 0 is a greedy row")
    return rounded


def fixed_weights(logits: npt.NDArray[np.float32], tau: float) -> npt.NDArray[np.int64]:
    """Fixed-point weights of one row: ``floor(exp((l - max) / tau) * 2**38)`` (DECISIONS 1).

    Difference and quotient are FP32 operations. The exponential is FP32 correctly rounded (by way of FP64, so that the
    value does not depend on the platform's vector library); a device's own is compared within a stated number of ulp,
    and whatever weights a device emits are then binding for everything after.

    Args:
        logits: float32 [n].
        tau: Temperature, positive.

    Returns:
        int64 [n] in [0, 2**38]; the maximum is exactly 2**38, masked and negligible tokens are 0.

    Raises:
        InvalidRowError: See `require_logits` and `require_temperature`.
    """
    require_logits(logits)
    return weights_below(logits, logits.max(), require_temperature(tau))


def weights_below(
    logits: npt.NDArray[np.float32], maximum: np.float32, temperature: np.float32
) -> npt.NDArray[np.int64]:
    """Fixed-point weights of part of a row, given the maximum of the whole row.

    Args:
        logits: float32 [n], a vocabulary shard or a whole row; all may be minus infinity.
        maximum: Greatest logit of the whole row, finite.
        temperature: From `require_temperature`.

    Returns:
        int64 [n] in [0, 2**38].
    """
    # a difference or quotient beyond FP32 becomes -inf, whose weight is 0: the right limit
    with np.errstate(over="ignore", under="ignore"):
        exponents = ((logits - maximum) / temperature).astype(np.float32)
        exponentials = np.exp(exponents.astype(np.float64)).astype(np.float32)
    # scaling by a power of two is exact
    weights: npt.NDArray[np.int64] = np.floor(exponentials.astype(np.float64) * WEIGHT_ONE).astype(np.int64)
    return weights


def weight_bounds(logits: npt.NDArray[np.float32], tau: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The interval in which every sound implementation's weight lies, from FP64 arithmetic on the same logits.

    Four FP32 roundings on the way to the exponent x (difference, temperature, reciprocal, product) move it by at most
    ``4 * |x| * 2**-24``, and an exponential good to 2 ulp adds ``4 * 2**-24``, both relative to the weight; then
    comes the floor.

    Args:
        logits: float32 [n], a valid row.
        tau: Temperature, positive.

    Returns:
        Lowest and highest int64 [n].

    Raises:
        InvalidRowError: See `require_logits` and `require_temperature`.
    """
    require_logits(logits)
    require_temperature(tau)
    wide = logits.astype(np.float64)
    with np.errstate(under="ignore"):
        exponents = (wide - wide.max()) / tau
        ideal = np.exp(exponents) * WEIGHT_ONE
    # beyond -64 the weight is 0 by any arithmetic, and 0 * inf must not reach the product
    slack = (4.0 + 4.0 * np.minimum(np.abs(exponents), 64.0)) * 2.0**-24
    lowest = np.floor(ideal * (1.0 - slack)).astype(np.int64)
    highest = np.minimum(np.floor(ideal * (1.0 + slack)), WEIGHT_ONE).astype(np.int64)
    return lowest, highest


def greedy_weights(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Weights of a row at temperature 0: the whole mass on the highest logit, ties to the lowest id.

    Returns:
        int64 [n] with one entry 2**38.
    """
    require_logits(logits)
    weights = np.zeros(logits.size, dtype=np.int64)
    # argmax returns the first of equals, and -0 equals +0
    weights[int(logits.argmax())] = WEIGHT_ONE
    return weights


def require_weights(weights: npt.NDArray[np.int64]) -> int:
    """Checks one row of fixed-point weights.

    Args:
        weights: int64 [n], each in [0, 2**38], n < 2**24.

    Returns:
        Their sum S as a Python integer, positive.

    Raises:
        InvalidRowError: Shape or dtype, a negative weight, one over 2**38, or zero mass.
    """
    if weights.ndim != 1 or weights.dtype != np.int64 or not 0 < weights.size < 1 << 24:
        raise InvalidRowError(RowFault.SHAPE, f"expected int64 [0 < n < 2**24], found {weights.dtype} {weights.shape}")
    if int(weights.min()) < 0:
        raise InvalidRowError(RowFault.NEGATIVE, f"weight {int(weights.argmin())} is {int(weights.min())}")
    if int(weights.max()) > WEIGHT_ONE:
        raise InvalidRowError(RowFault.TOO_LARGE, f"weight {int(weights.argmax())} exceeds 2**{WEIGHT_BITS}")
    total = int(weights.sum())
    if total == 0:
        raise InvalidRowError(RowFault.ZERO_MASS, f"all {weights.size} weights are 0")
    return total


def exact_probs(weights: npt.NDArray[np.int64]) -> tuple[Fraction, ...]:
    """The distribution that integer weights define: ``w / S``, exactly."""
    total = require_weights(weights)
    return tuple(Fraction(int(weight), total) for weight in weights)


def rational_weights(weights: Sequence[float] | npt.NDArray[np.floating]) -> tuple[Fraction, ...]:
    """Rounds given weights to FP32 first, then normalises exactly.

    Args:
        weights: Non-negative finite numbers [n]; of a dense row, or of the entries of a sparse one.

    Returns:
        n fractions whose sum is exactly 1.

    Raises:
        InvalidRowError: NaN, an infinity (also one made by the rounding), a negative weight, zero mass after it.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        rounded = np.asarray(weights, dtype=np.float32)
    if rounded.ndim != 1 or rounded.size == 0:
        raise InvalidRowError(RowFault.SHAPE, f"expected [n > 0], found {rounded.shape}")
    if np.isnan(rounded).any():
        raise InvalidRowError(RowFault.NAN, f"weight {int(np.isnan(rounded).argmax())} is NaN")
    if np.isinf(rounded).any():
        raise InvalidRowError(
            RowFault.POSITIVE_INFINITY, f"weight {int(np.isinf(rounded).argmax())} is infinite in FP32"
        )
    if (rounded < 0).any():
        raise InvalidRowError(RowFault.NEGATIVE, f"weight {int((rounded < 0).argmax())} is negative")
    exact = [Fraction(float(value)) for value in rounded]
    total = sum(exact, Fraction(0))
    if total == 0:
        raise InvalidRowError(RowFault.ZERO_MASS, f"all {rounded.size} weights are 0 in FP32")
    return tuple(value / total for value in exact)
