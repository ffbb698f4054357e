"""The physical pair on two GPUs: exactness, stress and the lone rank first, then times against the solo head.

    python benchmarks/gpu_pair.py [--quick] [--prime CASE]

Times are medians of graph replays with at least 20 positions each, events on each rank's own stream, the slower rank
counted. A position includes its share of the message that ends a chain of 5. ``--prime`` only compiles one case, so
that several processes can fill Triton's cache at once. Writes ``build/bench_gpu_pair.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_timing import Timing, time_graph
from remote_dspark.contract import Check
from remote_dspark.kernels.pair_chain import PairChain, PhysicalPair
from remote_dspark.kernels.pair_rank import PairSettings
from remote_dspark.qualify import pair_device_checks as on_device
from remote_dspark.qualify.pair_feed import FeedShape, PairFeed, SoloHead, chain_launch
from remote_dspark.qualify.pair_host import compiled_faults, device_state, peer_bandwidth
from remote_dspark.qualify.pair_lone import check_lone

DEVICES = (0, 1)
VOCAB = 129_280
DEPTH = 5
CHAINS = 8
EXTRA_US = 5.0
"""What a pair's position may cost beyond the solo head on half of the vocabulary."""

RESULT = Path("build/bench_gpu_pair.json")


@dataclass(frozen=True)
class Case:
    """One timed comparison.

    Attributes:
        name: Shown.
        num_rows: Requests B.
        vocab_size: V.
        uncached: Compute every bias row.
        tile: Columns of a tile.
        num_warps: Warps of a program.
    """

    name: str
    num_rows: int
    vocab_size: int
    uncached: bool
    tile: int
    num_warps: int


CASES = (
    Case("cached B=1", 1, VOCAB, False, 2048, 4),
    Case("cached B=4", 4, VOCAB, False, 2048, 4),
    Case("uncached B=1", 1, VOCAB, True, 512, 8),
    Case("uncached B=4", 4, VOCAB, True, 512, 8),
    Case("one tile B=1", 1, 4096, False, 2048, 4),
)


class Built:
    """A case's pair and both solo heads, primed."""

    def __init__(self, case: Case) -> None:
        self.settings = PairSettings(case.vocab_size, tile=case.tile, num_warps=case.num_warps)
        sets = 40 // case.num_rows
        shape = FeedShape(sets, case.num_rows, case.vocab_size, 512, rank=256 if case.uncached else 0)
        self.feed = PairFeed(shape, self.settings, DEVICES, seed=7, uncached=case.uncached)
        self.feed.set(on_device.make_control(case.num_rows), torch.arange(case.num_rows, dtype=torch.int32))
        self.pair = PhysicalPair(self.settings, DEPTH, case.num_rows, DEVICES)
        launch = chain_launch(self.feed, DEPTH, uncached=case.uncached)
        self.chain = PairChain(self.pair, launch, DEPTH * CHAINS)
        self.chain.prime()
        self.half, self.full = (
            SoloHead(self.feed, self.settings, DEPTH, half=half, uncached=case.uncached) for half in (True, False)
        )
        for solo in (self.half, self.full):
            solo.launch(0)
        torch.cuda.synchronize()

    def time_pair(self, replays: int = 60) -> list[Timing]:
        """Times the pair's graphs; one timing per rank."""
        self.chain.capture()
        for _ in range(3):
            self.chain.replay()
        self.pair.require_healthy()
        events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[], []]
        for _ in range(replays):
            for rank in (0, 1):
                with self.pair.on(rank):
                    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    start.record()
                    self.chain.replay_rank(rank)
                    end.record()
                events[rank].append((start, end))
        self.pair.require_healthy()
        return [
            Timing(tuple(int(start.elapsed_time(end) * 1e6) for start, end in pairs), DEPTH * CHAINS)
            for pairs in events
        ]

    def time_solo(self, solo: SoloHead) -> Timing:
        """Times a solo head on rank 0's device."""

        def body() -> None:
            for index in range(DEPTH * CHAINS):
                solo.launch(index)

        timing = time_graph(body, DEPTH * CHAINS, 60)
        if bool(solo.buffers.error.any()):
            raise RuntimeError(f"expected sampled rows, found errors {solo.buffers.error.tolist()}")
        return timing


