"""Device side of the verifier: one kernel in five stages, in one launch or in a launch for each.

A program owns one tile of one target row and keeps it in registers. Stages hand on `words`. STAGE 0 runs all stages
and waits for words in between: its programs must be resident together. STAGE n runs the n-th alone and finds every
word in place. Only integers are added, so tiles, shards, stages and order do not matter.

Everywhere: turn is the turn of this call; LOOKS bounds a wait; ids int32 [K] are a support, -1 where unused.
"""

from __future__ import annotations

import triton
import triton.language as tl

from remote_dspark.kernels.draws import philox4x32
from remote_dspark.kernels.finish import NAN_FLAG, POSITIVE_INFINITY_FLAG, ZERO_MASS_FLAG, u64
from remote_dspark.kernels.verifier_weights import (
    below,
    f32_key,
    f32_of_key,
    greater,
    num_runs,
    run_sums_of,
    small_sum,
    spread,
    target_weight,
    tile_bounds,
)
from remote_dspark.kernels.words import MISSING_FLAG, look, next_turn, payload_of, publish, wait_for

PROPOSAL_FLAG = tl.constexpr(64)
_NAN_KEY = tl.constexpr(2147483647)
_INFINITY_BITS = tl.constexpr(2139095040)


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
def _draft_row(line, drafted, greedy, proposed_ptr, ids_ptr, q_ptr, count_ptr, vocab_size, K: tl.constexpr):
    """Proposed token, support and tickets of one draft row, and whether the token could have been drawn from it.

    Returns:
        token, ids int32 [K] (-1 beyond the row's entries), tickets int32 [K], tickets of the token, is_valid.
    """
    token = tl.load(proposed_ptr + line, mask=drafted, other=0)
    count = tl.load(count_ptr + line, mask=drafted, other=0)
    entries = tl.arange(0, K)
    # loaded without waiting for the count
    inside = drafted & (entries >= 0)
    at = line * K + entries
    ids = tl.load(ids_ptr + at, mask=inside, other=-1)
    before = tl.load(ids_ptr + at - 1, mask=inside & (entries > 0), other=-1)
    tickets = (tl.load(q_ptr + at, mask=inside, other=0.0) * 16777216.0).to(tl.int32)
    present = drafted & (entries < count)
    ids = tl.where(present, ids, -1)
    tickets = tl.where(present, tickets, 0)
    # a greedy row has no entries and stands for all tickets at its token
    one_hot = drafted & (count == 0) & greedy & (entries == 0)
    ids = tl.where(one_hot, token, ids)
    tickets = tl.where(one_hot, 16777216, tickets)
    own = tl.sum(tl.where(ids == token, tickets, 0), axis=0)
    ordered = (ids > before) & (ids < vocab_size) & (tickets >= 0)
    num_bad = tl.sum((present & (ordered == 0)).to(tl.int32), axis=0)
    in_range = (token >= 0) & (token < vocab_size)
    could = (num_bad == 0) & in_range & (own > 0) & (tl.sum(tickets, axis=0) == 16777216)
    return tl.where(in_range, token, 0), ids, tickets, own, could | (drafted == 0)


@triton.jit
def _row_flags(key):
    """`RowError` flags of the maximum of a target row."""
    flags = tl.where(key == _NAN_KEY, NAN_FLAG, 0) | tl.where(key == _INFINITY_BITS, POSITIVE_INFINITY_FLAG, 0)
    return flags | tl.where(f32_of_key(key) == float("-inf"), ZERO_MASS_FLAG, 0)


@triton.jit
def _passed(ids, lost, limit):
    """What the support loses before column ``limit``."""
    return small_sum(tl.where(ids < limit, lost, 0), 19)


@triton.jit
def _num_below(prefix, index, N: tl.constexpr):
    """How many of the entries of a tuple of N tensors are at most ``index``."""
    found = (prefix[0] <= index).to(tl.int32)
    for part in tl.static_range(1, N):
        found += (prefix[part] <= index).to(tl.int32)
    return tl.sum(found, axis=0)


