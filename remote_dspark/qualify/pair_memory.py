"""The memory emulated ranks share: inputs, inboxes with epochs and acknowledgements, outputs.

One file, mapped by the parent and by all ranks. A rank writes candidates into each *peer's* inbox, then the signal;
it reads its own inbox, which has a part for each sender, after the signals. Ordering relies on x86 stores becoming
visible in program order: this proves the protocol, not weak-memory ordering. Every wait is bounded. No torch here.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

NUM_RANKS: Final = 2
MAX_RANKS: Final = 8
CANDIDATES: Final = 32
"""Packed (value, id) pairs per request and position: 256 bytes."""

PAUSE_S: Final = 2e-5


class Sticky(IntEnum):
    """Why a rank takes part in nothing any more. Only the end of the process clears it."""

    NONE = 0
    PEER_TIMEOUT = 1
    PEER_MISMATCH = 2
    EPOCH_EXHAUSTED = 3


class StickyError(Exception):
    """A peer error; the host discards the whole reply and tears the worker down."""

    def __init__(self, code: Sticky, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class PairShape:
    """Sizes: requests, positions, vocabulary, ranks. Ranks own ascending parts of the vocabulary."""

    num_requests: int
    depth: int
    vocab_size: int
    num_ranks: int = NUM_RANKS

    def __post_init__(self) -> None:
        """Refuses numbers that are no pair, and shards without a column."""
        is_wide = self.vocab_size >= CANDIDATES * self.num_ranks
        if not NUM_RANKS <= self.num_ranks <= MAX_RANKS or not is_wide:
            raise ValueError(
                f"expected {NUM_RANKS}..{MAX_RANKS} ranks of at least {CANDIDATES} columns each, found "
                f"{self.num_ranks} of {self.vocab_size} columns in all"
            )

    def shard(self, rank: int) -> tuple[int, int]:
        """Global ids [start, end) of a rank."""
        return rank * self.vocab_size // self.num_ranks, (rank + 1) * self.vocab_size // self.num_ranks


class PairMemory:
    """Named arrays over one mapped file; the attributes are views, shared by all processes. N is the number of ranks.

    Attributes:
        base: uint16 [B, P, V], bf16 bits of the base logits.
        bias: uint16 [V, V], bf16 bits of the Markov bias row of each previous token.
        previous: int64 [B], anchor tokens.
        tau: float32 [B].
        keys: uint32 [B, 2].
        rounds: int64 [B].
        positions: int64 [B], absolute position of the first draft token.
        greedy: uint8 [B].
        epoch_limit: int64 [1].
        payload: int64 [N, N, B, 32], packed candidates: by receiver, then sender, who writes it.
        flags: int64 [N, N, B], row errors found by the sender.
        signal: int64 [N, N, B], epoch of the payload.
        ack: int64 [N, N, B, 3], (token, digest of the counts, epoch) of the sender.
        ids: int32 [N, B, P, 32], support in ascending id; -1 where there is no ticket.
        tickets: int64 [N, B, P, 32].
        weights: int64 [N, B, P, 32], of the whole support, entries without a ticket included.
        token: int64 [N, B, P].
        error: int64 [N, B, P].
    """

    base: npt.NDArray[np.uint16]
    bias: npt.NDArray[np.uint16]
    previous: npt.NDArray[np.int64]
    tau: npt.NDArray[np.float32]
    keys: npt.NDArray[np.uint32]
    rounds: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    greedy: npt.NDArray[np.uint8]
    epoch_limit: npt.NDArray[np.int64]
    payload: npt.NDArray[np.int64]
    flags: npt.NDArray[np.int64]
    signal: npt.NDArray[np.int64]
    ack: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int32]
    tickets: npt.NDArray[np.int64]
    weights: npt.NDArray[np.int64]
    token: npt.NDArray[np.int64]
    error: npt.NDArray[np.int64]

    def __init__(self, path: Path, shape: PairShape) -> None:
        self.shape = shape
        layout = _layout(shape)
        size = sum(_padded(dims, kind) for _, dims, kind in layout)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, size)
            mapped = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        offset = 0
        for name, dims, kind in layout:
            count = math.prod(dims)
            setattr(self, name, np.frombuffer(mapped, dtype=kind, count=count, offset=offset).reshape(dims))
            offset += _padded(dims, kind)

    def poison_outputs(self) -> None:
        """Make every output of the last launch visibly wrong, so that a stale value cannot pass for a new one."""
        for array in (self.ids, self.tickets, self.weights, self.token, self.error):
            array[:] = -1


def wait_for(cell: npt.NDArray[np.int64], value: int, timeout_s: float, what: str) -> None:
    """Wait until every element of ``cell`` is ``value``.

    Raises:
        StickyError: The bound has passed.
    """
    deadline = time.monotonic() + timeout_s
    while not bool((cell == value).all()):
        if time.monotonic() > deadline:
            raise StickyError(Sticky.PEER_TIMEOUT, f"{what}: expected epoch {value} within {timeout_s} s, found {cell}")
        time.sleep(PAUSE_S)


def _layout(shape: PairShape) -> list[tuple[str, tuple[int, ...], Any]]:
    b, p, v, n = shape.num_requests, shape.depth, shape.vocab_size, shape.num_ranks
    return [
        ("base", (b, p, v), np.uint16),
        ("bias", (v, v), np.uint16),
        ("previous", (b,), np.int64),
        ("tau", (b,), np.float32),
        ("keys", (b, 2), np.uint32),
        ("rounds", (b,), np.int64),
        ("positions", (b,), np.int64),
        ("greedy", (b,), np.uint8),
        ("epoch_limit", (1,), np.int64),
        ("payload", (n, n, b, CANDIDATES), np.int64),
        ("flags", (n, n, b), np.int64),
        ("signal", (n, n, b), np.int64),
        ("ack", (n, n, b, 3), np.int64),
        ("ids", (n, b, p, CANDIDATES), np.int32),
        ("tickets", (n, b, p, CANDIDATES), np.int64),
        ("weights", (n, b, p, CANDIDATES), np.int64),
        ("token", (n, b, p), np.int64),
        ("error", (n, b, p), np.int64),
    ]


def _padded(dims: tuple[int, ...], kind: Any) -> int:
    size = math.prod(dims) * int(np.dtype(kind).itemsize)
    return (size + 63) // 64 * 64
