"""Device side of the verifier: row maxima, weight sums of tiles, and one program per request that decides.

Only integers are added here, so tiles, shards and order do not matter. The host side and the reasons for three
launches are in `verifier`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from remote_dspark.kernels.draws import philox4x32
from remote_dspark.kernels.finish import NAN_FLAG, POSITIVE_INFINITY_FLAG, ZERO_MASS_FLAG, u64
from remote_dspark.kernels.rounding import fixed_weight

PROPOSAL_FLAG = tl.constexpr(64)
_NO_VALUE = tl.constexpr(-2147483648)
_INFINITY_BITS = tl.constexpr(2139095040)


@triton.jit
def _f32_key(values):
    """int32 keys that order like float32 values; NaN is above everything, -inf below every finite value."""
    bits = values.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(values != values, 2147483647, key)


@triton.jit
def _f32_of_key(key):
    """Inverse of `_f32_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _greater(left, right):
    """The greater value; NaN wins, so that a bad value anywhere in a row reaches its maximum."""
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _tile_columns(tile, vocab_size, shard_size, tiles_per_shard, TILE: tl.constexpr):
    """First column and columns of a tile, and which of them are real and in its shard."""
    shard = tile // tiles_per_shard
    base = shard * shard_size + (tile - shard * tiles_per_shard) * TILE
    columns = base + tl.arange(0, TILE)
    return base, columns, columns < tl.minimum((shard + 1) * shard_size, vocab_size)


@triton.jit
def target_max_kernel(
    target_ptr,
    target_stride,
    top_ptr,
    vocab_size,
    shard_size,
    tiles_per_shard,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Maximum of each target row as a key; NaN and +inf show in it. Grid (tiles, rows)."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1)
    _, columns, real = _tile_columns(tl.program_id(0), vocab_size, shard_size, tiles_per_shard, TILE)
    values = tl.load(target_ptr + row.to(tl.int64) * target_stride + columns, mask=real, other=float("-inf"))
    tl.atomic_max(top_ptr + row, _f32_key(tl.reduce(values, 0, _greater)), sem="relaxed")


@triton.jit
def target_weights_kernel(
    target_ptr, target_stride, top_ptr, weights_ptr, vocab_size, shard_size, tiles_per_shard, TILE: tl.constexpr
):
    """The weights themselves, int64 [rows, V]: what the verifier sums, for checks. Grid (tiles, rows)."""
    row = tl.program_id(1).to(tl.int64)
    _, columns, real = _tile_columns(tl.program_id(0), vocab_size, shard_size, tiles_per_shard, TILE)
    values = tl.load(target_ptr + row * target_stride + columns, mask=real, other=float("-inf"))
    top = _f32_of_key(tl.load(top_ptr + row))
    tl.store(weights_ptr + row * vocab_size + columns, fixed_weight(values - top), mask=real)


@triton.jit
def accept(draw, tickets, total, weight):
    """``draw * tickets * total < weight * 2**56`` in 128 bits, element by element."""
    left = draw.to(tl.uint64) * tickets.to(tl.uint64)
    wide_total = total.to(tl.uint64)
    high = tl.umulhi(left, wide_total)
    low = left * wide_total
    limit = weight.to(tl.uint64)
    return (high < (limit >> 8)) | ((high == (limit >> 8)) & (low < (limit << 56)))


@triton.jit
def _lost(weights, tickets, total):
    """What residual weights lose against w: ``min(w, floor(c * S / 2**24))``, in 64 bits."""
    share = tickets * (total >> 24) + ((tickets * (total & 0xFFFFFF)) >> 24)
    return tl.minimum(weights, share)


@triton.jit
def _draft_rows(
    request,
    steps,
    num_draft,
    greedy,
    proposed_ptr,
    ids_ptr,
    q_ptr,
    count_ptr,
    vocab_size,
    D: tl.constexpr,
    D2: tl.constexpr,
    K: tl.constexpr,
):
    """Proposed tokens, support and tickets of all draft rows of a request, and whether all could have been drawn.

    Returns:
        tokens int32 [D2], ids int32 [D2, K] (-1 beyond a row's entries), tickets int32 [D2, K], tickets of the token
        int32 [D2], is_valid (scalar).
    """
    drafted = steps < num_draft
    line = request * D + steps
    tokens = tl.load(proposed_ptr + line, mask=drafted, other=0)
    counts = tl.load(count_ptr + line, mask=drafted, other=0)
    entries = tl.arange(0, K)[None, :]
    present = (entries < counts[:, None]) & drafted[:, None]
    # loaded without waiting for the counts
    inside = drafted[:, None] & (entries >= 0)
    at = line[:, None] * K + entries
    ids = tl.where(present, tl.load(ids_ptr + at, mask=inside, other=-1), -1)
    before = tl.load(ids_ptr + at - 1, mask=inside & (entries > 0), other=-1)
    tickets = (tl.load(q_ptr + at, mask=inside, other=0.0) * 16777216.0).to(tl.int32)
    tickets = tl.where(present, tickets, 0)
    # a greedy row has no entries and stands for all tickets at its token
    one_hot = drafted & (counts == 0) & greedy
    ids = tl.where(one_hot[:, None] & (entries == 0), tokens[:, None], ids)
    tickets = tl.where(one_hot[:, None] & (entries == 0), 16777216, tickets)
    own = tl.sum(tl.where(ids == tokens[:, None], tickets, 0), axis=1)
    ordered = (ids > before) & (ids < vocab_size) & (tickets >= 0)
    bad_entry = tl.sum((present & (ordered == 0)).to(tl.int32), axis=1) > 0
    in_range = (tokens >= 0) & (tokens < vocab_size)
    bad = drafted & (bad_entry | (in_range == 0) | (own <= 0) | (tl.sum(tickets, axis=1) != 16777216))
    return tl.where(in_range, tokens, 0), ids, tickets, own, tl.max(bad.to(tl.int32), axis=0) == 0


@triton.jit
def _pick(values, steps, index):
    """The element at ``index`` of a vector."""
    return tl.sum(tl.where(steps == index, values, 0), axis=0)


@triton.jit
def _draw_from_row(
    line_ptr,
    top,
    sums,
    ids,
    lost,
    loss_ptr,
    draw_low,
    draw_high,
    total,
    vocab_size,
    shard_size,
    tiles_per_shard,
    T2: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
):
    """The token that a 64-bit draw falls on, in a row whose support entries lose ``lost`` (zero for p itself).

    Takes:
        line_ptr: float32 target row.
        top: Its maximum.
        sums: int64 [T2], weights of each tile.
        ids: int32 [K] support, -1 where unused.
        lost: int64 [K].
        loss_ptr: int64 [TILE] scratch of this request, all 0; left all 0.
        total: Mass after the losses, positive.
    """
    shard = ids // shard_size
    tile_of = shard * tiles_per_shard + (ids - shard * shard_size) // TILE
    tiles = tl.arange(0, T2)
    inside = (tile_of[None, :] == tiles[:, None]) & (ids >= 0)[None, :]
    sums = sums - tl.sum(tl.where(inside, lost[None, :], 0), axis=1)
    index = tl.umulhi(u64(draw_low, draw_high).to(tl.uint64), total.to(tl.uint64)).to(tl.int64)
    prefix = tl.cumsum(sums, axis=0)
    tile = tl.sum((prefix <= index).to(tl.int32), axis=0)
    index -= tl.sum(tl.where(tiles < tile, sums, 0), axis=0)
    base, columns, real = _tile_columns(tile, vocab_size, shard_size, tiles_per_shard, TILE)
    here = (tile_of == tile) & (ids >= 0)
    tl.store(loss_ptr + tl.where(here, ids - base, 0), lost, mask=here)
    values = tl.load(line_ptr + columns, mask=real, other=float("-inf"))
    # the losses are read by other threads than wrote them
    tl.debug_barrier()
    weights = fixed_weight(values - top) - tl.load(loss_ptr + tl.arange(0, TILE))
    tl.debug_barrier()
    tl.store(loss_ptr + tl.where(here, ids - base, 0), lost * 0, mask=here)
    return base + tl.sum((tl.cumsum(weights, axis=0) <= index).to(tl.int32), axis=0)


@triton.jit
def verify_kernel(
    target_ptr,
    target_stride,
    top_ptr,
    sum_ptr,
    loss_ptr,
    control_ptr,
    proposed_ptr,
    ids_ptr,
    q_ptr,
    count_ptr,
    accepted_ptr,
    tokens_ptr,
    zero_ptr,
    error_ptr,
    totals_ptr,
    stamp_ptr,
    vocab_size,
    shard_size,
    tiles_per_shard,
    num_tiles,
    D: tl.constexpr,
    D2: tl.constexpr,
    T2: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Everything that one request needs after its rows are summed. Grid (requests,)."""
    request = tl.program_id(0)
    control = control_ptr + request * 16
    num_draft = tl.load(control + 11)
    first_row = tl.load(control + 12)
    key0 = tl.load(control)
    key1 = tl.load(control + 1)
    round_low = tl.load(control + 2)
    position = tl.load(control + 4)
    steps = tl.arange(0, D2)
    rows = first_row + steps
    own = steps <= num_draft
    tokens, ids, tickets, own_tickets, is_valid = _draft_rows(
        request,
        steps,
        num_draft,
        tl.load(control + 6) != 0,
        proposed_ptr,
        ids_ptr,
        q_ptr,
        count_ptr,
        vocab_size,
        D,
        D2,
        K,
    )
    tops = tl.load(top_ptr + rows, mask=own, other=_NO_VALUE, cache_modifier=".cg")
    lines = target_ptr + rows.to(tl.int64) * target_stride
    maxima = _f32_of_key(tops)
    at_ids = tl.load(lines[:, None] + ids, mask=(ids >= 0) & (ids < vocab_size), other=float("-inf"))
    at_tokens = tl.load(lines + tokens, mask=steps < num_draft, other=float("-inf"))

    flags = tl.max(tl.where(own & (tops == 2147483647), NAN_FLAG, 0), axis=0)
    infinite = own & (tops == _INFINITY_BITS)
    flags = flags | tl.max(tl.where(infinite, POSITIVE_INFINITY_FLAG, 0), axis=0)
    masked = own & (maxima == float("-inf"))
    flags = flags | tl.max(tl.where(masked, ZERO_MASS_FLAG, 0), axis=0)
    flags = flags | tl.where(is_valid, 0, PROPOSAL_FLAG)
    bad = (tops == 2147483647) | infinite | masked
    safe = tl.where(bad, 0.0, maxima)
    token_weights = fixed_weight(at_tokens - safe)
    draws, _ = philox4x32(round_low, position + steps, 2, 0, key0, key1)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    tiles = tl.arange(0, T2)
    live = own[:, None] & (tiles < num_tiles)[None, :]
    sums = tl.load(sum_ptr + rows[:, None] * num_tiles + tiles[None, :], mask=live, other=0, cache_modifier=".cg")
    totals = tl.sum(sums, axis=1)
    accepted = accept(draws, own_tickets, totals, token_weights)
    num_accepted = tl.min(tl.where((steps < num_draft) & (accepted == 0), steps, num_draft), axis=0)

    # the deciding row: the rejected one, or the bonus row, which has no support and so loses nothing
    here = steps == num_accepted
    total = _pick(totals, steps, num_accepted)
    row_top = _pick(safe, steps, num_accepted)
    row_ids = tl.sum(tl.where(here[:, None], ids + 1, 0), axis=0) - 1
    row_tickets = tl.sum(tl.where(here[:, None], tickets, 0), axis=0).to(tl.int64)
    row_values = tl.sum(tl.where(here[:, None], at_ids, 0.0), axis=0)
    lost = _lost(fixed_weight(row_values - row_top), row_tickets, total)
    mass = total - tl.sum(lost, axis=0)
    is_zero = mass <= 0
    lost = tl.where(is_zero, 0, lost)
    mass = tl.where(is_zero, total, mass)
    is_bonus = num_accepted == num_draft
    domain = tl.where(is_bonus, 4, 3)
    low, high = philox4x32(round_low, position + num_accepted, domain, 0, key0, key1)
    row = first_row + num_accepted
    row_sums = tl.sum(tl.where(here[:, None], sums, 0), axis=0)
    final = _draw_from_row(
        target_ptr + row.to(tl.int64) * target_stride,
        row_top,
        row_sums,
        row_ids,
        lost,
        loss_ptr + request * TILE,
        low,
        high,
        tl.maximum(mass, 1),
        vocab_size,
        shard_size,
        tiles_per_shard,
        T2,
        K,
        TILE,
    )
    good = flags == 0
    emitted = tl.where(steps < num_accepted, tokens, tl.where(here, final, 0))
    tl.store(tokens_ptr + request * (D + 1) + steps, tl.where(good, emitted, 0), mask=steps <= D)
    tl.store(totals_ptr + request * (D + 1) + steps, totals, mask=steps <= D)
    tl.store(accepted_ptr + request, tl.where(good, num_accepted, 0))
    tl.store(zero_ptr + request, tl.where(good & is_zero & (is_bonus == 0), 1, 0))
    tl.store(error_ptr + request, flags)
    fields = tl.arange(0, 4)
    words = tl.where(fields == 0, 7, tl.where(fields == 1, 2, 9))
    stamp = u64(tl.load(control + words), tl.load(control + words + 1))
    tl.store(stamp_ptr + request * 3 + fields, stamp, mask=fields < 3)
    # ready for the next call
    tl.store(top_ptr + rows, tl.full([D2], _NO_VALUE, tl.int32), mask=own)


@triton.jit
def target_sum_kernel(
    target_ptr,
    target_stride,
    top_ptr,
    sum_ptr,
    vocab_size,
    shard_size,
    tiles_per_shard,
    num_tiles,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sum of the weights of one tile of one row. Grid (tiles, rows)."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    _, columns, real = _tile_columns(tile, vocab_size, shard_size, tiles_per_shard, TILE)
    values = tl.load(target_ptr + row.to(tl.int64) * target_stride + columns, mask=real, other=float("-inf"))
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        # only now: whoever starts after this finds the maxima complete
        tl.extra.cuda.gdc_launch_dependents()
    weights = fixed_weight(values - _f32_of_key(tl.load(top_ptr + row, cache_modifier=".cg")))
    # at most 4,096 parts of at most 2**19: the sums fit 32 bits without a sign
    low = tl.sum((weights & 0x7FFFF).to(tl.int32), axis=0).to(tl.int64) & 0xFFFFFFFF
    high = tl.sum((weights >> 19).to(tl.int32), axis=0).to(tl.int64) & 0xFFFFFFFF
    tl.store(sum_ptr + row * num_tiles + tile, (high << 19) + low)
