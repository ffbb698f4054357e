"""From raw target logits to the processed distribution that verification uses.

Processing here is temperature alone (top_p = 1, no penalties, no grammar): the FP32 quotient. The distribution is
``target-fixed38-v1``: integer weights ``floor(exp(l - max) * 2**38)``. Every column is looked at; a bad row refuses.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from remote_dspark.contract import WEIGHT_ONE
from remote_dspark.verifier.errors import RowError


def require_rows(logits: npt.NDArray[np.float32]) -> None:
    """Refuse rows that define no distribution (NaN, +inf, only -inf).

    Args:
        logits: FP32 ``[n, V]``, real vocabulary columns only.

    Raises:
        RowError: Names the row and the column.
    """
    if logits.ndim != 2 or logits.dtype != np.float32 or logits.size == 0:
        raise RowError(f"target rows: expected float32 [n, V], found {logits.dtype} {list(logits.shape)}")
    bad = np.isnan(logits) | np.isposinf(logits)
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        raise RowError(f"target row {row}: expected finite or -inf logits, found {logits[row, column]} at id {column}")
    empty = np.isneginf(logits).all(axis=1)
    if empty.any():
        raise RowError(f"target row {int(empty.argmax())}: expected a token with mass, found only -inf")


def process(logits: npt.NDArray[np.float32], temperature: float) -> npt.NDArray[np.float32]:
    """Apply the request's processors: the FP32 quotient by the temperature.

    Args:
        logits: FP32 ``[n, V]``.
        temperature: Positive and finite; temperature 0 has no distribution to process (`greedy.verify_argmax`).

    Returns:
        A new FP32 ``[n, V]``.

    Raises:
        RowError: A bad row, or a temperature outside (0, FP32 max].
    """
    require_rows(logits)
    divisor = np.float32(temperature)
    if not 0.0 < divisor < np.inf:
        raise RowError(f"temperature: expected a positive finite FP32 number, found {temperature}")
    with np.errstate(over="ignore", under="ignore"):
        processed = logits / divisor
    require_rows(processed)
    return processed


def target_weights(processed: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Fixed-point weights of processed rows.

    Args:
        processed: FP32 ``[n, V]``.

    Returns:
        int64 ``[n, V]`` in 0..2**38; each row's maximum is exactly 2**38.

    Raises:
        RowError: A bad row.
    """
    require_rows(processed)
    with np.errstate(over="ignore", under="ignore"):
        exponents = processed - processed.max(axis=1, keepdims=True)
        # Through FP64 and back: correctly rounded FP32, the same on every platform's vector library.
        exponentials = np.exp(exponents.astype(np.float64)).astype(np.float32)
    weights: npt.NDArray[np.int64] = np.floor(exponentials.astype(np.float64) * WEIGHT_ONE).astype(np.int64)
    return weights
