"""Exact top-k of tiles of integer keys, without a sort: the k-th key by bisection, then one prefix sum.

Entries leave in ascending column order, which is also the order of the CDF (DECISIONS 2): nothing is sorted anywhere.
Ties at the k-th key go to the lowest columns because the prefix sum counts them in that order. Every function takes
R rows at once, because the latency of a step hardly depends on R.
"""

from __future__ import annotations

import triton
import triton.language as tl

from remote_dspark.kernels.rounding import KEY_LOWEST


@triton.jit
def column(values, R: tl.constexpr):
    """Per-row values in a shape that broadcasts over the entries of a row."""
    if R == 1:
        shaped = values
    else:
        shaped = values[:, None]
    return shaped


@triton.jit
def entries_of(K: tl.constexpr, R: tl.constexpr):
    """0..K-1 in the shape of a row's entries: [K], or [1, K] for several rows."""
    entries = tl.arange(0, K)
    if R > 1:
        entries = entries[None, :]
    return entries


@triton.jit
def row_max(values, R: tl.constexpr):
    """Maximum of each row."""
    return tl.max(values, axis=0 if R == 1 else 1)


@triton.jit
def row_min(values, R: tl.constexpr):
    """Minimum of each row."""
    return tl.min(values, axis=0 if R == 1 else 1)


@triton.jit
def row_sum(values, R: tl.constexpr):
    """Sum of each row."""
    return tl.sum(values, axis=0 if R == 1 else 1)


@triton.jit
def row_prefix(values, R: tl.constexpr):
    """Inclusive prefix sums of each row."""
    return tl.cumsum(values, axis=0 if R == 1 else 1)


@triton.jit
def any_row(condition, R: tl.constexpr):
    """Whether a per-row condition holds anywhere."""
    if R == 1:
        found = condition
    else:
        found = tl.max(condition.to(tl.int32), axis=0) > 0
    return found


@triton.jit
def _group_bound(keys, R: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """The least of the maxima of K groups: every group holds a key >= it, so at least K keys do."""
    if R > 1:
        bound = tl.min(tl.max(tl.reshape(keys, [R, N // K, K]), axis=1), axis=1)
    elif N >= 8 * K:
        # neighbours share a thread, equal positions modulo K share a lane: little data moves
        chunks = tl.max(tl.reshape(keys, [N // 8, 8]), axis=1)
        bound = tl.min(tl.max(tl.reshape(chunks, [N // 8 // K, K]), axis=0), axis=0)
    else:
        bound = tl.min(tl.max(tl.reshape(keys, [N // K, K]), axis=0), axis=0)
    return bound


@triton.jit
def kth_key(keys, top, R: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Threshold t and count c per row: all keys > t (exactly c of them) and the first K - c keys == t are the top K.

    Args:
        keys: int32 [N] or [R, N], `rounding.order_key`; excluded columns below `KEY_LOWEST`.
        top: int32 per row, their maximum.
        R: Rows.
        N: Keys of a row, a power of two, at most 65,536.
        K: Entries wanted, at most N.

    Returns:
        (t, c), int32 per row. With fewer than K selectable keys, t is `KEY_LOWEST` and all of them qualify.
    """
    low = tl.maximum(_group_bound(keys, R, N, K), KEY_LOWEST)
    high = top
    above = top * 0
    # invariant: the K-th key is in [low, high], and exactly `above` keys exceed high
    while any_row(low < high, R):
        active = low < high
        middle = (low + high + 1) >> 1
        count = row_sum((keys >= column(middle, R)).to(tl.int32), R)
        rises = active & (count > K)
        falls = active & (count <= K)
        # with exactly K the set is complete: name the key just below it
        low = tl.where(rises, middle, tl.where(falls & (count == K), middle - 1, low))
        high = tl.where(falls, middle - 1, high)
        above = tl.where(falls, count, above)
    return low, above


@triton.jit
def place(keys, threshold, above, R: tl.constexpr, K: tl.constexpr):
    """Which keys are selected, and their slots in ascending column order.

    Args:
        keys: int32 [N] or [R, N].
        threshold: int32 per row, from `kth_key`.
        above: int32 per row, from `kth_key`.
        R: Rows.
        K: Entries wanted.

    Returns:
        selected (bool) and slots (int32), shaped like keys, and the number selected per row.
    """
    greater = keys > column(threshold, R)
    level = keys == column(threshold, R)
    # both counts fit 16 bits, so one scan serves two
    packed = (greater.to(tl.int32) << 16) | level.to(tl.int32)
    prefix = row_prefix(packed, R)
    total = row_sum(packed, R)
    wanted = K - above
    level_before = prefix & 0xFFFF
    selected = greater | (level & (level_before <= column(wanted, R)))
    slots = (prefix >> 16) + tl.minimum(level_before, column(wanted, R)) - 1
    return selected, slots, (total >> 16) + tl.minimum(total & 0xFFFF, wanted)
