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
    ACK_WORD,
    BAD_LOGITS,
    FLAGS_WORD,
    LIMIT,
    PEER_FLAG,
    STATE_WORDS,
    close_message,
    exchange,
    inbox_block,
    read_state,
    received_word,
    result_word,
)
from remote_dspark.kernels.selection import any_row, column, entries_of, kth_key, place, row_max, scatter


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
    here,
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
    from_peer = live & (is_own == 0) & here
    theirs = tl.load(column(block_ptr, R) + index, mask=from_peer, other=ABSENT, cache_modifier=".cg")
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
    epoch, nonce, exhausted, stopped = read_state(state_ptr, channel)
    carried = tl.load(result_ptr + rows, mask=row_mask, other=0)
    count = merge_candidates(
        rows, candidate_ptr, merged_ptr, num_rows, num_tiles, num_tiles, num_tiles * TILE, R, K, TILE, N, DIRECT
    )
    entries = entries_of(K, R)
    mask = column(row_mask, R) & (entries >= 0)
    own = own_entries(merged_ptr, rows, count, entries, mask, shard_start, R, K)
    bound = bound.to(tl.int64)
    may_send = (exhausted | stopped) == 0
    here, fault = exchange(
        rows,
        row_mask,
        channel,
        num_rows,
        own,
        flags,
        carried,
        epoch,
        nonce,
        may_send,
        inbox,
        peer,
        state_ptr,
        bound,
        R,
        K,
        True,
    )
    # read together, used where needed: each read of the inbox alone would cost a trip to L2
    theirs = received_word(inbox, rows, row_mask, here, num_rows, epoch, FLAGS_WORD).to(tl.int32)
    acknowledged = received_word(inbox, rows, row_mask, here, num_rows, epoch, ACK_WORD)
    block_ptr = inbox_block(inbox, rows, num_rows, epoch)
    count = join_entries(rows, row_mask, count, here, merged_ptr, union_ptr, block_ptr, rank, shard_start, R, K)
    flags = flags | theirs | tl.where(here, 0, PEER_FLAG)
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
    result = result_word(token, ids, tickets, R)
    tl.store(result_ptr + rows, result, mask=row_mask)
    # only of rows that were exchanged: the peer has the same flags
    if here & any_row((flags != 0) & row_mask, R):
        tl.atomic_or(sticky_ptr, BAD_LOGITS, sem="relaxed", scope="gpu")
    goes_on = close_message(
        rows,
        row_mask,
        channel,
        num_rows,
        carried,
        acknowledged,
        epoch,
        here,
        fault,
        exhausted,
        stopped,
        peer,
        state_ptr,
        sticky_ptr,
        error_ptr,
        R,
    )
    if (last != 0) & goes_on:
        settle(
            rows,
            row_mask,
            channel,
            num_rows,
            own,
            result,
            epoch + 1,
            nonce,
            inbox,
            peer,
            state_ptr,
            sticky_ptr,
            error_ptr,
            bound,
            R,
            K,
        )


@triton.jit
def settle(
    rows,
    row_mask,
    channel,
    num_rows,
    entries,
    result,
    epoch,
    nonce,
    inbox,
    peer,
    state_ptr,
    sticky_ptr,
    error_ptr,
    bound,
    R: tl.constexpr,
    K: tl.constexpr,
):
    """Ends a chain: a message without candidates, which acknowledges the last position and awaits the peer's."""
    exhausted = epoch >= tl.load(state_ptr + channel * STATE_WORDS + LIMIT)
    here, fault = exchange(
        rows,
        row_mask,
        channel,
        num_rows,
        entries,
        rows * 0,
        result,
        epoch,
        nonce,
        exhausted == 0,
        inbox,
        peer,
        state_ptr,
        bound,
        R,
        K,
        False,
    )
    acknowledged = received_word(inbox, rows, row_mask, here, num_rows, epoch, ACK_WORD)
    close_message(
        rows,
        row_mask,
        channel,
        num_rows,
        result,
        acknowledged,
        epoch,
        here,
        fault,
        exhausted,
        False,
        peer,
        state_ptr,
        sticky_ptr,
        error_ptr,
        R,
    )
