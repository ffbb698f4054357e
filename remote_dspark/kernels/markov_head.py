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
from remote_dspark.kernels.finish import CONTINUATION_FLAG, emit_tile, finish_rows, retire
from remote_dspark.kernels.rounding import KEY_EXCLUDED, bf16_to_f32, order_key, round_to_bf16
from remote_dspark.kernels.sampled_head import HeadBuffers, HeadSettings, require_logits

STAGES = tl.constexpr(3)
"""Parts of W2 in flight: the loads of the next two overlap the products of this one."""

LANES = tl.constexpr(32)
"""Partial sums of a product; part of the numerics, never a tuning knob."""


@triton.jit
def prefetch_l2(addresses, BYTES: tl.constexpr):
    """Asks for BYTES (a multiple of 16) from each int64 address in L2; a hint without a result. CUDA only."""
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [addresses, tl.full(addresses.shape, BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _tree(lanes, SUB: tl.constexpr):
    """Sums 32 lanes as a tree of neighbours: every step adds exactly two values, so no compiler chooses the order."""
    for half in tl.static_range(5):
        lanes = tl.sum(tl.reshape(lanes, [SUB, 16 >> half, 2]), axis=2)
    return tl.reshape(lanes, [SUB])


@triton.jit
def _lane_row(w1_ptr, token, start, lanes, RANK: tl.constexpr):
    """One chunk of a W1 row, float32 [1, 32]."""
    return bf16_to_f32(tl.load(w1_ptr + token.to(tl.int64) * RANK + start + lanes))[None, :]


@triton.jit
def _take(bias, index, value, SUB: tl.constexpr, PARTS: tl.constexpr):
    """Puts the values of one part into its place of [PARTS, SUB].

    After a sum over lanes every lane holds a copy, and everything behind it would be kept and done once per copy; a
    gather by position is the one operation whose result does not inherit that layout.
    """
    value = tl.gather(value, tl.arange(0, SUB), 0)
    return tl.where((tl.arange(0, PARTS) == index)[:, None], tl.reshape(value, [1, SUB]), bias)


@triton.jit
def markov_bias_tile(
    w2_ptr,
    w1_ptr,
    tokens,
    base,
    limit,
    nought,
    TILE: tl.constexpr,
    SUB: tl.constexpr,
    R: tl.constexpr,
    RANK: tl.constexpr,
):
    """Bias of one tile for R <= 4 rows, rounded to BF16: float32 [R, TILE].

    The rows share one read of W2. Parts of SUB columns follow each other, so that the partial sums fit in registers.
    ``tokens`` is a tuple of four scalars of which the first R count. Columns from ``limit`` on are not read and give 0.
    """
    PARTS: tl.constexpr = TILE // SUB
    lanes = tl.arange(0, LANES)
    bias0 = tl.zeros([PARTS, SUB], tl.float32)
    bias1 = bias0
    bias2 = bias0
    bias3 = bias0
    for part in tl.range(0, PARTS, num_stages=STAGES):
        columns = base + part * SUB + tl.arange(0, SUB)
        real = (columns < limit)[:, None] & (lanes >= 0)[None, :]
        w2_tile = w2_ptr + columns.to(tl.int64)[:, None] * RANK + lanes[None, :]
        # always 0, but not to the compiler: hoisted out of this loop, four rows of W1 alone would fill the registers;
        # the factor keeps the alignment that wide loads need
        w1_part = w1_ptr + (part * (nought * 64) if R > 2 else 0)
        sum0 = tl.zeros([SUB, LANES], tl.float32)
        sum1 = sum0
        sum2 = sum0
        sum3 = sum0
        for start in tl.static_range(0, RANK, LANES):
            w2 = bf16_to_f32(tl.load(w2_tile + start, mask=real, other=0))
            sum0 += w2 * _lane_row(w1_part, tokens[0], start, lanes, RANK)
            if R > 1:
                sum1 += w2 * _lane_row(w1_part, tokens[1], start, lanes, RANK)
            if R > 2:
                sum2 += w2 * _lane_row(w1_part, tokens[2], start, lanes, RANK)
                sum3 += w2 * _lane_row(w1_part, tokens[3], start, lanes, RANK)
        bias0 = _take(bias0, part, _tree(sum0, SUB), SUB, PARTS)
        if R > 1:
            bias1 = _take(bias1, part, _tree(sum1, SUB), SUB, PARTS)
        if R > 2:
            bias2 = _take(bias2, part, _tree(sum2, SUB), SUB, PARTS)
            bias3 = _take(bias3, part, _tree(sum3, SUB), SUB, PARTS)
    if R == 1:
        bias = tl.reshape(tl.reshape(bias0, [TILE]), [1, TILE])
    elif R == 2:
        bias = tl.trans(tl.join(tl.reshape(bias0, [TILE]), tl.reshape(bias1, [TILE])))
    else:
        even = tl.join(tl.reshape(bias0, [TILE]), tl.reshape(bias2, [TILE]))
        odd = tl.join(tl.reshape(bias1, [TILE]), tl.reshape(bias3, [TILE]))
        bias = tl.trans(tl.reshape(tl.join(even, odd), [TILE, 4]))
    return round_to_bf16(bias)


@triton.jit
def _scalars(values, rows, R: tl.constexpr):
    """The first R <= 4 elements of per-row values as a tuple of four scalars."""
    if R == 1:
        found = (values, values, values, values)
    else:
        first = tl.sum(tl.where(rows == 0, values, 0), axis=0)
        second = tl.sum(tl.where(rows == 1, values, 0), axis=0)
        third = tl.sum(tl.where(rows == 2, values, 0), axis=0)
        fourth = tl.sum(tl.where(rows == 3, values, 0), axis=0)
        found = (first, second, third, fourth)
    return found


@triton.jit
def markov_bias_kernel(
    w2_ptr,
    w1_ptr,
    bias_ptr,
    token_ptr,
    vocab_size,
    bias_stride,
    TILE: tl.constexpr,
    SUB: tl.constexpr,
    R: tl.constexpr,
    RANK: tl.constexpr,
):
    """Bias rows of R tokens: what a Markov cache is filled with. Grid (tiles,)."""
    base = tl.program_id(0) * TILE
    rows = tl.arange(0, R)
    tokens = tl.load(token_ptr + rows)
    if R == 1:
        tokens = tl.max(tokens, axis=0)
    bias = markov_bias_tile(
        w2_ptr, w1_ptr, _scalars(tokens, rows, R), base, vocab_size, vocab_size >> 30, TILE, SUB, R, RANK
    )
    columns = base + tl.arange(0, TILE)
    bits = (bias.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    out = bias_ptr + rows[:, None].to(tl.int64) * bias_stride + columns[None, :]
    tl.store(out, bits, mask=(columns < vocab_size)[None, :] & (rows >= 0)[:, None])


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
    SUB: tl.constexpr,
    N: tl.constexpr,
    TILE_DIRECT: tl.constexpr,
    MERGE_DIRECT: tl.constexpr,
    FLOOR_FIRST: tl.constexpr,
    EMIT_WEIGHTS: tl.constexpr,
    OVERLAP: tl.constexpr,
    PREFETCH: tl.constexpr,
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
        if PREFETCH > 0:
            # the weights do not depend on the previous token: fetch them while its row is being finished
            lines = tl.arange(0, 256)
            addresses = (w2_ptr + (base.to(tl.int64) * RANK + lines * (PREFETCH // 512))).to(tl.int64)
            fits = base * RANK + (lines + 1) * (PREFETCH // 512) <= limit * RANK
            prefetch_l2(tl.where(fits, addresses, w2_ptr.to(tl.int64)), PREFETCH // 256)
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
        step >> 16,
        R,
        RANK,
        TILE,
        SUB,
    )
    candidates = candidate_ptr + rows * (num_tiles * K)
    top = emit_tile(keys, candidates + tile * K, exists, R, K, TILE, TILE_DIRECT)
    before = retire(counter_ptr, flag_ptr + rows, top, exists, R)
    if before == num_tiles - 1:
        flags = tl.load(flag_ptr + rows, mask=exists, other=0, cache_modifier=".cg")
        flags = flags | tl.where(known, 0, CONTINUATION_FLAG)
        tl.store(counter_ptr, 0)
        tl.store(flag_ptr + rows, flags * 0, mask=exists)
        finish_rows(
            rows,
            exists,
            num_rows,
            candidate_ptr,
            merged_ptr,
            flags,
            control_ptr,
            ids_ptr,
            q_ptr,
            count_ptr,
            token_ptr,
            weights_ptr,
            error_ptr,
            stamp_ptr,
            num_tiles,
            tiles_per_shard,
            shard_size,
            step,
            R,
            K,
            TILE,
            N,
            MERGE_DIRECT,
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
    nought,
    R: tl.constexpr,
    RANK: tl.constexpr,
    TILE: tl.constexpr,
    SUB: tl.constexpr,
):
    """Order keys of the corrected logits of one tile: int32 [TILE], or [R, TILE] for several rows."""
    if R == 1:
        real = columns < limit
        logits = tl.load(logits_ptr + columns, mask=real, other=0)
        if cached:
            line = bias_ptr + slot.to(tl.int64) * bias_stride
            bias = bf16_to_f32(tl.load(line + columns, mask=real, other=0))
        else:
            tokens = _scalars(previous, rows, 1)
            bias = tl.reshape(markov_bias_tile(w2_ptr, w1_ptr, tokens, base, limit, nought, TILE, SUB, 1, RANK), [TILE])
    else:
        real = (columns < limit)[None, :] & exists[:, None]
        at = rows[:, None] * logits_stride + columns[None, :]
        logits = tl.load(logits_ptr + at, mask=real, other=0)
        line = bias_ptr + tl.maximum(slot, 0).to(tl.int64) * bias_stride
        bias = bf16_to_f32(tl.load(line[:, None] + columns[None, :], mask=real & cached[:, None], other=0))
        if tl.min(cached.to(tl.int32), axis=0) == 0:
            tokens = _scalars(previous, rows, R)
            computed = markov_bias_tile(w2_ptr, w1_ptr, tokens, base, limit, nought, TILE, SUB, R, RANK)
            bias = tl.where(cached[:, None], bias, computed)
    # not by the load's own default: see sampled_head_kernel
    return tl.where(real, order_key(bf16_to_f32(logits) + bias), KEY_EXCLUDED)


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
    prefetch_bytes: int = 0,
    part: int = 64,
    max_registers: int | None = None,
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
        prefetch_bytes: Bytes of a tile's weights to ask for before the previous position is done; with ``overlap``
            only, a power of two from 4,096 on. Measured: no gain, so the default is none.
        part: Columns of W2 that a program multiplies at a time; no part of the result.
        max_registers: Cap for the compiler, or None.

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
        SUB=min(part, tiling.tile),
        N=triton.next_power_of_2(tiling.num_tiles * settings.k),
        TILE_DIRECT=tiling.fills_threads(tiling.tile * triton.next_power_of_2(num_rows)),
        MERGE_DIRECT=tiling.fills_threads(tiling.num_tiles * settings.k),
        FLOOR_FIRST=settings.semantics == Q_FLOOR_FIRST,
        EMIT_WEIGHTS=settings.emit_weights,
        OVERLAP=settings.overlap,
        PREFETCH=prefetch_bytes,
        num_warps=tiling.num_warps,
        maxnreg=max_registers,
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
        SUB=min(64, tile),
        R=tokens.shape[0],
        RANK=rank,
        num_warps=4,
    )
