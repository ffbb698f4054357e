"""Philox4x32-10 and the draws made from it, as Triton device functions (DECISIONS 3)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _high_low(a, b: tl.constexpr):
    """Both halves of the unsigned 64-bit product of a uint32 and a constant."""
    product = a.to(tl.uint64) * b
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def philox4x32(round_low, position, domain, draw, key0, key1):
    """First two words of Philox4x32-10; equal to `oracle.philox.philox4x32`.

    Args:
        round_low: Round modulo 2**32, any integer type (the bit pattern counts), likewise the others.
        position: Absolute position.
        domain: `contract.Domain`.
        draw: Draw counter.
        key0: First key word.
        key1: Second key word.

    Returns:
        Two uint32.
    """
    c0 = round_low.to(tl.uint32)
    c1 = position.to(tl.uint32)
    c2 = c0 * 0 + domain
    c3 = c0 * 0 + draw
    k0 = key0.to(tl.uint32)
    k1 = key1.to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = _high_low(c0, 0xD2511F53)
        high1, low1 = _high_low(c2, 0xCD9E8D57)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1
