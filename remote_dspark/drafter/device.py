"""The device path: committed states into seats, blocks to proposals, as captured sequences over fixed memory.

One backbone sequence per (batch, depth) writes base logits; behind it comes either the original greedy chain or the
sampled one. Which of them is decided on the host before either is launched; both read the same logits. The rules:

* A step is one copy in (captured with the backbone), two sequences, one copy out; q is ready only after the copy out
  was waited for and its stamps and tokens were checked. Outputs leave as copies: the next step may start at once.
* State rows go through a ring of registered buffers; one is written again only after its copy has been done.
* All sequences are captured at start, each depth that may be asked for included or covered by a deeper one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from remote_dspark.contract import PRODUCTION_DEPTHS
from remote_dspark.drafter.backbone import MIN_ROWS, Backbone, BackboneTiling
from remote_dspark.drafter.context import SeatContext
from remote_dspark.drafter.device_markov import DeviceMarkovRows
from remote_dspark.drafter.heads import DraftedRows
from remote_dspark.drafter.launcher import Launcher
from remote_dspark.drafter.model import DSparkDrafter
from remote_dspark.drafter.staging import Block, BlockStaging
from remote_dspark.drafter.timings import StepTimings
from remote_dspark.kernels.backbone_greedy import greedy_buffers, launch_greedy
from remote_dspark.kernels.backbone_markov import write_bias_rows
from remote_dspark.kernels.sampled_head import HeadBuffers, HeadSettings, Tiling, launch_position

HEAD_TILE: Final = 2048
WIDE_HEAD_TILE: Final = 4096
FEW_TILES: Final = 64
"""As many as four warps merge well: 2,048 candidates."""

STATE_ROWS: Final = (MIN_ROWS, 32)
"""Rows of one captured context write; a larger chunk is written in pieces."""

NUM_STATE_BUFFERS: Final = 4
HEADER_BYTES: Final = 16


def captured_depths(max_depth: int) -> list[int]:
    """Depths that have sequences of their own; every other one up to ``max_depth`` is the front of a deeper one."""
    return sorted({depth for depth in PRODUCTION_DEPTHS if depth < max_depth} | {max_depth})


def head_settings(vocab_size: int, num_rows: int, support: int, semantics: str, *, overlap: bool) -> HeadSettings:
    """Fixed choices of the sampled head, as measured on an H200; they move time and no result.

    A larger tile halves the programs where those of several requests would share multiprocessors.
    """
    are_few = triton.cdiv(vocab_size, HEAD_TILE) <= FEW_TILES
    largest = WIDE_HEAD_TILE if num_rows > (1 if are_few else 3) else HEAD_TILE
    tile = min(largest, triton.next_power_of_2(max(vocab_size, support)))
    num_warps = 4 if are_few and tile <= HEAD_TILE else 8
    return HeadSettings(Tiling(vocab_size, tile, 1, num_warps), support, semantics, overlap=overlap)


class HostTimes(NamedTuple):
    """What the host saw of a step; the fields of `StepTimings`."""

    num_sampled: int
    submit_ns: int
    wait_ns: int
    collect_ns: int


class BlockSequence:
    """The captured sequences of one (batch, depth).

    Args:
        backbone: Writes base logits.
        markov: Bias rows.
        launcher: Of the device.
        logits: bf16 [depth, B, >= V] scratch.
        settings: Of the sampled head; None captures the greedy chain alone.
        support: Entries of a sampled row.
        tiling: Fixed choices of the chains.
    """

    def __init__(
        self,
        backbone: Backbone,
        markov: DeviceMarkovRows,
        launcher: Launcher,
        logits: Tensor,
        settings: HeadSettings | None,
        support: int,
        tiling: BackboneTiling,
    ) -> None:
        depth, num_rows, _ = logits.shape
        self.depth = depth
        self.logits = logits
        self.staging = BlockStaging(launcher, num_rows, depth, support)
        self._vocab_size = backbone.model.config.vocab_size
        # first and last of the captured step; one between launches would keep them apart
        self._marks = launcher.mark(captured=True), launcher.mark(captured=True)
        self._done = launcher.mark()
        self._backbone = backbone
        head = backbone.model.markov_head
        self._tables = (head.markov_w1.weight, head.markov_w2.weight, markov.slots, markov.rows)
        self._places = torch.zeros(num_rows, dtype=torch.int32, device=logits.device)
        self._tiling = tiling
        self._greedy = launcher.capture(self._step(self._greedy_selector(), sampled=False))
        self._sampled = None
        if settings is not None:
            self._sampled = launcher.capture(self._step(self._sampled_selector(settings), sampled=True))

    def _front(self) -> None:
        """Inputs to base logits."""
        staging = self.staging
        self._backbone.write_logits(
            staging.host_anchors, staging.seats, staging.lengths, self.logits, staging.words, staging.clock
        )

    def _step(self, select: Callable[[int], None], *, sampled: bool) -> Callable[[], None]:
        """Everything of a step."""
        (begin, end), staging = self._marks, self.staging

        def step() -> None:
            begin.record()
            self._front()
            for position in range(self.depth):
                select(position)
            staging.store_out(sampled=sampled, overlap=self._tiling.chain_overlap)
            end.record()

        return step

    def _write_bias(self, step: int) -> None:
        """Bias rows of a position, whose previous token is the anchor, then the last selection."""
        tiling, staging = self._tiling, self.staging
        write_bias_rows(
            staging.token[step - 1] if step else staging.anchors,
            *self._tables,
            None,
            places=self._places,
            clock=None if step else staging.clock,
            overlap=tiling.chain_overlap,
            flip=tiling.chain_flip and step % 2 == 1,
        )

    def _greedy_selector(self) -> Callable[[int], None]:
        staging, rows, places = self.staging, self._tables[-1], self._places
        buffers = greedy_buffers(staging.token, staging.error, staging.stamp)
        vocab_size, overlap = self._vocab_size, self._tiling.chain_overlap

        def select(step: int) -> None:
            self._write_bias(step)
            launch_greedy(buffers, step, self.logits[step], rows, places, staging.control, vocab_size, overlap=overlap)

        return select

    def _sampled_selector(self, settings: HeadSettings) -> Callable[[int], None]:
        staging = self.staging
        buffers = HeadBuffers(settings, self.depth, staging.num_rows, staging.token.device)
        buffers.ids, buffers.q, buffers.count = staging.ids, staging.q, staging.count
        buffers.token, buffers.error, buffers.stamp = staging.token, staging.error, staging.stamp
        rows, places = self._tables[-1], self._places

        def select(step: int) -> None:
            self._write_bias(step)
            launch_position(
                settings, buffers, step, self.logits[step], rows, staging.control, places=places, follows=True
            )

        return select

    def write_logits(self, blocks: Sequence[Block]) -> None:
        """Launch everything before the heads, uncaptured."""
        self.staging.fill(blocks)
        self._front()

    def run(self, blocks: Sequence[Block]) -> tuple[DraftedRows, HostTimes]:
        """One whole step; errors as of `BlockStaging.collect`."""
        num_sampled = sum(block.tau != 0 for block in blocks)
        step = self._sampled if num_sampled else self._greedy
        if step is None:
            raise LookupError("expected greedy requests on a device that captured no sampled sequence")
        clock = time.perf_counter_ns
        start_ns = clock()
        self.staging.fill(blocks)
        step()
        self._done.record()
        submitted_ns = clock()
        self.staging.expect(blocks, sampled=num_sampled > 0)
        self._done.wait()
        done_ns = clock()
        rows = self.staging.collect(blocks, self._vocab_size, sampled=num_sampled > 0)
        return rows, HostTimes(num_sampled, submitted_ns - start_ns, done_ns - submitted_ns, clock() - done_ns)

    def timings(self, host: HostTimes, num_cached: int = 0, state_ns: int = 0) -> StepTimings:
        """The account of the last step; the device's part is read here, so before the next step is launched."""
        begin, end = self._marks
        backbone_ns, heads_ns = self.staging.parts_ns()
        return StepTimings(
            num_requests=self.staging.num_rows,
            depth=self.depth,
            num_sampled=host.num_sampled,
            num_cached=num_cached,
            state_ns=state_ns,
            submit_ns=host.submit_ns,
            backbone_ns=backbone_ns,
            heads_ns=heads_ns,
            copy_ns=end.since_ns(begin) - backbone_ns - heads_ns,
            wait_ns=host.wait_ns,
            collect_ns=host.collect_ns,
        )


