"""Weights of FP32 target rows as Triton device functions: keys, tiles and fixed-point weights of the verifier.

A program's grid is (tiles of a shard, rows, shards). Tiles never cross a shard.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def f32_key(values):
    """int32 keys that order like float32 values; NaN is above everything, -inf below every finite value."""
    bits = values.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(values != values, 2147483647, key)


@triton.jit
def f32_of_key(key):
    """Inverse of `f32_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def greater(left, right):
    """The greater value; NaN wins, so that a bad value anywhere in a row reaches its maximum."""
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def target_weight(distance):
    """``floor(exp(distance) * 2**38)`` as int64, for float32 ``distance <= 0``: `rounding.fixed_weight` in fewer steps.

    There is no temperature here, and what a refused row gives is not used.
    """
    # below exp(-27) everything is 0
    bounded = tl.maximum(distance, -40.0)
    # rounds to an integer, plus 38, in the low bits; then the two-part reduction to [-ln2/2, ln2/2]
    shifted = tl.math.fma(bounded, 1.4426950408889634, 12582950.0)
    whole = shifted - 12582950.0
    rest = tl.math.fma(whole, -0.693359375, bounded)
    rest = tl.math.fma(whole, 2.12194440e-4, rest)
    power = tl.exp2(rest * 1.4426950408889634)
    # the exponent is added in place
    bits = power.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)
    return bits.to(tl.float32, bitcast=True).to(tl.int64)


@triton.jit
def below(values, top):
    """Distance to the maximum; 0 where that is no negative number, in refused rows, whose weights nobody uses."""
    distance = values - top
    return tl.where(distance < 0, distance, 0.0)


@triton.jit
def tile_bounds(vocab_size, shard_size, TILE: tl.constexpr):
    """First column of this program's tile, and the first column beyond its shard."""
    start = tl.program_id(2) * shard_size
    return start + tl.program_id(0) * TILE, tl.minimum(start + shard_size, vocab_size)


@triton.constexpr_function
def num_runs(tile, parts, run):
    """Pieces of consecutive columns whose sums a tile keeps: up to four of a part, at most 32."""
    return parts * min(tile // (parts * run), 4)


@triton.jit
def small_sum(values, BITS: tl.constexpr):
    """Sum of at most 32 non-negative int64 below 2**(BITS + 27), BITS <= 27, by two 32-bit sums."""
    low = tl.sum((values & ((1 << BITS) - 1)).to(tl.int32), axis=0)
    return (tl.sum((values >> BITS).to(tl.int32), axis=0).to(tl.int64) << BITS) + low


@triton.jit
def run_sums_of(weights, TILE: tl.constexpr, PARTS: tl.constexpr, RUN: tl.constexpr):
    """int64 [num_runs] sums of a tile's pieces in the order of their columns, which are laid out by `spread`.

    Sums of a warp's columns are two 32-bit sums; then one trip brings all of them to all warps.
    """
    RUNS: tl.constexpr = num_runs(TILE, PARTS, RUN)
    OWN: tl.constexpr = RUNS // PARTS
    pieces = tl.sum(tl.reshape(weights, [OWN, TILE // (RUNS * RUN), PARTS, RUN]), axis=1)
    # below 2**41 in a thread, hence below 2**51 in a run of 1,024 columns
    low = tl.sum((pieces & 0x1FFFFF).to(tl.int32), axis=2)
    high = tl.sum((pieces >> 21).to(tl.int32), axis=2)
    sums = tl.reshape((high.to(tl.int64) << 21) + low, [RUNS])
    order = tl.arange(0, RUNS)
    return tl.gather(sums, order % OWN * PARTS + order // OWN, 0)


@triton.jit
def spread(TILE: tl.constexpr, PARTS: tl.constexpr, RUN: tl.constexpr):
    """Offsets in a tile, int32 [TILE]: runs of consecutive columns go to the parts in turn, a part to one warp.

    So each warp sums one part, in consecutive columns, and its loads are as wide as those of consecutive offsets.
    """
    at = tl.arange(0, TILE)
    return (at // RUN) % PARTS * (TILE // PARTS) + at // (RUN * PARTS) * RUN + at % RUN


@triton.jit
def target_weights_kernel(target_ptr, target_stride, top_ptr, weights_ptr, vocab_size, shard_size, TILE: tl.constexpr):
    """The weights themselves, int64 [rows, V]: what the verifier sums, for checks. Grid as below."""
    row = tl.program_id(1).to(tl.int64)
    base, end = tile_bounds(vocab_size, shard_size, TILE)
    columns = base + tl.arange(0, TILE)
    values = tl.load(target_ptr + row * target_stride + columns, mask=columns < end, other=float("-inf"))
    distance = below(values, tl.load(top_ptr + row))
    tl.store(weights_ptr + row * vocab_size + columns, target_weight(distance), mask=columns < end)
