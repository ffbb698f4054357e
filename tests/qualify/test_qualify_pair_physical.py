"""What the physical pair's program insists on before and after its kernels run; the kernels need two GPUs.

Turns red when: devices that the hold has not locked are used; a lone rank that hangs, forgets its error or leaves its
peer waiting passes; a missed goal is called met.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from remote_dspark.observe import HoldProof, ObserveError

pytestmark = pytest.mark.models

BOUND_NS = 50_000_000
GOOD: dict[str, Any] = {
    "first_ns": 50_300_000,
    "second_ns": 100_000,
    "peer_ns": 360_000,
    "errors": [1, 16],
    "late_errors": [17, 16],
    "refused": [4, 4],
}
"""As two GPUs answered."""


def test_both_devices_must_be_locked() -> None:
    from remote_dspark.qualify.pair_locks import require_locked

    hold = HoldProof("h-1", 3, ("GPU-a", "GPU-b", "GPU-c"))
    require_locked(("GPU-a", "GPU-c"), hold)
    for devices in (("GPU-a",), ("cpu:0",), ()):
        with pytest.raises(ObserveError, match="locks on both GPUs"):
            require_locked(("GPU-a", "GPU-c"), replace(hold, devices=devices))


def test_a_lone_rank_as_it_should_be() -> None:
    from remote_dspark.qualify.pair_lone import judge_lone

    assert all(check.ok for check in judge_lone(GOOD, BOUND_NS))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"first_ns": 49_000_000}, "lone.bounded"),
        ({"first_ns": 80_000_000}, "lone.bounded"),
        ({"errors": [1, 0]}, "lone.errors"),
        ({"errors": [0, 0]}, "lone.errors"),
        ({"second_ns": 50_300_000}, "lone.no_second_wait"),
        ({"peer_ns": 50_300_000}, "lone.peer_told"),
        ({"late_errors": [16, 16]}, "lone.sticky"),
        ({"refused": [4, 0]}, "lone.refused"),
    ],
)
def test_a_lone_rank_that_fails(change: dict[str, Any], name: str) -> None:
    from remote_dspark.qualify.pair_lone import judge_lone

    assert [check.name for check in judge_lone(GOOD | change, BOUND_NS) if not check.ok] == [name]


def test_goals_that_are_missed() -> None:
    from remote_dspark.qualify.pair_timing import POSITIONS, CaseTimes, cases, goal_faults

    cached, _, uncached, _, one_tile = cases(129_280)

    def times(pair: int, half: int, full: int) -> CaseTimes:
        return CaseTimes(*((value * POSITIONS,) for value in (pair, half, full)))

    assert goal_faults(cached, times(12_000, 8_000, 9_000)) == []
    assert "beyond the half vocabulary" in goal_faults(cached, times(13_001, 8_000, 9_000))[0]
    assert goal_faults(uncached, times(20_000, 15_000, 30_000)) == []
    assert "less than the solo head's" in goal_faults(uncached, times(20_000, 15_000, 20_000))[0]
    assert goal_faults(one_tile, times(13_001, 8_000, 9_000)) == []


def test_devices_are_two_numbers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "remote_dspark.qualify.pair", "--physical", "--output", str(tmp_path)]
    done = subprocess.run([*command, "--devices", "0"], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 2
    assert "two numbers" in done.stderr
