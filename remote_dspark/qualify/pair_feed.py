"""What both ranks of a physical pair, and the solo head beside them, are fed: the same rows, cut at the shard border.

A feed owns fixed addresses, so that graphs can be replayed over changed inputs; `PairFeed.set` changes them on every
device. The solo head runs on rank 0's device, in two logical shards, from the whole rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from remote_dspark.kernels.markov_head import launch_markov_position
from remote_dspark.kernels.pair_chain import Launch
from remote_dspark.kernels.pair_head import launch_pair_position
from remote_dspark.kernels.pair_markov import launch_pair_markov
from remote_dspark.kernels.pair_rank import NUM_RANKS, PairRank, PairSettings
from remote_dspark.kernels.rows import CONTROL_WORDS
from remote_dspark.kernels.sampled_head import HeadBuffers, HeadSettings, Tiling, launch_position


@dataclass(frozen=True)
class FeedShape:
    """Sizes of a feed.

    Attributes:
        num_sets: Sets of logits; a position takes the set of its index.
        num_rows: Requests B.
        vocab_size: V.
        cache_rows: C.
        rank: Of the Markov factors; 0 for none.
    """

    num_sets: int
    num_rows: int
    vocab_size: int
    cache_rows: int
    rank: int = 0


@dataclass(frozen=True)
class HeadFeed:
    """Inputs of one device.

    Attributes:
        logits: bf16 [sets, B, columns].
        cache: bf16 [C, columns].
        slots: int32 [V].
        anchors: int32 [B].
        control: int32 [B, 16].
        w1: bf16 [V, r], or None.
        w2: bf16 [columns, r], or None.
    """

    logits: torch.Tensor
    cache: torch.Tensor
    slots: torch.Tensor
    anchors: torch.Tensor
    control: torch.Tensor
    w1: torch.Tensor | None
    w2: torch.Tensor | None


class PairFeed:
    """Inputs of both ranks and of the solo head.

    Args:
        shape: Sizes.
        settings: Of the pair.
        devices: CUDA device of each rank.
        seed: Of the random values.
        uncached: Give no token a cache row.
    """

    def __init__(
        self, shape: FeedShape, settings: PairSettings, devices: Sequence[int], seed: int, *, uncached: bool = False
    ) -> None:
        self.shape = shape
        device = f"cuda:{devices[0]}"
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(size, device=device, generator=generator) * scale).to(torch.bfloat16)

        size = shape.vocab_size
        slots = torch.randint(0, shape.cache_rows, (size,), device=device, generator=generator, dtype=torch.int32)
        self.solo = HeadFeed(
            logits=normal(shape.num_sets, shape.num_rows, size, scale=3.0),
            cache=normal(shape.cache_rows, size),
            slots=torch.full_like(slots, -1) if uncached else slots,
            anchors=torch.zeros(shape.num_rows, dtype=torch.int32, device=device),
            control=torch.zeros((shape.num_rows, CONTROL_WORDS), dtype=torch.int32, device=device),
            w1=normal(size, shape.rank) if shape.rank else None,
            w2=normal(size, shape.rank, scale=1 / 16) if shape.rank else None,
        )
        self.ranks = [self._part(settings, rank, devices[rank]) for rank in range(NUM_RANKS)]
        # a quarter of the sets are full of ties
        self.set_logits((self.solo.logits.float() / 2).round().to(torch.bfloat16)[::4], slice(None, None, 4), settings)

    def _part(self, settings: PairSettings, rank: int, device: int) -> HeadFeed:
        start, end = settings.shard(rank)
        target = torch.device("cuda", device)

        def move(tensor: torch.Tensor) -> torch.Tensor:
            # a rank never shares memory with the solo head beside it
            return tensor.contiguous().clone().to(target)

        solo = self.solo
        return HeadFeed(
            logits=move(solo.logits[:, :, start:end]),
            cache=move(solo.cache[:, start:end]),
            slots=move(solo.slots),
            anchors=move(solo.anchors),
            control=move(solo.control),
            w1=None if solo.w1 is None else move(solo.w1),
            w2=None if solo.w2 is None else move(solo.w2[start:end]),
        )

    def set(self, control: torch.Tensor, anchors: torch.Tensor) -> None:
        """Copies a control block and anchors to every device, on its current stream."""
        for feed in (self.solo, *self.ranks):
            feed.control.copy_(control, non_blocking=True)
            feed.anchors.copy_(anchors, non_blocking=True)

    def set_logits(self, logits: torch.Tensor, sets: slice, settings: PairSettings) -> None:
        """Replaces some sets of logits, bf16 [n, B, V], everywhere."""
        self.solo.logits[sets].copy_(logits)
        for rank, feed in enumerate(self.ranks):
            start, end = settings.shard(rank)
            feed.logits[sets].copy_(logits[:, :, start:end])

    def set_cache(self, cache: torch.Tensor, settings: PairSettings) -> None:
        """Replaces the first rows of the cache, bf16 [n, V], everywhere."""
        rows = slice(0, cache.shape[0])
        self.solo.cache[rows].copy_(cache)
        for rank, feed in enumerate(self.ranks):
            start, end = settings.shard(rank)
            feed.cache[rows].copy_(cache[:, start:end])


def chain_launch(feed: PairFeed, depth: int, *, uncached: bool = False) -> Launch:
    """Launches of chains of ``depth`` positions that follow each other: position i is step i mod depth."""

    def launch(rank: PairRank, index: int) -> None:
        part, step = feed.ranks[rank.rank], index % depth
        logits = part.logits[index % feed.shape.num_sets]
        previous = part.anchors if step == 0 else rank.buffers.token[step - 1]
        last = step == depth - 1
        if uncached:
            assert part.w1 is not None
            assert part.w2 is not None
            launch_pair_markov(
                rank, step, logits, part.control, previous, part.w1, part.w2, part.slots, part.cache, last=last
            )
        else:
            launch_pair_position(
                rank, step, logits, part.cache, part.control, last=last, previous=previous, slots=part.slots
            )

    return launch


class SoloHead:
    """The head of one GPU over the same feed, in two logical shards, or over rank 0's half only.

    Args:
        feed: Inputs.
        settings: Of the pair; tile and warps are taken from it.
        depth: Positions of a chain.
        half: Use rank 0's half of the vocabulary as if it were all; it reads rank 0's feed.
        uncached: Launch the head with Markov factors.
    """

    def __init__(
        self, feed: PairFeed, settings: PairSettings, depth: int, *, half: bool = False, uncached: bool = False
    ) -> None:
        start, end = settings.shard(0)
        tiling = Tiling(
            end - start if half else settings.vocab_size, settings.tile, 1 if half else NUM_RANKS, settings.num_warps
        )
        self.settings = HeadSettings(
            tiling, k=settings.k, semantics=settings.semantics, emit_weights=settings.emit_weights
        )
        self.inputs = feed.ranks[0] if half else feed.solo
        self.buffers = HeadBuffers(self.settings, depth, feed.shape.num_rows, self.inputs.control.device)
        self._depth, self._uncached, self._half_size = depth, uncached, end - start

    def launch(self, index: int) -> None:
        """Launches position ``index`` on the current stream."""
        inputs, step = self.inputs, index % self._depth
        logits = inputs.logits[index % inputs.logits.shape[0]]
        previous = inputs.anchors if step == 0 else self.buffers.token[step - 1]
        if self._uncached:
            assert inputs.w1 is not None
            assert inputs.w2 is not None
            size = self.settings.tiling.vocab_size
            launch_markov_position(
                self.settings, self.buffers, step, logits, inputs.control, previous, inputs.w1[:size], inputs.w2,
                inputs.slots, inputs.cache,
            )  # fmt: skip
        else:
            launch_position(
                self.settings,
                self.buffers,
                step,
                logits,
                inputs.cache,
                inputs.control,
                previous=previous,
                slots=inputs.slots,
            )
