"""The sampled head of a physical pair on cached rows: one launch per rank and position, over half of the vocabulary.

As in `sampled_head`, a program owns one tile of one row and the one that retires last finishes; here it also exchanges
32 packed candidates with the peer, and it is the only one that ever waits. Each row is a channel with epochs of its
own, so that rows do not wait for each other. Uncached rows are in `pair_markov`.

Addresses, the bound, rank and step are run-time arguments that never specialise: both ranks run the same code, and no
replay can meet a kernel that is still being compiled. Not covered: overlap of positions (programmatic launch), more
than two ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from remote_dspark.contract import Q_FLOOR_FIRST
from remote_dspark.kernels.finish import CONTINUATION_FLAG, SMALL_POINTERS, emit_tile, read_control, retire
from remote_dspark.kernels.pair_finish import finish_pair
from remote_dspark.kernels.pair_rank import PairRank
from remote_dspark.kernels.rounding import KEY_EXCLUDED, bf16_to_f32, order_key
from remote_dspark.kernels.sampled_head import require_logits

RUN_TIME = ("inbox", "peer", "bound", "rank", "shard_start", "step", "last")


@triton.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=SMALL_POINTERS)
def pair_head_kernel(
    logits_ptr,
    logits_stride,
    bias_ptr,
    bias_stride,
    slot_ptr,
    previous_ptr,
    control_ptr,
    candidate_ptr,
    counter_ptr,
    flag_ptr,
    merged_ptr,
    union_ptr,
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
    vocab_size,
    shard_size,
    num_tiles,
    step,
    last,
    K: tl.constexpr,
    TILE: tl.constexpr,
    N: tl.constexpr,
    TILE_DIRECT: tl.constexpr,
    MERGE_DIRECT: tl.constexpr,
    BY_SLOT: tl.constexpr,
    FLOOR_FIRST: tl.constexpr,
    EMIT_WEIGHTS: tl.constexpr,
):
    """One position of cached rows on one rank: grid (tiles, rows). Columns are local, ids and tokens global."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    num_rows = tl.num_programs(1)
    columns = tile * TILE + tl.arange(0, TILE)
    real = columns < shard_size
    exists = row >= 0
    draw, tau, greedy, round_low, round_high = read_control(row, exists, control_ptr, step)
    logits = tl.load(logits_ptr + row * logits_stride + columns, mask=real, other=0)
    bad_previous = 0
    bias_row = row.to(tl.int64)
    if BY_SLOT:
        previous = tl.load(previous_ptr + row)
        known = (previous >= 0) & (previous < vocab_size)
        slot = tl.load(slot_ptr + tl.where(known, previous, 0))
        bad_previous = tl.where(known & (slot >= 0), 0, CONTINUATION_FLAG)
        bias_row = tl.maximum(slot, 0).to(tl.int64)
    bias = tl.load(bias_ptr + bias_row * bias_stride + columns, mask=real, other=0)
    # not by the loads' own default: see sampled_head_kernel
    keys = tl.where(real, order_key(bf16_to_f32(logits) + bf16_to_f32(bias)), KEY_EXCLUDED)
    candidates = candidate_ptr + row * (num_tiles * K)
    top = emit_tile(keys, candidates + tile * K, exists, 1, K, TILE, TILE_DIRECT)
    before = retire(counter_ptr + row, flag_ptr + row, top, exists, 1)
    if before == num_tiles - 1:
        flags = tl.load(flag_ptr + row, cache_modifier=".cg") | bad_previous
        tl.store(counter_ptr + row, 0)
        tl.store(flag_ptr + row, 0)
        finish_pair(
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
            K,
            TILE,
            N,
            MERGE_DIRECT,
            FLOOR_FIRST,
            EMIT_WEIGHTS,
        )


def output_arguments(rank: PairRank, step: int) -> tuple[torch.Tensor, ...]:
    """The buffer arguments that both kernels take, in their order."""
    buffers = rank.buffers
    return (
        buffers.candidate,
        buffers.counter,
        buffers.flag,
        buffers.merged,
        rank.union,
        buffers.ids[step],
        buffers.q[step],
        buffers.count[step],
        buffers.token[step],
        buffers.weights[step],
        buffers.error,
        buffers.stamp[step],
        rank.result,
        rank.state,
        rank.sticky,
    )


def shared_constants(rank: PairRank) -> dict[str, int]:
    """The constexprs and launch options that both kernels take."""
    settings = rank.settings
    tiling = settings.tiling
    return {
        "K": settings.k,
        "TILE": tiling.tile,
        "N": triton.next_power_of_2(tiling.num_tiles * settings.k),
        "TILE_DIRECT": tiling.fills_threads(tiling.tile),
        "MERGE_DIRECT": tiling.fills_threads(tiling.num_tiles * settings.k),
        "FLOOR_FIRST": settings.semantics == Q_FLOOR_FIRST,
        "EMIT_WEIGHTS": settings.emit_weights,
        "num_warps": tiling.num_warps,
    }


def launch_pair_position(
    rank: PairRank,
    step: int,
    logits: torch.Tensor,
    bias_rows: torch.Tensor,
    control: torch.Tensor,
    *,
    last: bool,
    previous: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> None:
    """Launches one rank's part of a position on the current stream of its device; the peer must launch its own.

    Args:
        rank: This rank.
        step: Position within the chain.
        logits: bf16 [B, >= shard], the columns of this rank's shard.
        bias_rows: bf16 [B, >= shard], or with ``slots`` [C, >= shard].
        control: int32 [B, 16], the same on both ranks.
        last: Whether this position ends the chain and its acknowledgement is awaited.
        previous: int32 [B], global previous tokens; needed with ``slots``.
        slots: int32 [V], cache row of each token or -1.

    Raises:
        ValueError: Dtypes or shapes.
    """
    tiling = rank.settings.tiling
    num_rows = rank.require_rows(control)
    require_logits(logits, num_rows, tiling.vocab_size)
    require_logits(bias_rows, bias_rows.shape[0], tiling.vocab_size)
    if (slots is None) != (previous is None):
        raise ValueError("slots and previous belong together: a cache row is looked up by the previous token")
    pair_head_kernel[(tiling.num_tiles, num_rows)](
        logits.view(torch.int16),
        logits.stride(0),
        bias_rows.view(torch.int16),
        bias_rows.stride(0),
        slots,
        previous,
        control,
        *output_arguments(rank, step),
        *rank.connection(),
        rank.vocab_size,
        tiling.vocab_size,
        tiling.num_tiles,
        step,
        int(last),
        BY_SLOT=slots is not None,
        **shared_constants(rank),
    )
