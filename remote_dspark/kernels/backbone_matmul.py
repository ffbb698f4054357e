"""Products of a few activation rows with a large weight: what a draft block spends its time on is reading weights.

A program owns BLOCK_N weight rows and one share of the inner dimension, for all activation rows: the weight is read
once, and multiplied as the left operand, so that a few activation rows fill the narrow side of a matrix instruction.
The rules of this file:

* The order of additions depends on the weight's shape alone (`split_of`), never on the number of rows, their place or
  their neighbours: a row's result is the same bits whatever shares the call with it.
* Partial sums are stored, not added by atomics; whoever reads them adds them in ascending order.

Covered: BF16 operands, FP32 sums, 16 or 32 rows (fewer would take another matrix instruction with another order of
additions), three kinds of output. Not covered: large batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from remote_dspark.kernels.rounding import round_to_bf16

PARTIAL = 0
LOGITS = 1
GATED = 2
PROGRAMS = 264
"""Two for each of 132 multiprocessors: more shares would cost their readers more than they gain."""

LINE = 128
"""Bytes of a cache line."""


@triton.jit
def bf16_bits(values):
    """int16 patterns of float32 values rounded to BF16; NaN stays a NaN or an infinity, never a number."""
    return (round_to_bf16(values).to(tl.int32, bitcast=True) >> 16).to(tl.int16)


@triton.jit
def ask_for(addresses):
    """Asks for the cache line of each pointer in L2; a hint without a result. CUDA only, one pointer per thread."""
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l",
        [addresses.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["num_requests", "num_positions"])
def skinny_matmul_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    out_stride,
    num_columns,
    inner_size,
    share,
    num_requests,
    num_positions,
    ROWS: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KIND: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
    STAGES: tl.constexpr,
    OWN: tl.constexpr,
    THREADS: tl.constexpr,
):
    """``x [ROWS, inner] . w [columns, inner]^T``; grid (column tiles, shares). See `skinny_matmul`."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(1) * share
    rows = tl.arange(0, ROWS)
    inner = tl.arange(0, BLOCK_K)
    w_at = w_ptr + columns.to(tl.int64)[:, None] * inner_size + (start + inner)[None, :]
    x_at = x_ptr + rows[None, :] * inner_size + (start + inner)[:, None]
    if OWN > 0:
        # weights depend on nothing: their first part is on its way while the kernel before this one ends
        for group in tl.static_range(OWN * BLOCK_N // THREADS):
            mine = group * THREADS + tl.arange(0, THREADS)
            at = tl.minimum(tl.program_id(0) * BLOCK_N + mine // OWN, num_columns - 1).to(tl.int64) * inner_size
            ask_for(w_ptr + at + start + mine % OWN * 64)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for done in tl.range(0, share, BLOCK_K, num_stages=STAGES):
        if EVEN:
            w = tl.load(w_at)
            x = tl.load(x_at)
        else:
            real = start + done + inner < inner_size
            w = tl.load(w_at, mask=(columns < num_columns)[:, None] & real[None, :], other=0.0)
            x = tl.load(x_at, mask=real[:, None], other=0.0)
        if WIDE:
            # the interpreter multiplies BF16 as integers
            w = w.to(tl.float32)
            x = x.to(tl.float32)
        total = tl.dot(w, x, total, input_precision="ieee")
        w_at += BLOCK_K
        x_at += BLOCK_K
    if OVERLAP:
        # not earlier: programs of the next kernel would take the places that this one's need
        tl.extra.cuda.gdc_launch_dependents()
    real = (columns < num_columns)[None, :] & (rows >= 0)[:, None]
    result = tl.trans(total)
    if KIND == 0:
        at = out_ptr + (tl.program_id(1) * ROWS + rows)[:, None] * num_columns + columns[None, :]
        tl.store(at, result, mask=real)
    elif KIND == 1:
        request = rows // PAD
        position = rows - request * PAD
        wanted = (request < num_requests) & (position < num_positions)
        at = out_ptr + (position * num_requests + request).to(tl.int64)[:, None] * out_stride + columns[None, :]
        tl.store(at, bf16_bits(result), mask=real & wanted[:, None])
    else:
        gate, up = tl.split(tl.reshape(result, [ROWS, BLOCK_N // 2, 2]))
        gate = round_to_bf16(gate)
        gated = round_to_bf16(gate / (1.0 + tl.exp(-gate))) * round_to_bf16(up)
        half = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        at = out_ptr + rows[:, None] * (num_columns // 2) + half[None, :]
        tl.store(at, bf16_bits(gated), mask=(half < num_columns // 2)[None, :] & (rows >= 0)[:, None])


@triton.jit
def partial_sum(partial_ptr, SHARES: tl.constexpr, share_stride, at, mask):
    """Sum of stored shares in ascending order, rounded to BF16: the product as a BF16 matrix product returns it."""
    total = tl.load(partial_ptr + at, mask=mask, other=0.0)
    for index in tl.static_range(1, SHARES):
        total += tl.load(partial_ptr + index * share_stride + at, mask=mask, other=0.0)
    return round_to_bf16(total)


@dataclass(frozen=True)
class MatmulTiling:
    """How a product is cut; part of the numerics is only ``block_k``, through `split_of`."""

    block_n: int = 64
    block_k: int = 128
    num_stages: int = 3
    num_warps: int = 4
    overlap: bool = True
    """Programmatic dependent launch: a kernel starts while the one before it ends."""

    own_bytes: int = 256
    """Bytes of each of its weight rows that a program asks for in L2 before it waits for the kernel before it."""

    programs: int = PROGRAMS
    """A product is split into at most this many."""


def split_of(num_columns: int, inner_size: int, tiling: MatmulTiling) -> int:
    """Shares of the inner dimension: the most whole ones within `MatmulTiling.programs`."""
    blocks, tiles = triton.cdiv(inner_size, tiling.block_k), triton.cdiv(num_columns, tiling.block_n)
    if inner_size % tiling.block_k:
        return 1
    whole = [share for share in range(1, blocks + 1) if blocks % share == 0 and tiles * share <= tiling.programs]
    return max(whole, default=1)


def skinny_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    kind: int,
    tiling: MatmulTiling,
    pad: int = 8,
    num_requests: int = 1,
    num_positions: int = 1,
) -> None:
    """Multiply on the current stream.

    Args:
        x: bf16 [rows, inner], contiguous; rows is 16 or 32 and rows that hold nothing real are ignored later.
        weight: bf16 [columns, inner], contiguous.
        out: By ``kind``: `PARTIAL` float32 [shares, rows, columns] with shares from `split_of`; `LOGITS` bf16
            [num_positions, num_requests, >= columns]; `GATED` bf16 [rows, columns / 2] where weight rows 2j and 2j+1
            are the gate and the value of output j.
        kind: What to do with the sums.
        tiling: Fixed choices.
        pad: Activation rows of one request; `LOGITS` only.
        num_requests: Requests whose logits are kept; `LOGITS` only.
        num_positions: Rows of each request whose logits are kept; `LOGITS` only.
    """
    num_columns, inner_size = weight.shape
    shares = split_of(num_columns, inner_size, tiling) if kind == PARTIAL else 1
    share = inner_size // shares
    is_cuda = x.is_cuda
    overlap = tiling.overlap and is_cuda
    target = out if kind == PARTIAL else out.view(torch.int16)
    skinny_matmul_kernel[(triton.cdiv(num_columns, tiling.block_n), shares)](
        x,
        weight,
        target,
        out.stride(-2),
        num_columns,
        inner_size,
        share,
        num_requests,
        num_positions,
        ROWS=x.shape[0],
        PAD=pad,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        KIND=kind,
        EVEN=num_columns % tiling.block_n == 0 and inner_size % tiling.block_k == 0,
        WIDE=not is_cuda,
        OVERLAP=overlap,
        STAGES=tiling.num_stages,
        OWN=min(tiling.own_bytes, 2 * share) // LINE if is_cuda else 0,
        THREADS=32 * tiling.num_warps,
        num_warps=tiling.num_warps,
        **({"launch_pdl": True} if overlap else {}),
    )
