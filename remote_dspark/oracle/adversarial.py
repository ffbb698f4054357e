"""Rows chosen to break an implementation, reproducible from (seed, index).

Tests, the long proof and kernels draw from the same families: ties at every rank, denormal differences, one token with
all the mass, ranges that underflow, masked columns, signed zeros, BF16 grids, and weights whose remainders tie. Rows
are valid: what must be refused is tested one by one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from remote_dspark.contract import WEIGHT_ONE
from remote_dspark.oracle.weights import fixed_weights

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
TEMPERATURES = (0.7, 1.0, 0.05, 3.0)


def _normal(rng: np.random.Generator, width: int) -> Float32:
    row: Float32 = (rng.standard_normal(width) * rng.choice([0.1, 1.0, 8.0])).astype(np.float32)
    return row


def _ties(rng: np.random.Generator, width: int) -> Float32:
    return rng.integers(-3, 3, width).astype(np.float32)


def _all_equal(rng: np.random.Generator, width: int) -> Float32:
    return np.full(width, rng.choice([-1e30, -0.0, 0.0, 5.5]), dtype=np.float32)


def _bf16_grid(rng: np.random.Generator, width: int) -> Float32:
    bits = (rng.standard_normal(width) * 4).astype(np.float32).view(np.uint32)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def _denormal(rng: np.random.Generator, width: int) -> Float32:
    return rng.integers(0, 1 << 20, width).astype(np.uint32).view(np.float32)


def _signed_zeros(rng: np.random.Generator, width: int) -> Float32:
    return np.where(rng.random(width) < 0.5, np.float32(0.0), np.float32(-0.0)).astype(np.float32)


def _one_token(rng: np.random.Generator, width: int) -> Float32:
    row = np.full(width, -1e4, dtype=np.float32)
    row[rng.integers(width)] = 1e4
    return row


def _huge_range(rng: np.random.Generator, width: int) -> Float32:
    return ((rng.random(width) * 2 - 1) * 3e38).astype(np.float32)


def _masked(rng: np.random.Generator, width: int) -> Float32:
    row = _normal(rng, width)
    row[rng.random(width) < 0.9] = -np.inf
    row[rng.integers(width)] = 0.0
    return row


def _geometric(rng: np.random.Generator, width: int) -> Float32:
    # neighbours differ by a factor of two at temperature 1, down to weights of one unit and of none
    row: Float32 = (-np.log(2.0) * rng.permutation(width)).astype(np.float32)
    return row


LOGIT_FAMILIES: tuple[Callable[[np.random.Generator, int], Float32], ...] = (
    _normal,
    _ties,
    _all_equal,
    _bf16_grid,
    _denormal,
    _signed_zeros,
    _one_token,
    _huge_range,
    _masked,
    _geometric,
)


def adversarial_logits(seed: int, index: int, max_width: int) -> tuple[Float32, float]:
    """One row of logits and a temperature.

    Args:
        seed: Of the whole run.
        index: Of the row; its family is ``index % len(LOGIT_FAMILIES)``.
        max_width: Greatest width; the width is random, 1 included.

    Returns:
        float32 [n] with at least one finite value, no NaN and no +inf; and tau.
    """
    rng = np.random.default_rng((seed, index))
    width = int(rng.integers(1, max_width + 1))
    row = LOGIT_FAMILIES[index % len(LOGIT_FAMILIES)](rng, width)
    return row, float(rng.choice(TEMPERATURES))


def adversarial_weights(seed: int, index: int, max_width: int) -> tuple[Int64, int]:
    """One row of fixed-point weights and the index of rank 1.

    Two rows in three come from `adversarial_logits`; the third is made of integers directly: few distinct values (so
    remainders tie), tiny ones, or the greatest possible.

    Returns:
        int64 [n] in [0, 2**38] with positive mass, and the first index of the greatest weight.
    """
    if index % 3:
        weights = fixed_weights(*adversarial_logits(seed, index, max_width))
    else:
        rng = np.random.default_rng((seed, index))
        width = int(rng.integers(1, max_width + 1))
        values = rng.choice([0, 1, 2, 3, 5, WEIGHT_ONE // 3, WEIGHT_ONE - 1, WEIGHT_ONE], 3)
        weights = rng.choice(values, width).astype(np.int64)
        weights[rng.integers(width)] = max(int(values.max()), 1)
    return weights, int(weights.argmax())
