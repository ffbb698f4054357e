"""BF16 rounding, order-preserving keys and fixed-point weights as Triton device functions.

BF16 travels as its bit pattern (int16) and is handled with integer operations only: under the CPU interpreter a cast
to BF16 truncates and BF16 arithmetic is wrong, and the bits must be the same in both places.

A key is the BF16 pattern turned from sign-magnitude into a signed integer: keys order like the values and -0 equals +0.
"""

from __future__ import annotations

import triton
import triton.language as tl

KEY_NAN = tl.constexpr(32767)
KEY_POSITIVE_INFINITY = tl.constexpr(32640)
KEY_EXCLUDED = tl.constexpr(-32640)
"""Key of -inf, which is also what padded columns read as: never selected."""

KEY_LOWEST = tl.constexpr(-32639)
"""Key of the lowest finite value."""


@triton.jit
def bf16_to_f32(bits):
    """BF16 bit patterns (int16) as float32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def rounded_bits(values):
    """The BF16 pattern of float32 values, nearest even, sign-extended in int32. NaN needs a check of its own."""
    bits = values.to(tl.int32, bitcast=True)
    # an overflow of the sum past the sign bit needs a NaN; infinities and finite values cannot reach it
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def round_to_bf16(values):
    """float32 values rounded to BF16, nearest even, kept in float32; NaN stays NaN."""
    rounded = (rounded_bits(values) << 16).to(tl.float32, bitcast=True)
    return tl.where(values != values, values, rounded)


@triton.jit
def order_key(values):
    """int32 keys of float32 values after rounding to BF16; NaN is above everything."""
    pattern = rounded_bits(values)
    # a negative pattern is -(magnitude): -0 becomes 0 as well
    key = tl.where(pattern >= 0, pattern, -(pattern & 0x7FFF))
    return tl.where(values != values, 32767, key)


@triton.jit
def key_value(key):
    """float32 value of a finite key."""
    pattern = tl.where(key >= 0, key, (-key) | 0x8000)
    return (pattern << 16).to(tl.float32, bitcast=True)


@triton.jit
def fixed_weight(exponent):
    """``floor(exp(exponent) * 2**38)`` as int64 for float32 exponents <= 0 (DECISIONS 1).

    The argument is reduced to [-ln2/2, ln2/2] in two FP32 parts, so the error of the hardware's 2**x does not grow with
    the distance from the maximum: at most 3 ulp of FP32 over the whole range, exactly 2**38 at 0.
    """
    # below exp(-27) everything is 0, so the clamp changes nothing; it also keeps a refused row's NaN out of the
    # integers
    bounded = tl.where(exponent > -60.0, tl.minimum(exponent, 0.0), -60.0)
    # adding 1.5 * 2**23 rounds to an integer and leaves it in the low bits: no conversion instructions, which are slow
    shifted = tl.math.fma(bounded, 1.4426950408889634, 12582912.0)
    whole = shifted - 12582912.0
    rest = tl.math.fma(whole, -0.693359375, bounded)
    rest = tl.math.fma(whole, 2.12194440e-4, rest)
    scale = ((shifted.to(tl.int32, bitcast=True) << 23) + ((127 + 38) << 23)).to(tl.float32, bitcast=True)
    # the conversion truncates, which is the floor of a non-negative number
    return (tl.exp2(rest * 1.4426950408889634) * scale).to(tl.int64)
