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
from remote_dspark.kernels.markov_product import LANES, markov_bias_tile, prefetch_l2, row_scalars
from remote_dspark.kernels.rounding import KEY_EXCLUDED, bf16_to_f32, order_key
from remote_dspark.kernels.sampled_head import HeadBuffers, HeadSettings, require_logits

MAX_SHARED_ROWS = 4
"""Rows that one launch can serve: their partial sums live in registers together."""


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
            tokens = row_scalars(previous, rows, 1)
            bias = tl.reshape(markov_bias_tile(w2_ptr, w1_ptr, tokens, base, limit, nought, TILE, SUB, 1, RANK), [TILE])
    else:
        real = (columns < limit)[None, :] & exists[:, None]
        at = rows[:, None] * logits_stride + columns[None, :]
        logits = tl.load(logits_ptr + at, mask=real, other=0)
        line = bias_ptr + tl.maximum(slot, 0).to(tl.int64) * bias_stride
        bias = bf16_to_f32(tl.load(line[:, None] + columns[None, :], mask=real & cached[:, None], other=0))
        if tl.min(cached.to(tl.int32), axis=0) == 0:
            tokens = row_scalars(previous, rows, R)
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
    if num_rows > MAX_SHARED_ROWS:
        raise ValueError(f"at most {MAX_SHARED_ROWS} rows share a launch, found {num_rows}; launch them in groups")
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
