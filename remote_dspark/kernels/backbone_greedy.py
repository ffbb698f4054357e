"""The original greedy selector on the device: highest corrected logit, ties to the lowest id, one launch per position.

The branch between this and the sampled head is made before either is launched; neither calls the other. Both read the
same bias rows (`backbone_markov`), so a greedy row and the argmax of a sampled row are the same number.
Not covered: vocabulary shards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from remote_dspark.kernels.finish import u64
from remote_dspark.kernels.rounding import KEY_EXCLUDED, KEY_NAN, KEY_POSITIVE_INFINITY, bf16_to_f32, order_key

NOTHING = tl.constexpr(-(1 << 63))
"""Below every packed candidate."""


@triton.jit(do_not_specialize=["first_place", "step"])
def greedy_head_kernel(
    logits_ptr,
    logits_stride,
    bias_ptr,
    bias_stride,
    place_ptr,
    control_ptr,
    best_ptr,
    counter_ptr,
    token_ptr,
    error_ptr,
    stamp_ptr,
    vocab_size,
    first_place,
    step,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One position: grid (tiles, rows). See `launch_greedy`."""
    row = tl.program_id(1)
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    real = columns < vocab_size
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    logits = tl.load(logits_ptr + row * logits_stride + columns, mask=real, other=0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    place = tl.load(place_ptr + row)
    own = first_place + row.to(tl.int64)
    bias = tl.load(bias_ptr + own * bias_stride + columns, mask=real, other=0)
    # its own row came while the place was looked up
    if place != own:
        bias = tl.load(bias_ptr + place.to(tl.int64) * bias_stride + columns, mask=real, other=0)
    # not by the loads' own default: see sampled_head_kernel
    keys = tl.where(real, order_key(bf16_to_f32(logits) + bf16_to_f32(bias)), KEY_EXCLUDED)
    # of equal keys the lowest column has the highest complement
    packed = (keys.to(tl.int64) << 32) | (0x7FFFFFFF - columns).to(tl.int64)
    tl.atomic_max(best_ptr + row, tl.max(packed, axis=0), sem="relaxed", scope="gpu")
    tl.debug_barrier()
    if tl.atomic_add(counter_ptr + row, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        best = tl.load(best_ptr + row, cache_modifier=".cg")
        tl.store(best_ptr + row, tl.full([], NOTHING, tl.int64))
        tl.store(counter_ptr + row, 0)
        key = (best >> 32).to(tl.int32)
        # the values of `rows.RowError`: NaN, positive infinity, no mass
        error = tl.where(key == KEY_NAN, 1, tl.where(key == KEY_POSITIVE_INFINITY, 2, 0))
        error = tl.where(key <= KEY_EXCLUDED, 4, error) | tl.load(error_ptr + row, mask=step > 0, other=0)
        token = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
        tl.store(token_ptr + row, tl.where(error == 0, token, 0))
        tl.store(error_ptr + row, error)
        for word in tl.static_range(3):
            # generation, round and epoch
            low = 7 if word == 0 else (2 if word == 1 else 9)
            first = tl.load(control_ptr + row * 16 + low)
            second = tl.load(control_ptr + row * 16 + low + 1)
            tl.store(stamp_ptr + row * 3 + word, u64(first, second))


@dataclass(frozen=True)
class GreedyBuffers:
    """Outputs and scratch of one greedy chain.

    Attributes:
        token: int32 [depth, B].
        error: int32 [B], `RowError` flags, sticky along a chain.
        stamp: int64 [depth, B, 3].
        best: int64 [B] scratch, `NOTHING` between launches.
        counter: int32 [B] scratch, 0 between launches.
    """

    token: torch.Tensor
    error: torch.Tensor
    stamp: torch.Tensor
    best: torch.Tensor
    counter: torch.Tensor


def greedy_buffers(token: torch.Tensor, error: torch.Tensor, stamp: torch.Tensor) -> GreedyBuffers:
    """Scratch for given outputs."""
    best = torch.full_like(error, NOTHING.value, dtype=torch.int64)
    return GreedyBuffers(token, error, stamp, best, torch.zeros_like(error))


def launch_greedy(
    buffers: GreedyBuffers,
    step: int,
    logits: torch.Tensor,
    bias: torch.Tensor,
    places: torch.Tensor,
    control: torch.Tensor,
    vocab_size: int,
    *,
    tile: int = 2048,
    overlap: bool = False,
) -> None:
    """Launches one position on the current stream.

    Args:
        buffers: Outputs; index ``step`` is written.
        step: Position within the chain.
        logits: bf16 [B, >= V].
        bias: bf16 [C, >= V], rows of Markov bias, of which the last B are the requests' own.
        places: int32 [B], which of them is each request's.
        control: int32 [B, 16]; only its stamp is read.
        vocab_size: Real columns V.
        tile: Columns of a program.
        overlap: Programmatic dependent launch.
    """
    overlap = overlap and logits.is_cuda
    greedy_head_kernel[(triton.cdiv(vocab_size, tile), control.shape[0])](
        logits.view(torch.int16),
        logits.stride(0),
        bias.view(torch.int16),
        bias.stride(0),
        places,
        control,
        buffers.best,
        buffers.counter,
        buffers.token[step],
        buffers.error,
        buffers.stamp[step],
        vocab_size,
        bias.shape[0] - control.shape[0],
        step,
        TILE=tile,
        OVERLAP=overlap,
        num_warps=4,
        **({"launch_pdl": True} if overlap else {}),
    )
