"""Where an engine's numbers come from: the torch reference here, or a device (`drafter.device`).

The rules of this file: a compute knows seats as numbers, no generations; it returns all rows of all requests or
raises; a request's rows never depend on its neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from remote_dspark.drafter.context import ContextCache, SeatContext
from remote_dspark.drafter.heads import DraftedRows, SampleInputs, greedy_rows, sample_block, select_greedy
from remote_dspark.drafter.markov import MarkovRows
from remote_dspark.drafter.model import DSparkDrafter
from remote_dspark.drafter.staging import Block
from remote_dspark.drafter.timings import StepTimings


class CachedRows(Protocol):
    """The counters of a Markov cache."""

    hits: int
    misses: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the rows held now."""


class BlockCompute(Protocol):
    """What drafts blocks."""

    @property
    def timings(self) -> StepTimings | None:
        """Those of the last step; may be worked out by this call, so it belongs behind the reply."""

    @property
    def markov(self) -> CachedRows:
        """The cache of bias rows."""

    def context(self, seat: int) -> SeatContext:
        """The context of a seat, made once."""

    def draft(self, blocks: Sequence[Block], depth: int) -> DraftedRows:
        """Proposals of one step.

        Raises:
            RowError: A row has no distribution.
            DeviceFaultError: The device cannot be trusted any more.
        """

    def base_logits(self, blocks: Sequence[Block], depth: int) -> Tensor:
        """BF16 [B, depth, V] base logits, a fresh tensor."""

    def close(self) -> None:
        """End what outlives this object; nothing is drafted afterwards."""


class TorchCompute:
    """The reference: plain torch, one request at a time.

    Args:
        model: A loaded drafter.
        support: Entries of a sampled row.
        semantics: Ticket allocation.
        cache_bytes: Bound of cached bias rows.
        max_positions: Of a seat.
    """

    def __init__(
        self, model: DSparkDrafter, *, support: int, semantics: str, cache_bytes: int, max_positions: int
    ) -> None:
        self._model = model
        self._support = support
        self._semantics = semantics
        self._max_positions = max_positions
        self._contexts: dict[int, ContextCache] = {}
        self.markov = MarkovRows(model, cache_bytes)
        self.timings: StepTimings | None = None

    def context(self, seat: int) -> SeatContext:
        """The context of a seat."""
        return self._contexts.setdefault(seat, ContextCache(self._model, self._max_positions))

    def close(self) -> None:
        """Nothing to end."""

    def draft(self, blocks: Sequence[Block], depth: int) -> DraftedRows:
        """Draft; the selector is chosen before either runs."""
        start_ns, hits = time.perf_counter_ns(), self.markov.hits
        base = self.base_logits(blocks, depth)
        base_ns = time.perf_counter_ns()
        anchors = [block.anchor for block in blocks]
        num_sampled = sum(block.tau != 0 for block in blocks)
        if num_sampled:
            rows = sample_block(base, anchors, self.markov, self._inputs(blocks))
        else:
            rows = greedy_rows(select_greedy(base, anchors, self.markov), self._support)
        heads_ns = time.perf_counter_ns()
        self.timings = StepTimings(
            num_requests=len(blocks),
            depth=depth,
            num_sampled=num_sampled,
            num_cached=self.markov.hits - hits,
            state_ns=0,
            submit_ns=0,
            backbone_ns=base_ns - start_ns,
            heads_ns=heads_ns - base_ns,
            copy_ns=0,
            wait_ns=0,
            collect_ns=0,
        )
        return rows

    @torch.inference_mode()
    def base_logits(self, blocks: Sequence[Block], depth: int) -> Tensor:
        """One request at a time: its rows never depend on its neighbours."""
        rows = []
        for block in blocks:
            context = self._contexts[block.seat].view()
            hidden = self._model.draft_hidden(block.anchor, block.position, context)
            rows.append(self._model.base_logits(hidden[:depth]))
        return torch.stack(rows)

    def _inputs(self, blocks: Sequence[Block]) -> SampleInputs:
        return SampleInputs(
            tau=torch.tensor([block.tau for block in blocks], dtype=torch.float32),
            keys=torch.tensor([block.key for block in blocks], dtype=torch.int64),
            rounds=torch.tensor([block.round for block in blocks], dtype=torch.int64),
            first_positions=torch.tensor([block.position + 1 for block in blocks], dtype=torch.int64),
            greedy=torch.tensor([block.tau == 0 for block in blocks]),
            support=self._support,
            semantics=self._semantics,
        )
