"""The physical pair on two GPUs: exactness, stress and the lone rank first, then times against the solo head.

    python benchmarks/gpu_pair.py [--quick] [--prime CASE|worker]

What is checked and how it is timed is in `qualify.pair_physical` and `qualify.pair_timing`; this adds a table against
the goals. ``--prime`` only compiles one case, or the heads of a worker on the pair, so that several processes can fill
Triton's cache at once. Writes ``build/bench_gpu_pair.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from remote_dspark.contract import Q_FLOOR_FIRST, SUPPORT_K
from remote_dspark.drafter.pair_rank import RankShape
from remote_dspark.drafter.shapes import synthetic_config
from remote_dspark.kernels.pair_chain import PairChain, PhysicalPair
from remote_dspark.kernels.pair_head import launch_pair_position
from remote_dspark.kernels.pair_rank import DEFAULT_TIMEOUT_NS, PairRank
from remote_dspark.kernels.rows import CONTROL_WORDS
from remote_dspark.qualify.pair_host import device_state
from remote_dspark.qualify.pair_physical import device_checks
from remote_dspark.qualify.pair_timing import Case, CaseTimes, TimedCase, cases, goal_faults

DEVICES = (0, 1)
VOCAB = 129_280
RESULT = Path("build/bench_gpu_pair.json")


def measure(case: Case) -> CaseTimes:
    """Times one case and prints its line."""
    timed = TimedCase(case, DEVICES, DEFAULT_TIMEOUT_NS)
    with timed.pair:
        times = timed.measure()
    pair, half, full = (times.position_ns(name) / 1000 for name in ("pair", "half", "full"))
    faults = goal_faults(case, times)
    print(
        f"{case.name:12s} pair {pair:7.2f} half {half:7.2f} full {full:7.2f} extra {times.extra_ns / 1000:6.2f} us "
        f"{'; '.join(faults) or 'met'}",
        flush=True,
    )
    return times


def prime_worker() -> None:
    """Compiles the heads of a worker of the published shape."""
    config = synthetic_config("qwen3-4b")
    settings = RankShape(
        num_seats=1,
        support=SUPPORT_K,
        semantics=Q_FLOOR_FIRST,
        cache_bytes=0,
        max_positions=1,
        max_depth=1,
        bound=DEFAULT_TIMEOUT_NS,
    ).pair_settings(config.vocab_size)
    with PhysicalPair(settings, 1, 1, DEVICES) as pair:
        rows = [torch.zeros(1, config.vocab_size // 2, dtype=torch.bfloat16, device=f"cuda:{d}") for d in DEVICES]
        control = [torch.zeros(1, CONTROL_WORDS, dtype=torch.int32, device=f"cuda:{d}") for d in DEVICES]

        def launch(rank: PairRank, index: int) -> None:
            mine = rows[rank.rank]
            launch_pair_position(rank, index, mine, mine, control[rank.rank], last=True)

        PairChain(pair, launch, 1).prime()


def main() -> int:
    """Runs everything; 0 when all checks hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a fiftieth of the long checks")
    parser.add_argument("--prime", metavar="CASE|worker")
    arguments = parser.parse_args()
    timed = cases(VOCAB)
    if arguments.prime == "worker":
        prime_worker()
        return 0
    if arguments.prime is not None:
        TimedCase(timed[int(arguments.prime)], DEVICES, DEFAULT_TIMEOUT_NS).pair.close()
        return 0
    begin = time.monotonic()
    before = device_state()
    checks = []
    for check in device_checks(DEVICES, VOCAB, DEFAULT_TIMEOUT_NS, share=50 if arguments.quick else 1):
        print(f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.found} [{time.monotonic() - begin:.0f} s]")
        checks.append(check)
    times = {case.name: asdict(measure(case)) for case in timed}
    print(f"total: {time.monotonic() - begin:.0f} s")
    document = {
        "checks": [asdict(check) for check in checks],
        "times_ns": times,
        "before": before,
        "after": device_state(),
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="ascii")
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    raise SystemExit(main())
