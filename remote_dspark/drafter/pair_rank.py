"""One rank of a drafting pair on its device: the whole backbone, its own columns of every head, its inboxes.

As in `drafter.device`, everything is captured once over fixed memory; the heads are bias rows of the rank's columns and
the pair's kernel, for greedy rows too, because the highest logit may lie on the other rank. Rules:

* Every (batch, depth) has channels of its own, in one dedicated allocation per rank that the peer writes.
* Sequences are primed and captured while the rank is stopped: nothing compiles while the peer waits.
* The rank's device is current only inside a call.

Covered: two ranks. Not covered: a backbone in parts; overlap of the exchange with the next position.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor, nn

from remote_dspark.drafter.backbone import Backbone, BackboneTiling
from remote_dspark.drafter.compute import CachedRows
from remote_dspark.drafter.device import HEAD_TILE, StateWriter, captured_depths
from remote_dspark.drafter.device_markov import DeviceMarkovRows
from remote_dspark.drafter.launcher import Launcher
from remote_dspark.drafter.model import DSparkDrafter
from remote_dspark.drafter.pair import PairShape, RankStep
from remote_dspark.drafter.staging import Block, BlockStaging
from remote_dspark.drafter.timings import StepTimings
from remote_dspark.kernels.backbone_markov import write_bias_rows
from remote_dspark.kernels.pair_head import launch_pair_position
from remote_dspark.kernels.pair_rank import PairError, PairRank, PairSettings, inbox_words


@dataclass(frozen=True)
class RankShape(PairShape):
    """A pair's shape, and what follows from it on a device.

    Attributes:
        bound: Of a wait: ns on a GPU, reads of the signal under the interpreter.
        tiling: Fixed choices of the products.
    """

    bound: int
    tiling: BackboneTiling = field(default_factory=BackboneTiling)

    def pair_settings(self, vocab_size: int) -> PairSettings:
        """Settings of the heads."""
        columns = -(-vocab_size // 2)
        tile = min(HEAD_TILE, triton.next_power_of_2(max(columns, self.support)))
        return PairSettings(vocab_size, tile, semantics=self.semantics, k=self.support, bound=self.bound)

    def sequences(self) -> list[tuple[int, int]]:
        """Every (batch, depth) that is captured, in the order of their inboxes."""
        return [(rows, depth) for rows in range(1, self.num_seats + 1) for depth in captured_depths(self.max_depth)]

    @property
    def inbox_words(self) -> int:
        """int64 words of a rank's inboxes."""
        return sum(inbox_words(rows) for rows, _ in self.sequences())


@torch.no_grad()
def keep_columns(model: DSparkDrafter, start: int, end: int) -> None:
    """Drop every row of LM head and W2 but those of the columns [start, end); in place."""
    for owner in (model.lm_head, model.markov_head.markov_w2):
        owner.weight = nn.Parameter(owner.weight[start:end].clone(), requires_grad=False)