class StateWriter:
    """Registered buffers and captured sequences that turn state rows into a seat's context."""

    def __init__(self, backbone: Backbone, launcher: Launcher) -> None:
        width = backbone.model.config.fused_width
        size = HEADER_BYTES + STATE_ROWS[-1] * width * 2
        self._row_bytes = 2 * width
        self._hosts = [launcher.pinned(size) for _ in range(NUM_STATE_BUFFERS)]
        self._done = [launcher.mark() for _ in range(NUM_STATE_BUFFERS)]
        for mark in self._done:
            mark.record()
        self._turns = itertools.cycle(range(NUM_STATE_BUFFERS))
        self._device = torch.zeros(size, dtype=torch.uint8, device=launcher.device)
        header = self._device[:HEADER_BYTES].view(torch.int32)
        states = self._device[HEADER_BYTES:].view(torch.bfloat16).view(STATE_ROWS[-1], width)
        self._sequences = {
            rows: launcher.capture(lambda rows=rows: backbone.write_context(states[:rows], header))  # type: ignore[misc]
            for rows in STATE_ROWS
        }

    def write(self, seat: int, position: int, rows: NDArray[np.uint8]) -> None:
        """Launch the writes of rows uint8 [n, 2*m*d]; they are copied before this returns."""
        for first in range(0, len(rows), STATE_ROWS[-1]):
            self._write_piece(seat, position + first, rows[first : first + STATE_ROWS[-1]])

    def _write_piece(self, seat: int, position: int, rows: NDArray[np.uint8]) -> None:
        turn = next(self._turns)
        self._done[turn].wait()
        host, size = self._hosts[turn], HEADER_BYTES + rows.size
        view = host.numpy()
        view[:HEADER_BYTES].view(np.int32)[:] = (seat, position, len(rows), 0)
        view[HEADER_BYTES:size].reshape(rows.shape)[:] = rows
        self._device[:size].copy_(host[:size], non_blocking=True)
        self._done[turn].record()
        self._sequences[next(count for count in STATE_ROWS if count >= len(rows))]()


