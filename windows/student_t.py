"""Student's t and exact-to-the-digit logarithms, in decimal arithmetic: the same digits on every machine.

Rules: integer degrees of freedom only, where the distribution has a closed form; one context of 50 digits; no
floats. Source of the closed form: Abramowitz and Stegun, 26.7.3 and 26.7.4.
"""

from __future__ import annotations

from decimal import Context, Decimal, localcontext
from fractions import Fraction
from functools import lru_cache
from typing import Final

DIGITS: Final = 50
_CONTEXT: Final = Context(prec=DIGITS)
_PI: Final = Decimal("3.14159265358979323846264338327950288419716939937510582")
_BISECTIONS: Final = 160
"""Each halves the bracket; 160 leave less than 1e-40 of it."""

MAX_DF: Final = 400
"""The sum of the closed form has df/2 terms; more pairs than this are another design."""


def ln(value: Fraction) -> Decimal:
    """Natural logarithm of a positive fraction, 50 digits.

    Raises:
        ValueError: The value is not positive.
    """
    if value <= 0:
        raise ValueError(f"logarithm of {value}, expected a positive ratio")
    with localcontext(_CONTEXT):
        return (Decimal(value.numerator) / Decimal(value.denominator)).ln()


def exp(value: Decimal) -> Decimal:
    """Exponential, 50 digits."""
    with localcontext(_CONTEXT):
        return value.exp()


def two_sided(t: Decimal, df: int) -> Decimal:
    """Probability that a t variable with ``df`` degrees of freedom lies within [-t, t], t >= 0."""
    with localcontext(_CONTEXT):
        norm = (Decimal(df) + t * t).sqrt()
        sine, cosine = t / norm, Decimal(df).sqrt() / norm
        if df % 2:
            angle = _arctan(t / Decimal(df).sqrt())
            total, term = Decimal(0), cosine
            for k in range(1, (df - 1) // 2 + 1):
                total += term
                term = term * cosine * cosine * (2 * k) / (2 * k + 1)
            return 2 / _PI * (angle + sine * total)
        total, term = Decimal(0), Decimal(1)
        for k in range(1, df // 2 + 1):
            total += term
            term = term * cosine * cosine * (2 * k - 1) / (2 * k)
        return sine * total


@lru_cache(maxsize=1024)
def critical(df: int, confidence_ppm: int) -> Decimal:
    """The t beyond which, in both tails together, the rest of the probability lies.

    Remembered: some 20 ms each, and a log of comparisons asks for the same few thousands of times.

    Args:
        df: Degrees of freedom, 1..400.
        confidence_ppm: Level of the interval in millionths, below 1000000.

    Raises:
        ValueError: A number is out of range.
    """
    if not 1 <= df <= MAX_DF or not 0 < confidence_ppm < 1_000_000:
        raise ValueError(f"t for df={df} at {confidence_ppm} ppm, expected df 1..{MAX_DF} and a level below 1")
    with localcontext(_CONTEXT):
        wanted = Decimal(confidence_ppm) / 1_000_000
        low, high = Decimal(0), Decimal(1)
        while two_sided(high, df) < wanted:
            low, high = high, high * 2
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if two_sided(middle, df) < wanted:
                low = middle
            else:
                high = middle
        return (low + high) / 2


def _arctan(x: Decimal) -> Decimal:
    """Arc tangent of x >= 0 in the current context: three halvings of the angle, then the series."""
    for _ in range(3):
        x = x / (1 + (1 + x * x).sqrt())
    square, power, total, k = x * x, x, Decimal(0), 0
    while abs(power) > Decimal(10) ** -(DIGITS + 2):
        total += power / (2 * k + 1) * (-1 if k % 2 else 1)
        power *= square
        k += 1
    return total * 8