@triton.jit
def _locate(prefix, index, origin, ids, lost, SIZE: tl.constexpr, N: tl.constexpr):
    """First entry whose prefix, less what is lost up to the end of that entry, exceeds ``index``.

    Losses passed are added until there are no more: from the left, and never beyond the wanted entry, because both
    prefixes only grow. A row of losses as wide as the tile would cost more.

    Takes:
        prefix: A tuple of N int64 tensors, inclusive sums of weights of entries of SIZE columns from column ``origin``.
        ids: int32 [K] support.
        lost: int64 [K], what it loses, 0 outside these entries.
    """
    entry = _num_below(prefix, index, N)
    passed = _passed(ids, lost, origin + (entry + 1) * SIZE)
    counted = passed * 0
    while passed > counted:
        counted = passed
        entry = _num_below(prefix, index + counted, N)
        passed = _passed(ids, lost, origin + (entry + 1) * SIZE)
    return entry


@triton.jit
def _find_in_tile(line_ptr, run_sums, top, base, end, ids, lost, index, SIZE: tl.constexpr, RUNS: tl.constexpr):
    """The token of a tile on which an index falls: first the run of columns, then the column in it.

    Every warp does all of it, a lane for neighbouring columns, so that no warp waits for another.

    Takes:
        line_ptr: float32 target row.
        run_sums: int64 [RUNS], weights of the tile's runs of SIZE columns.
        top: The row's maximum.
        base: First column of the tile.
        end: First column beyond its shard.
        ids: int32 [K] support.
        lost: int64 [K], what it loses in this tile.
        index: int64 below the tile's weights less its losses.
    """
    LANES: tl.constexpr = SIZE if SIZE < 32 else 32
    OWN: tl.constexpr = SIZE // LANES
    run = _locate((tl.cumsum(run_sums, axis=0),), index, base, ids, lost, SIZE, 1)
    first = base + run * SIZE
    columns = first + tl.arange(0, LANES) * OWN
    weights = ()
    for part in tl.static_range(OWN):
        values = tl.load(line_ptr + columns + part, mask=columns + part < end, other=float("-inf"))
        weights += (target_weight(values - top),)  # type: ignore[assignment]
    index -= small_sum(tl.where(tl.arange(0, RUNS) < run, run_sums, 0), 25)
    index += _passed(ids, lost, first)
    lost = tl.where(ids < first, 0, lost)
    own = weights[0]  # type: ignore[misc]
    for part in tl.static_range(1, OWN):
        own += weights[part]
    before = tl.cumsum(own, axis=0) - own
    prefix = ()
    for part in tl.static_range(OWN):
        before += weights[part]
        prefix += (before,)  # type: ignore[assignment]
    return first + _locate(prefix, index, first, ids, lost, 1, OWN)


@triton.jit
def _or(left, right):
    """Flags of either."""
    return left | right


@triton.jit
def _close(
    control_ptr,
    verdicts_ptr,
    turn_ptr,
    accepted_ptr,
    tokens_ptr,
    zero_ptr,
    error_ptr,
    totals_ptr,
    stamp_ptr,
    turn,
    num_requests,
    num_rows,
    D: tl.constexpr,
    D2: tl.constexpr,
    R2: tl.constexpr,
    N2: tl.constexpr,
    LOOKS: tl.constexpr,
):
    """What does not depend on a deciding row: errors, stamps, refused requests' outputs, and the next turn."""
    rows = tl.arange(0, N2)
    there = rows < num_rows
    _, stalled = wait_for(look(verdicts_ptr, rows, there), verdicts_ptr, rows, there, turn, LOOKS)
    requests = tl.arange(0, R2)
    real = requests < num_requests
    control = control_ptr + requests * 16
    num_draft = tl.load(control + 11, mask=real, other=0)
    first = tl.load(control + 12, mask=real, other=0)
    fits = _fits(first, num_draft, num_rows, D)
    steps = tl.arange(0, D2)[None, :]
    own = (real & fits)[:, None] & (steps <= num_draft[:, None])
    verdicts = look(verdicts_ptr, first[:, None] + steps, own)
    flags = tl.reduce((payload_of(verdicts) >> 1).to(tl.int32), 1, _or)
    flags = flags | stalled | tl.where(fits, 0, MISSING_FLAG)
    tl.store(error_ptr + requests, flags, mask=real)
    tl.store(accepted_ptr + requests, flags * 0, mask=real & (flags != 0))
    tl.store(zero_ptr + requests, flags * 0, mask=real & (flags != 0))
    at = requests[:, None] * (D + 1) + steps
    inside = real[:, None] & (steps <= D)
    tl.store(tokens_ptr + at, tl.zeros([R2, D2], tl.int32), mask=inside & (flags != 0)[:, None])
    tl.store(totals_ptr + at, tl.zeros([R2, D2], tl.int64), mask=inside & (own == 0))
    fields = tl.arange(0, 4)[None, :]
    words = control[:, None] + tl.where(fields == 0, 7, tl.where(fields == 1, 2, 9))
    stamped = real[:, None] & (fields < 3)
    stamp = u64(tl.load(words, mask=stamped, other=0), tl.load(words + 1, mask=stamped, other=0))
    tl.store(stamp_ptr + requests[:, None] * 3 + fields, stamp, mask=stamped)
    tl.store(turn_ptr, next_turn(turn))


