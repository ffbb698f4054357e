"""Exact top-k of tiles of integer keys, without a sort: the k-th key by bisection, then one prefix sum.

Entries leave in ascending column order, which is also the order of the CDF (DECISIONS 2): nothing is sorted anywhere.
Ties at the k-th key go to the lowest columns because the prefix sum counts them in that order. Every function takes
R rows at once, because the latency of a step hardly depends on R.
"""

from __future__ import annotations

import triton
import triton.language as tl

from remote_dspark.kernels.rounding import KEY_LOWEST

HAS_ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)
"""Under the CPU interpreter there is no inline assembly."""


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
def pick(values, rows, row, R: tl.constexpr):
    """The value of one row out of R."""
    if R == 1:
        found = values
    else:
        found = tl.sum(tl.where(rows == row, values, 0), axis=0)
    return found


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
def row_weight_sum(weights, R: tl.constexpr):
    """int64 sum of each row's fixed-point weights (at most 2**38 each, at most 4,096 of them), by two int32 sums.

    A 32-bit sum over a warp is one instruction; a 64-bit one is ten exchanges.
    """
    low = row_sum((weights & 0x7FFFF).to(tl.int32), R)
    high = row_sum((weights >> 19).to(tl.int32), R)
    return (high.to(tl.int64) << 19) + low


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
def _spread(values, WARPS: tl.constexpr):
    """One value of each warp, for every warp: int32 [32], repeated.

    A gather costs one trip through shared memory. A sum over warps would make two, and three barriers.
    """
    return tl.gather(values, tl.arange(0, 32) & (WARPS - 1), 0)


