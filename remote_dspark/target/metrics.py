"""Counters of the target server and their Prometheus text.

Names come from `remote_dspark.contract.Metric` only. All are monotonic and live as long as the process; nothing resets
them, because a gate compares growth over a baseline. One lock, so that a snapshot is consistent.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final

from remote_dspark.contract import Metric

LABELS: Final = {
    Metric.ACCEPTED_AT_POSITION: "position",
    Metric.PROPOSED_AT_POSITION: "position",
    Metric.REPLIES_REJECTED: "reason",
}
"""Label name of each labelled metric."""

Snapshot = Mapping[tuple[Metric, str | None], int]


class Counters:
    """The process's counters. ``depth`` fixes the position labels, so that zeros are visible from the start."""

    def __init__(self, depth: int) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[Metric, str | None], int] = {}
        for metric in Metric:
            if metric not in LABELS:
                self._values[metric, None] = 0
        for metric in (Metric.ACCEPTED_AT_POSITION, Metric.PROPOSED_AT_POSITION):
            for position in range(depth):
                self._values[metric, str(position)] = 0

    def add(self, metric: Metric, amount: int = 1, label: str | None = None) -> None:
        """Grow one counter.

        Raises:
            ValueError: A negative amount, or a label where there is none (or the reverse): our own bug.
        """
        if amount < 0 or (metric in LABELS) != (label is not None):
            raise ValueError(f"counter {metric}: amount {amount}, label {label!r}")
        with self._lock:
            self._values[metric, label] = self._values.get((metric, label), 0) + amount

    def snapshot(self) -> Snapshot:
        """A consistent copy."""
        with self._lock:
            return dict(self._values)

    def render(self) -> str:
        """Prometheus text exposition, version 0.0.4."""
        values = self.snapshot()
        lines: list[str] = []
        for metric in Metric:
            lines.append(f"# TYPE {metric} counter")
            rows = sorted((label, count) for (name, label), count in values.items() if name is metric and label)
            if metric in LABELS:
                lines += [f'{metric}{{{LABELS[metric]}="{label}"}} {count}' for label, count in rows]
            else:
                lines.append(f"{metric} {values[metric, None]}")
        return "\n".join(lines) + "\n"


def parse_metrics(text: str) -> dict[str, int]:
    """Read our own exposition: ``name`` or ``name.label`` to count.

    Raises:
        ValueError: A line that is no counter of ours.
    """
    found: dict[str, int] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        name, _, count = line.rpartition(" ")
        metric, brace, labels = name.partition("{")
        if not count.isdigit() or Metric(metric) not in Metric:
            raise ValueError(f"metrics: expected '<name> <integer>', found {line!r}")
        key = f"{metric}.{labels.split(chr(34))[1]}" if brace else metric
        found[key] = int(count)
    return found
