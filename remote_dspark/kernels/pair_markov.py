"""The sampled head of a physical pair on rows that may be uncached: the Markov bias of half of the vocabulary.

As in `markov_head`, a program owns one tile for all rows, which share the read of this rank's half of W2. The rows are
finished, and exchanged, by one program, so they share one channel. The rules of `pair_head` hold here too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from remote_dspark.kernels.finish import CONTINUATION_FLAG, emit_tile, retire
from remote_dspark.kernels.markov_head import MAX_SHARED_ROWS, _tile_keys
from remote_dspark.kernels.markov_product import LANES
from remote_dspark.kernels.pair_finish import finish_pair
from remote_dspark.kernels.pair_head import RUN_TIME, output_arguments, shared_constants
from remote_dspark.kernels.pair_rank import PairRank
from remote_dspark.kernels.sampled_head import require_logits


@triton.jit(do_not_specialize=RUN_TIME)
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
    if R == 1:
        rows = base * 0
    else:
        rows = tl.arange(0, R)
    exists = rows < num_rows
    previous = tl.load(previous_ptr + rows, mask=exists, other=0)
    known = (previous >= 0) & (previous < vocab_size)
    previous = tl.where(known, previous, 0)
    slot = tl.load(slot_ptr + previous, mask=exists, other=0)
    keys = _tile_keys(
        logits_ptr,
        logits_stride,
        bias_ptr,
        bias_stride,
        w1_ptr,
        w2_ptr,
        rows,
        exists,
        previous,
        slot,
        slot >= 0,
        base + tl.arange(0, TILE),
        base,
        shard_size,
        step >> 16,
        R,
        RANK,
        TILE,
        SUB,
    )
    candidates = candidate_ptr + rows * (num_tiles * K)
    top = emit_tile(keys, candidates + tile * K, exists, R, K, TILE, TILE_DIRECT)
    before = retire(counter_ptr, flag_ptr + rows, top, exists, R)
    if before == num_tiles - 1:
        flags = tl.load(flag_ptr + rows, mask=exists, other=0, cache_modifier=".cg")
        flags = flags | tl.where(known, 0, CONTINUATION_FLAG)
        tl.store(counter_ptr, 0)
        tl.store(flag_ptr + rows, flags * 0, mask=exists)
        finish_pair(
            rows,
            exists,
            0,
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
            R,
            K,
            TILE,
            N,
            MERGE_DIRECT,
            FLOOR_FIRST,
            EMIT_WEIGHTS,
        )


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
    max_registers: int | None = None,
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
        part: Columns of W2 that a program multiplies at a time.
        max_registers: Cap for the compiler, or None.

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
        maxnreg=max_registers,
        **shared_constants(rank, shared),
    )
