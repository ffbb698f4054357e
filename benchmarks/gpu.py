"""The GPU benchmark: ceilings, kernels and peers in one run; a table, build/bench_gpu.json, optionally an observation.

    python benchmarks/gpu.py [--observation DIR] [--quick] [--peer-dir DIR]

Every time is the median of graph replays with at least 20 calls in the graph. Peers are measured in the same run; the
torch ones are our own plain statements of the same job; another engine's kernels are timed where their files are in
build/peer or `--peer-dir` (`gpu_peer`). Correctness runs first: a run with a failed check reports no speed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import gpu_ceilings, gpu_head, gpu_peer, gpu_verifier
from benchmarks.gpu_inputs import VOCAB
from benchmarks.gpu_stress import stress, stress_verifier
from benchmarks.gpu_timing import Timing
from remote_dspark.contract import Check, ComputeKind, ObservationKind
from remote_dspark.kernels import checks
from remote_dspark.kernels.graph_checks import check_graph_replays, check_overlapping_graphs
from remote_dspark.observe import Recorder, output_folder
from remote_dspark.qualify.hold import prove_hold

RESULT = Path(__file__).resolve().parents[1] / "build" / "bench_gpu.json"
PEER = RESULT.parent / "peer"
"""Where another engine's files are looked for; not in the command, so that no receipt names a folder of a machine."""


@dataclass(frozen=True)
class Line:
    """One line of the table; ``ratio`` is value over peer, smaller is better."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    met: bool | None = None
    peer: str | None = None
    ratio: float | None = None


class Report:
    """Lines as they are measured, with their raw samples."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.samples: dict[str, Timing] = {}

    def value(self, name: str) -> float:
        """A value already measured."""
        return next(line.value for line in self.lines if line.name == name)

    def add(self, name: str, timing: Timing, goal: float | None = None, peer: str | None = None) -> None:
        """Adds a timed line and prints it at once."""
        value = timing.per_call_us
        self.samples[name] = timing
        met = None if goal is None else value <= goal
        ratio = None if peer is None else value / self.value(peer)
        self._append(Line(name, round(value, 2), "us", goal and round(goal, 2), met, peer, ratio and round(ratio, 3)))

    def add_plain(self, name: str, value: float, unit: str) -> None:
        """Adds a derived line."""
        self._append(Line(name, round(value, 3), unit))

    def _append(self, line: Line) -> None:
        self.lines.append(line)
        goal = "" if line.goal is None else f"goal {line.goal:g} {'met' if line.met else 'MISSED'}"
        peer = "" if line.peer is None else f"{line.ratio:.2f} x {line.peer}"
        print(f"{line.name:46s} {line.value:10.2f} {line.unit:6s} {goal:20s} {peer}", flush=True)


def run_checks(seconds: float) -> list[Check]:
    """Everything that must hold before a time means anything."""
    found = [
        checks.check_head("cuda", VOCAB, tile=2048, seeds=range(2)),
        checks.check_head("cuda", 50_021, tile=2048, seeds=range(1), semantics="dyadic24-standard-v1"),
        checks.check_markov("cuda", VOCAB, tile=512, seeds=range(1)),
        checks.check_markov("cuda", 50_021, tile=1024, seeds=range(1)),
        checks.check_verifier("cuda", 20_011, tile=4096, seeds=range(2)),
        check_graph_replays("cuda", 50_021, tile=2048),
        check_overlapping_graphs("cuda", 50_021, tile=2048),
        stress(seconds),
        stress_verifier(seconds),
    ]
    for check in found:
        print(f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.found}", flush=True)
    return found


def open_recorder(folder: str | None, *, require_hold: bool) -> Recorder:
    """Proves the hold first, so that a run that may not count ends before it measures."""
    return Recorder(
        ObservationKind.WHOLE_WORKER,
        "benchmarks.gpu",
        argv=sys.argv[1:],
        compute=ComputeKind.CUDA,
        folder=output_folder(folder, os.environ),
        hold=prove_hold(os.environ, required=require_hold),
    )


def write_observation(recorder: Recorder, report: Report, found: list[Check]) -> None:
    """Writes the observation with every raw replay time in ns."""
    for number, check in enumerate(found):
        recorder.check(f"{check.name}-{number}", expected=check.expected, found=check.found, ok=bool(check.ok))
    for number, (name, timing) in enumerate(report.samples.items()):
        key = f"kernel-{number:02d}"
        recorder.label(key, name)
        recorder.value(f"{key}.calls_per_replay", timing.calls)
        recorder.value(f"{key}.median_ns_per_call", int(timing.per_call_us * 1000))
        recorder.samples(f"{key}.jsonl", "ns", timing.samples_ns)
    recorder.write()


def main() -> int:
    """Runs everything; 0 when all checks hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--observation", metavar="DIR", help="inside a hold: the hold's own folder")
    parser.add_argument("--require-hold", action="store_true", help="refuse to run outside an open hold")
    parser.add_argument("--quick", action="store_true", help="fewer batch sizes")
    parser.add_argument("--stress-seconds", type=float, default=15.0, help="at most, for each of two proofs")
    parser.add_argument("--peer-dir", type=Path, metavar="DIR", help="another engine's files (gpu_peer); build/peer")
    arguments = parser.parse_args()
    peer = arguments.peer_dir or PEER
    begin = time.monotonic()
    recorder = None
    if arguments.observation or arguments.require_hold:
        recorder = open_recorder(arguments.observation, require_hold=arguments.require_hold)
    report = Report()
    found = run_checks(arguments.stress_seconds)
    print(f"checks: {time.monotonic() - begin:.0f} s", flush=True)
    # a kernel whose check failed is not timed
    good = {check.name for check in found if check.ok} - {check.name for check in found if not check.ok}
    gpu_ceilings.measure(report)
    if peer.is_dir():
        gpu_peer.measure(report, peer)
    else:
        print(f"peer: not run, expected its files in {peer}")
    if "head-exact" in good:
        gpu_head.measure_cached(report, (1, 4) if arguments.quick else (1, 2, 3, 4))
    if {"verifier-exact", "verifier-replays"} <= good:
        gpu_verifier.measure(report)
    if "markov-exact" in good:
        gpu_head.measure_uncached(report, (1, 4) if arguments.quick else (1, 2, 3, 4))
    gpu_ceilings.add_rates(report)
    if peer.is_dir():
        gpu_peer.compare(report)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps([asdict(line) for line in report.lines], indent=1) + "\n", encoding="ascii")
    if recorder is not None:
        write_observation(recorder, report, found)
    print(f"total: {time.monotonic() - begin:.0f} s, device {torch.cuda.get_device_name()}")
    return 0 if all(check.ok for check in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
