"""Times of a physical pair's positions beside the solo head's, by graph replay.

A graph holds 8 chains of 5 positions; events surround each replay on each rank's own stream, and the slower rank
counts. A position therefore includes its share of the message that ends a chain. The solo head runs on rank 0's device:
over half of the vocabulary, which is a rank's own work, and over all of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from remote_dspark.kernels.pair_chain import PairChain, PhysicalPair
from remote_dspark.kernels.pair_rank import NUM_RANKS, PairSettings
from remote_dspark.qualify.pair_device_checks import make_control
from remote_dspark.qualify.pair_feed import FeedShape, PairFeed, SoloHead, chain_launch

DEPTH: Final = 5
POSITIONS: Final = 8 * DEPTH
REPLAYS: Final = 60
EXTRA_NS: Final = 5_000
"""What a pair's position may cost beyond the solo head on half of the vocabulary."""


@dataclass(frozen=True)
class Case:
    """One timed comparison.

    Attributes:
        name: Shown; also a part of file names.
        num_rows: Requests B.
        vocab_size: V.
        uncached: Compute every bias row.
        tile: Columns of a tile.
        num_warps: Warps of a program.
    """

    name: str
    num_rows: int
    vocab_size: int
    uncached: bool = False
    tile: int = 2048
    num_warps: int = 4


def cases(vocab_size: int) -> tuple[Case, ...]:
    """What is timed; the last one has a single tile per rank, so that little but the exchange is left."""
    return (
        Case("cached-b1", 1, vocab_size),
        Case("cached-b4", 4, vocab_size),
        Case("uncached-b1", 1, vocab_size, uncached=True, tile=512, num_warps=8),
        Case("uncached-b4", 4, vocab_size, uncached=True, tile=512, num_warps=8),
        Case("one-tile-b1", 1, 4096),
    )


@dataclass(frozen=True)
class CaseTimes:
    """Durations of replays in ns, of the slower rank and of both solo heads."""

    pair: tuple[int, ...]
    half: tuple[int, ...]
    full: tuple[int, ...]

    def position_ns(self, name: str) -> int:
        """Median time of one position: ``pair``, ``half`` or ``full``."""
        return int(statistics.median(getattr(self, name)) / POSITIONS)

    @property
    def extra_ns(self) -> int:
        """Cost beyond the solo head on half of the vocabulary."""
        return self.position_ns("pair") - self.position_ns("half")


class TimedCase:
    """A case's primed pair and both solo heads; close its pair when done."""

    def __init__(self, case: Case, devices: Sequence[int], bound: int) -> None:
        settings = PairSettings(case.vocab_size, tile=case.tile, num_warps=case.num_warps, bound=bound)
        sets = POSITIONS // case.num_rows
        shape = FeedShape(sets, case.num_rows, case.vocab_size, 512, rank=256 if case.uncached else 0)
        feed = PairFeed(shape, settings, devices, seed=7, uncached=case.uncached)
        feed.set(make_control(case.num_rows), torch.arange(case.num_rows, dtype=torch.int32))
        self.pair = PhysicalPair(settings, DEPTH, case.num_rows, devices)
        self._chain = PairChain(self.pair, chain_launch(feed, DEPTH, uncached=case.uncached), POSITIONS)
        self._chain.prime()
        self._half, self._full = (
            SoloHead(feed, settings, DEPTH, half=half, uncached=case.uncached) for half in (True, False)
        )
        for solo in (self._half, self._full):
            solo.launch(0)
        self.pair.synchronize()

    def measure(self) -> CaseTimes:
        """Captures and times everything."""
        ranks = self._time_pair()
        slower = max(ranks, key=statistics.median)
        return CaseTimes(slower, self._time_solo(self._half), self._time_solo(self._full))

    def _time_pair(self) -> list[tuple[int, ...]]:
        self._chain.capture()
        for _ in range(3):
            self._chain.replay()
        self.pair.require_healthy()
        events: list[list[tuple[Any, Any]]] = [[] for _ in range(NUM_RANKS)]
        for _ in range(REPLAYS):
            for rank in range(NUM_RANKS):
                with self.pair.on(rank):
                    events[rank].append(_between(lambda rank=rank: self._chain.replay_rank(rank)))  # type: ignore[misc]
        self.pair.require_healthy()
        return [_durations(pairs) for pairs in events]

    def _time_solo(self, solo: SoloHead) -> tuple[int, ...]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.pair.devices[0]), torch.cuda.graph(graph, stream=self.pair.streams[0]):
            for index in range(POSITIONS):
                solo.launch(index)
        with self.pair.on(0):
            for _ in range(3):
                graph.replay()
            events = [_between(graph.replay) for _ in range(REPLAYS)]
        self.pair.synchronize()
        if bool(solo.buffers.error.any()):
            # refused rows take another way, so their time means nothing
            raise RuntimeError(f"expected sampled rows, found errors {solo.buffers.error.tolist()}")
        return _durations(events)


def _between(action: Callable[[], None]) -> tuple[Any, Any]:
    """Events on the current stream around an action."""
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    action()
    end.record()
    return start, end


def _durations(events: Sequence[tuple[Any, Any]]) -> tuple[int, ...]:
    """Durations in ns of finished pairs of events."""
    return tuple(int(start.elapsed_time(end) * 1e6) for start, end in events)


def goal_faults(case: Case, times: CaseTimes) -> list[str]:
    """Which goals a case misses; an empty list when it meets all."""
    faults = []
    if case.vocab_size > 2 * case.tile and times.extra_ns > EXTRA_NS:
        faults.append(f"{times.extra_ns} ns beyond the half vocabulary, expected at most {EXTRA_NS}")
    pair, full = times.position_ns("pair"), times.position_ns("full")
    if case.uncached and pair >= full:
        faults.append(f"{pair} ns, expected less than the solo head's {full}")
    return faults
