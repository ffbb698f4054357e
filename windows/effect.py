"""The size of an effect: ratio with interval over pairs, drift, and what the order did.

Rules: the pair is the unit; all arithmetic is exact or in 50-digit decimals; a ratio is B over A. With one pair
there is no interval; with two it rests on one degree of freedom, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from typing import Final

from windows.arm import ArmBlock
from windows.measures import half_drift
from windows.student_t import DIGITS, critical, exp, ln

MILLION: Final = 1_000_000


@dataclass(frozen=True)
class Effect:
    """Ratio B/A over pairs.

    Attributes:
        ratio: Geometric mean.
        low: Lower end of the interval, or None with one pair.
        high: Upper end.
        deltas_ppm: B/A - 1 of each pair, in pair order.
        is_reversed: Whether two pairs point in opposite directions.
        is_degenerate: Whether all pairs agree exactly, so that the interval has no width.
        method: How the interval was built.
    """

    ratio: Fraction
    low: Fraction | None
    high: Fraction | None
    deltas_ppm: tuple[int, ...]
    is_reversed: bool
    is_degenerate: bool
    method: str

    @property
    def num_pairs(self) -> int:
        """Pairs it rests on."""
        return len(self.deltas_ppm)

    @property
    def distance_ppm(self) -> int:
        """Distance of the ratio from 1, the larger way round: 0.5 is as far as 2."""
        return round((max(self.ratio, 1 / self.ratio) - 1) * MILLION)


@dataclass(frozen=True)
class Drift:
    """What moved although the switch did not. All in ppm; a missing key could not be computed.

    Attributes:
        holds: Hold to the speed of the later half of its arms over the earlier half, minus 1.
        between: Last hold over first hold, same arms, minus 1.
        order: Half the difference between A-first and B-first pairs: what running second did.
    """

    holds: tuple[tuple[int, int], ...]
    between: int | None
    order: int | None

    def to_values(self) -> dict[str, int]:
        """Flat integers, ``hold1``, ``hold2``, ``between``, ``order``."""
        values = {f"hold{number}": ppm for number, ppm in self.holds}
        for name, ppm in (("between", self.between), ("order", self.order)):
            if ppm is not None:
                values[name] = ppm
        return values


def effect_of(ratios: Sequence[Fraction], confidence_ppm: int) -> Effect:
    """Geometric mean of pair ratios with a t interval on their logarithms.

    Args:
        ratios: B/A per pair, positive, at least one.
        confidence_ppm: Level of the interval.
    """
    logs = [ln(ratio) for ratio in ratios]
    deltas = tuple(round((ratio - 1) * MILLION) for ratio in ratios)
    is_reversed = min(ratios) < 1 < max(ratios)
    is_degenerate = len(ratios) > 1 and min(ratios) == max(ratios)
    with localcontext(Context(prec=DIGITS)):
        mean = sum(logs, Decimal(0)) / len(logs)
        if len(ratios) == 1:
            return Effect(Fraction(ratios[0]), None, None, deltas, is_reversed, False, "")
        df = len(logs) - 1
        variance = sum(((value - mean) ** 2 for value in logs), Decimal(0)) / df
        half = critical(df, confidence_ppm) * (variance / len(logs)).sqrt()
        low, high = exp(mean - half), exp(mean + half)
    method = f"t interval on log ratios of pairs, df={df}, level={confidence_ppm} ppm"
    if is_degenerate:
        same = Fraction(ratios[0])
        return Effect(same, same, same, deltas, is_reversed, True, method)
    return Effect(Fraction(exp(mean)), Fraction(low), Fraction(high), deltas, is_reversed, False, method)


def drift_of(
    pairs: Sequence[tuple[ArmBlock, ArmBlock]],
    values: Sequence[tuple[Fraction, Fraction]],
    a_first: Sequence[bool],
) -> Drift:
    """Drift within holds, between holds, and the effect of the order.

    Args:
        pairs: Usable pairs (A, B).
        values: Their values of the metric, positive; empty when the metric is not usable.
        a_first: Per pair, whether A ran first.
    """
    holds: dict[int, list[Fraction]] = {}
    for block in (block for pair in pairs for block in pair):
        ratio = half_drift(block)
        if ratio is not None:
            holds.setdefault(block.hold, []).append(ratio)
    within = tuple((number, _ppm(ratios)) for number, ratios in sorted(holds.items()))
    return Drift(within, _between(pairs, values), _order_effect(values, a_first))


def _between(pairs: Sequence[tuple[ArmBlock, ArmBlock]], values: Sequence[tuple[Fraction, Fraction]]) -> int | None:
    """Geometric mean of all values in the last hold over that in the first; both arms are in each."""
    by_hold: dict[int, list[Fraction]] = {}
    for (a, _), both in zip(pairs, values, strict=False):
        by_hold.setdefault(a.hold, []).extend(both)
    if len(by_hold) < 2:
        return None
    first, last = by_hold[min(by_hold)], by_hold[max(by_hold)]
    return round((_geometric_mean(last) / _geometric_mean(first) - 1) * MILLION)


def _order_effect(values: Sequence[tuple[Fraction, Fraction]], a_first: Sequence[bool]) -> int | None:
    """A drift inside a hold favours whoever runs second; the two orders separate it from the effect."""
    ratios: dict[bool, list[Fraction]] = {True: [], False: []}
    for (a, b), first in zip(values, a_first, strict=False):
        ratios[first].append(b / a)
    if not ratios[True] or not ratios[False]:
        return None
    with localcontext(Context(prec=DIGITS)):
        half = (_mean_log(ratios[True]) - _mean_log(ratios[False])) / 2
    return round((Fraction(exp(half)) - 1) * MILLION)


def _ppm(ratios: Sequence[Fraction]) -> int:
    return round((_geometric_mean(ratios) - 1) * MILLION)


def _geometric_mean(values: Sequence[Fraction]) -> Fraction:
    return Fraction(exp(_mean_log(values)))


def _mean_log(values: Sequence[Fraction]) -> Decimal:
    with localcontext(Context(prec=DIGITS)):
        return sum((ln(value) for value in values), Decimal(0)) / len(values)
