"""Real holds on three real hosts, disturbed while an owned program runs: by the program itself, or for its device."""

from __future__ import annotations

import pytest

from tests.hosts.estate import STATE
from tests.hosts.faults import ALONE_S, conclude, host_of, kill_all, pids_of_role, reach
from tests.hosts.machine import Machine, wait_for
from tests.hosts.trio import NAMES, Trio

LOCK = f"{STATE}/devices/cpu0.lock"
TEN_MEGABYTES = "head -c 10485760 /dev/zero >&2; echo done; exec sleep 60"
FORKS = "for i in 1 2 3 4 5 6 7 8; do (trap '' TERM; setsid sleep 600) & done; exec sleep 60"


@pytest.mark.parametrize("script", [TEN_MEGABYTES, FORKS], ids=["ten-megabytes-on-stderr", "deaf-children"])
@pytest.mark.parametrize("how", ["goes-on", "alone", "recover", "cut"])
def test_a_program_that_misbehaves(how: str, script: str, trio: Trio) -> None:
    """Red when what a program prints, or what it leaves running, keeps a hold from its end."""
    driver = reach(trio, "outcome:run:h2", script=script)
    machine = trio.machines[2]
    if script is TEN_MEGABYTES:
        wait_for(lambda: capped(machine, driver.hold_id), 20, "the program prints, and its file is capped")
    if how == "goes-on":
        driver.go()
        assert conclude(trio, driver) == 0
    elif how == "cut":
        machine.cut()
        driver.go()
        conclude(trio, driver)
    else:
        driver.kill()
        conclude(trio, driver, how)
    for host in trio.machines:
        assert not host.pids("sleep 600"), host.name


def capped(machine: Machine, hold_id: str) -> bool:
    """Whether the program's stderr reached its cap and stays there."""
    sizes = [path.stat().st_size for path in machine.path(f"{STATE}/holds/{hold_id}/runs").glob("*/stderr")]
    assert all(size <= 4096 for size in sizes)
    return sizes == [4096]


def take_device(machine: Machine) -> bool:
    """A foreign program takes the device's lock, if it can, and keeps it for the rest of the case."""
    unit = ["systemd-run", "-q", "--unit=foreign", "flock", "-n", LOCK, "sleep", "300"]
    machine.inside("sh", "-c", f"flock -n {LOCK} true && {' '.join(unit)}", check=False)
    return "active" in machine.inside("systemctl", "is-active", "foreign", check=False).split()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stage", ["note:all-leased", "note:all-held", "outcome:run:h2"])
def test_a_foreign_process_wants_a_held_device(stage: str, name: str, trio: Trio) -> None:
    """Red when somebody else gets the device of a living hold, or trying disturbs it."""
    driver = reach(trio, stage, orphan_after_s=20, bound_s=110)
    assert not take_device(host_of(trio, name))
    driver.go()
    assert conclude(trio, driver) == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_foreign_process_takes_the_device_in_the_middle_of_an_arm(name: str, trio: Trio) -> None:
    """Red when a measurement goes on beside a foreigner, production stays down, or the next hold opens."""
    driver = reach(trio, "outcome:run:h2")
    machine = host_of(trio, name)
    trio.tainted = True  # the foreigner stays
    kill_all(pids_of_role(machine, "holder"))
    wait_for(lambda: take_device(machine), 10, "the foreigner has the device")
    driver.go()
    assert conclude(trio, driver) == 40, driver.log.read_text()
    second = trio.drive(name="second")
    assert second.finish() == 11, second.log.read_text()
    machine.inside("systemctl", "stop", "foreign")
    for other in trio.machines:
        trio.wait_state(other, lambda status: status["state"] == "free", ALONE_S, "is free again")
    third = trio.drive(name="third")
    assert conclude(trio, third) == 0, third.log.read_text()
