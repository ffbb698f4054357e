#!/usr/bin/env python
"""The wire's long proofs: a million random and mutated frames, and 200 000 rounds without growth of memory.

Seeded and resumable: progress is written after each batch of frames to ``--state``, and a second run goes on from
there; the rounds run in one process pair and start again if they were interrupted. Prints one JSON document with the
result; exit code 0 only if everything held.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "wire")]

from wire_fuzz import cases, judge  # noqa: E402 - needs the path above

from benchmarks.wire import memory_drafter, round_times_us  # noqa: E402

BATCH = 20_000
WARMUP_SHARE = 0.1
GROWTH_LIMIT_BYTES = 4 << 20
"""Allocators breathe; a leak of one small object per round would be at least 10 MB over 200 000 rounds."""


def _load(path: Path, seed: int, frames: int) -> dict[str, Any]:
    """State of an earlier run with the same seed and size, or a fresh one."""
    if path.exists():
        state: dict[str, Any] = json.loads(path.read_text())
        if state.get("seed") == seed and state.get("frames") == frames:
            return state
    return {"seed": seed, "frames": frames, "done": 0, "outcomes": {}, "rounds": None}


def _save(path: Path, state: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(state, indent=1, sort_keys=True) + "\n")
    part.replace(path)


def soak_frames(state: dict[str, Any], path: Path) -> None:
    """Judges what is left of the frames; any exception but the protocol error ends the run with its seed known."""
    while state["done"] < state["frames"]:
        index = state["done"] // BATCH
        size = min(BATCH, state["frames"] - state["done"])
        for number, (kind, limits, frame) in enumerate(itertools.islice(cases(state["seed"] + index), size)):
            try:
                outcome = judge(limits, frame)
            except BaseException:
                sys.stderr.write(f"seed {state['seed'] + index}, case {number}, {kind}: {bytes(frame).hex()}\n")
                raise
            state["outcomes"][outcome] = state["outcomes"].get(outcome, 0) + 1
        state["done"] += size
        _save(path, state)
        sys.stderr.write(f"frames {state['done']}/{state['frames']}\n")


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def soak_rounds(rounds: int) -> dict[str, Any]:
    """Plays rounds and compares resident memory of both ends after the warm-up with the end."""
    times: list[float] = []
    marks: list[tuple[int, int]] = []
    warmup, interval = max(int(rounds * WARMUP_SHARE), min(rounds // 2, 5000)), max(rounds // 20, 1)
    with memory_drafter() as (client, worker, _):
        for number, elapsed in enumerate(round_times_us(client, rounds)):
            if len(times) < 20_000:
                times.append(elapsed)
            if number >= warmup and (number - warmup) % interval == 0:
                marks.append((_resident_bytes(os.getpid()), _resident_bytes(worker)))
                sys.stderr.write(f"rounds {number}/{rounds}: client, worker bytes {marks[-1]}\n")
        marks.append((_resident_bytes(os.getpid()), _resident_bytes(worker)))
    times.sort()
    growth = [marks[-1][end] - marks[0][end] for end in (0, 1)]
    return {
        "rounds": rounds,
        "client_growth_bytes": growth[0],
        "worker_growth_bytes": growth[1],
        "p50_us": round(times[len(times) // 2]),
        "p99_us": round(times[len(times) * 99 // 100]),
        "ok": max(growth) <= GROWTH_LIMIT_BYTES,
    }


def main() -> int:
    """Runs both parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "soak" / "wire.json")
    options = parser.parse_args()
    state = _load(options.state, options.seed, options.frames)
    started = time.monotonic()
    soak_frames(state, options.state)
    done = state["rounds"]
    if options.rounds and (done is None or done["rounds"] != options.rounds or not done["ok"]):
        state["rounds"] = soak_rounds(options.rounds)
        _save(options.state, state)
    state["elapsed_s"] = round(time.monotonic() - started)
    sys.stdout.write(json.dumps(state, sort_keys=True) + "\n")
    return 0 if state["rounds"] is None or state["rounds"]["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
