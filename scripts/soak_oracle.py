"""Long proofs of the oracle's vectorised forms: equal to the scalar ones, values and faults, bit for bit.

Three phases: adversarial rows up to 512 wide (one in fifty poisoned, so that faults are compared too), full rows in
batches of 20 x 129,280, and Philox words. Everything follows from (seed, index). The state file is replaced after
every batch, so an interrupted run goes on where it stopped, and its result is the same as of one that was not.

    python scripts/soak_oracle.py --state build/soak/oracle.json [--time-box-s 60]

Prints the state as JSON. Exit codes: 0 all done and equal, 1 a difference was found, 3 the time box ended first.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from remote_dspark.contract import Q_SEMANTICS, WEIGHT_ONE
from remote_dspark.oracle.adversarial import adversarial_weights
from remote_dspark.oracle.errors import InvalidRowError
from remote_dspark.oracle.philox import philox4x32, philox4x32_array
from remote_dspark.oracle.tickets import allocate, allocate_rows
from remote_dspark.oracle.weights import fixed_weights

MAX_WIDTH = 512
VOCAB_SIZE = 129_280
NARROW_BATCH, FULL_BATCH, WORD_BATCH = 500, 20, 10_000
POISON_EVERY = 50
TEMPERATURES = (0.7, 1.0)

Int64 = npt.NDArray[np.int64]


@dataclass
class SoakState:
    """Progress of one run; the file's content.

    Attributes:
        seed: Of everything drawn.
        narrow_done: Adversarial rows compared, each in both semantics.
        full_done: Rows of the full vocabulary compared, each in both semantics.
        words_done: Philox blocks compared.
        faults_seen: Poisoned rows whose fault was equal in both forms.
        differences: One line per difference; empty is the proof.
    """

    seed: int
    narrow_done: int = 0
    full_done: int = 0
    words_done: int = 0
    faults_seen: int = 0
    differences: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Goals:
    """How much of each phase to do."""

    narrow: int
    full: int
    words: int


def poisoned(weights: Int64, first: int, index: int) -> tuple[Int64, int]:
    """One of four ways to make a row that must be refused."""
    weights = weights.copy()
    kind = index // POISON_EVERY % 4
    if kind == 0:
        weights[-1] = -1
    elif kind == 1:
        weights[0] = WEIGHT_ONE + 1
    elif kind == 2:
        weights[:] = 0
    else:
        first = weights.size
    return weights, first


def narrow_batch(seed: int, start: int, count: int) -> tuple[list[Int64], list[int]]:
    """Rows start..start+count of the adversarial sequence and their rank-1 indices."""
    rows, firsts = [], []
    for index in range(start, start + count):
        weights, first = adversarial_weights(seed, index, MAX_WIDTH)
        if index % POISON_EVERY == 0:
            weights, first = poisoned(weights, first, index)
        rows.append(weights)
        firsts.append(first)
    return rows, firsts


def full_batch(seed: int, start: int, count: int) -> tuple[list[Int64], list[int]]:
    """Rows of the full vocabulary: from spiky to flat, on a BF16 grid every other time so that weights tie."""
    rows = []
    for index in range(start, start + count):
        rng = np.random.default_rng((seed, VOCAB_SIZE, index))
        logits = (rng.standard_normal(VOCAB_SIZE) * (0.0, 0.5, 3.0, 10.0)[index % 4]).astype(np.float32)
        if index % 2:
            logits = (logits.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        rows.append(fixed_weights(logits, TEMPERATURES[index // 4 % 2]))
    return rows, [int(row.argmax()) for row in rows]


def compare_rows(rows: list[Int64], firsts: list[int], label: str) -> tuple[list[str], int]:
    """Both forms, both semantics, values and faults.

    Returns:
        One line per difference, and the number of equal faults.
    """
    width = max(row.size for row in rows)
    padded = np.zeros((len(rows), width), dtype=np.int64)
    for index, row in enumerate(rows):
        padded[index, : row.size] = row
    # a rank-1 index outside its own row must not fall into the padding of the batch
    indices = np.array([width if first >= row.size else first for row, first in zip(rows, firsts, strict=True)])
    differences, num_faults = [], 0
    for semantics in Q_SEMANTICS:
        tickets, faults = allocate_rows(padded, semantics, indices)
        for index, (row, first) in enumerate(zip(rows, firsts, strict=True)):
            expected, fault = np.zeros(row.size, dtype=np.int64), None
            try:
                expected = allocate(row, semantics, first)
            except InvalidRowError as refused:
                fault = refused.fault
            same = np.array_equal(tickets[index, : row.size], expected) and not tickets[index, row.size :].any()
            if not same or faults[index] is not fault:
                differences.append(f"{label} row {index} {semantics}: faults {fault} / {faults[index]}, equal {same}")
            num_faults += fault is not None and faults[index] is fault
    return differences, num_faults


def compare_words(seed: int, start: int, count: int) -> list[str]:
    """Philox blocks of random and extreme counters in both forms."""
    rng = np.random.default_rng((seed, 4, start))
    counters = rng.integers(0, 1 << 32, (count, 4), dtype=np.uint32)
    keys = rng.integers(0, 1 << 32, (count, 2), dtype=np.uint32)
    counters[::3] |= rng.choice(np.array([0, 0xFFFFFFFF], dtype=np.uint32), (len(counters[::3]), 4))
    words = philox4x32_array(counters, keys)
    return [
        f"words {start + index}: counter {counter}, key {key}"
        for index, (counter, key, found) in enumerate(
            zip(counters.tolist(), keys.tolist(), words.tolist(), strict=True)
        )
        if list(philox4x32(tuple(counter), tuple(key))) != found
    ]


def step(state: SoakState, goals: Goals) -> bool:
    """Does one batch of the first unfinished phase, in place.

    Returns:
        Whether there was anything left to do.
    """
    if state.narrow_done < goals.narrow:
        count = min(NARROW_BATCH, goals.narrow - state.narrow_done)
        label = f"narrow {state.narrow_done}+"
        found, faults = compare_rows(*narrow_batch(state.seed, state.narrow_done, count), label)
        state.narrow_done += count
        state.faults_seen += faults
    elif state.words_done < goals.words:
        count = min(WORD_BATCH, goals.words - state.words_done)
        found = compare_words(state.seed, state.words_done, count)
        state.words_done += count
    elif state.full_done < goals.full:
        count = min(FULL_BATCH, goals.full - state.full_done)
        found, _ = compare_rows(*full_batch(state.seed, state.full_done, count), f"full {state.full_done}+")
        state.full_done += count
    else:
        return False
    state.differences += found
    return True


def load(path: Path, seed: int) -> SoakState:
    """The stored state, or a fresh one.

    Raises:
        SystemExit: The file belongs to another seed.
    """
    if not path.exists():
        return SoakState(seed)
    state = SoakState(**json.loads(path.read_text()))
    if state.seed != seed:
        raise SystemExit(f"{path} has seed {state.seed}, expected {seed}; use another --state file")
    return state


def store(path: Path, state: SoakState) -> None:
    """Replaces the state file at once, so that an interruption leaves the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(asdict(state)) + "\n")
    fresh.replace(path)


