"""A drafter without a network, for long loads: cheap proposals that depend on all that the real ones depend on.

A row's support and tickets are taken from a fixed pool by a checksum of the states that the seat's context holds, the
anchor and the tokens drawn so far; the token is the oracle's draw from it. So a row of another seat, occupant, round,
position or context is another row, as with a model. What it cannot show is a fault of the model's own computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from remote_dspark.contract import TICKET_TOTAL
from remote_dspark.drafter.config import DSparkConfig
from remote_dspark.drafter.context import SeatContext
from remote_dspark.drafter.heads import DraftedRows
from remote_dspark.drafter.staging import Block
from remote_dspark.drafter.timings import StepTimings
from remote_dspark.oracle.philox import proposal_draw
from remote_dspark.oracle.tickets import draw_token

POOL = 61


class NoCachedRows:
    """Counters of a cache that keeps nothing."""

    hits = 0
    misses = 0
    size_bytes = 0


class MemoryCompute:
    """A `BlockCompute` over a pool of rows.

    Args:
        config: Of the shape that is stood in for.
        support: Entries of a sampled row at most.
        max_positions: Of a seat.
    """

    def __init__(self, config: DSparkConfig, support: int, max_positions: int) -> None:
        generator = np.random.default_rng(7)
        self._config, self._support, self._max_positions = config, support, max_positions
        self._sums: dict[int, list[int]] = {}
        self._contexts: dict[int, SeatContext] = {}
        self._pool = [_row(generator, config.vocab_size, support) for _ in range(POOL)]
        self.markov = NoCachedRows()
        self.timings: StepTimings | None = None

    def context(self, seat: int) -> SeatContext:
        """The context of a seat."""
        if seat not in self._contexts:
            self._sums[seat] = [0] * (self._max_positions + 1)
            self._contexts[seat] = SeatContext(self, seat, self._config.fused_width, self._max_positions)
        return self._contexts[seat]

    def write(self, seat: int, position: int, rows: NDArray[np.uint8]) -> None:
        """Checksums of all states up to each position."""
        sums = self._sums[seat]
        for offset, row in enumerate(rows):
            sums[position + offset + 1] = crc32(row.tobytes(), sums[position + offset])

    def draft(self, blocks: Sequence[Block], depth: int) -> DraftedRows:
        """Proposals of one step."""
        shape = (len(blocks), depth, self._support)
        rows = DraftedRows(
            np.zeros(shape[:2], np.int32),
            np.zeros(shape, np.int32),
            np.zeros(shape, np.float32),
            np.zeros(shape[:2], np.int32),
        )
        for index, block in enumerate(blocks):
            seen, token = self._sums[block.seat][block.position], block.anchor
            for position in range(depth):
                seen = crc32(token.to_bytes(4, "little"), seen)
                ids, tickets = self._pool[seen % POOL]
                if block.tau == 0:
                    token = int(ids[tickets.argmax()])
                else:
                    token = draw_token(
                        ids, tickets, proposal_draw(block.key, block.round, block.position + 1 + position)
                    )
                    count = len(ids)
                    rows.ids[index, position, :count], rows.counts[index, position] = ids, count
                    rows.q[index, position, :count] = tickets / TICKET_TOTAL
                rows.tokens[index, position] = token
        num_sampled = sum(block.tau != 0 for block in blocks)
        self.timings = StepTimings(len(blocks), depth, num_sampled, *[0] * 8)
        return rows

    def base_logits(self, blocks: Sequence[Block], depth: int) -> torch.Tensor:
        """There are none."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to end."""


def _row(generator: np.random.Generator, vocab_size: int, support: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ascending ids, and tickets that are all positive and sum to `TICKET_TOTAL`."""
    count = int(generator.integers(1, support + 1))
    ids = np.sort(generator.choice(vocab_size, count, replace=False)).astype(np.int64)
    ends = np.sort(generator.choice(TICKET_TOTAL - 1, count - 1, replace=False) + 1)
    return ids, np.diff(np.concatenate([[0], ends, [TICKET_TOTAL]])).astype(np.int64)
