"""Real holds on three real hosts whose wall clock is stepped by an hour: no deadline may move with it.

The hosts share this machine's clock, so a preload shifts what their programs read as wall time.
"""

from __future__ import annotations

import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.hosts.faults import conclude, reach
from tests.hosts.trio import Trio

STAGES = ("note:all-leased", "outcome:arm:h1", "note:all-held", "intent:restore:h1")
SOURCE = Path(__file__).with_name("clock_shift.c")


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("NOT RUN: stepping a host's clock needs a C compiler")
    built = tmp_path_factory.mktemp("shim") / "clock_shift.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(built), str(SOURCE)], check=True)
    return built.read_bytes()


@pytest.mark.parametrize("how", ["goes-on", "alone"])
@pytest.mark.parametrize("seconds", [3600, -3600])
@pytest.mark.parametrize("stage", STAGES)
def test_the_wall_clock_is_stepped(stage: str, seconds: int, how: str, shim: bytes, trio: Trio) -> None:
    """Red when a deadline, a bound or an order follows the wall clock, or a hold ends because it jumped."""
    trio.tainted = True
    for machine in trio.machines:
        machine.path("/usr/lib/clock_shift.so").write_bytes(shim)
        machine.path("/etc/ld.so.preload").write_text("/usr/lib/clock_shift.so\n")
    driver = reach(trio, stage, **({"orphan_after_s": 20, "bound_s": 110} if how == "goes-on" else {}))
    for machine in trio.machines:
        machine.path("/srv/clock-shift").write_text(str(seconds))
    if how == "alone":
        driver.kill()
        conclude(trio, driver, "alone")
    else:
        driver.go()
        assert conclude(trio, driver) == 0
    for machine in trio.machines:
        (ended,) = [event for event in trio.events(machine) if event["event"] == "ended"][-1:]
        shifted = datetime.fromisoformat(ended["utc"]) - datetime.now(UTC)
        assert abs(shifted - timedelta(seconds=seconds)) < timedelta(minutes=10), f"the shim did nothing: {shifted}"