def soak(
    path: Path, seed: int, goals: Goals, time_box_s: float, monotonic_s: Callable[[], float]
) -> tuple[SoakState, bool]:
    """Runs until done or until the time box ends; at least one batch if there is one.

    Returns:
        The state, and whether everything is done.
    """
    state, deadline_s = load(path, seed), monotonic_s() + time_box_s
    while step(state, goals):
        store(path, state)
        if monotonic_s() >= deadline_s:
            break
    done = (state.narrow_done, state.full_done, state.words_done)
    return state, all(value >= goal for value, goal in zip(done, (goals.narrow, goals.full, goals.words), strict=True))


def main(argv: list[str] | None = None) -> int:
    """Parses, runs, prints the state, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--state", type=Path, default=Path("build/soak/oracle.json"))
    parser.add_argument("--seed", type=int, default=20260630)
    parser.add_argument("--narrow", type=int, default=100_000)
    parser.add_argument("--full", type=int, default=200)
    parser.add_argument("--words", type=int, default=1_000_000)
    parser.add_argument("--time-box-s", type=float, default=float("inf"))
    arguments = parser.parse_args(argv)
    goals = Goals(arguments.narrow, arguments.full, arguments.words)
    state, is_done = soak(arguments.state, arguments.seed, goals, arguments.time_box_s, time.monotonic)
    sys.stdout.write(json.dumps({**asdict(state), "done": is_done}) + "\n")
    if state.differences:
        return 1
    return 0 if is_done else 3


if __name__ == "__main__":
    sys.exit(main())
