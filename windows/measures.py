"""The numbers of one arm, from its counters and raw samples.

Rules: exact integers and fractions inside, integers outside (base units, or millionths where a number is a ratio);
every estimator has a name; a number that cannot be computed is absent, never zero. Time to first token is kept out
of decode rates, warm-up out of everything.

Estimators:

- ``tokens per round``: accepted draft tokens / rounds + 1 (each round adds one token of the target's).
- ``acceptance at position i``, *conditional on reaching*: rounds that accepted draft token i / rounds that reached it.
- ``per second``: over the span from the first request's start to the last one's end, requests in flight included.
- percentiles: *nearest rank*, i.e. the smallest sample that at least that share of the samples does not exceed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from remote_dspark.contract import Metric
from windows.arm import HEADLINE, ArmBlock
from windows.errors import MeasureError

MILLION: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000
ACCEPTANCE_ESTIMATOR: Final = "conditional-on-reaching"
PERCENTILE_ESTIMATOR: Final = "nearest-rank"
PERCENTILES: Final = (50, 90, 99)
MAX_DEPTH: Final = 64
"""Positions looked for; far above any draft depth."""


@dataclass(frozen=True)
class Measures:
    """What one arm measured.

    Attributes:
        rates: Metric name (as in ``windows.plan.PrimaryMetric`` and the further ones) to its exact value.
        acceptance: Position to the conditional acceptance; positions never reached are absent.
        num_rounds: Rounds of the headline.
        num_tokens: Tokens of the headline's requests.
        num_requests: Requests of the headline.
        span_ns: First start to last end.
    """

    rates: dict[str, Fraction]
    acceptance: dict[int, Fraction]
    num_rounds: int
    num_tokens: int
    num_requests: int
    span_ns: int

    def to_values(self) -> dict[str, int]:
        """Flat integers: ratios and rates in millionths, times in ns."""
        values = {
            f"{name}{'' if name.endswith('-ns') else '-micro'}": to_integer(
                value if name.endswith("-ns") else value * MILLION
            )
            for name, value in self.rates.items()
        }
        for position, share in self.acceptance.items():
            values[f"acceptance-at-{position}-ppm"] = to_integer(share * MILLION)
        return {
            **values,
            "rounds": self.num_rounds,
            "tokens": self.num_tokens,
            "requests": self.num_requests,
            "span-ns": self.span_ns,
        }


def measure(block: ArmBlock) -> Measures:
    """Computes the numbers of one arm's headline.

    Raises:
        MeasureError: There is no headline request, no round, or no time in it.
    """
    requests = block.headline_requests()
    if not requests:
        raise MeasureError(f"arm {block.label}: no request of phase {HEADLINE!r} in the raw samples")
    rounds = _required(block, Metric.ROUNDS)
    accepted = _required(block, Metric.ACCEPTED_TOKENS)
    span_ns = max(r.end_ns for r in requests) - min(r.start_ns for r in requests)
    if rounds <= 0 or span_ns <= 0 or accepted < 0:
        raise MeasureError(
            f"arm {block.label}: {rounds} rounds, {accepted} accepted, {span_ns} ns: nothing was measured"
        )
    tokens = sum(request.num_tokens for request in requests)
    rates = {
        "tokens-per-second": Fraction(tokens * NS_PER_S, span_ns),
        "rounds-per-second": Fraction(rounds * NS_PER_S, span_ns),
        "tokens-per-round": Fraction(accepted, rounds) + 1,
    }
    first = [request.first_token_ns - request.start_ns for request in requests]
    for share in PERCENTILES:
        rates[f"first-token-p{share}-ns"] = Fraction(percentile(first, share))
        if block.inter_token_ns:
            rates[f"inter-token-p{share}-ns"] = Fraction(percentile(block.inter_token_ns, share))
    return Measures(rates, acceptance_by_position(block), rounds, tokens, len(requests), span_ns)


def acceptance_by_position(block: ArmBlock) -> dict[int, Fraction]:
    """Conditional acceptance at each position that was reached.

    Raises:
        MeasureError: More rounds accepted at a position than reached it.
    """
    shares: dict[int, Fraction] = {}
    for position in range(MAX_DEPTH):
        reached = block.growth(HEADLINE, Metric.PROPOSED_AT_POSITION, str(position))
        accepted = block.growth(HEADLINE, Metric.ACCEPTED_AT_POSITION, str(position))
        if reached is None or accepted is None:
            break
        if not 0 <= accepted <= reached:
            raise MeasureError(
                f"arm {block.label}: position {position}: {accepted} accepted of {reached} that reached it"
            )
        if reached:
            shares[position] = Fraction(accepted, reached)
    return shares


def percentile(samples: Sequence[int], share: int) -> int:
    """The nearest-rank percentile.

    Args:
        samples: Integers, not empty.
        share: 1..100.

    Raises:
        MeasureError: No samples.
    """
    if not samples:
        raise MeasureError(f"p{share} of no samples")
    rank = -(-share * len(samples) // 100)
    return sorted(samples)[max(rank, 1) - 1]


def half_drift(block: ArmBlock) -> Fraction | None:
    """Decode speed of the arm's later half of requests over that of its earlier half, or None below four requests.

    Speed is tokens per time inside requests, so that a pause between requests is no drift.
    """
    requests = block.headline_requests()
    half = len(requests) // 2
    if half < 2:
        return None
    speeds = []
    for part in (requests[:half], requests[-half:]):
        time_ns = sum(request.elapsed_ns for request in part)
        tokens = sum(request.num_tokens for request in part)
        if time_ns <= 0 or tokens <= 0:
            return None
        speeds.append(Fraction(tokens, time_ns))
    return speeds[1] / speeds[0]


def to_integer(value: Fraction) -> int:
    """The nearest integer, halves to even."""
    return round(value)


def decimal_text(value: Fraction, places: int = 6) -> str:
    """A fraction as a decimal string, halves to even, without trailing zeros.

    Args:
        value: What to write.
        places: Digits behind the point.
    """
    scaled = round(value * 10**places)
    sign, digits = ("-" if scaled < 0 else ""), str(abs(scaled)).rjust(places + 1, "0")
    whole, part = digits[:-places], digits[-places:].rstrip("0")
    return f"{sign}{whole}.{part}" if part else f"{sign if int(whole) else ''}{whole}"


def _required(block: ArmBlock, metric: Metric) -> int:
    """Growth of a counter that must have been read."""
    growth = block.growth(HEADLINE, metric)
    if growth is None:
        raise MeasureError(f"arm {block.label}: {metric.value} was not read at baseline and headline")
    return growth
