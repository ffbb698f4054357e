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
from remote_dspark.kernels.finish import CONTINUATION_FLAG, emit_tile, finish_rows, merge_candidates, retire
from remote_dspark.kernels.rounding import NEGATIVE_INFINITY_BITS, bf16_to_f32, order_key, round_to_bf16
from remote_dspark.kernels.sampled_head import HeadBuffers, HeadSettings, require_logits

LANES = tl.constexpr(32)
"""Partial sums of a product; part of the numerics, never a tuning knob."""


@triton.jit
def markov_product(
    w2_ptr, w1_ptrs, first_column, limit, STRIDE: tl.constexpr, SUB: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr
):
    """FP32 products W1 . W2 of SUB columns, each 4 apart, for R rows: [SUB, R], before rounding.

    Args:
        w2_ptr: bf16 bits [V, RANK].
        w1_ptrs: pointers [R] to bf16 bits [RANK].
        first_column: The first column.
        limit: Columns from here on are not read and count as 0.
        STRIDE: Distance of the columns.
        SUB: Number of columns.
        R: Rows.
        RANK: Inner dimension.
    """
    columns = first_column + tl.arange(0, SUB) * STRIDE
    lanes = tl.arange(0, LANES)
    real = (columns < limit)[:, None] & (lanes >= 0)[None, :]
    w2_tile = w2_ptr + columns.to(tl.int64)[:, None] * RANK + lanes[None, :]
    w1_tile = w1_ptrs[None, :] + lanes[:, None]
    total = tl.zeros([SUB, LANES, R], tl.float32)
    for start in tl.static_range(0, RANK, LANES):
        w2 = bf16_to_f32(tl.load(w2_tile + start, mask=real, other=0))
        w1 = bf16_to_f32(tl.load(w1_tile + start))
        total += w2[:, :, None] * w1[None, :, :]
    # a tree of neighbours, spelled out so that no compiler chooses the order
    for half in tl.static_range(5):
        pairs = tl.permute(tl.reshape(total, [SUB, 16 >> half, 2, R]), [0, 1, 3, 2])
        even, odd = tl.split(pairs)
        total = even + odd
    return tl.reshape(total, [SUB, R])


@triton.jit
def markov_bias_tile(w2_ptr, w1_ptrs, base, limit, TILE: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr):
    """Bias of one tile, rounded to BF16, float32 [TILE, R]; in four parts so that the partial sums fit in registers."""
    SUB: tl.constexpr = TILE // 4
    part0 = markov_product(w2_ptr, w1_ptrs, base, limit, 4, SUB, R, RANK)
    part1 = markov_product(w2_ptr, w1_ptrs, base + 1, limit, 4, SUB, R, RANK)
    part2 = markov_product(w2_ptr, w1_ptrs, base + 2, limit, 4, SUB, R, RANK)
    part3 = markov_product(w2_ptr, w1_ptrs, base + 3, limit, 4, SUB, R, RANK)
    # column 4 i + 2 a + b is part 2 a + b at i
    low = tl.join(part0, part1)
    high = tl.join(part2, part3)
    both = tl.permute(tl.join(low, high), [0, 3, 2, 1])
    return round_to_bf16(tl.reshape(both, [TILE, R]))