class _RankSequence:
    """The captured sequences of one (batch, depth) on one rank."""

    def __init__(
        self, backbone: Backbone, markov: DeviceMarkovRows, launcher: Launcher, logits: Tensor, rank: PairRank
    ) -> None:
        self.depth, num_rows, _ = logits.shape
        self.logits = logits
        self.rank = rank
        self.staging = BlockStaging(launcher, num_rows, self.depth, rank.pair.k)
        self._marks = [launcher.mark() for _ in range(4)]
        self._sticky = launcher.pinned(4).view(torch.int32)
        self._sampled = False
        self._submit_ns = [0, 0]
        staging, buffers = self.staging, rank.buffers
        buffers.ids, buffers.q, buffers.count = staging.ids, staging.q, staging.count
        buffers.token, buffers.error, buffers.stamp = staging.token, staging.error, staging.stamp
        head = backbone.model.markov_head
        tables = (head.markov_w1.weight, head.markov_w2.weight, markov.slots, markov.rows)
        bias = torch.zeros_like(logits[0])
        previous = [staging.anchors, *staging.token]

        def front() -> None:
            staging.copy_in()
            backbone.write_logits(staging.anchors, staging.seats, staging.lengths, logits)

        def heads() -> None:
            for step in range(self.depth):
                write_bias_rows(previous[step], *tables, bias, overlap=step > 0)
                launch_pair_position(rank, step, logits[step], bias, staging.control, last=step == self.depth - 1)

        rank.stop()
        self._front, self._heads = launcher.capture(front), launcher.capture(heads)

    def start(self, blocks: Sequence[Block]) -> None:
        start_ns = time.perf_counter_ns()
        self._sampled = any(block.tau != 0 for block in blocks)
        self.staging.fill(blocks)
        self.staging.expect(blocks, sampled=self._sampled)
        self._marks[0].record()
        self._front()
        self._marks[1].record()
        self._submit_ns[0] = time.perf_counter_ns() - start_ns

    def draft(self) -> None:
        start_ns = time.perf_counter_ns()
        self._heads()
        self._marks[2].record()
        self.staging.copy_out(sampled=self._sampled)
        self._sticky.copy_(self.rank.sticky, non_blocking=True)
        self._marks[3].record()
        self._submit_ns[1] = time.perf_counter_ns() - start_ns

    def finish(self, blocks: Sequence[Block], vocab_size: int, *, with_rows: bool) -> RankStep:
        start_ns = time.perf_counter_ns()
        self._marks[3].wait()
        done_ns = time.perf_counter_ns()
        errors, outputs, rows = PairError(int(self._sticky[0])), b"", None
        if not errors:
            outputs = self.staging.outputs(sampled=self._sampled)
            if with_rows:
                rows = self.staging.collect(blocks, vocab_size, sampled=self._sampled)
        timings = StepTimings(
            num_requests=len(blocks),
            depth=self.depth,
            num_sampled=sum(block.tau != 0 for block in blocks),
            num_cached=0,
            state_ns=0,
            submit_ns=sum(self._submit_ns),
            backbone_ns=self._marks[1].since_ns(self._marks[0]),
            heads_ns=self._marks[2].since_ns(self._marks[1]),
            copy_ns=self._marks[3].since_ns(self._marks[2]),
            wait_ns=done_ns - start_ns,
            collect_ns=time.perf_counter_ns() - done_ns,
        )
        return RankStep(error_names(errors), outputs, rows, timings)


def error_names(errors: PairError) -> str:
    """Names of sticky errors, empty without one."""
    return "|".join(str(flag.name) for flag in PairError if flag in errors)


