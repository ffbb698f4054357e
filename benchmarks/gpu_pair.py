"""The physical pair on two GPUs: exactness, stress and the lone rank first, then times against the solo head.

    python benchmarks/gpu_pair.py [--quick] [--prime CASE]

What is checked and how it is timed is in `qualify.pair_physical` and `qualify.pair_timing`; this adds a table against
the goals. ``--prime`` only compiles one case, so that several processes can fill Triton's cache at once. Writes
``build/bench_gpu_pair.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from remote_dspark.kernels.pair_rank import DEFAULT_TIMEOUT_NS
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


def main() -> int:
    """Runs everything; 0 when all checks hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a fiftieth of the long checks")
    parser.add_argument("--prime", type=int, metavar="CASE")
    arguments = parser.parse_args()
    timed = cases(VOCAB)
    if arguments.prime is not None:
        TimedCase(timed[arguments.prime], DEVICES, DEFAULT_TIMEOUT_NS).pair.close()
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
