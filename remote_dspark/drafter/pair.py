"""A drafter over several ranks: each holds a part of the vocabulary, all draft every block, one reply leaves.

The backbone is computed by every rank; base logits, bias rows and candidates only for the rank's own columns. The
ranks agree on the device (`kernels.pair_exchange`); here the host launches them, waits for all, and compares. Rules:

* A reply leaves only when no rank has an error and all ranks have the same output, byte for byte. The first one's rows
  are the reply.
* An error is for life: the reply is discarded, all ranks are quiesced, then their memory is freed, and this object
  drafts nothing any more. A fresh one works.

Not here: what a rank computes (`pair_rank`), where it runs (`pair_devices`, `pair_emulated`). No kernels are imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remote_dspark.drafter.compute import CachedRows
from remote_dspark.drafter.context import SeatContext
from remote_dspark.drafter.errors import DeviceFaultError
from remote_dspark.drafter.heads import DraftedRows
from remote_dspark.drafter.staging import Block
from remote_dspark.drafter.timings import StepTimings


@dataclass(frozen=True)
class PairShape:
    """What all ranks of a drafting pair agree on, wherever they run.

    Attributes:
        num_seats: Seats, and requests of one step at most.
        support: Entries of a sampled row.
        semantics: Ticket allocation.
        cache_bytes: Bound of a rank's cached bias rows.
        max_positions: Of a seat.
        max_depth: Deepest step.
    """

    num_seats: int
    support: int
    semantics: str
    cache_bytes: int
    max_positions: int
    max_depth: int


@dataclass(frozen=True)
class RankStep:
    """What one rank says of a step.

    Attributes:
        errors: Names of its sticky errors (`kernels.pair_rank.PairError`), empty without one.
        outputs: Its whole output as copied to the host; empty with an error.
        rows: Checked rows, of the rank that was asked for them.
        timings: Where its time went.
    """

    errors: str
    outputs: bytes
    rows: DraftedRows | None
    timings: StepTimings


class DraftingRank(Protocol):
    """One rank, wherever it runs. Calls of one step: `start` of all ranks, `draft` of all, `finish` of all."""

    @property
    def markov(self) -> CachedRows:
        """Counters of its cached rows."""

    def write(self, seat: int, position: int, rows: NDArray[np.uint8]) -> None:
        """Store the context of committed rows, uint8 [n, 2*m*d]; they are not kept."""

    def start(self, blocks: Sequence[Block], depth: int) -> None:
        """Launch everything before the heads."""

    def draft(self) -> None:
        """Launch the heads; every other rank's must follow within the bound."""

    def finish(self, *, with_rows: bool) -> RankStep:
        """Wait for the step.

        Raises:
            DeviceFaultError: The rank answered something else than was asked, or not at all.
        """

    def base_logits(self, blocks: Sequence[Block], depth: int) -> Tensor:
        """BF16 [B, depth, columns of the rank] on the CPU."""

    def quiesce(self) -> None:
        """Wait until nothing of this rank runs any more."""

    def close(self) -> None:
        """Free what the peers write; all ranks are quiesced."""


class PairCompute:
    """Drafts with all ranks; a `drafter.compute.BlockCompute`.

    Args:
        ranks: In the order of their columns; owned and closed by this object.
        fused_width: Elements of a state row.
        max_positions: Of a seat.
    """

    def __init__(self, ranks: Sequence[DraftingRank], *, fused_width: int, max_positions: int) -> None:
        self._ranks = list(ranks)
        self._fused_width = fused_width
        self._max_positions = max_positions
        self._contexts: dict[int, SeatContext] = {}
        self._markov = ranks[0].markov
        self.timings: StepTimings | None = None

    @property
    def ranks(self) -> tuple[DraftingRank, ...]:
        """The open ranks, none after `close`."""
        return tuple(self._ranks)

    @property
    def markov(self) -> CachedRows:
        """Counters of the first rank's cached rows; every rank sees the same tokens."""
        return self._markov

    def context(self, seat: int) -> SeatContext:
        """The context of a seat, which every rank holds."""
        if seat not in self._contexts:
            self._contexts[seat] = SeatContext(self, seat, self._fused_width, self._max_positions)
        return self._contexts[seat]

    def write(self, seat: int, position: int, rows: NDArray[np.uint8]) -> None:
        """Store committed rows on every rank."""
        for rank in self._open_ranks():
            rank.write(seat, position, rows)

    def draft(self, blocks: Sequence[Block], depth: int) -> DraftedRows:
        """Draft on every rank.

        Raises:
            DeviceFaultError: A rank has an error or another answer, or had one earlier.
        """
        ranks = self._open_ranks()
        try:
            for rank in ranks:
                rank.start(blocks, depth)
            for rank in ranks:
                rank.draft()
            steps = [rank.finish(with_rows=number == 0) for number, rank in enumerate(ranks)]
            rows = _require_agreement(steps)
        except BaseException:
            self.close()
            raise
        self.timings = _joined([step.timings for step in steps])
        return rows

    def base_logits(self, blocks: Sequence[Block], depth: int) -> Tensor:
        """BF16 [B, depth, V] on the CPU, the ranks' columns side by side."""
        return torch.cat([rank.base_logits(blocks, depth) for rank in self._open_ranks()], dim=-1)

    def close(self) -> None:
        """Quiesce every rank, then free what they share; again is nothing."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.quiesce()
        for rank in ranks:
            rank.close()

    def _open_ranks(self) -> list[DraftingRank]:
        if not self._ranks:
            raise DeviceFaultError("pair: expected open ranks, found them closed after an error; start a fresh worker")
        return self._ranks


def _require_agreement(steps: Sequence[RankStep]) -> DraftedRows:
    """The first rank's rows, once no rank has an error and all have the same output."""
    if any(step.errors for step in steps):
        found = ", ".join(f"rank {number}: {step.errors or 'none'}" for number, step in enumerate(steps))
        raise DeviceFaultError(f"pair: expected no error, found {found}; the reply is discarded, start a fresh worker")
    first = steps[0]
    for number, step in enumerate(steps):
        if step.outputs != first.outputs:
            raise DeviceFaultError(
                f"pair: expected the output of rank 0 on rank {number}, found another; start a fresh worker"
            )
    assert first.rows is not None
    return first.rows


def _joined(timings: Sequence[StepTimings]) -> StepTimings:
    """Host times of all ranks together, since one thread makes them; device times of the slowest."""
    first = timings[0]
    return replace(
        first,
        state_ns=sum(one.state_ns for one in timings),
        submit_ns=sum(one.submit_ns for one in timings),
        backbone_ns=max(one.backbone_ns for one in timings),
        heads_ns=max(one.heads_ns for one in timings),
        copy_ns=max(one.copy_ns for one in timings),
        wait_ns=sum(one.wait_ns for one in timings),
        collect_ns=sum(one.collect_ns for one in timings),
    )
