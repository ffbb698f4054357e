"""Bias rows of the previous tokens of a batch: from the cache where it has them, else the Markov product.

One launch before each position's selector. Either cached rows are copied beside the computed ones, or they stay where
they are and the selector is told where each row lies. The order of additions is that of `markov_product` (32 lanes in
ascending order, then a tree of neighbours), so a row computed here, a cached row and the reference are the same bits.
Programs take parts of the vocabulary in turn, so that all of them end together.

Covered: vanilla Markov head, 1 to 4 rows, rank a multiple of 32. Not covered: gated and RNN heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from remote_dspark.kernels.backbone_matmul import bf16_bits
from remote_dspark.kernels.markov_product import BLOCK, block_products, load_rows, row_scalars

PROGRAMS = {1: 528, 2: 264, 4: 132}
"""By rows, rounded up: as many as an H200 holds at a time; another number changes the time and nothing else."""


@triton.jit
def _of_row(values, row, R: tl.constexpr):
    """Elements of a tuple of four scalars by row, as a tensor."""
    found = row * 0 + values[0]
    for index in tl.static_range(1, R):
        found = tl.where(row == index, values[index], found)
    return found


@triton.jit(do_not_specialize=["num_rows", "first_place", "flip"])
def bias_rows_kernel(
    w2_ptr,
    w1_ptr,
    out_ptr,
    out_stride,
    cache_ptr,
    cache_stride,
    slot_ptr,
    previous_ptr,
    place_ptr,
    clock_ptr,
    num_rows,
    num_tokens,
    vocab_size,
    num_parts,
    first_place,
    flip,
    R: tl.constexpr,
    RANK: tl.constexpr,
    COPY: tl.constexpr,
    STAGES: tl.constexpr,
    IN_PLACE: tl.constexpr,
    FIRST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Bias rows of up to R rows; grid (programs,). See `write_bias_rows`."""
    program = tl.program_id(0)
    if OVERLAP and FIRST:
        # the selector behind this reads base logits before it waits
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    elif OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if FIRST:
        if program == 0:
            tl.store(clock_ptr + 1, tl.extra.cuda.globaltimer())
    rows = tl.arange(0, R)
    exists = rows < num_rows
    previous = tl.load(previous_ptr + rows, mask=exists, other=0)
    previous = tl.minimum(tl.maximum(previous, 0), num_tokens - 1)
    # a row that does not exist asks for nothing
    slot = tl.where(exists, tl.load(slot_ptr + previous, mask=exists, other=0), 0)
    num_uncached = tl.sum((slot < 0).to(tl.int32), axis=0)
    if IN_PLACE:
        tl.store(place_ptr + rows, tl.where(slot < 0, first_place + rows, slot), mask=exists & (program == 0))
    if R == 1:
        tokens = row_scalars(tl.max(previous, axis=0), rows, R)
        slots = row_scalars(tl.max(slot, axis=0), rows, R)
    else:
        tokens = row_scalars(previous, rows, R)
        slots = row_scalars(slot, rows, R)
    if num_uncached == 0:
        if not IN_PLACE:
            for begin in range(program * COPY, vocab_size, tl.num_programs(0) * COPY):
                columns = begin + tl.arange(0, COPY)
                real = columns < vocab_size
                found = ()
                for row in tl.static_range(R):
                    source = cache_ptr + slots[row].to(tl.int64) * cache_stride
                    found += (tl.load(source + columns, mask=real & (row < num_rows), other=0),)  # type: ignore[assignment]
                for row in tl.static_range(R):
                    tl.store(out_ptr + row * out_stride + columns, found[row], mask=real & (row < num_rows))
    else:
        w2_words = w2_ptr.to(tl.pointer_type(tl.int64))
        w1 = load_rows(w1_ptr.to(tl.pointer_type(tl.int64)), tokens, R, RANK)
        element = tl.arange(0, BLOCK * R)
        row = element % R
        wide = _of_row(slots, row, R)
        source = cache_ptr + tl.maximum(wide, 0).to(tl.int64) * cache_stride
        for turn in tl.range(program, num_parts, tl.num_programs(0), num_stages=STAGES):
            # every other position goes backwards: what was read last is still in L2
            part = tl.where(flip != 0, num_parts - 1 - turn, turn)
            columns = tl.minimum(part * BLOCK + tl.arange(0, BLOCK), vocab_size - 1)
            line = w2_words + columns.to(tl.int64)[:, None] * (RANK // 4) + tl.arange(0, 8)[None, :]
            # by column, then row; gathered so that not every thread of a sum keeps a copy
            computed = tl.gather(block_products(line, w1, R, RANK), element, 0)
            column = part * BLOCK + element // R
            real = (column < vocab_size) & (row < num_rows)
            bits = bf16_bits(computed)
            if IN_PLACE:
                real = real & (wide < 0)
            else:
                bits = tl.where(wide >= 0, tl.load(source + column, mask=real & (wide >= 0), other=0), bits)
            tl.store(out_ptr + row * out_stride + column, bits, mask=real)


def write_bias_rows(
    previous: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor | None,
    *,
    places: torch.Tensor | None = None,
    clock: torch.Tensor | None = None,
    overlap: bool = False,
    flip: bool = False,
) -> None:
    """Launches the bias rows of one position on the current stream.

    Args:
        previous: int32 [B], previous tokens, B at most 4.
        w1: bf16 [V, r].
        w2: bf16 [S, r]: V rows, or those of one rank's shard.
        slots: int32 [V], cache row of each token or -1.
        cache: bf16 [C, >= S], at least one row.
        out: bf16 [B, >= S], every row written in its first S columns; None leaves cached rows where they are.
        places: int32 [B], needed without ``out``. Written: the row of ``cache`` that holds each request's bias. Those
            that were not cached are written to its last B rows, which belong to no token.
        clock: int64 [2 or more], given at the first position: its programs let the selector start only once the base
            logits are complete, and on CUDA the second word gets the device's clock, in ns.
        overlap: Programmatic dependent launch: starts while the kernel before it ends.
        flip: Read W2 from its end: what the position before this one read last is still in L2.

    Raises:
        ValueError: Both or neither of ``out`` and ``places``.
    """
    if (out is None) == (places is None):
        raise ValueError("expected rows to write or places to tell, one of them")
    num_rows, (vocab_size, rank) = previous.shape[0], w2.shape
    out = cache[-num_rows:] if out is None else out
    overlap = overlap and previous.is_cuda
    num_parts = triton.cdiv(vocab_size, BLOCK.value)
    padded = triton.next_power_of_2(num_rows)
    num_warps = 8 if padded > 2 else 4
    bias_rows_kernel[(min(num_parts, PROGRAMS[padded]),)](
        w2.view(torch.int16),
        w1.view(torch.int16),
        out.view(torch.int16),
        out.stride(0),
        cache.view(torch.int16),
        cache.stride(0),
        slots,
        previous,
        places,
        clock,
        num_rows,
        w1.shape[0],
        vocab_size,
        num_parts,
        cache.shape[0] - num_rows,
        int(flip),
        R=padded,
        RANK=rank,
        COPY=8 * 32 * num_warps,
        STAGES=6 if padded > 2 else 4,
        IN_PLACE=places is not None,
        FIRST=clock is not None and w2.is_cuda,
        OVERLAP=overlap,
        num_warps=num_warps,
        **({"launch_pdl": True} if overlap else {}),
    )
