"""Attention of a draft block over its seat's committed context and over itself.

A program owns one key head of one request, some of the query heads that share it, and one share of the context.
Shares follow the request's own context length, never the batch; the program that retires last merges them in
ascending order. Inside the block attention has no order; context keys are strictly before the anchor.

Covered: grouped query heads, any context length that the seat holds, block sizes up to 16. Head width a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from remote_dspark.kernels.backbone_matmul import bf16_bits, partial_sum
from remote_dspark.kernels.backbone_rows import normalised_halves, weight_halves
from remote_dspark.kernels.rounding import bf16_to_f32

SPLITS = 8
"""Shares that a context is cut into at most; the block itself is one more."""

SHORTEST = 2
"""Tiles of a share at least: merging a share costs more than reading one."""

TILE = 64
"""Context positions of one step."""

QUERIES = 16
"""Query rows of a program: what a matrix product needs; fewer heads of a group at once take less time."""


@triton.jit
def _operand(values, WIDE: tl.constexpr):
    """A matrix operand: BF16, or FP32 where the interpreter would multiply BF16 as integers."""
    return values.to(tl.float32) if WIDE else values.to(tl.bfloat16)


@triton.jit
def _attend(top, mass, mixed, first, second, key_first, key_second, value, is_key, scale, WIDE: tl.constexpr):
    """One step of the running softmax: highest score [M], sum of weights [M], weighted values [M, head]."""
    scores = tl.dot(first, tl.trans(_operand(key_first, WIDE)), input_precision="ieee")
    scores = tl.dot(second, tl.trans(_operand(key_second, WIDE)), scores, input_precision="ieee") * scale
    scores = tl.where(is_key[None, :], scores, -float("inf"))
    best = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.exp2(scores - best[:, None])
    fade = tl.exp2(top - best)
    mixed = tl.dot(_operand(weights, WIDE), _operand(value, WIDE), mixed * fade[:, None], input_precision="ieee")
    return best, mass * fade + tl.sum(weights, axis=1), mixed


@triton.jit
def _block_half(partial_ptr, SHARES: tl.constexpr, step, row, column, at, real):
    """One half of the heads of block rows, [n, HALF]."""
    return partial_sum(partial_ptr, SHARES, step, row[:, None] + (column[:, None] + at[None, :]), real[:, None])


@triton.jit
def _angles(cos_ptr, sin_ptr, positions, at, real, HALF: tl.constexpr):
    """Cosines and sines of positions [n], each [n, HALF]."""
    angle = positions[:, None] * HALF + at[None, :]
    cos = bf16_to_f32(tl.load(cos_ptr + angle, mask=real[:, None], other=0))
    return cos, bf16_to_f32(tl.load(sin_ptr + angle, mask=real[:, None], other=0))


@triton.jit
def _merged(parts, num_active, query, whole, QUERIES: tl.constexpr, HEAD: tl.constexpr, SPLITS: tl.constexpr):
    """Weighted values [QUERIES, HEAD] of all shares, added in ascending order, and their masses [QUERIES].

    Other programs wrote the shares: they are read where those writes are, in L2. No read waits for another one's value.
    """
    SIZE: tl.constexpr = QUERIES * (HEAD + 2)
    share = tl.arange(0, 2 * SPLITS)
    line = parts + share[:, None] * SIZE + query[None, :]
    is_active = (share < num_active)[:, None]
    tops = tl.load(line, mask=is_active, other=-float("inf"), cache_modifier=".cg")
    masses = tl.load(line + QUERIES, mask=is_active, other=0.0, cache_modifier=".cg")
    best = tl.max(tops, axis=0)
    mass = tl.sum(masses * tl.exp2(tops - best[None, :]), axis=0)
    mixed = tl.zeros([QUERIES, HEAD], tl.float32)
    for index in tl.static_range(SPLITS + 1):
        other = parts + index * SIZE
        theirs = tl.load(other + query, mask=index < num_active, other=-float("inf"), cache_modifier=".cg")
        where = other + 2 * QUERIES + query[:, None] * HEAD + whole[None, :]
        their_mixed = tl.load(where, mask=index < num_active, other=0.0, cache_modifier=".cg")
        mixed += their_mixed * tl.exp2(theirs - best)[:, None]
    return mixed, mass


@triton.jit(do_not_specialize=["num_rows", "num_seats", "block_size"])
def block_attention_kernel(
    partial_ptr,
    num_rows,
    seat_ptr,
    length_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    scratch_ptr,
    counter_ptr,
    num_heads,
    num_seats,
    max_positions,
    block_size,
    scale,
    eps,
    SHARES: tl.constexpr,
    PAD: tl.constexpr,
    GROUPS: tl.constexpr,
    QUERIES: tl.constexpr,
    PARTS: tl.constexpr,
    KEYS: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr,
    WIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (shares + 1, key heads * parts, requests); see `block_attention`."""
    HEAD: tl.constexpr = 2 * HALF
    split = tl.program_id(0)
    head = tl.program_id(1) // PARTS
    part = tl.program_id(1) - head * PARTS
    request = tl.program_id(2)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    # nothing that is read before the wait is written by the kernel before this one
    length = tl.minimum(tl.maximum(tl.load(length_ptr + request), 0), max_positions)
    seat = tl.minimum(tl.maximum(tl.load(seat_ptr + request), 0), num_seats - 1)
    chunk = tl.maximum(tl.cdiv(tl.cdiv(length, SPLITS), TILE), SHORTEST) * TILE
    num_context = tl.cdiv(length, chunk)
    num_active = num_context + 1
    if split < num_active:
        width = num_heads * (GROUPS + 2) * HEAD
        step = num_rows * width
        at = tl.arange(0, HALF)
        query = tl.arange(0, QUERIES)
        group = part * (QUERIES // PAD) + query // PAD
        place = query % PAD
        is_query = (group < GROUPS) & (place < block_size)
        q_first, q_second = weight_halves(q_norm_ptr, at, HALF)
        cos, sin = _angles(cos_ptr, sin_ptr, length + place, at, is_query, HALF)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        line = (request * PAD + place) * width
        column = (head * GROUPS + group) * HEAD
        first = _block_half(partial_ptr, SHARES, step, line, column, at, is_query)
        second = _block_half(partial_ptr, SHARES, step, line, column + HALF, at, is_query)
        first, second = normalised_halves(first, second, q_first, q_second, cos, sin, is_query[:, None], HALF, eps)
        first = _operand(first, WIDE)
        second = _operand(second, WIDE)
        top = tl.full([QUERIES], -float("inf"), tl.float32)
        mass = tl.zeros([QUERIES], tl.float32)
        mixed = tl.zeros([QUERIES, HEAD], tl.float32)
        whole = tl.arange(0, HEAD)
        if split == num_context:
            # the block's own keys and values, which are never stored
            block_row = tl.arange(0, KEYS)
            in_block = block_row < block_size
            block_line = (request * PAD + block_row) * width
            block_column = block_row * 0 + (num_heads * GROUPS + head) * HEAD
            block_first = _block_half(partial_ptr, SHARES, step, block_line, block_column, at, in_block)
            block_second = _block_half(partial_ptr, SHARES, step, block_line, block_column + HALF, at, in_block)
            k_first, k_second = weight_halves(k_norm_ptr, at, HALF)
            block_cos, block_sin = _angles(cos_ptr, sin_ptr, length + block_row, at, in_block, HALF)
            block_first, block_second = normalised_halves(
                block_first, block_second, k_first, k_second, block_cos, block_sin, in_block[:, None], HALF, eps
            )
            block_column += num_heads * HEAD
            block_value = _block_half(partial_ptr, SHARES, step, block_line, block_column, whole, in_block)
            top, mass, mixed = _attend(
                top, mass, mixed, first, second, block_first, block_second, block_value, in_block, scale, WIDE
            )
        base = (seat * num_heads + head).to(tl.int64) * max_positions * HEAD
        end = tl.minimum((split + 1) * chunk, length)
        for begin in range(split * chunk, end, TILE):
            position = begin + tl.arange(0, TILE)
            is_key = position < end
            there = base + position[:, None] * HEAD
            key_first = tl.load(key_ptr + there + at[None, :], mask=is_key[:, None], other=0.0)
            key_second = tl.load(key_ptr + there + HALF + at[None, :], mask=is_key[:, None], other=0.0)
            value = tl.load(value_ptr + there + whole[None, :], mask=is_key[:, None], other=0.0)
            top, mass, mixed = _attend(
                top, mass, mixed, first, second, key_first, key_second, value, is_key, scale, WIDE
            )
        is_last = num_active == 1
        if num_active > 1:
            place_of = (request * num_heads + head) * PARTS + part
            parts = scratch_ptr + place_of * ((SPLITS + 1) * QUERIES * (HEAD + 2))
            mine = parts + split * (QUERIES * (HEAD + 2))
            tl.store(mine + query, top)
            tl.store(mine + QUERIES + query, mass)
            tl.store(mine + 2 * QUERIES + query[:, None] * HEAD + whole[None, :], mixed)
            tl.debug_barrier()
            is_last = tl.atomic_add(counter_ptr + place_of, 1, sem="acq_rel", scope="gpu") == num_active - 1
            if is_last:
                tl.store(counter_ptr + place_of, 0)
                mixed, mass = _merged(parts, num_active, query, whole, QUERIES, HEAD, SPLITS)
        if is_last:
            row = (request * PAD + place) * (num_heads * GROUPS * HEAD)
            to = row[:, None] + ((head * GROUPS + group) * HEAD)[:, None] + whole[None, :]
            tl.store(out_ptr + to, bf16_bits(mixed / mass[:, None]), mask=is_query[:, None])


class AttentionScratch:
    """Shares that are not merged yet, and how many have retired; one for kernels that never overlap.

    Attributes:
        parts: float32, all shares of all requests.
        counter: int32 [requests * key heads * parts], 0 between launches.
    """

    def __init__(
        self, num_requests: int, num_heads: int, groups: int, pad: int, head_dim: int, device: torch.device
    ) -> None:
        count = num_requests * num_heads * query_parts(groups, pad)
        size = count * (SPLITS + 1) * QUERIES * (head_dim + 2)
        self.parts = torch.zeros(size, dtype=torch.float32, device=device)
        self.counter = torch.zeros(count, dtype=torch.int32, device=device)


def block_attention(
    partial: torch.Tensor,
    seats: torch.Tensor,
    lengths: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor],
    rope: tuple[torch.Tensor, torch.Tensor],
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    scratch: AttentionScratch,
    *,
    block_size: int,
    pad: int,
    eps: float,
    overlap: bool,
) -> None:
    """Attends from every block row to its seat's context and its block.

    Args:
        partial: float32 [shares, rows, (query heads + 2 * key heads) * head_dim]: queries, keys, values.
        seats: int32 [B].
        lengths: int32 [B], committed positions of each seat: the anchor's position.
        norms: bf16 [head_dim] weights of the query and key norms.
        rope: bf16 [positions + pad, head_dim / 2] cosines and sines.
        keys: bf16 [seats, key heads, positions, head_dim] of this layer, rotated.
        values: The same shape.
        out: bf16 [rows, query heads * head_dim], written in real rows.
        scratch: For the shares of every request.
        block_size: Real rows of a request.
        pad: Rows that a request owns.
        eps: Of the norms.
        overlap: Programmatic dependent launch.
    """
    num_seats, num_heads, positions, head_dim = keys.shape
    groups = out.shape[1] // (num_heads * head_dim)
    is_cuda = partial.is_cuda
    overlap = overlap and is_cuda
    parts = query_parts(groups, pad)
    block_attention_kernel[(SPLITS + 1, num_heads * parts, seats.shape[0])](
        partial,
        partial.shape[1],
        seats,
        lengths,
        norms[0].view(torch.int16),
        norms[1].view(torch.int16),
        rope[0].view(torch.int16),
        rope[1].view(torch.int16),
        keys,
        values,
        out.view(torch.int16),
        scratch.parts,
        scratch.counter,
        num_heads,
        num_seats,
        positions,
        block_size,
        head_dim**-0.5 * 1.4426950408889634,
        eps,
        SHARES=partial.shape[0],
        PAD=pad,
        GROUPS=groups,
        QUERIES=QUERIES,
        PARTS=parts,
        KEYS=max(16, pad),
        HALF=head_dim // 2,
        TILE=TILE,
        SPLITS=SPLITS,
        SHORTEST=SHORTEST,
        WIDE=not is_cuda,
        OVERLAP=overlap,
        num_warps=4,
        **({"launch_pdl": True} if overlap else {}),
    )


def query_parts(groups: int, pad: int) -> int:
    """Programs among which the query heads of a key head are divided."""
    return int(triton.cdiv(groups * pad, QUERIES))
