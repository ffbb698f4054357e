"""Start-up of the command line, and the cost of one guard call: what an operator waits for."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RUNS = 7


def measure() -> list[dict[str, Any]]:
    help_s = median_s([sys.executable, "-m", "coordinator", "--help"])
    python_s = median_s([sys.executable, "-c", "pass"])
    guard_s = guard_call_s()
    return [
        row("coordinator --help", help_s, 0.3, "bare interpreter", python_s),
        row("one guard call (status)", guard_s, 0.25, "bare interpreter", python_s),
    ]


def row(name: str, value: float, goal: float, peer: str, peer_value: float) -> dict[str, Any]:
    return {
        "name": name,
        "value": value,
        "unit": "s",
        "goal": f"< {goal}",
        "met": value < goal,
        "peer": peer,
        "ratio": value / peer_value,
    }


def median_s(argv: list[str]) -> float:
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        subprocess.run(argv, check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def guard_call_s() -> float:
    from coordinator.guard_client import GuardClient
    from coordinator.local import LocalHost
    from coordinator.session import new_operation_id
    from coordinator.staging import stage_guard

    with tempfile.TemporaryDirectory() as folder:
        state = str(Path(folder) / "state")
        host = LocalHost("here")
        guard = GuardClient(
            host,
            python=sys.executable,
            archive=stage_guard(host, state).path,
            state_dir=state,
            operation_ids=new_operation_id,
        )
        times = []
        for _ in range(RUNS):
            start = time.perf_counter()
            guard.call("status")
            times.append(time.perf_counter() - start)
    return statistics.median(times)
