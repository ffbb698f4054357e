"""What the pair is fed: seeded logits, a Markov bias table, and the cases that must be exact.

Everything follows from one seed. The boundary rows have 32 equal logits, hence 2**19 tickets each; the rounds listed
here make the real Philox draw fall exactly on and right below a cumulative count, so no draw is injected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from remote_dspark.oracle.philox import derive_key

BOUNDARY_SEED: Final = 2024
BOUNDARY_GENERATION: Final = 1
BOUNDARY_POSITION: Final = 7
BOUNDARY_DRAWS: Final = {
    10_702_626: 0,
    2_632_990: (1 << 19) - 1,
    13_641_597: 1 << 19,
    20_334_981: (16 << 19) - 1,
    8_235_166: 16 << 19,
    25_946_083: (31 << 19) - 1,
    3_789_339: 31 << 19,
    53_818_978: (1 << 24) - 1,
}
"""Round to its 24-bit proposal draw at `BOUNDARY_POSITION` under the key of seed and generation above."""


@dataclass
class BlockInputs:
    """Inputs of one launch. B requests, P positions, V ids; see `PairMemory` for dtypes."""

    base: npt.NDArray[np.uint16]
    previous: npt.NDArray[np.int64]
    tau: npt.NDArray[np.float32]
    keys: npt.NDArray[np.uint32]
    rounds: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    greedy: npt.NDArray[np.uint8]


def to_bf16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round FP32 to bf16, nearest even, by integers; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def from_bf16_bits(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """bf16 bit patterns as FP32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def corrected(base: npt.NDArray[np.uint16], bias: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Base logits plus bias, one bf16 rounding; FP32 values."""
    with np.errstate(invalid="ignore", over="ignore"):
        return from_bf16_bits(to_bf16_bits(from_bf16_bits(base) + from_bf16_bits(bias)))


def bias_table(rng: np.random.Generator, vocab_size: int) -> npt.NDArray[np.uint16]:
    """A bias row for every previous token: uint16 ``[V, V]``."""
    return to_bf16_bits(rng.normal(scale=1.5, size=(vocab_size, vocab_size)).astype(np.float32))


def random_block(rng: np.random.Generator, num_requests: int, depth: int, vocab_size: int) -> BlockInputs:
    """An ordinary block: peaked and flat rows, no greedy row."""
    scale = rng.choice([0.5, 3.0, 12.0], size=(num_requests, depth, 1))
    logits = (rng.normal(size=(num_requests, depth, vocab_size)) * scale).astype(np.float32)
    keys = [derive_key(int(rng.integers(1 << 53)), int(rng.integers(1, 1 << 32))) for _ in range(num_requests)]
    return BlockInputs(
        base=to_bf16_bits(logits),
        previous=rng.integers(vocab_size, size=num_requests),
        tau=np.full(num_requests, 0.7, dtype=np.float32),
        keys=np.array(keys, dtype=np.uint32),
        rounds=rng.integers(1 << 32, size=num_requests),
        positions=rng.integers(1, 4096, size=num_requests),
        greedy=np.zeros(num_requests, dtype=np.uint8),
    )


def edge_block(rng: np.random.Generator, num_requests: int, depth: int, vocab_size: int) -> BlockInputs:
    """Rows at the edge: ties across the shards, fewer than 32 finite candidates, one shard fully masked, -0."""
    block = random_block(rng, num_requests, depth, vocab_size)
    half = vocab_size // 2
    for position in range(depth):
        rows = from_bf16_bits(block.base[:, position])
        rows[0] = np.round(rows[0])
        rows[1 % num_requests, 5:] = -np.inf
        rows[2 % num_requests, :half] = -np.inf
        rows[3 % num_requests, ::3] = -0.0
        block.base[:, position] = to_bf16_bits(rows)
    return block


def boundary_block(rng: np.random.Generator, rounds: list[int], depth: int, vocab_size: int) -> BlockInputs:
    """Rows with 32 equal best logits on both shards, and rounds whose draws are boundaries at the first position."""
    block = random_block(rng, len(rounds), depth, vocab_size)
    block.base[:, 0] = to_bf16_bits(np.full(vocab_size, -np.inf, dtype=np.float32))
    chosen = np.sort(rng.choice(vocab_size, size=32, replace=False))
    block.base[:, 0, chosen] = 0
    block.keys[:] = derive_key(BOUNDARY_SEED, BOUNDARY_GENERATION)
    block.rounds = np.array(rounds, dtype=np.int64)
    block.positions[:] = BOUNDARY_POSITION
    return block