class DeviceCompute:
    """A drafter on a device.

    Args:
        model: Loaded, BF16, on the device.
        num_seats: Seats, and requests of one step at most.
        support: Entries of a sampled row.
        semantics: Ticket allocation.
        cache_bytes: Bound of cached bias rows.
        max_positions: Of a seat.
        max_depth: Deepest step.
        sampled: Whether sampled sequences are captured.
        tiling: Fixed choices of the products.

    Raises:
        UnsupportedShapeError: A model that this path does not compute.
    """

    def __init__(
        self,
        model: DSparkDrafter,
        num_seats: int,
        *,
        support: int,
        semantics: str,
        cache_bytes: int,
        max_positions: int,
        max_depth: int = PRODUCTION_DEPTHS[-1],
        sampled: bool = True,
        tiling: BackboneTiling | None = None,
    ) -> None:
        config, weight = model.config, model.markov_head.markov_w2.weight
        self._launcher = Launcher(weight.device)
        tiling = BackboneTiling() if tiling is None else tiling
        self.backbone = Backbone(model, num_seats, max_positions, tiling)
        self.markov = DeviceMarkovRows(model.markov_head.markov_w1.weight, weight, cache_bytes, num_seats)
        self._states = StateWriter(self.backbone, self._launcher)
        self._contexts: dict[int, SeatContext] = {}
        self._state_ns = 0
        self._timings: StepTimings | None = None
        self._unsettled: tuple[BlockSequence, HostTimes, list[int], NDArray[np.int32]] | None = None
        # the interpreter knows no dependent launches
        overlap = tiling.chain_overlap and self._launcher.is_cuda
        width = -(-config.vocab_size // 64) * 64
        self._sequences: dict[int, list[BlockSequence]] = {}
        for num_rows in range(1, num_seats + 1):
            logits = torch.zeros((max_depth, num_rows, width), dtype=torch.bfloat16, device=weight.device)
            settings = None
            if sampled:
                settings = head_settings(config.vocab_size, num_rows, support, semantics, overlap=overlap)
            self._sequences[num_rows] = [
                BlockSequence(self.backbone, self.markov, self._launcher, logits[:depth], settings, support, tiling)
                for depth in captured_depths(max_depth)
            ]

    @property
    def timings(self) -> StepTimings | None:
        """Where the last step's time went."""
        self._settle()
        return self._timings

    def close(self) -> None:
        """Nothing to end: the device's memory goes with this object."""

    def context(self, seat: int) -> SeatContext:
        """The context of a seat."""
        if seat not in self._contexts:
            width = self.backbone.model.config.fused_width
            self._contexts[seat] = SeatContext(self, seat, width, self.backbone.max_positions)
        return self._contexts[seat]

    def write(self, seat: int, position: int, rows: NDArray[np.uint8]) -> None:
        """Launch the context write of committed rows, and of wanted cache rows: no step waits for this call."""
        self._settle()
        start_ns = time.perf_counter_ns()
        self._states.write(seat, position, rows)
        self._state_ns += time.perf_counter_ns() - start_ns
        self.markov.admit()

    def draft(self, blocks: Sequence[Block], depth: int) -> DraftedRows:
        """Draft; a shallower step is the front of a deeper one, because no position sees a later one."""
        self._settle()
        sequence = self.sequence(len(blocks), depth)
        rows, host = sequence.run(blocks)
        self._unsettled = sequence, host, [block.anchor for block in blocks], rows.tokens
        if rows.tokens.shape[1] == depth:
            return rows
        return rows.front(depth)

    def _settle(self) -> None:
        """Account for the last step, which nobody has to wait for: cached rows that served, and times."""
        if self._unsettled is None:
            return
        (sequence, host, anchors, tokens), self._unsettled = self._unsettled, None
        num_cached = self.markov.observe(anchors + tokens[:, :-1].ravel().tolist())
        self._timings = sequence.timings(host, num_cached, self._state_ns)
        self._state_ns = 0

    def sequence(self, num_rows: int, depth: int) -> BlockSequence:
        """The sequences that serve a batch and depth.

        Raises:
            LookupError: Nothing was captured for it; there is no uncaptured way.
        """
        for found in self._sequences.get(num_rows, []):
            if found.depth >= depth:
                return found
        raise LookupError(f"expected a captured sequence, found none for {num_rows} requests of depth {depth}")

    def base_logits(self, blocks: Sequence[Block], depth: int) -> Tensor:
        """BF16 [B, depth, V], a copy."""
        self._settle()
        found = self.sequence(len(blocks), depth)
        found.write_logits(blocks)
        vocab_size = self.backbone.model.config.vocab_size
        return found.logits[:depth, :, :vocab_size].transpose(0, 1).clone()
