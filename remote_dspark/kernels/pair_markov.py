"""The sampled head of a physical pair on rows that may be uncached: the Markov bias of half of the vocabulary.

As in `markov_head`, a program owns one tile for all rows, which share the read of this rank's half of W2, and different
programs finish different rows. The rules of `pair_head` hold here too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from remote_dspark.kernels.finish import CONTINUATION_FLAG, SMALL_POINTERS, emit_tile, read_control, retire
from remote_dspark.kernels.markov_head import MAX_SHARED_ROWS, read_row
from remote_dspark.kernels.markov_product import LANES, markov_products, product_index, row_scalars
from remote_dspark.kernels.pair_finish import finish_pair
from remote_dspark.kernels.pair_head import RUN_TIME, output_arguments, shared_constants
from remote_dspark.kernels.pair_rank import PairRank
from remote_dspark.kernels.rounding import KEY_EXCLUDED, bf16_to_f32, order_key, round_to_bf16
from remote_dspark.kernels.sampled_head import require_logits
from remote_dspark.kernels.selection import any_row, pick


@triton.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=SMALL_POINTERS)
def pair_markov_kernel(
    logits_ptr,
    logits_stride,
    bias_ptr,
    bias_stride,
    slot_ptr,
    w1_ptr,
    w2_ptr,
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
    num_rows,
    vocab_size,
    shard_size,
    num_tiles,
    step,
    last,
    R: tl.constexpr,
    RANK: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    SUB: tl.constexpr,
    N: tl.constexpr,
    TILE_DIRECT: tl.constexpr,
    MERGE_DIRECT: tl.constexpr,
    FLOOR_FIRST: tl.constexpr,
    EMIT_WEIGHTS: tl.constexpr,
):
    """One position of up to R rows, cached or not, on one rank: grid (tiles,). W1 is whole, W2 is the rank's part."""
    tile = tl.program_id(0)
    base = tile * TILE
    rows = base * 0 if R == 1 else tl.arange(0, R)
    exists = rows < num_rows
    draw, tau, greedy, round_low, round_high = read_control(rows, exists, control_ptr, step)
    previous = tl.load(previous_ptr + rows, mask=exists, other=0)
    known = (previous >= 0) & (previous < vocab_size)
    previous = tl.where(known, previous, 0)
    slot = tl.load(slot_ptr + previous, mask=exists, other=0)
    products = tl.zeros([TILE * R], tl.float32)
    if any_row(slot < 0, R):
        products = markov_products(w2_ptr, w1_ptr, row_scalars(previous, rows, R), base, shard_size, TILE, SUB, R, RANK)
    # programs start with different rows, so that different programs are the last of different rows
    row = tile & (R - 1)
    finishes = tile * 0
    for _ in tl.range(0, R, num_stages=1):
        own_slot = pick(slot, rows, row, R)
        logits, cached = read_row(
            logits_ptr, logits_stride, bias_ptr, bias_stride, base, shard_size, row, num_rows, own_slot, TILE
        )
        found = tl.gather(products, product_index(tl.arange(0, TILE), row, SUB, R), 0)
        bias = tl.where(own_slot < 0, round_to_bf16(found), bf16_to_f32(cached))
        real = base + tl.arange(0, TILE) < shard_size
        # not by the load's own default: see sampled_head_kernel
        keys = tl.where(real, order_key(bf16_to_f32(logits) + bias), KEY_EXCLUDED)
        if row < num_rows:
            top = emit_tile(keys, candidate_ptr + (row * num_tiles + tile) * K, row >= 0, 1, K, TILE, TILE_DIRECT)
            before = retire(counter_ptr + row, flag_ptr + row, top, row >= 0, 1)
            finishes |= (before == num_tiles - 1).to(tl.int32) << row
        row = (row + 1) & (R - 1)
    # in ascending order on both ranks, and only after the last tile: no wait can hold up what another wait is for
    row = tile * 0
    while finishes >> row > 0:
        if (finishes >> row) & 1 > 0:
            flags = tl.load(flag_ptr + row, cache_modifier=".cg")
            flags = flags | tl.where(pick(known.to(tl.int32), rows, row, R) > 0, 0, CONTINUATION_FLAG)
            tl.store(counter_ptr + row, 0)
            tl.store(flag_ptr + row, 0)
            finish_pair(
                row,
                num_rows,
                candidate_ptr,
                merged_ptr,
                union_ptr,
                flags,
                pick(draw, rows, row, R),
                pick(tau, rows, row, R),
                pick(greedy.to(tl.int32), rows, row, R) > 0,
                pick(round_low, rows, row, R),
                pick(round_high, rows, row, R),
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
        row += 1


def launch_pair_markov(
    rank: PairRank,
    step: int,
    logits: torch.Tensor,
    control: torch.Tensor,
    previous: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    *,
    last: bool,
    part: int = 64,
) -> None:
    """The same for rows that may be uncached; see `markov_head.launch_markov_position`.

    Args:
        rank: This rank.
        step: Position within the chain.
        logits: bf16 [B, >= shard].
        control: int32 [B, 16].
        previous: int32 [B], global previous tokens.
        w1: bf16 [V, r], the whole table.
        w2: bf16 [shard, r], the rows of this rank's shard.
        slots: int32 [V].
        cache: bf16 [C, >= shard], at least one row.
        last: Whether this position ends the chain.
        part: Columns of W2 that a program multiplies at a time; no part of the result.

    Raises:
        ValueError: Dtypes or shapes.
    """
    tiling = rank.settings.tiling
    num_rows = rank.require_rows(control)
    require_logits(logits, num_rows, tiling.vocab_size)
    size = w2.shape[1]
    for name, tensor, length in (("w1", w1, rank.vocab_size), ("w2", w2, tiling.vocab_size)):
        if tensor.dtype != torch.bfloat16 or tensor.shape != (length, size) or not tensor.is_contiguous():
            raise ValueError(f"{name}: expected contiguous bf16 [{length}, {size}], found {tuple(tensor.shape)}")
    if num_rows > MAX_SHARED_ROWS or size % LANES.value:
        raise ValueError(f"expected <= {MAX_SHARED_ROWS} rows and a rank of {LANES.value}s, found {num_rows}, {size}")
    shared = triton.next_power_of_2(num_rows)
    pair_markov_kernel[(tiling.num_tiles,)](
        logits.view(torch.int16),
        logits.stride(0),
        cache.view(torch.int16),
        cache.stride(0),
        slots,
        w1.view(torch.int16),
        w2.view(torch.int16),
        previous,
        control,
        *output_arguments(rank, step),
        *rank.connection(),
        num_rows,
        rank.vocab_size,
        tiling.vocab_size,
        tiling.num_tiles,
        step,
        int(last),
        R=shared,
        RANK=size,
        SUB=min(part, tiling.tile),
        **shared_constants(rank),
    )
