#!/usr/bin/env python
"""The worker's long proof: an hour of rounds of four requests, compressed in time, with random ends and faults.

An hour at 20 ms a round is 180,000 rounds; ``--rounds`` asks for another number. Seeded: a part
is one life of a worker of ``PART`` rounds under its own seed, and a second run goes on behind the last finished part.
Every ``REFERENCE_EVERY``-th part is drafted by the torch reference, the others by what stands in for it
(`tests/drafter/memory_compute.py`): the network's time would be most of an hour, and it is not what this proves.
Prints one JSON document; exit code 0 only if every reply was right, every counter added up and memory did not grow.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "drafter")]

from worker_load import load_worker, resident_bytes  # noqa: E402 - needs the path above

PART = 250
REFERENCE_EVERY = 40
GROWTH_LIMIT_BYTES = 8 << 20
"""Allocators breathe; one kept row of a tiny reply per round would be over 100 MB in an hour."""

TIME_BOX_ENDED = 3


def run_part(seed: int, rounds: int, *, without_network: bool) -> dict[str, Any]:
    """One worker's life; every difference is listed."""
    with (
        tempfile.TemporaryDirectory() as folder,
        load_worker(Path(folder), seed, 97, without_network=without_network) as (handler, engine, load),
    ):
        asyncio.run(load.run(rounds))
        tally, counters = load.tally, engine.counters
        expected = {
            "wrong_draws": (tally.wrong_draws, 0),
            "rounds": (counters.rounds, tally.rounds),
            "sampled": (counters.sampled_rounds, tally.sampled),
            "draft_tokens": (counters.draft_tokens, tally.rows),
            "accepted": (counters.accepted_tokens, tally.accepted),
            "state_rows": (counters.state_rows, tally.state_rows),
            "opened": (counters.opened, tally.opened),
            "closed": (counters.closed, tally.opened),
            "lost": (counters.row_errors, tally.lost),
            "refusals": (dict(handler.refusals), dict(tally.refusals)),
            "held": (handler.num_held, 0),
        }
        wrong = {name: pair for name, pair in expected.items() if pair[0] != pair[1]}
        by_reference = 0 if without_network else tally.rounds
        return {
            "rounds": tally.rounds,
            "by_reference": by_reference,
            "refusals": sum(tally.refusals.values()),
            "lost": tally.lost,
            "wrong": wrong,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=180_000)
    parser.add_argument("--seconds", type=float, default=7200.0, help="time box; run again to go on")
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "soak" / "worker.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    state: dict[str, Any] = dict.fromkeys(("rounds", "by_reference", "parts", "refusals", "lost", "grown"), 0)
    state["seed"] = arguments.seed
    if arguments.state.exists():
        found = json.loads(arguments.state.read_text())
        state = found if found["seed"] == arguments.seed else state
    begin, base, wrong = time.monotonic(), 0, {}
    while state["rounds"] < arguments.rounds and not wrong and time.monotonic() - begin < arguments.seconds:
        part = run_part(
            arguments.seed * 1_000_003 + state["parts"],
            min(PART, arguments.rounds - state["rounds"]),
            without_network=state["parts"] % REFERENCE_EVERY != 0,
        )
        wrong = part["wrong"]
        state["parts"] += 1
        for name in ("rounds", "by_reference", "refusals", "lost"):
            state[name] += part[name]
        # cycles that nothing reaches are not kept; what the first part of this process left is imports and pools
        gc.collect()
        base = base or resident_bytes()
        state["grown"] = max(state["grown"], resident_bytes() - base)
        arguments.state.parent.mkdir(parents=True, exist_ok=True)
        arguments.state.write_text(json.dumps(state) + "\n")
    is_good = not wrong and state["grown"] <= GROWTH_LIMIT_BYTES
    print(json.dumps(state | {"wrong": wrong, "ok": is_good}, default=str))
    if not is_good:
        return 1
    return 0 if state["rounds"] >= arguments.rounds else TIME_BOX_ENDED


if __name__ == "__main__":
    sys.exit(main())
