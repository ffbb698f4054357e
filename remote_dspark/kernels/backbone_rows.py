"""What happens to activation rows between the matrix products of a draft block: norms, residuals, context writes.

One program owns one row. Roundings are those of the torch statement in `drafter.model`: whatever it keeps in BF16 is
rounded here at the same place. Not covered: how rows are multiplied (`backbone_matmul`) and attend
(`backbone_attention`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from remote_dspark.kernels.backbone_matmul import bf16_bits, partial_sum
from remote_dspark.kernels.rounding import bf16_to_f32, round_to_bf16

NORM_WARPS = 16
"""Of a residual row: few rows exist, so each takes a multiprocessor to itself."""


@triton.jit
def _normalised(x, weight, width, eps):
    """RMS norm of one row in FP32 with the roundings of `drafter.model.RMSNorm`."""
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
    return round_to_bf16(x * scale) * weight


@triton.jit(do_not_specialize=["num_requests", "mask_id", "num_words"])
def embed_norm_kernel(
    anchor_ptr,
    source_ptr,
    target_ptr,
    clock_ptr,
    num_words,
    table_ptr,
    weight_ptr,
    x_ptr,
    out_ptr,
    num_requests,
    mask_id,
    vocab_size,
    width,
    eps,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    CLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Block rows ``[anchor, MASK, MASK, ...]`` of every request, embedded and normalised; grid (rows,)."""
    row = tl.program_id(0)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    if CLOCK:
        if row == 0:
            tl.store(clock_ptr, tl.extra.cuda.globaltimer())
    if WORDS > 0:
        word = tl.arange(0, WORDS)
        brought = (word < num_words) & (row == 0)
        tl.store(target_ptr + word, tl.load(source_ptr + word, mask=brought, other=0), mask=brought)
    request = row // PAD
    anchor = tl.load(anchor_ptr + tl.minimum(request, num_requests - 1))
    token = tl.where(row - request * PAD == 0, anchor, mask_id)
    # the host has checked the anchor; a broken one must still not read outside the table
    token = tl.minimum(tl.maximum(token, 0), vocab_size - 1)
    at = tl.arange(0, BLOCK)
    real = at < width
    bits = tl.load(table_ptr + token.to(tl.int64) * width + at, mask=real, other=0)
    tl.store(x_ptr + row * width + at, bits, mask=real)
    weight = bf16_to_f32(tl.load(weight_ptr + at, mask=real, other=0))
    out = _normalised(bf16_to_f32(bits), weight, width, eps)
    tl.store(out_ptr + row * width + at, bf16_bits(out), mask=real)


