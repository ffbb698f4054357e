"""The Markov product W1[prev] . W2 as a device function, and the kernel that fills cache rows with it.

The order of additions is fixed in the source (32 lanes in ascending order, then a tree of neighbours) and depends on
neither tile, warps, batch nor shard: a cached row is bit for bit what the head computes (DECISIONS 7).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from remote_dspark.kernels.rounding import round_to_bf16

LANES = tl.constexpr(32)
"""Partial sums of a product; part of the numerics, never a tuning knob."""

BLOCK = tl.constexpr(32)
"""Columns that are multiplied side by side: eight threads each own four lanes of one column."""


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
def _four_lanes(words):
    """Four neighbouring BF16 lanes of int64 words as float32, in ascending order."""
    low = words.to(tl.int32)
    high = (words >> 32).to(tl.int32)
    return (
        (low << 16).to(tl.float32, bitcast=True),
        (low & -65536).to(tl.float32, bitcast=True),
        (high << 16).to(tl.float32, bitcast=True),
        (high & -65536).to(tl.float32, bitcast=True),
    )


@triton.jit
def load_rows(w1_words, tokens, R: tl.constexpr, RANK: tl.constexpr):
    """The W1 rows of R tokens: a tuple of float32 [1, 8], by row, step of 32 and lane of a word."""
    found = ()
    for row in tl.static_range(R):
        line = w1_words + tokens[row].to(tl.int64) * (RANK // 4) + tl.arange(0, 8)
        for step in tl.static_range(RANK // LANES):
            found += _four_lanes(tl.load(line + step * 8)[None, :])
    return found


@triton.jit
def stack(values, N: tl.constexpr):
    """A tuple of N = 1, 2 or 4 tensors [n] as [n, N], or [n] for one."""
    if N == 1:
        stacked = values[0]
    elif N == 2:
        stacked = tl.join(values[0], values[1])
    else:
        stacked = tl.join(tl.join(values[0], values[2]), tl.join(values[1], values[3]))
    return stacked


@triton.jit
def _tree(lanes):
    """Sums 8 words of lanes as a tree of neighbours: each step adds exactly two values, so no compiler orders them."""
    for half in tl.static_range(3):
        lanes = tl.sum(tl.reshape(lanes, [BLOCK, 4 >> half, 2]), axis=2)
    return tl.reshape(lanes, [BLOCK])


@triton.jit
def _load_steps(w2_line, RANK: tl.constexpr):
    """W2 of BLOCK columns, from pointers [BLOCK, 8] to their first words: int64 [BLOCK, 8] for each step."""
    steps = ()
    for step in tl.static_range(RANK // LANES):
        steps += (tl.load(w2_line + step * 8),)  # type: ignore[assignment]
    return steps


@triton.jit
def _sum_steps(steps, w1, R: tl.constexpr, RANK: tl.constexpr):
    """Products of BLOCK columns (from `_load_steps`) with R rows (from `load_rows`): float32 [BLOCK * R]."""
    STEPS: tl.constexpr = RANK // LANES
    sums = ()
    for _ in tl.static_range(4 * R):
        sums += (tl.zeros([BLOCK, 8], tl.float32),)  # type: ignore[assignment]
    for step in tl.static_range(STEPS):
        w2 = _four_lanes(steps[step])
        following = ()
        for row in tl.static_range(R):
            for lane in tl.static_range(4):
                following += (sums[4 * row + lane] + w2[lane] * w1[(row * STEPS + step) * 4 + lane],)  # type: ignore[assignment]
        sums = following
    found = ()
    for row in tl.static_range(R):
        found += (_tree((sums[4 * row] + sums[4 * row + 1]) + (sums[4 * row + 2] + sums[4 * row + 3])),)  # type: ignore[assignment]
    return tl.reshape(stack(found, R), [BLOCK * R])


@triton.jit
def block_products(w2_line, w1, R: tl.constexpr, RANK: tl.constexpr):
    """`_sum_steps` of columns that are still to be loaded."""
    return _sum_steps(_load_steps(w2_line, RANK), w1, R, RANK)


@triton.jit
def load_part(w2_ptr, first, end, SUB: tl.constexpr, RANK: tl.constexpr):
    """W2 of SUB columns, for `continue_products`; it depends on no token. From ``end`` on its last column again."""
    words = w2_ptr.to(tl.pointer_type(tl.int64))
    loaded = ()
    for block in tl.static_range(SUB // BLOCK):
        columns = tl.minimum(first + block * BLOCK + tl.arange(0, BLOCK), end - 1)
        line = words + columns.to(tl.int64)[:, None] * (RANK // 4) + tl.arange(0, 8)[None, :]
        loaded += _load_steps(line, RANK)
    return loaded


@triton.jit
def continue_products(
    ahead,
    w2_ptr,
    w1_ptr,
    tokens,
    base,
    end,
    TILE: tl.constexpr,
    SUB: tl.constexpr,
    R: tl.constexpr,
    RANK: tl.constexpr,
):
    """`markov_products`, whose first part is already on its way: ``ahead`` is `load_part` at ``base``.

    Parts of SUB columns follow each other; as soon as one is used, its registers take the loads of the next.
    ``end`` must not lie beyond the tile, whose neighbour would be read in vain.
    """
    STEPS: tl.constexpr = RANK // LANES
    BLOCKS: tl.constexpr = SUB // BLOCK
    PARTS: tl.constexpr = TILE // SUB
    w1 = load_rows(w1_ptr.to(tl.pointer_type(tl.int64)), tokens, R, RANK)
    products = tl.zeros([PARTS, SUB * R], tl.float32)
    for part in tl.range(0, PARTS, num_stages=1):
        following = load_part(w2_ptr, base + (part + 1) * SUB, end, SUB, RANK)
        blocks = ()
        for block in tl.static_range(BLOCKS):
            blocks += (_sum_steps(ahead[block * STEPS : (block + 1) * STEPS], w1, R, RANK),)  # type: ignore[assignment]
        ahead = following
        found = tl.reshape(stack(blocks, BLOCKS), [SUB * R])
        # after a sum over threads each of them holds a copy, and everything behind it would be kept and done once per
        # copy; a gather by position is the one operation whose result does not inherit that layout
        found = tl.gather(found, tl.arange(0, SUB * R), 0)
        products = tl.where((tl.arange(0, PARTS) == part)[:, None], found[None, :], products)
    return tl.reshape(products, [TILE * R])


@triton.jit
def markov_products(
    w2_ptr,
    w1_ptr,
    tokens,
    base,
    limit,
    TILE: tl.constexpr,
    SUB: tl.constexpr,
    R: tl.constexpr,
    RANK: tl.constexpr,
):
    """Products of one tile for R <= 4 rows, before rounding: float32 [TILE * R], in the order of `product_index`.

    The rows share one read of W2. ``tokens`` is a tuple of four scalars of which the first R count. A column from
    ``limit`` on gives the product of the last one before it.
    """
    end = tl.minimum(limit, base + TILE)
    ahead = load_part(w2_ptr, base, end, SUB, RANK)
    return continue_products(ahead, w2_ptr, w1_ptr, tokens, base, end, TILE, SUB, R, RANK)


@triton.jit
def product_index(columns, row, SUB: tl.constexpr, R: tl.constexpr):
    """Where `markov_products` puts columns of a row."""
    inner = (columns % BLOCK * R + row) * (SUB // BLOCK) + columns // BLOCK % (SUB // BLOCK)
    return columns // SUB * (SUB * R) + inner


@triton.jit
def markov_bias_tile(
    w2_ptr,
    w1_ptr,
    tokens,
    base,
    limit,
    TILE: tl.constexpr,
    SUB: tl.constexpr,
    R: tl.constexpr,
    RANK: tl.constexpr,
):
    """Bias of one tile for R <= 4 rows, rounded to BF16: float32 [R, TILE]. See `markov_products`."""
    products = markov_products(w2_ptr, w1_ptr, tokens, base, limit, TILE, SUB, R, RANK)
    places = product_index(tl.arange(0, TILE)[None, :], tl.arange(0, R)[:, None], SUB, R)
    return round_to_bf16(tl.reshape(tl.gather(products, tl.reshape(places, [R * TILE]), 0), [R, TILE]))


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
    bias = markov_bias_tile(w2_ptr, w1_ptr, row_scalars(tokens, rows, R), base, vocab_size, TILE, SUB, R, RANK)
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
