#!/usr/bin/env python
"""One million mutated receipts: each is refused with the one error, or is a receipt of exactly its own bytes.

And none of them has the digest that was recorded for its original. Seeded and resumable: progress is written after each
batch to ``--state``, and a second run with the same seed and number goes on from there. Prints one JSON document; exit
code 0 only if every mutant was judged and the line held for all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "receipts")]

from receipt_kit import every_kind  # noqa: E402 - needs the path above
from receipt_mutants import judge, mutants  # noqa: E402

BATCH = 10_000


def load(path: Path, seed: int, number: int) -> dict[str, Any]:
    """State of an earlier run with the same seed and size, or a fresh one."""
    if path.exists():
        state: dict[str, Any] = json.loads(path.read_text())
        if (state.get("seed"), state.get("mutants")) == (seed, number):
            return state
    return {"seed": seed, "mutants": number, "done": 0, "outcomes": {}, "cpu_s": 0}


def save(path: Path, state: dict[str, Any]) -> None:
    """Replace the state file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(state, indent=1, sort_keys=True) + "\n")
    part.replace(path)


def soak(state: dict[str, Any], path: Path, limit_s: float | None) -> None:
    """Judge what is left, batch by batch; each batch has its own seed, so that any of them can be run alone."""
    originals = [entry.content for entry in every_kind().entries]
    outcomes: Counter[str] = Counter(state["outcomes"])
    start, cpu = time.monotonic(), time.process_time()
    spent = state["cpu_s"]
    while state["done"] < state["mutants"]:
        if limit_s is not None and time.monotonic() - start > limit_s:
            return
        size = min(BATCH, state["mutants"] - state["done"])
        seed = state["seed"] * 1_000_003 + state["done"] // BATCH
        for place, (original, mutant) in enumerate(itertools.islice(mutants(originals, seed), size)):
            try:
                outcomes[judge(original, mutant)] += 1
            except BaseException:
                sys.stderr.write(f"batch seed {seed}, mutant {place}: {mutant[:2000]!r}\n")
                raise
        state["done"] += size
        state["outcomes"] = dict(sorted(outcomes.items()))
        state["cpu_s"] = round(spent + time.process_time() - cpu)
        save(path, state)
        sys.stderr.write(f"mutants {state['done']}/{state['mutants']}\n")


def main() -> int:
    """Run, or go on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=None, help="stop after this long; run again to go on")
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "soak" / "receipts.json")
    options = parser.parse_args()
    state = load(options.state, options.seed, options.mutants)
    soak(state, options.state, options.limit_s)
    sys.stdout.write(json.dumps(state, sort_keys=True) + "\n")
    return 0 if state["done"] == state["mutants"] else 1


if __name__ == "__main__":
    sys.exit(main())
