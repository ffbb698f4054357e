"""What a pair's outputs must be: recomputed by the oracle from the same inputs, position by position.

The weights come from the rank (one FP32 exponential is a device's own) and are judged against the oracle's within a
stated number of ulp; everything after them must be equal bit for bit. Returns sentences, an empty list when all holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from remote_dspark.contract import SUPPORT_K
from remote_dspark.oracle.errors import InvalidRowError
from remote_dspark.oracle.philox import proposal_draw
from remote_dspark.oracle.sample_row import row_from_weights
from remote_dspark.oracle.support import top_k_support
from remote_dspark.oracle.weights import fixed_weights
from remote_dspark.qualify.pair_inputs import BlockInputs, corrected

WEIGHT_ULP: Final = 3
"""Bound of a device's exponential against the correctly rounded one, in FP32 units in the last place."""


@dataclass(frozen=True)
class BlockOutputs:
    """Outputs of one rank for one launch: copies of the shared arrays, without the rank axis."""

    ids: npt.NDArray[np.int32]
    tickets: npt.NDArray[np.int64]
    weights: npt.NDArray[np.int64]
    token: npt.NDArray[np.int64]
    error: npt.NDArray[np.int64]


def compare_block(
    inputs: BlockInputs, bias: npt.NDArray[np.uint16], outputs: BlockOutputs, semantics: str
) -> list[str]:
    """Differences between one rank's outputs and the oracle."""
    differences: list[str] = []
    num_requests, depth, _ = inputs.base.shape
    for request in range(num_requests):
        previous, is_refused = int(inputs.previous[request]), False
        for position in range(depth):
            with np.errstate(invalid="ignore"):
                row = corrected(inputs.base[request, position], bias[previous])
            where = f"request {request} position {position}"
            is_refused = is_refused or not _is_row(row)
            if is_refused:
                differences += _compare_refused(outputs, request, position, where)
            elif inputs.greedy[request]:
                differences += _compare_greedy(outputs, request, position, int(row.argmax()), where)
            else:
                differences += _compare_sampled(inputs, outputs, request, position, row, semantics, where)
            previous = int(outputs.token[request, position])
    return differences


def same_outputs(first: BlockOutputs, second: BlockOutputs) -> list[str]:
    """Names of the arrays in which two ranks differ."""
    names = ("ids", "tickets", "weights", "token", "error")
    return [name for name in names if not np.array_equal(getattr(first, name), getattr(second, name))]


def _is_row(row: npt.NDArray[np.float32]) -> bool:
    return not (bool(np.isnan(row).any()) or bool(np.isposinf(row).any()) or bool(np.isneginf(row).all()))


def _compare_refused(outputs: BlockOutputs, request: int, position: int, where: str) -> list[str]:
    found = (int(outputs.token[request, position]), int(outputs.tickets[request, position].sum()))
    if int(outputs.error[request, position]) == 0 or found != (0, 0):
        return [f"{where}: expected an error flag, token 0 and no tickets, found {found}"]
    return []


def _compare_greedy(outputs: BlockOutputs, request: int, position: int, best: int, where: str) -> list[str]:
    found = (int(outputs.token[request, position]), int(outputs.tickets[request, position].sum()))
    if found != (best, 0) or int(outputs.error[request, position]):
        return [f"{where}: expected greedy token {best} without q, found {found}"]
    return []


def _compare_sampled(
    inputs: BlockInputs,
    outputs: BlockOutputs,
    request: int,
    position: int,
    row: npt.NDArray[np.float32],
    semantics: str,
    where: str,
) -> list[str]:
    if int(outputs.error[request, position]):
        return [f"{where}: expected no error, found flags {int(outputs.error[request, position])}"]
    ids, first = top_k_support(row, SUPPORT_K)
    expected_weights = fixed_weights(row[ids], float(inputs.tau[request]))
    shown = outputs.ids[request, position] >= 0
    weights = outputs.weights[request, position][: ids.size]
    bound = np.maximum(expected_weights >> 23, 1) * WEIGHT_ULP
    differences: list[str] = []
    if bool((np.abs(weights - expected_weights) > bound).any()):
        differences.append(f"{where}: a weight is more than {WEIGHT_ULP} ulp from the oracle's")
    counter = int(inputs.rounds[request]), int(inputs.positions[request]) + position
    draw = proposal_draw((int(inputs.keys[request, 0]), int(inputs.keys[request, 1])), *counter)
    try:
        expected = row_from_weights(ids, weights, first, semantics, draw)
    except InvalidRowError as fault:
        return [*differences, f"{where}: the rank's weights are refused by the oracle: {fault}"]
    found_tickets = outputs.tickets[request, position][shown]
    if not np.array_equal(expected.ids, outputs.ids[request, position][shown]):
        differences.append(f"{where}: ids differ")
    elif not np.array_equal(expected.tickets, found_tickets):
        differences.append(f"{where}: tickets differ")
    if expected.token != int(outputs.token[request, position]):
        found = int(outputs.token[request, position])
        differences.append(f"{where}: draw {draw}: expected token {expected.token}, found {found}")
    return differences