class RankCompute:
    """One rank; a `drafter.pair.DraftingRank`.

    Args:
        model: Loaded, BF16, whole, on this rank's device; loses the rows of the other rank's columns.
        rank: 0 or 1.
        shape: Agreed.
        inbox: int64 [`RankShape.inbox_words`], zero, on the device: one dedicated allocation that the peer writes.
        peer_address: Of the peer's inboxes, valid on this device.
        nonce: Of the incarnation, the same on both ranks.
        keep_alive: Held until `close`, such as the pool of the inbox.

    The rank is stopped until `restart`, which may be called once every rank exists.

    Raises:
        UnsupportedShapeError: A model that the device path does not compute.
    """

    def __init__(
        self,
        model: DSparkDrafter,
        rank: int,
        shape: RankShape,
        inbox: Tensor,
        peer_address: int,
        nonce: int,
        keep_alive: object = None,
    ) -> None:
        self._device = inbox.device
        self._vocab_size = model.config.vocab_size
        self._keep_alive: list[object] = [keep_alive, inbox]
        self._running: tuple[_RankSequence, Sequence[Block]] | None = None
        self._depth = 0
        self._state_ns = 0
        settings = shape.pair_settings(self._vocab_size)
        start, end = settings.shard(rank)
        keep_columns(model, start, end)
        self._sequences: dict[tuple[int, int], _RankSequence] = {}
        with self._current():
            launcher = Launcher(self._device)
            weight = model.markov_head.markov_w2.weight
            self.backbone = Backbone(model, shape.num_seats, shape.max_positions, shape.tiling)
            self._markov = DeviceMarkovRows(model.markov_head.markov_w1.weight, weight, shape.cache_bytes)
            self._states = StateWriter(self.backbone, launcher)
            width, first = -(-(end - start) // 64) * 64, 0
            logits = [
                torch.zeros((shape.max_depth, rows, width), dtype=torch.bfloat16, device=self._device)
                for rows in range(1, shape.num_seats + 1)
            ]
            for rows, depth in shape.sequences():
                size = inbox_words(rows)
                channels = PairRank(settings, rank, depth, rows, inbox[first : first + size], nonce)
                channels.connect(peer_address + first * inbox.element_size())
                first += size
                self._sequences[rows, depth] = _RankSequence(
                    self.backbone, self._markov, launcher, logits[rows - 1][:depth], channels
                )

    @property
    def markov(self) -> CachedRows:
        """Counters of the cached rows."""
        return self._markov

    def restart(self) -> None:
        """Take part from now on; every rank has been built."""
        with self._current():
            for sequence in self._sequences.values():
                sequence.rank.restart()
        self.quiesce()

    def write(self, seat: int, position: int, rows: NDArray[np.uint8]) -> None:
        """Launch the context write of committed rows, and of wanted cache rows."""
        start_ns = time.perf_counter_ns()
        with self._current():
            self._states.write(seat, position, rows)
            self._markov.admit()
        self._state_ns += time.perf_counter_ns() - start_ns

    def start(self, blocks: Sequence[Block], depth: int) -> None:
        """Launch everything before the heads."""
        sequence = self._sequence(len(blocks), depth)
        self._running, self._depth = (sequence, blocks), depth
        with self._current():
            sequence.start(blocks)

    def draft(self) -> None:
        """Launch the heads; the peer's must follow within the bound."""
        sequence, _ = self._require_running()
        with self._current():
            sequence.draft()

    def finish(self, *, with_rows: bool) -> RankStep:
        """Wait for the step; errors as of `BlockStaging.collect`."""
        sequence, blocks = self._require_running()
        self._running = None
        with self._current():
            step = sequence.finish(blocks, self._vocab_size, with_rows=with_rows)
        if step.errors:
            return step
        previous = [block.anchor for block in blocks] + sequence.staging.tokens()[:-1].ravel().tolist()
        timings = replace(step.timings, num_cached=self._markov.observe(previous), state_ns=self._state_ns)
        self._state_ns = 0
        rows = step.rows
        if rows is not None and rows.tokens.shape[1] != self._depth:
            rows = rows.front(self._depth)
        return replace(step, rows=rows, timings=timings)

    def base_logits(self, blocks: Sequence[Block], depth: int) -> Tensor:
        """BF16 [B, depth, columns of this rank] on the CPU."""
        sequence = self._sequence(len(blocks), depth)
        with self._current():
            sequence.start(blocks)
            columns = self.backbone.model.lm_head.weight.shape[0]
            return sequence.logits[:depth, :, :columns].transpose(0, 1).cpu().clone()

    def quiesce(self) -> None:
        """Wait for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Drop every sequence, then what the peer writes; all ranks are quiesced."""
        self._running = None
        self._sequences.clear()
        self._keep_alive.clear()

    def _sequence(self, num_rows: int, depth: int) -> _RankSequence:
        for (rows, deepest), sequence in self._sequences.items():
            if rows == num_rows and deepest >= depth:
                return sequence
        raise LookupError(f"expected a captured sequence, found none for {num_rows} requests of depth {depth}")

    def _require_running(self) -> tuple[_RankSequence, Sequence[Block]]:
        if self._running is None:
            raise LookupError("expected a started step, found none; call start first")
        return self._running

    def _current(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
