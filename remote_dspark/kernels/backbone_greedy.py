"""The original greedy selector on the device: highest corrected logit, ties to the lowest id, one launch per position.

The branch between this and the sampled head is made before either is launched; neither calls the other. The Markov
bias is the sampled head's own product, so a greedy row and the argmax of a sampled row are the same number.
Covered: 1 to 4 requests, cached and uncached bias rows. Not covered: vocabulary shards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from remote_dspark.kernels.finish import u64
from remote_dspark.kernels.markov_product import markov_bias_tile, row_scalars
from remote_dspark.kernels.rounding import KEY_EXCLUDED, KEY_NAN, KEY_POSITIVE_INFINITY, bf16_to_f32, order_key

NOTHING = tl.constexpr(-(1 << 63))
"""Below every packed candidate."""


@triton.jit(do_not_specialize=["step"])
def greedy_head_kernel(
    logits_ptr,
    logits_stride,
    bias_ptr,
    bias_stride,
    slot_ptr,
    w1_ptr,
    w2_ptr,
    previous_ptr,
    control_ptr,
    best_ptr,
    counter_ptr,
    token_ptr,
    error_ptr,
    stamp_ptr,
    num_rows,
    vocab_size,
    step,
    R: tl.constexpr,
    RANK: tl.constexpr,
    TILE: tl.constexpr,
    SUB: tl.constexpr,
):
    """One position of up to R rows: grid (tiles,). See `launch_greedy`."""
    base = tl.program_id(0) * TILE
    rows = tl.arange(0, R)
    exists = rows < num_rows
    previous = tl.load(previous_ptr + rows, mask=exists, other=0)
    known = (previous >= 0) & (previous < vocab_size)
    previous = tl.where(known, previous, 0)
    slot = tl.load(slot_ptr + previous, mask=exists, other=0)
    cached = slot >= 0
    columns = base + tl.arange(0, TILE)
    real = (columns < vocab_size)[None, :] & exists[:, None]
    logits = tl.load(logits_ptr + rows[:, None] * logits_stride + columns[None, :], mask=real, other=0)
    line = bias_ptr + tl.maximum(slot, 0).to(tl.int64) * bias_stride
    bias = bf16_to_f32(tl.load(line[:, None] + columns[None, :], mask=real & cached[:, None], other=0))
    if tl.min(cached.to(tl.int32), axis=0) == 0:
        if R == 1:
            tokens = row_scalars(tl.max(previous, axis=0), rows, R)
        else:
            tokens = row_scalars(previous, rows, R)
        computed = markov_bias_tile(w2_ptr, w1_ptr, tokens, base, vocab_size, step >> 16, TILE, SUB, R, RANK)
        bias = tl.where(cached[:, None], bias, computed)
    # not by the load's own default: see sampled_head_kernel
    keys = tl.where(real, order_key(bf16_to_f32(logits) + bias), KEY_EXCLUDED)
    # of equal keys the lowest column has the highest complement
    packed = (keys.to(tl.int64) << 32) | (0x7FFFFFFF - columns)[None, :].to(tl.int64)
    tl.atomic_max(best_ptr + rows, tl.max(packed, axis=1), mask=exists, sem="relaxed", scope="gpu")
    tl.debug_barrier()
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        best = tl.load(best_ptr + rows, mask=exists, other=0, cache_modifier=".cg")
        tl.store(best_ptr + rows, tl.full([R], NOTHING, tl.int64), mask=exists)
        tl.store(counter_ptr, 0)
        key = (best >> 32).to(tl.int32)
        # the values of `rows.RowError`: NaN, positive infinity, no mass, continuation
        error = tl.where(key == KEY_NAN, 1, tl.where(key == KEY_POSITIVE_INFINITY, 2, 0))
        error = tl.where(key <= KEY_EXCLUDED, 4, error) | tl.where(known, 0, 32)
        earlier = tl.load(error_ptr + rows, mask=exists & (step > 0), other=0)
        error = error | earlier
        token = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
        tl.store(token_ptr + rows, tl.where(error == 0, token, 0), mask=exists)
        tl.store(error_ptr + rows, error, mask=exists)
        for word in tl.static_range(3):
            # generation, round and epoch
            low = 7 if word == 0 else (2 if word == 1 else 9)
            first = tl.load(control_ptr + rows * 16 + low, mask=exists, other=0)
            second = tl.load(control_ptr + rows * 16 + low + 1, mask=exists, other=0)
            tl.store(stamp_ptr + rows * 3 + word, u64(first, second), mask=exists)


@dataclass(frozen=True)
class GreedyBuffers:
    """Outputs and scratch of one greedy chain.

    Attributes:
        token: int32 [depth, B].
        error: int32 [B], `RowError` flags, sticky along a chain.
        stamp: int64 [depth, B, 3].
        best: int64 [B] scratch, `NOTHING` between launches.
        counter: int32 [1] scratch, 0 between launches.
    """

    token: torch.Tensor
    error: torch.Tensor
    stamp: torch.Tensor
    best: torch.Tensor
    counter: torch.Tensor


def greedy_buffers(token: torch.Tensor, error: torch.Tensor, stamp: torch.Tensor) -> GreedyBuffers:
    """Scratch for given outputs."""
    best = torch.full_like(error, NOTHING.value, dtype=torch.int64)
    return GreedyBuffers(token, error, stamp, best, torch.zeros(1, dtype=torch.int32, device=error.device))


def launch_greedy(
    buffers: GreedyBuffers,
    step: int,
    logits: torch.Tensor,
    control: torch.Tensor,
    previous: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    *,
    tile: int = 1024,
) -> None:
    """Launches one position on the current stream.

    Args:
        buffers: Outputs; index ``step`` is written.
        step: Position within the chain.
        logits: bf16 [B, >= V].
        control: int32 [B, 16]; only its stamp is read.
        previous: int32 [B].
        w1: bf16 [V, r].
        w2: bf16 [V, r].
        slots: int32 [V], cache row of each token or -1.
        cache: bf16 [C, >= V], at least one row.
        tile: Columns of a program.
    """
    vocab_size, rank = w2.shape
    num_rows = control.shape[0]
    greedy_head_kernel[(triton.cdiv(vocab_size, tile),)](
        logits.view(torch.int16),
        logits.stride(0),
        cache.view(torch.int16),
        cache.stride(0),
        slots,
        w1.view(torch.int16),
        w2.view(torch.int16),
        previous,
        control,
        buffers.best,
        buffers.counter,
        buffers.token[step],
        buffers.error,
        buffers.stamp[step],
        num_rows,
        vocab_size,
        step,
        R=triton.next_power_of_2(num_rows),
        RANK=rank,
        TILE=tile,
        SUB=min(64, tile),
        num_warps=8,
    )
