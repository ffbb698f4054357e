"""Timing by graph replay: what one call costs when many follow each other in one graph.

A replay of an empty graph alone takes 10-15 us, so every graph here holds at least `MIN_CALLS` calls and its time is
divided by them. Events surround each replay; all replays are kept as raw samples, the median is what is reported.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

MIN_CALLS = 20


@dataclass(frozen=True)
class Timing:
    """Raw replay times of one graph.

    Attributes:
        samples_ns: Duration of each replay.
        calls: Calls in the graph.
    """

    samples_ns: tuple[int, ...]
    calls: int

    @property
    def per_call_us(self) -> float:
        """Median time of one call."""
        return statistics.median(self.samples_ns) / self.calls / 1000

    @property
    def spread_us(self) -> float:
        """Difference of the 90th and the 10th percentile of one call's time."""
        ordered = sorted(self.samples_ns)
        return (ordered[len(ordered) * 9 // 10] - ordered[len(ordered) // 10]) / self.calls / 1000


def capture(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Runs ``body`` once to compile and prime everything, then captures it."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    torch.cuda.synchronize()
    return graph


def time_graph(body: Callable[[], None], calls: int, replays: int = 100) -> Timing:
    """Captures ``body``, which makes ``calls`` calls, and times its replays."""
    if calls < MIN_CALLS:
        raise ValueError(f"a graph needs at least {MIN_CALLS} calls to be timed, found {calls}")
    graph = capture(body)
    for _ in range(3):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    # a replay that fills the gap of the launch before it is not shortened: events are on the stream
    return Timing(tuple(int(start.elapsed_time(end) * 1e6) for start, end in events), calls)
