"""The oracle's vectorised forms: agreement with the scalar ones, and speed against named peers in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from remote_dspark.contract import Q_FLOOR_FIRST, Q_STANDARD, TICKET_TOTAL
from remote_dspark.oracle.adversarial import adversarial_weights
from remote_dspark.oracle.philox import philox4x32, philox4x32_array
from remote_dspark.oracle.tickets import allocate, allocate_rows
from remote_dspark.oracle.weights import fixed_weights

ROWS, VOCAB_SIZE = 20, 129_280
Int64 = npt.NDArray[np.int64]


def median_s(call: Callable[[], object], repetitions: int) -> float:
    """Median wall time of a call."""
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[repetitions // 2]


def float_allocation(weights: Int64) -> Int64:
    """Peer: largest remainders the usual way, FP64 quotas and a full argsort. Not exact; only its time counts."""
    quotas = weights / weights.sum(axis=1, keepdims=True) * TICKET_TOTAL
    counts: Int64 = np.floor(quotas).astype(np.int64)
    for row in range(len(weights)):
        order = np.argsort(counts[row] - quotas[row], kind="stable")
        counts[row, order[: TICKET_TOTAL - int(counts[row].sum())]] += 1
    return counts


def full_rows() -> tuple[Int64, Int64]:
    """20 rows of the whole vocabulary and their rank-1 indices."""
    rng = np.random.default_rng(7)
    logits = (rng.standard_normal((ROWS, VOCAB_SIZE)) * 3).astype(np.float32)
    weights = np.stack([fixed_weights(row, 0.7) for row in logits])
    return weights, weights.argmax(axis=1)


def narrow_mismatches(num_rows: int) -> int:
    """Adversarial rows whose two forms differ."""
    wrong = 0
    for index in range(num_rows):
        weights, first = adversarial_weights(11, index, 512)
        for semantics in (Q_STANDARD, Q_FLOOR_FIRST):
            tickets, _ = allocate_rows(weights[None, :], semantics, np.array([first]))
            wrong += not np.array_equal(tickets[0], allocate(weights, semantics, first))
    return wrong


def result(name: str, value: float, unit: str, goal: float | None = None, peer: float | None = None) -> dict[str, Any]:
    """One line of the table; a goal is an upper limit, a ratio is peer / value."""
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "goal": goal,
        "met": None if goal is None else value <= goal,
        "peer": peer,
        "ratio": None if not peer or not value else peer / value,
    }


def measure() -> list[dict[str, Any]]:
    """Runs in a few seconds on one core."""
    weights, firsts = full_rows()
    tickets, _ = allocate_rows(weights, Q_STANDARD, firsts)
    scalar_s = []
    wrong = 0
    for row in range(ROWS):
        start = time.perf_counter()
        expected = allocate(weights[row], Q_STANDARD, int(firsts[row]))
        scalar_s.append(time.perf_counter() - start)
        wrong += not np.array_equal(tickets[row], expected)
    standard_ms = median_s(lambda: allocate_rows(weights, Q_STANDARD, firsts), 5) * 1e3
    first_ms = median_s(lambda: allocate_rows(weights, Q_FLOOR_FIRST, firsts), 5) * 1e3
    float_ms = median_s(lambda: float_allocation(weights), 3) * 1e3
    counters = np.random.default_rng(1).integers(0, 1 << 32, (100_000, 4), dtype=np.uint32)
    key = np.array([1, 2], dtype=np.uint32)
    words_ns = median_s(lambda: philox4x32_array(counters, key), 5) / len(counters) * 1e9
    blocks = [tuple(block) for block in counters[:2000].tolist()]
    scalar_ns = median_s(lambda: [philox4x32(block, (1, 2)) for block in blocks], 3) / len(blocks) * 1e9
    return [
        result("oracle: allocation 20 x 129280, rows that differ from the scalar oracle", wrong, "rows", 0),
        result(
            "oracle: allocation of 2000 adversarial rows, both semantics, differing", narrow_mismatches(2000), "rows", 0
        ),
        result(
            "oracle: allocate 20 x 129280 standard (peer: FP64 quotas and argsort)", standard_ms, "ms", None, float_ms
        ),
        result(
            "oracle: allocate 20 x 129280 standard (peer: scalar oracle)", standard_ms, "ms", None, sum(scalar_s) * 1e3
        ),
        result(
            "oracle: allocate 20 x 129280 floor-first (peer: FP64 quotas and argsort)", first_ms, "ms", None, float_ms
        ),
        result("oracle: philox block, array form (peer: scalar form)", words_ns, "ns", None, scalar_ns),
    ]
