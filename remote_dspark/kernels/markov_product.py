"""The Markov product W1[prev] . W2 as a device function, and the kernel that fills cache rows with it.

The order of additions is fixed in the source (32 lanes in ascending order, then a tree of neighbours) and depends on
neither tile, warps, batch nor shard: a cached row is bit for bit what the head computes (DECISIONS 7).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from remote_dspark.kernels.rounding import bf16_to_f32, round_to_bf16

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
def row_scalars(values, rows, R: tl.constexpr):
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
        w2_ptr, w1_ptr, row_scalars(tokens, rows, R), base, vocab_size, vocab_size >> 30, TILE, SUB, R, RANK
    )
    columns = base + tl.arange(0, TILE)
    bits = (bias.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    out = bias_ptr + rows[:, None].to(tl.int64) * bias_stride + columns[None, :]
    tl.store(out, bits, mask=(columns < vocab_size)[None, :] & (rows >= 0)[:, None])


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
