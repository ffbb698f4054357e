"""The fused sampled head with uncached rows: the Markov bias is computed in the kernel, W2 is read once per position.

A program owns one tile of the vocabulary for all rows, so that the rows share the read of W2; rows whose bias is in
the cache take it from there, and W2 is not touched when all do. The product has a fixed order of additions (32 lanes
in ascending order, then a tree of neighbours), independent of tile, warps, batch and shard: a cached row is bit for
bit this kernel's own bias (DECISIONS 7).

Covered: vanilla Markov head, rank a multiple of 32. Not covered: gated and RNN heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from remote_dspark.contract import Q_FLOOR_FIRST
from remote_dspark.kernels.finish import (
    CONTINUATION_FLAG,
    SMALL_POINTERS,
    draw_rows,
    emit_tile,
    merge_candidates,
    read_control,
    retire_early,
)
from remote_dspark.kernels.markov_product import LANES, row_scalars
from remote_dspark.kernels.markov_stream import (
    ask_columns,
    ask_lines,
    load_ahead,
    load_requests,
    products_size,
    stream_index,
    stream_products,
)
from remote_dspark.kernels.rounding import KEY_EXCLUDED, bf16_to_f32, order_key, round_to_bf16
from remote_dspark.kernels.sampled_head import HeadBuffers, HeadSettings, require_logits
from remote_dspark.kernels.selection import any_row, pick

MAX_SHARED_ROWS = 4
"""Rows that one launch can serve: their partial sums live in registers together."""


@triton.jit(do_not_specialize=["step"], do_not_specialize_on_alignment=SMALL_POINTERS)
def markov_head_kernel(
    logits_ptr,
    logits_stride,
    bias_ptr,
    bias_stride,
    slot_ptr,
    w1_ptr,
    w2_ptr,
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
    num_rows,
    vocab_size,
    shard_size,
    tiles_per_shard,
    num_tiles,
    step,
    R: tl.constexpr,
    RANK: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    SUB: tl.constexpr,
    BLOCK: tl.constexpr,
    ASK: tl.constexpr,
    N: tl.constexpr,
    TILE_DIRECT: tl.constexpr,
    MERGE_DIRECT: tl.constexpr,
    FLOOR_FIRST: tl.constexpr,
    EMIT_WEIGHTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One position of up to R rows: grid (tiles,). See `sampled_head.HeadBuffers` for shapes."""
    tile = tl.program_id(0)
    shard = tile // tiles_per_shard
    base = shard * shard_size + (tile - shard * tiles_per_shard) * TILE
    limit = tl.minimum((shard + 1) * shard_size, vocab_size)
    end = tl.minimum(limit, base + TILE)
    # weights do not depend on the previous token: the first come while that is looked up
    ahead = load_ahead(w2_ptr, base, end, SUB, BLOCK, RANK)
    rows = base * 0 if R == 1 else tl.arange(0, R)
    exists = rows < num_rows
    draw, tau, greedy, round_low, round_high = read_control(rows, exists, control_ptr, step)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    previous = tl.load(previous_ptr + rows, mask=exists, other=0)
    known = (previous >= 0) & (previous < vocab_size)
    previous = tl.where(known, previous, 0)
    slot = tl.load(slot_ptr + previous, mask=exists, other=0)
    # not only where they are needed: then they would wait for the slot
    w1 = load_requests(w1_ptr, row_scalars(previous, rows, R), R, RANK)
    # programs start with different rows, so that different programs are the last of different rows
    row = tile & (R - 1)
    logits, cached = read_row(
        logits_ptr, logits_stride, bias_ptr, bias_stride, base, limit, row, num_rows, pick(slot, rows, row, R), TILE
    )
    products = tl.zeros([products_size(TILE, SUB, BLOCK, R)], tl.float32)
    if any_row(slot < 0, R):
        products = stream_products(ahead, w2_ptr, w1, base, end, TILE, SUB, BLOCK, R, RANK)
        if ASK > 0:
            # what the next position reads first comes into L2 while this one selects
            ask_columns(w2_ptr, base, end, ASK, RANK)
    last = tl.zeros([16 * BLOCK], tl.int32)
    for turn in tl.range(0, R, num_stages=1):
        found = tl.gather(products, stream_index(tl.arange(0, TILE), row, SUB, BLOCK, R), 0)
        bias = tl.where(pick(slot, rows, row, R) < 0, round_to_bf16(found), bf16_to_f32(cached))
        real = base + tl.arange(0, TILE) < limit
        # not by the load's own default: see sampled_head_kernel
        keys = tl.where(real, order_key(bf16_to_f32(logits) + bias), KEY_EXCLUDED)
        following = (row + 1) & (R - 1)
        if turn + 1 < R:
            logits, cached = read_row(
                logits_ptr,
                logits_stride,
                bias_ptr,
                bias_stride,
                base,
                limit,
                following,
                num_rows,
                pick(slot, rows, following, R),
                TILE,
            )
        if row < num_rows:
            candidates = candidate_ptr + (row * num_tiles + tile) * K
            top = emit_tile(keys, candidates, row >= 0, 1, K, TILE, TILE_DIRECT)
            before = retire_early(counter_ptr + row, flag_ptr + row, top, 16 * BLOCK)
            last |= (before == num_tiles - 1).to(tl.int32) << row
        row = following
    # one thread has the answers
    finishes = tl.max(last, axis=0)
    row = tile * 0
    while finishes >> row > 0:
        if (finishes >> row) & 1 > 0:
            flags = tl.load(flag_ptr + row, cache_modifier=".cg")
            flags = flags | tl.where(pick(known.to(tl.int32), rows, row, R) > 0, 0, CONTINUATION_FLAG)
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
            _, token, _, _ = draw_rows(
                row,
                row >= 0,
                merged_ptr,
                count,
                flags,
                pick(draw, rows, row, R),
                pick(tau, rows, row, R),
                pick(greedy.to(tl.int32), rows, row, R) > 0,
                pick(round_low, rows, row, R),
                pick(round_high, rows, row, R),
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
            if ASK > 0:
                # what the next position looks up first
                lane = tl.arange(0, 32)
                ask_lines(slot_ptr + token + lane * 0)
                ask_lines(w1_ptr + token.to(tl.int64) * RANK + lane * (RANK // 32))
        row += 1


@triton.jit
def read_row(logits_ptr, logits_stride, bias_ptr, bias_stride, base, limit, row, num_rows, slot, TILE: tl.constexpr):
    """Logits and cached bias of one tile of one row, int16 [TILE]; the bias means nothing in an uncached row."""
    columns = base + tl.arange(0, TILE)
    real = (columns < limit) & (row < num_rows)
    logits = tl.load(logits_ptr + row * logits_stride + columns, mask=real, other=0)
    line = bias_ptr + tl.maximum(slot, 0).to(tl.int64) * bias_stride
    return logits, tl.load(line + columns, mask=real & (slot >= 0), other=0)


def launch_markov_position(
    settings: HeadSettings,
    buffers: HeadBuffers,
    step: int,
    logits: torch.Tensor,
    control: torch.Tensor,
    previous: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    part: int | None = None,
) -> None:
    """Launches one position whose rows may be cached or not, on the current stream.

    Args:
        settings: Fixed choices; 1,024 columns and 8 warps were the fastest.
        buffers: Outputs of the chain; index ``step`` is written.
        step: Position within the chain.
        logits: bf16 [B, >= V].
        control: int32 [B, 16].
        previous: int32 [B], previous tokens.
        w1: bf16 [V, r].
        w2: bf16 [V, r].
        slots: int32 [V], cache row of each token or -1.
        cache: bf16 [C, >= V], at least one row.
        part: Columns of W2 that a program has under way at a time, 32 to 256; no part of the result. By default as
            many as fit in its registers beside the W1 rows.

    Raises:
        ValueError: Dtypes or shapes.
    """
    tiling = settings.tiling
    num_rows = control.shape[0]
    require_logits(logits, num_rows, tiling.vocab_size)
    rank = w2.shape[1]
    for name, tensor in (("w1", w1), ("w2", w2)):
        if tensor.dtype != torch.bfloat16 or tensor.shape != (tiling.vocab_size, rank) or not tensor.is_contiguous():
            raise ValueError(f"{name}: expected contiguous bf16 [{tiling.vocab_size}, r], found {tensor.shape}")
    if num_rows > MAX_SHARED_ROWS:
        raise ValueError(f"at most {MAX_SHARED_ROWS} rows share a launch, found {num_rows}; launch them in groups")
    if rank % LANES.value:
        raise ValueError(f"the Markov rank must be a multiple of {LANES.value}, found {rank}")
    overlap = settings.overlap and logits.is_cuda
    sub = min(part or (256 if num_rows == 1 else 128), tiling.tile)
    asked = min(512, tiling.tile) if overlap else 0
    markov_head_kernel[(tiling.num_tiles,)](
        logits.view(torch.int16),
        logits.stride(0),
        cache.view(torch.int16),
        cache.stride(0),
        slots,
        w1.view(torch.int16),
        w2.view(torch.int16),
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
        num_rows,
        tiling.vocab_size,
        tiling.shard_size,
        tiling.tiles_per_shard,
        tiling.num_tiles,
        step,
        R=triton.next_power_of_2(num_rows),
        RANK=rank,
        K=settings.k,
        TILE=tiling.tile,
        SUB=sub,
        BLOCK=2 * tiling.num_warps,
        ASK=asked,
        N=triton.next_power_of_2(tiling.num_tiles * settings.k),
        TILE_DIRECT=tiling.fills_threads(tiling.tile),
        MERGE_DIRECT=tiling.fills_threads(tiling.num_tiles * settings.k),
        FLOOR_FIRST=settings.semantics == Q_FLOOR_FIRST,
        EMIT_WEIGHTS=settings.emit_weights,
        OVERLAP=overlap,
        num_warps=tiling.num_warps,
        **({"launch_pdl": True} if overlap and step > 0 else {}),
    )