@triton.jit
def _by_warp(keys, N: tl.constexpr, WARPS: tl.constexpr, VECTOR: tl.constexpr):
    """Keys as [repetitions, warps, keys of a warp side by side]: as they lie in registers, so that nothing moves."""
    OWN: tl.constexpr = 32 * min(VECTOR, N // (32 * WARPS))
    return tl.reshape(keys, [N // WARPS // OWN, WARPS, OWN])


@triton.jit
def _bounds(keys, N: tl.constexpr, K: tl.constexpr, WARPS: tl.constexpr, VECTOR: tl.constexpr):
    """The least of the maxima of K groups, and the maximum: every group holds a key >= the first, so K keys do."""
    own = tl.max(_by_warp(keys, N, WARPS, VECTOR), axis=0)
    GROUPS: tl.constexpr = K // WARPS
    groups = tl.max(tl.reshape(own, [WARPS, GROUPS, own.shape[1] // GROUPS]), axis=2)
    both = (tl.min(groups, axis=1) << 16) | (tl.max(groups, axis=1) & 0xFFFF)
    both = _spread(both, WARPS)
    return tl.min(both >> 16, axis=0), tl.max((both << 16) >> 16, axis=0)


@triton.jit
def _sum(values, N: tl.constexpr, WARPS: tl.constexpr, VECTOR: tl.constexpr):
    """Sum of int32 [N], a scalar."""
    own = tl.sum(tl.sum(_by_warp(values, N, WARPS, VECTOR), axis=0), axis=1)
    return tl.sum(tl.where(tl.arange(0, 32) < WARPS, _spread(own, WARPS), 0), axis=0)


@triton.jit
def _group_bound(keys, R: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """The first of `_bounds` for rows of any shape."""
    if R > 1:
        bound = tl.min(tl.max(tl.reshape(keys, [R, N // K, K]), axis=1), axis=1)
    else:
        bound = tl.min(tl.max(tl.reshape(keys, [N // K, K]), axis=0), axis=0)
    return bound


@triton.jit
def _bisect(
    keys, bound, top, R: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WARPS: tl.constexpr, VECTOR: tl.constexpr
):
    """`kth_key`, given a bound that at least K keys reach; with WARPS > 0 rows are summed by `_sum`."""
    low = tl.maximum(bound, KEY_LOWEST)
    high = top
    above = top * 0
    # invariant: the K-th key is in [low, high], and exactly `above` keys exceed high
    while any_row(low < high, R):
        active = low < high
        # two pivots a round: a round costs a trip between warps, a second comparison little
        span = high - low - 1
        lower = low + 1 + span // 3
        upper = low + 1 + span * 2 // 3
        # both counts fit 16 bits, so one sum serves two
        pair = (keys >= column(lower, R)).to(tl.int32) | ((keys >= column(upper, R)).to(tl.int32) << 16)
        if WARPS > 0:
            counts = _sum(pair, N, WARPS, VECTOR)
        else:
            counts = row_sum(pair, R)
        lower_count = counts & 0xFFFF
        upper_count = counts >> 16
        exact = (upper_count == K) | (lower_count == K)
        # with exactly K the set is complete: name the key just below it
        pivot = tl.where(upper_count >= K, upper, lower)
        next_low = tl.where(upper_count > K, upper, tl.where(lower_count > K, lower, low))
        next_high = tl.where(upper_count > K, high, tl.where(lower_count > K, upper - 1, lower - 1))
        next_above = tl.where(upper_count > K, above, tl.where(lower_count > K, upper_count, lower_count))
        low = tl.where(active, tl.where(exact, pivot - 1, next_low), low)
        high = tl.where(active, tl.where(exact, pivot - 1, next_high), high)
        above = tl.where(active, tl.where(exact, K, next_above), above)
    return low, above


@triton.jit
def kth_key(keys, top, R: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Threshold t and count c per row: all keys > t (exactly c of them) and the first K - c keys == t are the top K.

    Args:
        keys: int32 [N] or [R, N], `rounding.order_key`; excluded columns below `KEY_LOWEST`.
        top: int32 per row, their maximum.
        R: Rows.
        N: Keys of a row, a power of two, at most 32,768.
        K: Entries wanted, at most N.

    Returns:
        (t, c), int32 per row. With fewer than K selectable keys, t is `KEY_LOWEST` and all of them qualify.
    """
    return _bisect(keys, _group_bound(keys, R, N, K), top, R, N, K, 0, 0)


@triton.jit
def threshold_of(keys, R: tl.constexpr, N: tl.constexpr, K: tl.constexpr, VECTOR: tl.constexpr):
    """`kth_key` and the maximum of each row: (t, c, top), int32 per row.

    VECTOR is the number of keys that a thread holds side by side (those of one wide load); it only affects speed.
    """
    WARPS: tl.constexpr = tl.extra.cuda.num_warps() if HAS_ASSEMBLY else 4
    if R == 1 and K >= WARPS and N >= 32 * WARPS:
        bound, top = _bounds(keys, N, K, WARPS, VECTOR)
        threshold, above = _bisect(keys, bound, top, R, N, K, WARPS, VECTOR)
    else:
        top = row_max(keys, R)
        threshold, above = kth_key(keys, top, R, N, K)
    return threshold, above, top


@triton.jit
def scatter(pointers, values, mask, DIRECT: tl.constexpr):
    """Stores values at scattered addresses without moving them to another layout first.

    A plain store of scattered addresses makes the compiler regroup addresses, values and mask through shared memory,
    which takes longer than the store. DIRECT asks for the short way; it is only allowed where every thread owns its
    elements (at least 4 per thread exist), because copies of an element in further threads may hold another prefix
    sum. The interpreter has no assembly and uses the plain store.
    """
    if HAS_ASSEMBLY and DIRECT:
        if values.dtype == tl.int64:
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b64 [$1], $2; mov.u32 $0, 0; }",
                "=r,l,l,r",
                [pointers.to(tl.int64), values, mask.to(tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        else:
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b32 [$1], $2; mov.u32 $0, 0; }",
                "=r,l,r,r",
                [pointers.to(tl.int64), values, mask.to(tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
    else:
        tl.store(pointers, values, mask=mask)


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
    wanted = K - above
    level_before = prefix & 0xFFFF
    selected = greater | (level & (level_before <= column(wanted, R)))
    slots = (prefix >> 16) + tl.minimum(level_before, column(wanted, R)) - 1
    count = wanted + above
    if any_row(threshold == KEY_LOWEST, R):
        # only then can there be fewer than K
        total = row_sum(packed, R)
        count = (total >> 16) + tl.minimum(total & 0xFFFF, wanted)
    return selected, slots, count
