"""From tile to token: what every sampled head does after it has the keys of a tile.

`emit_tile` keeps a tile's top k; `retire` counts the tile in; the program that retires last calls `merge_candidates`
and `draw_rows`: merge, normalise, allocate, draw, store. Everything after the exponential is integer arithmetic, so it
does not matter which program that is. "Takes" lists the operands that need a word; constexprs are R rows, K entries,
TILE columns, N merged candidates, DIRECT (see `selection.scatter`). R rows are handled at once; R is 1 where a program
owns one row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from remote_dspark.kernels.draws import philox4x32
from remote_dspark.kernels.rounding import (
    KEY_LOWEST,
    KEY_NAN,
    KEY_POSITIVE_INFINITY,
    fixed_weight,
    key_value,
)
from remote_dspark.kernels.selection import (
    HAS_ASSEMBLY,
    any_row,
    column,
    entries_of,
    place,
    row_max,
    row_min,
    row_prefix,
    row_sum,
    row_weight_sum,
    scatter,
    threshold_of,
)

# RowError flags, spelled out because device code cannot read an enum
NAN_FLAG = tl.constexpr(1)
POSITIVE_INFINITY_FLAG = tl.constexpr(2)
ZERO_MASS_FLAG = tl.constexpr(4)
REMAINDER_FLAG = tl.constexpr(8)
TEMPERATURE_FLAG = tl.constexpr(16)
CONTINUATION_FLAG = tl.constexpr(32)

SMALL_POINTERS = ["previous_ptr", "count_ptr", "token_ptr", "stamp_ptr", "error_ptr", "counter_ptr", "flag_ptr"]
"""Arguments of a head of which each step passes another slice: no kernel is compiled for their alignment."""

NO_CANDIDATE = tl.constexpr(-32640 * 65536)
"""Packed candidate that is never selected: the excluded key, column 0."""


@triton.jit
def emit_tile(
    keys, candidate_ptrs, row_mask, R: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, DIRECT: tl.constexpr
):
    """Stores the top k of one tile of R rows, packed as key << 16 | column, in ascending column.

    Takes:
        keys: int32 [R, TILE] from `rounding.order_key`.
        candidate_ptrs: pointers [R] to int32 [K] of each row's tile; every entry is written.
        row_mask: bool [R], rows that exist.

    Returns:
        int32 [R], the highest key of each row: above `KEY_POSITIVE_INFINITY` - 1 it tells of a bad value.
    """
    threshold, above, top = threshold_of(keys, R, TILE, K, 8)
    selected, slots, count = place(keys, threshold, above, R, K)
    columns = entries_of(TILE, R)
    first = column(candidate_ptrs, R)
    scatter(first + slots, (keys << 16) | columns, selected & column(row_mask, R), DIRECT)
    if any_row(count < K, R):
        entries = entries_of(K, R)
        tl.store(first + entries, NO_CANDIDATE, mask=(entries >= column(count, R)) & column(row_mask, R))
    return top


@triton.jit
def retire(counter_ptr, flag_ptrs, top, row_mask, R: tl.constexpr):
    """Counts one finished tile in and returns how many had retired before.

    The barrier orders the whole program's stores before the release of the one thread that adds.

    Takes:
        counter_ptr: int32, retired tiles of these rows.
        flag_ptrs: pointers [R] to int32 `RowError` flags, 0 between launches.
        top: From `emit_tile`.
        row_mask: bool [R].
    """
    bad = (top >= KEY_POSITIVE_INFINITY) & row_mask
    if any_row(bad, R):
        tl.atomic_or(flag_ptrs, tl.where(top == KEY_NAN, NAN_FLAG, POSITIVE_INFINITY_FLAG), mask=bad, sem="relaxed")
    tl.debug_barrier()
    return tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")


@triton.jit
def retire_early(counter_ptr, flag_ptr, top, THREADS: tl.constexpr):
    """`retire` for one row, whose answer is not waited for: int32 [THREADS], the number before in one element, else -1.

    A program that retires several rows goes on with the next one and looks at all answers in the end.
    """
    if top >= KEY_POSITIVE_INFINITY:
        tl.atomic_or(flag_ptr, tl.where(top == KEY_NAN, NAN_FLAG, POSITIVE_INFINITY_FLAG), sem="relaxed")
    tl.debug_barrier()
    thread = tl.arange(0, THREADS)
    if HAS_ASSEMBLY:
        before = tl.inline_asm_elementwise(
            "{ .reg .pred p; mov.s32 $0, -1; setp.eq.s32 p, $2, 0; @p atom.global.acq_rel.gpu.add.u32 $0, [$1], 1; }",
            "=&r,l,r",
            [(counter_ptr + thread * 0).to(tl.int64), thread],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        before = tl.where(thread == 0, tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu"), -1)
    return before


@triton.jit
def _merge_row(
    candidate_ptr,
    merged_ptr,
    num_tiles,
    tiles_per_shard,
    shard_size,
    K: tl.constexpr,
    TILE: tl.constexpr,
    N: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """Reduces the candidates of one row to its top k, in ascending id; returns their number.

    Candidates are int32 [num_tiles * K] in ascending id because tiles are; N is that length rounded up to a power of
    two. The merged entries are int64 key << 32 | id; entries beyond their number are not written.
    """
    index = tl.arange(0, N)
    # other programs wrote these: read them where those writes are, in L2
    candidates = tl.load(candidate_ptr + index, mask=index < num_tiles * K, other=NO_CANDIDATE, cache_modifier=".cg")
    keys = candidates >> 16
    # the compiler gives loads of one shape one layout: then this one has that of the tile's 16-bit loads
    threshold, above, _ = threshold_of(keys, 1, N, K, 8 if N == TILE else 4)
    selected, slots, count = place(keys, threshold, above, 1, K)
    tile = index // K
    shard = tile // tiles_per_shard
    ids = shard * shard_size + (tile - shard * tiles_per_shard) * TILE + (candidates & 0xFFFF)
    scatter(merged_ptr + slots, (keys.to(tl.int64) << 32) | ids.to(tl.int64), selected, DIRECT)
    return count


@triton.jit
def merge_candidates(
    rows,
    candidate_ptr,
    merged_ptr,
    num_rows,
    num_tiles,
    tiles_per_shard,
    shard_size,
    R: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    N: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """`_merge_row` for R rows, one after the other; a second dimension would not fit in registers.

    ``candidate_ptr`` and ``merged_ptr`` are those of row 0; with one row per program, ``rows`` names it.
    """
    if R == 1:
        count = _merge_row(
            candidate_ptr + rows * (num_tiles * K),
            merged_ptr + rows * K,
            num_tiles,
            tiles_per_shard,
            shard_size,
            K,
            TILE,
            N,
            DIRECT,
        )
    else:
        count = rows * 0
        row = num_rows * 0
        while row < num_rows:
            found = _merge_row(
                candidate_ptr + row * (num_tiles * K),
                merged_ptr + row * K,
                num_tiles,
                tiles_per_shard,
                shard_size,
                K,
                TILE,
                N,
                DIRECT,
            )
            count = tl.where(rows == row, found, count)
            row += 1
    # the entries are read back by other threads of this program
    tl.debug_barrier()
    return count


@triton.jit
def allocate(weights, leader, R: tl.constexpr, K: tl.constexpr, FLOOR_FIRST: tl.constexpr):
    """Tickets of R rows: floor, then the remainder (DECISIONS 1).

    Takes:
        weights: int64 [R, K], 0 in unused entries; the total of every row is positive.
        leader: int32 [R], index of rank 1.

    Returns:
        tickets int32 [R, K], cumulative tickets int32 [R, K], tickets left after flooring int32 [R].
    """
    entries = entries_of(K, R)
    total = column(row_weight_sum(weights, R), R)
    scaled = weights << 24
    # one Newton step makes the FP32 reciprocal good to 2**-40, so the product is within one of the quotient; the
    # integer remainder then decides
    wide = total.to(tl.float64)
    inverse = (1.0 / total.to(tl.float32)).to(tl.float64)
    inverse = inverse * (2.0 - wide * inverse)
    counts = (weights.to(tl.float64) * (16777216.0 * inverse)).to(tl.int64)
    rest = scaled - counts * total
    counts = tl.where(rest < 0, counts - 1, tl.where(rest >= total, counts + 1, counts))
    tickets = counts.to(tl.int32)
    left = 16777216 - row_sum(tickets, R)
    if FLOOR_FIRST:
        # the remainder shifts every partial sum from rank 1 on, so the scan need not wait for it
        cumulative = row_prefix(tickets, R) + tl.where(entries >= column(leader, R), column(left, R), 0)
        tickets = tickets + tl.where(entries == column(leader, R), column(left, R), 0)
    else:
        rest = tl.reshape(scaled - counts * total, [R, K])
        entry = tl.arange(0, K)
        tied = (rest[:, None, :] == rest[:, :, None]) & (entry[None, None, :] < entry[None, :, None])
        rank = tl.sum(((rest[:, None, :] > rest[:, :, None]) | tied).to(tl.int32), axis=2)
        tickets = tickets + (tl.reshape(rank, tickets.shape) < column(left, R)).to(tl.int32)
        cumulative = row_prefix(tickets, R)
    return tickets, cumulative, left


@triton.jit
def u64(low, high):
    """int64 from two 32-bit words."""
    return (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)


@triton.jit
def read_control(rows, row_mask, control_ptr, step):
    """What the control block says of R rows, with the proposal draw already made; see `draw_rows` for the types.

    Nothing here depends on the chain: read at the start of a program, it costs nothing.
    """
    control = control_ptr + rows * 16
    round_low = tl.load(control + 2, mask=row_mask, other=0)
    round_high = tl.load(control + 3, mask=row_mask, other=0)
    position = tl.load(control + 4, mask=row_mask, other=0) + step
    tau = tl.load(control + 5, mask=row_mask, other=0).to(tl.float32, bitcast=True)
    greedy = tl.load(control + 6, mask=row_mask, other=0) != 0
    key0 = tl.load(control, mask=row_mask, other=0)
    key1 = tl.load(control + 1, mask=row_mask, other=0)
    word0, _ = philox4x32(round_low, position, 1, 0, key0, key1)
    return (word0 >> 8).to(tl.int32), tau, greedy, round_low, round_high


@triton.jit
def draw_rows(
    rows,
    row_mask,
    merged_ptr,
    count,
    flags,
    draw,
    tau,
    greedy,
    round_low,
    round_high,
    control_ptr,
    ids_ptr,
    q_ptr,
    count_ptr,
    token_ptr,
    weights_ptr,
    error_ptr,
    stamp_ptr,
    step,
    R: tl.constexpr,
    K: tl.constexpr,
    FLOOR_FIRST: tl.constexpr,
    EMIT_WEIGHTS: tl.constexpr,
):
    """Normalises, allocates, draws and stores R rows whose support is known.

    Takes:
        rows: int32 [R], row numbers.
        row_mask: bool [R].
        merged_ptr: int64 [B, K]: key << 32 | id, ascending id.
        count: int32 [R], valid entries.
        flags: int32 [R], `RowError` flags so far.
        draw: int32 [R], from `read_control`, like tau (float32), greedy (bool) and the two round words.

    Returns:
        Final flags int32 [R], token int32 [R], and as stored (0 where not) ids and tickets int32 [R, K].
    """
    entries = entries_of(K, R)
    live = column(row_mask, R)
    at = column(rows, R) * K + entries
    control = control_ptr + rows * 16
    # sticky along the chain; its first position starts afresh
    flags = flags | tl.load(error_ptr + rows, mask=row_mask & (step > 0), other=0)
    flags = flags | tl.where((flags == 0) & (count == 0), ZERO_MASS_FLAG, 0)
    # only a number in (0, inf) passes both comparisons
    tau_is_good = (tau > 0.0) & (tau < float("inf"))
    flags = flags | tl.where(greedy | tau_is_good, 0, TEMPERATURE_FLAG)

    present = (entries < column(count, R)) & column(flags == 0, R) & live
    packed = tl.load(merged_ptr + at, mask=present, other=0)
    ids = tl.where(present, packed.to(tl.int32), 0)
    keys = tl.where(present, (packed >> 32).to(tl.int32), KEY_LOWEST)
    # rank 1: the highest key, ties to the lowest id, which is the lowest entry
    first = row_max((keys << 7) | (127 - entries), R)
    leader = 127 - (first & 127)
    distance = tl.where(present, key_value(keys) - column(key_value(first >> 7), R), 0.0)
    exponent = tl.div_rn(distance, column(tl.where(tau_is_good, tau, 1.0), R) + distance * 0.0)
    weights = tl.where(present, fixed_weight(exponent), 0)
    # a refused row goes through the arithmetic as one entry of full mass
    weights = tl.where(column((flags != 0) | (row_mask == 0), R) & (entries == 0), 1, weights)
    tickets, cumulative, left = allocate(weights, leader, R, K, FLOOR_FIRST)
    flags = flags | tl.where((left < 0) | (left >= tl.maximum(count, 1)), REMAINDER_FLAG, 0)
    drawn = row_min(tl.where(present & (cumulative > column(draw, R)), ids, 2147483647), R)
    argmax = row_sum(tl.where(entries == column(leader, R), ids, 0), R)
    token = tl.where(flags == 0, tl.where(greedy, argmax, drawn), 0)
    tl.store(token_ptr + rows, token, mask=row_mask)

    sampled = (flags == 0) & (greedy == 0)
    shown = present & column(sampled, R)
    every = live & (entries >= 0)
    tl.store(ids_ptr + at, tl.where(shown, ids, 0), mask=every)
    q = tl.where(shown, tickets, 0).to(tl.float32) * 5.9604644775390625e-08
    tl.store(q_ptr + at, q, mask=every)
    tl.store(count_ptr + rows, tl.where(sampled, count, 0), mask=row_mask)
    tl.store(error_ptr + rows, flags, mask=row_mask)
    if EMIT_WEIGHTS:
        tl.store(weights_ptr + at, tl.where(shown, weights, 0), mask=every)
    stamp = stamp_ptr + rows * 3
    generation_low = tl.load(control + 7, mask=row_mask, other=0)
    generation_high = tl.load(control + 8, mask=row_mask, other=0)
    epoch_low = tl.load(control + 9, mask=row_mask, other=0)
    epoch_high = tl.load(control + 10, mask=row_mask, other=0)
    tl.store(stamp, u64(generation_low, generation_high), mask=row_mask)
    tl.store(stamp + 1, u64(round_low, round_high), mask=row_mask)
    tl.store(stamp + 2, u64(epoch_low, epoch_high), mask=row_mask)
    return flags, token, tl.where(shown, ids, 0), tl.where(shown, tickets, 0)
