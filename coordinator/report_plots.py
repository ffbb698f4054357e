"""The report's drawings as inline SVG: hold timelines, distributions, paired deltas. Pure: numbers in, markup out.

A drawing repeats what a table beside it says; nothing is in a drawing alone, and colours are never the only sign.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.report_html import text

WIDTH: Final = 1000
LEFT: Final = 190
ROW: Final = 34
_STATES: Final[Mapping[str, str]] = {
    "admitted": "#dfe7ef", "leased": "#c3d3e3", "snapshot": "#a6bed6", "held": "#d8c7a0", "qualifying": "#9fcfae",
    "measuring": "#6fb487", "restoring": "#e0a676", "closed": "#ffffff", "degraded": "#a11212",
}  # fmt: skip


@dataclass(frozen=True)
class Span:
    """One state of a hold, in ns since it was opened."""

    state: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Interval:
    """One row of a forest plot, in ppm around no change."""

    label: str
    points_ppm: Sequence[int]
    ratio_ppm: int | None
    low_ppm: int | None
    high_ppm: int | None
    margin_ppm: int


def _svg(height: int, body: str, title: str) -> str:
    return (
        f'<svg role="img" aria-label="{text(title)}" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{text(title)}</title>{body}</svg>'
    )


def _label(x: float, y: float, words: object, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, width: float = 1, dash: str = "") -> str:
    extra = f' stroke-dasharray="{dash}"' if dash else ""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="#1a1a1a" stroke-width="{width}"{extra}/>'


def timelines(holds: Sequence[tuple[str, Sequence[Span]]]) -> str:
    """One bar per hold, its states one after the other on a common scale."""
    end_ns = max((span.end_ns for _, spans in holds for span in spans), default=1) or 1
    scale = (WIDTH - LEFT - 20) / end_ns
    parts = []
    for number, (name, spans) in enumerate(holds):
        y = 8 + number * (ROW + 12)
        parts.append(_label(0, y + 20, name))
        for span in spans:
            x, width = LEFT + span.start_ns * scale, (span.end_ns - span.start_ns) * scale
            fill = _STATES.get(span.state, "#e8e8e8")
            words = f"{span.state}: {(span.end_ns - span.start_ns) / 1e9:.1f} s"
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(width, 1):.1f}" height="{ROW - 6}" fill="{fill}" '
                f'stroke="#1a1a1a" stroke-width="1"><title>{text(words)}</title></rect>'
            )
            if width > 7 * len(span.state):
                parts.append(_label(x + 4, y + 19, span.state))
    height = 8 + len(holds) * (ROW + 12) + 24
    for step in range(5):
        x = LEFT + (WIDTH - LEFT - 20) * step / 4
        parts.append(
            _line(x, height - 24, x, height - 18) + _label(x, height - 5, _seconds(end_ns * step / 4), "middle")
        )
    return _svg(height, "".join(parts), "timeline of the holds")


def _seconds(time_ns: float) -> str:
    return f"{time_ns / 1e9:.0f} s"


def distributions(rows: Sequence[tuple[str, Sequence[int]]], unit: str) -> str:
    """A box per row: whiskers p5 to p95, box p25 to p75, bar at the median."""
    marks = [(name, [_rank(sorted(values), share) for share in (5, 25, 50, 75, 95)]) for name, values in rows if values]
    top = max((points[-1] for _, points in marks), default=1) * 1.05 or 1
    scale = (WIDTH - LEFT - 40) / top
    parts = []
    for number, (name, points) in enumerate(marks):
        y = 18 + number * ROW
        low, first, median, third, high = (LEFT + point * scale for point in points)
        parts.append(_label(0, y + 4, name) + _line(low, y, high, y))
        parts.append(_line(low, y - 5, low, y + 5) + _line(high, y - 5, high, y + 5))
        parts.append(
            f'<rect x="{first:.1f}" y="{y - 9}" width="{max(third - first, 1):.1f}" height="18" fill="#c3d3e3" '
            f'stroke="#1a1a1a"/>' + _line(median, y - 9, median, y + 9, 3)
        )
    height = 18 + len(marks) * ROW + 20
    for step in range(5):
        x, value = LEFT + (WIDTH - LEFT - 40) * step / 4, top * step / 4
        parts.append(_line(x, height - 26, x, height - 20) + _label(x, height - 6, f"{value:.3g} {unit}", "middle"))
    return _svg(height, "".join(parts), "distributions by arm")


def _rank(ordered: Sequence[int], share: int) -> int:
    """Nearest rank, as the receipts use it."""
    return ordered[max(-(-share * len(ordered) // 100), 1) - 1]


def forest(rows: Sequence[Interval]) -> str:
    """Paired deltas as dots, the ratio as a square with its interval, the margin as a band around no change."""
    reach = 20_000
    for row in rows:
        reach = max([reach, row.margin_ppm * 2, *(abs(point) for point in row.points_ppm), abs(row.ratio_ppm or 0)])
    reach = int(reach * 1.15)
    middle, half = (LEFT + WIDTH) / 2, (WIDTH - LEFT - 90) / 2

    def place(ppm: int) -> float:
        return middle + max(-1.0, min(1.0, ppm / reach)) * half

    parts = []
    height = 20 + len(rows) * ROW + 24
    for number, row in enumerate(rows):
        y = 20 + number * ROW
        band = place(row.margin_ppm) - place(-row.margin_ppm)
        parts.append(
            f'<rect x="{place(-row.margin_ppm):.1f}" y="{y - 13}" width="{band:.1f}" height="26" fill="#ececec"/>'
        )
        parts.append(_label(0, y + 4, row.label))
        if row.low_ppm is not None and row.high_ppm is not None:
            parts.append(_line(place(row.low_ppm), y, place(row.high_ppm), y, 2))
            for end, sign in ((row.low_ppm, -1), (row.high_ppm, 1)):
                # An interval that leaves the drawing ends in an arrow, not in a mark that could be read as its end.
                mark = ("‹" if sign < 0 else "›") if abs(end) > reach else "|"
                parts.append(_label(place(end), y + 4, mark, "middle"))
        for point in row.points_ppm:
            parts.append(
                f'<circle cx="{place(point):.1f}" cy="{y}" r="5" fill="#fff" stroke="#1a1a1a" stroke-width="2"/>'
            )
        if row.ratio_ppm is not None:
            x = place(row.ratio_ppm)
            parts.append(f'<rect x="{x - 5:.1f}" y="{y - 5}" width="10" height="10" fill="#1a1a1a"/>')
    parts.append(_line(middle, 4, middle, height - 26, 1, "4 3"))
    for share in (-1, -0.5, 0, 0.5, 1):
        x = middle + share * half
        parts.append(
            _line(x, height - 26, x, height - 20) + _label(x, height - 6, f"{share * reach / 1e4:+.1f} %", "middle")
        )
    return _svg(height, "".join(parts), "paired differences of ON against OFF")