@triton.jit
def residual_norm_kernel(
    partial_ptr,
    weight_ptr,
    x_ptr,
    out_ptr,
    width,
    eps,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    RESIDUAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Adds a product to the residual row (or takes it alone) and normalises; grid (rows,)."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    real = at < width
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    # the kernel before this one has waited for the last writer of these, so they are complete
    weight = bf16_to_f32(tl.load(weight_ptr + at, mask=real, other=0))
    if RESIDUAL:
        before = tl.load(x_ptr + row * width + at, mask=real, other=0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    x = partial_sum(partial_ptr, SHARES, tl.num_programs(0) * width, row * width + at, real)
    if RESIDUAL:
        x = round_to_bf16(bf16_to_f32(before) + x)
        tl.store(x_ptr + row * width + at, bf16_bits(x), mask=real)
    out = _normalised(x, weight, width, eps)
    tl.store(out_ptr + row * width + at, bf16_bits(out), mask=real)


@triton.jit
def weight_halves(weight_ptr, at, HALF: tl.constexpr):
    """A head norm's weight, as halves [HALF] in FP32."""
    return bf16_to_f32(tl.load(weight_ptr + at)), bf16_to_f32(tl.load(weight_ptr + HALF + at))


@triton.jit
def normalised_halves(first, second, weight_first, weight_second, cos, sin, real, HALF: tl.constexpr, eps):
    """Per-head RMS norm and rotation of rows given as two halves [n, HALF]; both halves in FP32, rounded to BF16.

    The norm's weight comes as halves [HALF], cosines and sines [n, HALF].
    """
    square = tl.sum(tl.where(real, first * first + second * second, 0.0), axis=1)
    scale = (1.0 / tl.sqrt(square / (2 * HALF) + eps))[:, None]
    first = round_to_bf16(round_to_bf16(first * scale) * weight_first[None, :])
    second = round_to_bf16(round_to_bf16(second * scale) * weight_second[None, :])
    left = round_to_bf16(round_to_bf16(first * cos) - round_to_bf16(second * sin))
    right = round_to_bf16(round_to_bf16(second * cos) + round_to_bf16(first * sin))
    return left, right


@triton.jit(do_not_specialize=["num_seats"])
def context_write_kernel(
    partial_ptr,
    header_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    key_ptr,
    value_ptr,
    num_heads,
    num_seats,
    max_positions,
    eps,
    SHARES: tl.constexpr,
    HALF: tl.constexpr,
):
    """Keys (normalised, rotated) and values of committed rows into a seat; grid (rows, layers * heads)."""
    row = tl.program_id(0)
    layer = tl.program_id(1) // num_heads
    head = tl.program_id(1) - layer * num_heads
    seat = tl.load(header_ptr)
    position = tl.load(header_ptr + 1) + row
    count = tl.load(header_ptr + 2)
    if (row < count) & (position >= 0) & (position < max_positions) & (seat >= 0) & (seat < num_seats):
        at = tl.arange(0, HALF)
        every = (at >= 0)[None, :]
        width = tl.num_programs(1) * (4 * HALF)
        key = row * width + (layer * 2 * num_heads + head) * (2 * HALF) + at
        value = key + num_heads * (2 * HALF)
        step = tl.num_programs(0) * width
        first = partial_sum(partial_ptr, SHARES, step, key[None, :], every)
        second = partial_sum(partial_ptr, SHARES, step, (key + HALF)[None, :], every)
        cos = bf16_to_f32(tl.load(cos_ptr + position * HALF + at))[None, :]
        sin = bf16_to_f32(tl.load(sin_ptr + position * HALF + at))[None, :]
        weight_first, weight_second = weight_halves(k_norm_ptr + layer * (2 * HALF), at, HALF)
        first, second = normalised_halves(first, second, weight_first, weight_second, cos, sin, every, HALF, eps)
        line = ((layer * num_seats + seat) * num_heads + head).to(tl.int64) * max_positions + position
        out = (line * (2 * HALF) + at)[None, :]
        tl.store(key_ptr + out, bf16_bits(first))
        tl.store(key_ptr + out + HALF, bf16_bits(second))
        first = partial_sum(partial_ptr, SHARES, step, value[None, :], every)
        second = partial_sum(partial_ptr, SHARES, step, (value + HALF)[None, :], every)
        tl.store(value_ptr + out, bf16_bits(first))
        tl.store(value_ptr + out + HALF, bf16_bits(second))


def _pdl(overlap: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if overlap else {}


def embed_norm(
    anchors: torch.Tensor,
    table: torch.Tensor,
    weight: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    mask_id: int,
    eps: float,
    pad: int,
    words: tuple[torch.Tensor, torch.Tensor] | None = None,
    clock: torch.Tensor | None = None,
    overlap: bool = False,
) -> None:
    """Embeds and normalises blocks.

    Args:
        anchors: int32 [B], on the device or in registered host memory.
        table: bf16 [V, d].
        weight: bf16 [d], the first layer's input norm.
        x: bf16 [rows, d], the residual rows, written; a request owns ``pad`` rows.
        out: bf16 [rows, d], the normalised rows, written.
        mask_id: Token of every block row but the first.
        eps: Of the norm.
        pad: Rows per request.
        words: int32 [n] in registered host memory, and int32 [n] on the device that they are copied to beside the work,
            for the launches behind this one.
        clock: int64 [1 or more]; on CUDA the first word gets the device's clock, in ns.
        overlap: Programmatic dependent launch of the kernel behind this one.
    """
    rows, width = x.shape
    source, target = (anchors, anchors) if words is None else words
    embed_norm_kernel[(rows,)](
        anchors,
        source,
        target,
        clock,
        target.shape[0],
        table.view(torch.int16),
        weight.view(torch.int16),
        x.view(torch.int16),
        out.view(torch.int16),
        anchors.shape[0],
        mask_id,
        table.shape[0],
        width,
        eps,
        PAD=pad,
        BLOCK=triton.next_power_of_2(width),
        WORDS=0 if words is None else triton.next_power_of_2(target.shape[0]),
        CLOCK=clock is not None and table.is_cuda,
        OVERLAP=overlap and table.is_cuda,
        num_warps=8,
    )


def residual_norm(
    partial: torch.Tensor, weight: torch.Tensor, x: torch.Tensor | None, out: torch.Tensor, *, eps: float, overlap: bool
) -> None:
    """``x += sum of partial; out = norm(x)``, or ``out = norm(sum of partial)`` without ``x``.

    Args:
        partial: float32 [shares, rows, d].
        weight: bf16 [d].
        x: bf16 [rows, d], modified, or None.
        out: bf16 [rows, d], written.
        eps: Of the norm.
        overlap: Programmatic dependent launch.
    """
    shares, rows, width = partial.shape
    overlap = overlap and partial.is_cuda
    residual_norm_kernel[(rows,)](
        partial,
        weight.view(torch.int16),
        (out if x is None else x).view(torch.int16),
        out.view(torch.int16),
        width,
        eps,
        SHARES=shares,
        BLOCK=triton.next_power_of_2(width),
        RESIDUAL=x is not None,
        OVERLAP=overlap,
        num_warps=NORM_WARPS,
        **_pdl(overlap),
    )


def write_context(
    partial: torch.Tensor,
    header: torch.Tensor,
    k_norm: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    eps: float,
) -> None:
    """Writes context rows of one seat.

    Args:
        partial: float32 [shares, rows, layers * 2 * heads * head_dim]: per layer keys, then values.
        header: int32 [4]: seat, first position, number of real rows, unused.
        k_norm: bf16 [layers, head_dim].
        rope: bf16 [positions, head_dim / 2] cosines and sines.
        keys: bf16 [layers, seats, heads, positions, head_dim], written in place.
        values: The same.
        eps: Of the key norm.
    """
    shares, rows, _ = partial.shape
    layers, seats, heads, positions, head_dim = keys.shape
    context_write_kernel[(rows, layers * heads)](
        partial,
        header,
        k_norm.view(torch.int16),
        rope[0].view(torch.int16),
        rope[1].view(torch.int16),
        keys.view(torch.int16),
        values.view(torch.int16),
        heads,
        seats,
        positions,
        eps,
        SHARES=shares,
        HALF=head_dim // 2,
        num_warps=1,
    )
