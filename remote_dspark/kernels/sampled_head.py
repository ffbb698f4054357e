"""The fused sampled head on cached Markov rows: one launch per draft position, from BF16 logits to token and exact q.

Each program owns one tile of one row: it adds the bias, rounds, keeps the tile's top k and retires. The program that
retires last merges the tiles and finishes the row; no program ever waits for another, so any grid size and any order
of scheduling is safe. Solo runs both logical vocabulary shards in one launch: a tile never crosses a shard boundary.

Covered: cached rows (or plain bias rows), chains of positions, mixed greedy rows. Uncached rows are in `markov_head`;
the physical pair is not here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from remote_dspark.contract import DEVELOPMENT_SUPPORT_K, Q_FLOOR_FIRST, Q_SEMANTICS, SUPPORT_K, TICKET_TOTAL
from remote_dspark.kernels.finish import (
    CONTINUATION_FLAG,
    SMALL_POINTERS,
    draw_rows,
    emit_tile,
    merge_candidates,
    read_control,
    retire,
)
from remote_dspark.kernels.rounding import KEY_EXCLUDED, bf16_to_f32, order_key
from remote_dspark.kernels.rows import SampledRows


@triton.jit(do_not_specialize=["first_place", "step"], do_not_specialize_on_alignment=SMALL_POINTERS)
def sampled_head_kernel(
    logits_ptr,
    logits_stride,
    bias_ptr,
    bias_stride,
    slot_ptr,
    previous_ptr,
    control_ptr,
    candidate_ptr,
    counter_ptr,
    flag_ptr,
    merged_ptr,
    ids_ptr,
    q_ptr,
    count_ptr,
    token_ptr,
    weights_ptr,
    error_ptr,
    stamp_ptr,
    vocab_size,
    shard_size,
    tiles_per_shard,
    num_tiles,
    first_place,
    step,
    K: tl.constexpr,
    TILE: tl.constexpr,
    N: tl.constexpr,
    TILE_DIRECT: tl.constexpr,
    MERGE_DIRECT: tl.constexpr,
    BY_SLOT: tl.constexpr,
    BY_PLACE: tl.constexpr,
    FLOOR_FIRST: tl.constexpr,
    EMIT_WEIGHTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One position: grid (tiles, rows). See `SampledHead` for shapes."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    shard = tile // tiles_per_shard
    base = shard * shard_size + (tile - shard * tiles_per_shard) * TILE
    limit = tl.minimum((shard + 1) * shard_size, vocab_size)
    columns = base + tl.arange(0, TILE)
    real = columns < limit
    exists = row >= 0
    draw, tau, greedy, round_low, round_high = read_control(row, exists, control_ptr, step)
    logits = tl.load(logits_ptr + row * logits_stride + columns, mask=real, other=0)
    if OVERLAP:
        # the previous position's token, and everything this launch overwrites
        tl.extra.cuda.gdc_wait()
        # the next position's programs start and read their logits while this one works
        tl.extra.cuda.gdc_launch_dependents()
    bad_previous = 0
    bias_row = first_place + row.to(tl.int64)
    if BY_SLOT:
        previous = tl.load(previous_ptr + row)
        known = (previous >= 0) & (previous < vocab_size)
        slot = tl.load(slot_ptr + tl.where(known, previous, 0))
        bad_previous = tl.where(known & (slot >= 0), 0, CONTINUATION_FLAG)
        bias_row = tl.maximum(slot, 0).to(tl.int64)
    if BY_PLACE:
        place = tl.load(slot_ptr + row)
    bias = tl.load(bias_ptr + bias_row * bias_stride + columns, mask=real, other=0)
    if BY_PLACE:
        # its own row came while the place was looked up
        if place != first_place + row:
            bias = tl.load(bias_ptr + place.to(tl.int64) * bias_stride + columns, mask=real, other=0)
    # not by the loads' own default: a negative int16 default comes out wrong in the upper half of each 32-bit pair
    keys = tl.where(real, order_key(bf16_to_f32(logits) + bf16_to_f32(bias)), KEY_EXCLUDED)
    candidates = candidate_ptr + row * (num_tiles * K)
    top = emit_tile(keys, candidates + tile * K, exists, 1, K, TILE, TILE_DIRECT)
    before = retire(counter_ptr + row, flag_ptr + row, top, exists, 1)
    if before == num_tiles - 1:
        flags = tl.load(flag_ptr + row, cache_modifier=".cg") | bad_previous
        tl.store(counter_ptr + row, 0)
        tl.store(flag_ptr + row, 0)
        count = merge_candidates(
            row,
            candidate_ptr,
            merged_ptr,
            1,
            num_tiles,
            tiles_per_shard,
            shard_size,
            1,
            K,
            TILE,
            N,
            MERGE_DIRECT,
        )
        draw_rows(
            row,
            exists,
            merged_ptr,
            count,
            flags,
            draw,
            tau,
            greedy,
            round_low,
            round_high,
            control_ptr,
            ids_ptr,
            q_ptr,
            count_ptr,
            token_ptr,
            weights_ptr,
            error_ptr,
            stamp_ptr,
            step,
            1,
            K,
            FLOOR_FIRST,
            EMIT_WEIGHTS,
        )


@dataclass(frozen=True)
class Tiling:
    """How a vocabulary is cut into tiles.

    Attributes:
        vocab_size: Real columns V; columns beyond are never read.
        tile: Columns of a tile, a power of two.
        num_shards: Logical vocabulary shards; a tile belongs to one.
        num_warps: Warps of a program.
    """

    vocab_size: int
    tile: int = 2048
    num_shards: int = 1
    num_warps: int = 4

    def fills_threads(self, elements: int) -> bool:
        """Whether a program's threads each own 4 elements of their own (see `selection.scatter`)."""
        return elements >= self.num_warps * 128

    @property
    def shard_size(self) -> int:
        """Columns of a shard; the last one may be shorter."""
        return -(-self.vocab_size // self.num_shards)

    @property
    def tiles_per_shard(self) -> int:
        """Tiles of a shard."""
        return -(-self.shard_size // self.tile)

    @property
    def num_tiles(self) -> int:
        """Tiles of a row."""
        return self.tiles_per_shard * self.num_shards


@dataclass(frozen=True)
class HeadSettings:
    """What is fixed when a head is built: every value here is part of the compiled kernel or of its buffers."""

    tiling: Tiling
    k: int = SUPPORT_K
    semantics: str = Q_FLOOR_FIRST
    emit_weights: bool = False
    overlap: bool = True
    """Programmatic dependent launch between the positions of a chain, on CUDA and never on the first one: a position's
    programs start, and read logits and control, while the one before still finishes. Both must be ready before the
    first position is launched."""

    def __post_init__(self) -> None:
        """Refuses what no kernel was built for."""
        if self.k not in (SUPPORT_K, *DEVELOPMENT_SUPPORT_K):
            raise ValueError(f"k must be {SUPPORT_K} (or {DEVELOPMENT_SUPPORT_K} in development), found {self.k}")
        if self.semantics not in Q_SEMANTICS:
            raise ValueError(f"expected one of {Q_SEMANTICS}, found {self.semantics!r}")
        if self.tiling.tile & (self.tiling.tile - 1) or not self.k <= self.tiling.tile <= 1 << 16:
            raise ValueError(f"the tile must be a power of two in [k, 65536], found {self.tiling.tile}")
        if self.tiling.num_tiles > 1023:
            raise ValueError(f"a row may have 1023 tiles, found {self.tiling.num_tiles}; use larger tiles")


class HeadBuffers:
    """Outputs and scratch of one chain, with fixed addresses; two graphs that may overlap need two of these.

    Attributes:
        ids: int32 [depth, B, k].
        q: float32 [depth, B, k].
        count: int32 [depth, B].
        token: int32 [depth, B].
        weights: int64 [depth, B, k]; only written with ``emit_weights``.
        error: int32 [B], sticky along a chain.
        stamp: int64 [depth, B, 3].
        candidate: int32 [B, tiles * k] scratch.
        counter: int32 [B] scratch: retired tiles, 0 between launches.
        flag: int32 [B] scratch: bad values of the tiles, 0 between launches.
        merged: int64 [B, k] scratch.
    """

    def __init__(self, settings: HeadSettings, depth: int, num_rows: int, device: torch.device | str) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        k = settings.k
        self.ids = zeros(depth, num_rows, k)
        self.q = zeros(depth, num_rows, k, dtype=torch.float32)
        self.count = zeros(depth, num_rows)
        self.token = zeros(depth, num_rows)
        self.weights = zeros(depth, num_rows, k, dtype=torch.int64)
        self.error = zeros(num_rows)
        self.stamp = zeros(depth, num_rows, 3, dtype=torch.int64)
        self.candidate = zeros(num_rows, settings.tiling.num_tiles * k)
        self.counter = zeros(num_rows)
        self.flag = zeros(num_rows)
        self.merged = zeros(num_rows, k, dtype=torch.int64)

    def poison(self) -> None:
        """Fills every output and all scratch but counters and flags with a pattern that no launch writes."""
        for tensor in (self.ids, self.count, self.token, self.weights, self.error, self.stamp, self.merged):
            tensor.fill_(-0x5A5A5A5B)
        self.q.fill_(float("nan"))
        # as a candidate this would be a high key with a high column
        self.candidate.fill_(0x7E5AFFFF)

    def rows(self, step: int) -> SampledRows:
        """One position as rows on the CPU (copies); tickets are recovered from q, which is exact."""
        q = self.q[step].cpu().clone()
        return SampledRows(
            ids=self.ids[step].cpu().clone(),
            tickets=(q.to(torch.float64) * TICKET_TOTAL).to(torch.int32),
            q=q,
            count=self.count[step].cpu().clone(),
            token=self.token[step].cpu().clone(),
            weights=self.weights[step].cpu().clone(),
            error=self.error.cpu().clone(),
            stamp=self.stamp[step].cpu().clone(),
        )


def require_logits(rows: torch.Tensor, num_rows: int, vocab_size: int) -> None:
    """Checks BF16 rows.

    Raises:
        ValueError: Another dtype, too few rows or columns, or columns that are not contiguous.
    """
    if rows.dtype != torch.bfloat16 or rows.shape[0] != num_rows or rows.shape[1] < vocab_size or rows.stride(1) != 1:
        raise ValueError(f"expected bf16 [{num_rows}, >= {vocab_size}], found {rows.dtype} {tuple(rows.shape)}")


def launch_position(
    settings: HeadSettings,
    buffers: HeadBuffers,
    step: int,
    logits: torch.Tensor,
    bias_rows: torch.Tensor,
    control: torch.Tensor,
    *,
    previous: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
    follows: bool = False,
) -> None:
    """Launches one position on the current stream.

    Args:
        settings: Fixed choices.
        buffers: Outputs of the chain; index ``step`` is written.
        step: Position within the chain.
        logits: bf16 [B, >= V], last dimension contiguous.
        bias_rows: bf16 [B, >= V] (one per row), or with ``slots`` [C, >= V] (a cache).
        control: int32 [B, 16].
        previous: int32 [B], previous token of each row; needed with ``slots``.
        slots: int32 [V], cache row of each token or -1; a row whose previous token has none gets CONTINUATION.
        places: int32 [B], instead of the two: which of ``bias_rows`` is each row's. The last B are the rows' own.
        follows: The launch before lets this one start only once logits and control are complete, so that the first
            position may overlap, too.

    Raises:
        ValueError: Dtypes or shapes.
    """
    tiling = settings.tiling
    num_rows = control.shape[0]
    require_logits(logits, num_rows, tiling.vocab_size)
    require_logits(bias_rows, bias_rows.shape[0], tiling.vocab_size)
    if (slots is None) != (previous is None):
        raise ValueError("slots and previous belong together: a cache row is looked up by the previous token")
    if places is not None and slots is not None:
        raise ValueError("a row is found by its previous token or by its place, not by both")
    overlap = settings.overlap and logits.is_cuda
    sampled_head_kernel[(tiling.num_tiles, num_rows)](
        logits.view(torch.int16),
        logits.stride(0),
        bias_rows.view(torch.int16),
        bias_rows.stride(0),
        slots if places is None else places,
        previous,
        control,
        buffers.candidate,
        buffers.counter,
        buffers.flag,
        buffers.merged,
        buffers.ids[step],
        buffers.q[step],
        buffers.count[step],
        buffers.token[step],
        buffers.weights[step],
        buffers.error,
        buffers.stamp[step],
        tiling.vocab_size,
        tiling.shard_size,
        tiling.tiles_per_shard,
        tiling.num_tiles,
        0 if places is None else bias_rows.shape[0] - num_rows,
        step,
        K=settings.k,
        TILE=tiling.tile,
        N=triton.next_power_of_2(tiling.num_tiles * settings.k),
        TILE_DIRECT=tiling.fills_threads(tiling.tile),
        MERGE_DIRECT=tiling.fills_threads(tiling.num_tiles * settings.k),
        BY_SLOT=slots is not None,
        BY_PLACE=places is not None,
        FLOOR_FIRST=settings.semantics == Q_FLOOR_FIRST,
        EMIT_WEIGHTS=settings.emit_weights,
        OVERLAP=overlap,
        num_warps=tiling.num_warps,
        **({"launch_pdl": True} if overlap and (follows or step > 0) else {}),
    )