@triton.jit
def markov_bias_kernel(
    w2_ptr,
    w1_ptr,
    bias_ptr,
    token_ptr,
    vocab_size,
    bias_stride,
    TILE: tl.constexpr,
    R: tl.constexpr,
    RANK: tl.constexpr,
):
    """Bias rows of R tokens: what a Markov cache is filled with. Grid (tiles,)."""
    base = tl.program_id(0) * TILE
    rows = tl.arange(0, R)
    tokens = tl.load(token_ptr + rows).to(tl.int64)
    bias = markov_bias_tile(w2_ptr, w1_ptr + tokens * RANK, base, vocab_size, TILE, R, RANK)
    columns = base + tl.arange(0, TILE)
    bits = (bias.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    out = bias_ptr + rows[None, :].to(tl.int64) * bias_stride + columns[:, None]
    tl.store(out, bits, mask=(columns < vocab_size)[:, None] & (rows >= 0)[None, :])


@triton.jit(do_not_specialize=["step"])
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
    N: tl.constexpr,
    FLOOR_FIRST: tl.constexpr,
    EMIT_WEIGHTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One position of up to R rows: grid (tiles,). See `sampled_head.HeadBuffers` for shapes."""
    tile = tl.program_id(0)
    shard = tile // tiles_per_shard
    base = shard * shard_size + (tile - shard * tiles_per_shard) * TILE
    limit = tl.minimum((shard + 1) * shard_size, vocab_size)
    if R == 1:
        rows = base * 0
    else:
        rows = tl.arange(0, R)
    exists = rows < num_rows
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    previous = tl.load(previous_ptr + rows, mask=exists, other=0)
    known = (previous >= 0) & (previous < vocab_size)
    previous = tl.where(known, previous, 0)
    slot = tl.load(slot_ptr + previous, mask=exists, other=0)
    cached = slot >= 0
    columns = base + tl.arange(0, TILE)
    keys = _tile_keys(
        logits_ptr,
        logits_stride,
        bias_ptr,
        bias_stride,
        w1_ptr,
        w2_ptr,
        rows,
        exists,
        previous,
        slot,
        cached,
        columns,
        base,
        limit,
        R,
        RANK,
        TILE,
    )
    candidates = candidate_ptr + rows * (num_tiles * K)
    top = emit_tile(keys, candidates + tile * K, exists, R, K, TILE)
    before = retire(counter_ptr, flag_ptr + rows, top, exists, R)
    if before == num_tiles - 1:
        flags = tl.load(flag_ptr + rows, mask=exists, other=0, cache_modifier=".cg")
        flags = flags | tl.where(known, 0, CONTINUATION_FLAG)
        tl.store(counter_ptr, 0)
        tl.store(flag_ptr + rows, flags * 0, mask=exists)
        count = merge_candidates(
            candidates, merged_ptr + rows * K, exists, num_tiles, tiles_per_shard, shard_size, R, K, TILE, N
        )
        finish_rows(
            rows,
            exists,
            merged_ptr,
            count,
            flags,
            control_ptr,
            ids_ptr,
            q_ptr,
            count_ptr,
            token_ptr,
            weights_ptr,
            error_ptr,
            stamp_ptr,
            step,
            R,
            K,
            FLOOR_FIRST,
            EMIT_WEIGHTS,
        )


@triton.jit
def _tile_keys(
    logits_ptr,
    logits_stride,
    bias_ptr,
    bias_stride,
    w1_ptr,
    w2_ptr,
    rows,
    exists,
    previous,
    slot,
    cached,
    columns,
    base,
    limit,
    R: tl.constexpr,
    RANK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Order keys of the corrected logits of one tile: int32 [TILE], or [R, TILE] for several rows."""
    if R == 1:
        real = columns < limit
        logits = tl.load(logits_ptr + columns, mask=real, other=NEGATIVE_INFINITY_BITS)
        if cached:
            line = bias_ptr + slot.to(tl.int64) * bias_stride
            bias = bf16_to_f32(tl.load(line + columns, mask=real, other=0))
        else:
            one = tl.arange(0, 1)
            w1_ptrs = w1_ptr + (previous + one).to(tl.int64) * RANK
            bias = tl.reshape(markov_bias_tile(w2_ptr, w1_ptrs, base, limit, TILE, 1, RANK), [TILE])
    else:
        real = (columns < limit)[None, :] & exists[:, None]
        at = rows[:, None] * logits_stride + columns[None, :]
        logits = tl.load(logits_ptr + at, mask=real, other=NEGATIVE_INFINITY_BITS)
        line = bias_ptr + tl.maximum(slot, 0).to(tl.int64) * bias_stride
        bias = bf16_to_f32(tl.load(line[:, None] + columns[None, :], mask=real & cached[:, None], other=0))
        if tl.min(cached.to(tl.int32), axis=0) == 0:
            computed = markov_bias_tile(w2_ptr, w1_ptr + previous.to(tl.int64) * RANK, base, limit, TILE, R, RANK)
            bias = tl.where(cached[:, None], bias, tl.trans(computed))
    return order_key(bf16_to_f32(logits) + bias)


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
) -> None:
    """Launches one position whose rows may be cached or not, on the current stream.

    Args:
        settings: Fixed choices; a tile of 512 or 1,024 keeps all of the memory system busy.
        buffers: Outputs of the chain; index ``step`` is written.
        step: Position within the chain.
        logits: bf16 [B, >= V].
        control: int32 [B, 16].
        previous: int32 [B], previous tokens.
        w1: bf16 [V, r].
        w2: bf16 [V, r].
        slots: int32 [V], cache row of each token or -1.
        cache: bf16 [C, >= V], at least one row.

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
    if rank % LANES.value:
        raise ValueError(f"the Markov rank must be a multiple of {LANES.value}, found {rank}")
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
        N=triton.next_power_of_2(tiling.num_tiles * settings.k),
        FLOOR_FIRST=settings.semantics == Q_FLOOR_FIRST,
        EMIT_WEIGHTS=settings.emit_weights,
        OVERLAP=settings.overlap,
        num_warps=tiling.num_warps,
        **({"launch_pdl": True} if settings.overlap and step > 0 else {}),
    )


def fill_bias_rows(
    tokens: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, out: torch.Tensor, tile: int = 512
) -> None:
    """Computes bias rows for a cache with the kernel's own product.

    Args:
        tokens: int32 [n], n a power of two.
        w1: bf16 [V, r].
        w2: bf16 [V, r].
        out: bf16 [n, >= V], written in its first V columns.
        tile: Columns of a program; the result does not depend on it.
    """
    vocab_size, rank = w2.shape
    markov_bias_kernel[(triton.cdiv(vocab_size, tile),)](
        w2.view(torch.int16),
        w1.view(torch.int16),
        out.view(torch.int16),
        tokens,
        vocab_size,
        out.stride(0),
        TILE=tile,
        R=tokens.shape[0],
        RANK=rank,
        num_warps=4,
    )
