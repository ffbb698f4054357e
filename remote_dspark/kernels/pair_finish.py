"""The end of a row's position on a physical pair: local top k, exchange, union, draw; the same on both ranks.

The union of two shards' top k holds the vocabulary's top k, the draw has one key, and everything after the exponential
is integers, so both ranks find the same token and the same q. Constexprs as in `finish`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from remote_dspark.kernels.finish import draw_rows, merge_candidates
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
from remote_dspark.kernels.selection import kth_key, place, scatter


@triton.jit
def own_entries(merged_ptr, count, index, mask, shard_start):
    """This rank's packed entries with global ids, `ABSENT` beyond their number."""
    present = mask & (index < count)
    packed = tl.load(merged_ptr + index, mask=present, other=ABSENT)
    return tl.where(present, packed + shard_start, ABSENT)


@triton.jit
def join_entries(count, here, merged_ptr, union_ptr, block_ptr, rank, shard_start, K: tl.constexpr):
    """Top k of both ranks' entries of a row in ascending id, stored in ``union_ptr``; returns their number.

    Rank 0 owns the lower ids and both halves ascend, so the lower rank's entries simply come first.
    """
    both = tl.arange(0, 2 * K)
    index = both & (K - 1)
    is_own = (both < K) == (rank == 0)
    own = own_entries(merged_ptr, count, index, is_own, shard_start)
    theirs = tl.load(block_ptr + index, mask=(is_own == 0) & here, other=ABSENT, cache_modifier=".cg")
    joined = tl.where(is_own, own, theirs)
    keys = (joined >> 32).to(tl.int32)
    threshold, above = kth_key(keys, tl.max(keys, axis=0), 1, 2 * K, K)
    selected, slots, found = place(keys, threshold, above, 1, K)
    scatter(union_ptr + slots, joined, selected, False)
    # the entries are read back by other threads of this program
    tl.debug_barrier()
    return found


@triton.jit
def finish_pair(
    row,
    num_rows,
    candidate_ptr,
    merged_ptr,
    union_ptr,
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
    K: tl.constexpr,
    TILE: tl.constexpr,
    N: tl.constexpr,
    DIRECT: tl.constexpr,
    FLOOR_FIRST: tl.constexpr,
    EMIT_WEIGHTS: tl.constexpr,
):
    """Finishes one row of a position together with the peer; see `finish.draw_rows` and `exchange`.

    Takes:
        row: int32.
        num_rows: Rows of the inbox.
        merged_ptr: int64 [B, K] scratch, this rank's entries with local ids.
        union_ptr: int64 [B, K] scratch, both ranks' entries.
        result_ptr: int64 [B], the last `result_word`s of this rank.
        last: Not 0 at the last position of a chain, whose result is acknowledged by a message of its own.
    """
    state = state_ptr + row * STATE_WORDS
    epoch, nonce, exhausted, stopped = read_state(state)
    carried = tl.load(result_ptr + row)
    count = merge_candidates(
        row, candidate_ptr, merged_ptr, 1, num_tiles, num_tiles, num_tiles * TILE, 1, K, TILE, N, DIRECT
    )
    entries = tl.arange(0, K)
    own = own_entries(merged_ptr + row * K, count, entries, entries >= 0, shard_start)
    bound = bound.to(tl.int64)
    may_send = (exhausted | stopped) == 0
    here, fault = exchange(
        row, num_rows, own, flags, carried, epoch, nonce, may_send, inbox, peer, state, bound, K, True
    )
    # read together, used where needed: each read of the inbox alone would cost a trip to L2
    theirs = received_word(inbox, row, here, num_rows, epoch, FLAGS_WORD).to(tl.int32)
    acknowledged = received_word(inbox, row, here, num_rows, epoch, ACK_WORD)
    block_ptr = inbox_block(inbox, row, num_rows, epoch)
    count = join_entries(count, here, merged_ptr + row * K, union_ptr + row * K, block_ptr, rank, shard_start, K)
    flags, token, ids, tickets = draw_rows(
        row,
        row >= 0,
        union_ptr,
        count,
        flags | theirs | tl.where(here, 0, PEER_FLAG),
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
        1,
        K,
        FLOOR_FIRST,
        EMIT_WEIGHTS,
    )
    result = result_word(token, ids, tickets)
    tl.store(result_ptr + row, result)
    # only of a row that was exchanged: the peer has the same flags
    if here & (flags != 0):
        tl.atomic_or(sticky_ptr, BAD_LOGITS, sem="relaxed", scope="gpu")
    goes_on = close_message(
        row,
        num_rows,
        carried,
        acknowledged,
        epoch,
        here,
        fault,
        exhausted,
        stopped,
        peer,
        state,
        sticky_ptr,
        error_ptr,
    )
    if (last != 0) & goes_on:
        settle(row, num_rows, own, result, epoch + 1, nonce, inbox, peer, state, sticky_ptr, error_ptr, bound, K)


@triton.jit
def settle(
    row,
    num_rows,
    entries,
    result,
    epoch,
    nonce,
    inbox,
    peer,
    state,
    sticky_ptr,
    error_ptr,
    bound,
    K: tl.constexpr,
):
    """Ends a chain: a message without candidates, which acknowledges the last position and awaits the peer's."""
    exhausted = epoch >= tl.load(state + LIMIT)
    here, fault = exchange(
        row, num_rows, entries, row * 0, result, epoch, nonce, exhausted == 0, inbox, peer, state, bound, K, False
    )
    acknowledged = received_word(inbox, row, here, num_rows, epoch, ACK_WORD)
    close_message(
        row, num_rows, result, acknowledged, epoch, here, fault, exhausted, False, peer, state, sticky_ptr, error_ptr
    )
