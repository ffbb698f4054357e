"""The end of a position on a physical pair: local top k, exchange, union, draw; the same on both ranks.

The union of two shards' top k holds the vocabulary's top k, the draw has one key, and everything after the exponential
is integers, so both ranks find the same token and the same q. Constexprs as in `finish`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from remote_dspark.kernels.finish import draw_rows, merge_candidates, read_control
from remote_dspark.kernels.pair_exchange import (
    ABSENT,
    BAD_LOGITS,
    BLOCK_WORDS,
    EPOCH,
    STATE_WORDS,
    exchange,
    result_word,
    words_at,
)
from remote_dspark.kernels.selection import any_row, column, entries_of, kth_key, place, row_max, scatter

PEER_FLAG = tl.constexpr(128)
"""`RowError.PEER`."""


@triton.jit
def own_entries(merged_ptr, rows, count, index, mask, shard_start, R: tl.constexpr, K: tl.constexpr):
    """This rank's packed entries with global ids, `ABSENT` beyond their number."""
    present = mask & (index < column(count, R))
    packed = tl.load(merged_ptr + column(rows, R) * K + index, mask=present, other=ABSENT)
    return tl.where(present, packed + shard_start, ABSENT)


@triton.jit
def join_entries(
    rows,
    row_mask,
    count,
    received,
    merged_ptr,
    union_ptr,
    block_ptr,
    rank,
    shard_start,
    R: tl.constexpr,
    K: tl.constexpr,
):
    """Top k of both ranks' entries in ascending id, stored in ``union_ptr``; returns their number per row.

    Rank 0 owns the lower ids and both halves ascend, so the lower rank's entries simply come first.
    """
    both = entries_of(2 * K, R)
    index = both & (K - 1)
    live = column(row_mask, R) & (both >= 0)
    is_own = (both < K) == (rank == 0)
    own = own_entries(merged_ptr, rows, count, index, live & is_own, shard_start, R, K)
    theirs = tl.load(
        column(block_ptr, R) + index, mask=live & (is_own == 0) & received, other=ABSENT, cache_modifier=".cg"
    )
    joined = tl.where(is_own, own, theirs)
    keys = (joined >> 32).to(tl.int32)
    threshold, above = kth_key(keys, row_max(keys, R), R, 2 * K, K)
    selected, slots, found = place(keys, threshold, above, R, K)
    scatter(union_ptr + column(rows, R) * K + slots, joined, selected & live, False)
    # the entries are read back by other threads of this program
    tl.debug_barrier()
    return found


@triton.jit
def finish_pair(
    rows,
    row_mask,
    channel,
    num_rows,
    candidate_ptr,
    merged_ptr,
    union_ptr,
    flags,
    control_ptr,
    ids_ptr,
    q_ptr,
    count_ptr,
    token_ptr,
    weights_ptr,
    error_ptr,
    stamp_ptr,
    result_ptr,
    state_ptr,
    sticky_ptr,
    inbox,
    peer,
    bound,
    rank,
    shard_start,
    num_tiles,
    step,
    last,
    R: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    N: tl.constexpr,
    DIRECT: tl.constexpr,
    FLOOR_FIRST: tl.constexpr,
    EMIT_WEIGHTS: tl.constexpr,
):
    """Finishes R rows of a position together with the peer; see `finish.finish_rows` and `exchange`.

    Takes:
        channel: int32, first of these rows.
        num_rows: Rows of the launch, and of the inbox.
        merged_ptr: int64 [B, K] scratch, this rank's entries with local ids.
        union_ptr: int64 [B, K] scratch, both ranks' entries.
        result_ptr: int64 [B], the last `result_word`s of this rank.
        last: Not 0 at the last position of a chain, whose result is acknowledged by a message of its own.
    """
    draw, tau, greedy, round_low, round_high = read_control(rows, row_mask, control_ptr, step)
    count = merge_candidates(
        rows, candidate_ptr, merged_ptr, num_rows, num_tiles, num_tiles, num_tiles * TILE, R, K, TILE, N, DIRECT
    )
    entries = entries_of(K, R)
    mask = column(row_mask, R) & (entries >= 0)
    own = own_entries(merged_ptr, rows, count, entries, mask, shard_start, R, K)
    # the epoch says which slot the message will be in, before the exchange moves it on
    epoch = tl.load(state_ptr + channel * STATE_WORDS + EPOCH) + 1
    bound = bound.to(tl.int64)
    good, theirs = exchange(
        rows, row_mask, channel, num_rows, own, flags, result_ptr, inbox, peer, state_ptr, sticky_ptr, bound, R, K, True
    )
    flags = flags | theirs | tl.where(good, 0, PEER_FLAG)
    block_ptr = words_at(inbox) + ((epoch & 1).to(tl.int32) * num_rows + rows) * BLOCK_WORDS
    count = join_entries(rows, row_mask, count, good, merged_ptr, union_ptr, block_ptr, rank, shard_start, R, K)
    flags, token, ids, tickets = draw_rows(
        rows,
        row_mask,
        union_ptr,
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
        R,
        K,
        FLOOR_FIRST,
        EMIT_WEIGHTS,
    )
    tl.store(result_ptr + rows, result_word(token, ids, tickets, R), mask=row_mask)
    # only of rows that were exchanged: the peer has the same flags
    if good & any_row((flags != 0) & row_mask, R):
        tl.atomic_or(sticky_ptr, BAD_LOGITS, sem="relaxed", scope="gpu")
    if last != 0:
        # the result is read back by other threads of this program
        tl.debug_barrier()
        settled, _ = exchange(
            rows,
            row_mask,
            channel,
            num_rows,
            own,
            flags,
            result_ptr,
            inbox,
            peer,
            state_ptr,
            sticky_ptr,
            bound,
            R,
            K,
            False,
        )
        # without the peer's acknowledgement nothing of this row may be used
        if settled == 0:
            tl.atomic_or(error_ptr + rows, PEER_FLAG, mask=row_mask, sem="relaxed")