@triton.jit
def _fits(first, num_draft, num_rows, D: tl.constexpr):
    """Whether a request's target rows exist."""
    return (first >= 0) & (num_draft >= 0) & (num_draft <= D) & (first + num_draft < num_rows)


@triton.jit
def verify_kernel(
    target_ptr,
    target_stride,
    control_ptr,
    proposed_ptr,
    ids_ptr,
    q_ptr,
    count_ptr,
    turn_ptr,
    maxima_ptr,
    sums_ptr,
    verdicts_ptr,
    accepted_ptr,
    tokens_ptr,
    zero_ptr,
    error_ptr,
    totals_ptr,
    stamp_ptr,
    vocab_size,
    shard_size,
    num_tiles,
    num_requests,
    num_rows,
    D: tl.constexpr,
    D2: tl.constexpr,
    R2: tl.constexpr,
    N2: tl.constexpr,
    T2: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    RUN: tl.constexpr,
    LOOKS: tl.constexpr,
    STAGE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One tile of one target row; a row of no request only stores its words. Grid (tiles of a shard, rows, shards)."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    RUNS: tl.constexpr = num_runs(TILE, PARTS, RUN)
    tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    row = tl.program_id(1)
    line_ptr = target_ptr + row.to(tl.int64) * target_stride
    base, end = tile_bounds(vocab_size, shard_size, TILE)
    columns = base + spread(TILE, PARTS, RUN)
    values = tl.load(line_ptr + columns, mask=columns < end, other=float("-inf"))
    turn = tl.load(turn_ptr)
    tiles = tl.arange(0, T2)
    is_tile = tiles < num_tiles
    row_maxima = maxima_ptr + row * num_tiles
    row_sums = sums_ptr + row * num_tiles

    requests = tl.arange(0, R2)
    real = requests < num_requests
    drafts = tl.load(control_ptr + requests * 16 + 11, mask=real, other=0)
    firsts = tl.load(control_ptr + requests * 16 + 12, mask=real, other=0)

    if STAGE == 0 or STAGE == 1:
        key = f32_key(tl.reduce(values, 0, greater))
        publish(row_maxima + tile, turn, key.to(tl.int64) + 0x80000000)

    # what the decision needs and no other program has to say, while the maxima are on their way
    if STAGE == 0 or STAGE >= 3:
        request = tl.max(tl.where(real & (row >= firsts) & (row <= firsts + drafts), requests, -1), axis=0)
        num_draft = tl.sum(tl.where(requests == request, drafts, 0), axis=0)
        first = tl.sum(tl.where(requests == request, firsts, 0), axis=0)
        used = (request >= 0) & _fits(first, num_draft, num_rows, D)
        request = tl.maximum(request, 0)
        step = row - first
        drafted = used & (step < num_draft)
        control = control_ptr + request * 16
        token, ids, tickets, own_tickets, is_valid = _draft_row(
            request * D + step,
            drafted,
            tl.load(control + 6) != 0,
            proposed_ptr,
            ids_ptr,
            q_ptr,
            count_ptr,
            vocab_size,
            K,
        )
        at_ids = tl.load(line_ptr + ids, mask=(ids >= 0) & (ids < vocab_size), other=float("-inf"))
        at_token = tl.load(line_ptr + token, mask=drafted, other=float("-inf"))
        key0 = tl.load(control)
        key1 = tl.load(control + 1)
        round_low = tl.load(control + 2)
        position = tl.load(control + 4) + step
        draw, _ = philox4x32(round_low, position, 2, 0, key0, key1)
        low, high = philox4x32(round_low, position, tl.where(drafted, 3, 4), 0, key0, key1)
        steps = tl.arange(0, D2)
        proposed = tl.load(proposed_ptr + request * D + steps, mask=used & (steps < step), other=0)

    if STAGE != 1:
        maxima, missing = wait_for(look(row_maxima, tiles, is_tile), row_maxima, tiles, is_tile, turn, LOOKS)
        key = (tl.max(maxima, axis=0) - 0x80000000).to(tl.int32)
        row_flags = _row_flags(key)
        top = tl.where(row_flags == 0, f32_of_key(key), 0.0)
        run_sums = tl.zeros([RUNS], tl.int64)
        if row_flags == 0:
            run_sums = run_sums_of(target_weight(values - top), TILE, PARTS, RUN)

    if STAGE == 0 or STAGE == 2:
        publish(row_sums + tile, turn, small_sum(run_sums, 25))

    if STAGE == 0 or STAGE >= 3:
        token_weight = target_weight(below(at_token, top))
        id_weights = target_weight(below(at_ids, top))
        sums, late = wait_for(look(row_sums, tiles, is_tile), row_sums, tiles, is_tile, turn, LOOKS)
        total = tl.sum(sums, axis=0)
        is_accepted = drafted & accept(draw, own_tickets, total, token_weight)
        flags = row_flags | missing | late | tl.where(is_valid, 0, PROPOSAL_FLAG)

    if STAGE == 0 or STAGE == 3:
        if tile == 0:
            publish(verdicts_ptr + row, turn, (flags * 2 + is_accepted.to(tl.int32)).to(tl.int64))
            tl.store(totals_ptr + request * (D + 1) + step, total, mask=used)

    if STAGE == 0 or STAGE == 4:
        if used & (flags == 0) & (is_accepted == 0):
            lost = _lost(id_weights, tickets.to(tl.int64), total)
            mass = total - small_sum(lost, 19)
            is_zero = mass <= 0
            lost = tl.where(is_zero, 0, lost)
            mass = tl.where(is_zero, total, mass)
            index = tl.umulhi(u64(low, high).to(tl.uint64), mass.to(tl.uint64)).to(tl.int64)
            # from the first weight of this tile; tokens that lose nothing have id -1
            index -= tl.sum(tl.where(tiles < tile, sums, 0), axis=0) - _passed(ids, lost, base)
            lost = tl.where((ids >= base) & (ids < tl.minimum(base + TILE, end)), lost, 0)
            if (index >= 0) & (index < small_sum(run_sums, 25) - small_sum(lost, 19)):
                own = steps <= num_draft
                looked = look(verdicts_ptr + first, steps, own)
                final = _find_in_tile(line_ptr, run_sums, top, base, end, ids, lost, index, TILE // RUNS, RUNS)
                verdicts, late = wait_for(looked, verdicts_ptr + first, steps, own, turn, LOOKS)
                all_flags = late | tl.reduce((verdicts >> 1).to(tl.int32), 0, _or)
                num_accepted = tl.min(tl.where((verdicts & 1) == 0, steps, D2), axis=0)
                if (all_flags == 0) & (num_accepted == step):
                    outputs = tl.where(steps == step, final, proposed)
                    tl.store(tokens_ptr + request * (D + 1) + steps, outputs, mask=steps <= D)
                    tl.store(accepted_ptr + request, num_accepted)
                    tl.store(zero_ptr + request, (is_zero & drafted).to(tl.int32))

    if STAGE == 0 or STAGE == 5:
        if (tile == 0) & (row == 0):
            _close(
                control_ptr,
                verdicts_ptr,
                turn_ptr,
                accepted_ptr,
                tokens_ptr,
                zero_ptr,
                error_ptr,
                totals_ptr,
                stamp_ptr,
                turn,
                num_requests,
                num_rows,
                D,
                D2,
                R2,
                N2,
                LOOKS,
            )