@dataclass(frozen=True)
class Row:
    """A timed case in us per position."""

    name: str
    pair_us: float
    pair_spread_us: float
    half_us: float
    full_us: float
    extra_us: float
    met: bool | None


def measure(case: Case) -> Row:
    """Times one case; the goal depends on its kind."""
    built = Built(case)
    with built.pair:
        timings = built.time_pair()
        slower = max(timings, key=lambda timing: timing.per_call_us)
        half, full = built.time_solo(built.half).per_call_us, built.time_solo(built.full).per_call_us
    extra = slower.per_call_us - half
    met = extra <= EXTRA_US and (not case.uncached or slower.per_call_us < full)
    row = Row(case.name, slower.per_call_us, slower.spread_us, half, full, extra, met)
    print(
        f"{row.name:16s} pair {row.pair_us:7.2f} (p90-p10 {row.pair_spread_us:.2f}) half {half:7.2f} full {full:7.2f} "
        f"extra {extra:6.2f} us {'met' if met else 'MISSED'}",
        flush=True,
    )
    return row


def run_checks(quick: bool) -> list[Check]:
    """Everything that must hold before a time means anything; after a failure the long ones are cut short."""
    settings = PairSettings(VOCAB)
    emitting = PairSettings(VOCAB, emit_weights=True)
    uncached = PairSettings(VOCAB, tile=512, num_warps=8)
    kinds = ("plain", "ties", "flat", "masked", "wide", "greedy", "bad")
    found: list[Check] = []

    def size(long: int) -> int:
        return long // 50 if quick or not all(check.ok for check in found) else long

    steps: list[Callable[[], list[Check]]] = [
        lambda: on_device.check_oracle(DEVICES, emitting, kinds, range(1)),
        lambda: [on_device.check_exhaustion(DEVICES, settings)],
        lambda: [on_device.check_mismatch(DEVICES, settings)],
        lambda: check_lone(DEVICES)[0],
        lambda: [on_device.check_replays(DEVICES, settings, positions=size(100_000), seconds=30)],
        lambda: [on_device.check_replays(DEVICES, uncached, positions=size(2_000), seconds=15, uncached=True)],
        lambda: [on_device.check_stress(DEVICES, settings, exchanges=size(1_000_000), seconds=30)],
        lambda: [Check("barriers", "[]", str(faults)[:200], faults == []) for faults in [compiled_faults(DEVICES)]],
    ]
    for step in steps:
        begin = time.monotonic()
        try:
            checks = step()
        except (RuntimeError, ValueError) as cause:
            checks = [Check("raised", "a check", f"{type(cause).__name__}: {cause}"[:300], False)]
        for check in checks:
            mark = "ok  " if check.ok else "FAIL"
            print(f"{mark} {check.name}: {check.found} [{time.monotonic() - begin:.1f} s]", flush=True)
        found += checks
    return found


def main() -> int:
    """Runs everything; 0 when all checks hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--prime", type=int, metavar="CASE")
    arguments = parser.parse_args()
    if arguments.prime is not None:
        Built(CASES[arguments.prime]).pair.close()
        return 0
    begin = time.monotonic()
    before = device_state()
    print(f"before: {before}", flush=True)
    found = run_checks(arguments.quick)
    bandwidth = [peer_bandwidth(one, other) for one, other in (DEVICES, DEVICES[::-1])]
    print(f"peer bandwidth, GB/s: {[round(statistics.median(samples), 1) for samples in bandwidth]}", flush=True)
    rows = []
    for case in CASES:
        try:
            rows.append(measure(case))
        except RuntimeError as cause:
            print(f"{case.name}: {type(cause).__name__}: {cause}", flush=True)
    after = device_state()
    print(f"after: {after}\ntotal: {time.monotonic() - begin:.0f} s", flush=True)
    RESULT.parent.mkdir(exist_ok=True)
    document = {
        "checks": [asdict(check) for check in found],
        "times": [asdict(row) for row in rows],
        "peer_gb_s": bandwidth,
        "before": before,
        "after": after,
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="ascii")
    return 0 if all(check.ok for check in found) and len(rows) == len(CASES) else 1


if __name__ == "__main__":
    raise SystemExit(main())
