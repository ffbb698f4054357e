"""Real holds on three hosts without a service manager: everything the guard starts is a session of its own."""

from __future__ import annotations

import signal
import time

import pytest

from coordinator.heartbeat import DEAD_MAN_GRACE_S
from tests.hosts.estate import STATE
from tests.hosts.faults import ALONE_S, conclude, host_of, kill_all, pids_of_role, reach
from tests.hosts.machine import wait_for
from tests.hosts.trio import BARE_NAMES, Trio

STAGES = (
    "outcome:acquire:b1",
    "note:all-snapshot",
    "outcome:arm:b1",
    "note:all-held",
    "outcome:run:b1",
    "intent:restore:b1",
    "outcome:close:b1",
)
TOUCHED = STAGES[3:6]


@pytest.mark.parametrize("how", ["recover", "alone"])
@pytest.mark.parametrize("stage", STAGES)
def test_bare_coordinator_killed(stage: str, how: str, bare: Trio) -> None:
    """Red when a host needs systemd to put production back."""
    driver = reach(bare, stage)
    driver.kill()
    conclude(bare, driver, how)


@pytest.mark.parametrize("stage", ["note:all-leased", *TOUCHED])
def test_bare_whole_hold_after_the_link_was_cut_for_a_moment(stage: str, bare: Trio) -> None:
    """Red when the death of the SSH session takes the guard's background programs along."""
    driver = reach(bare, stage, orphan_after_s=20, bound_s=110)
    for machine in bare.machines:
        kill_all(pids_of_role(machine, "sshd"))
    driver.go()
    conclude(bare, driver)


@pytest.mark.parametrize("stage", ["outcome:arm:b1", *TOUCHED])
def test_bare_dead_man_killed_and_the_coordinator_goes_on(stage: str, bare: Trio) -> None:
    """Red when a dead-man's death costs a hold that has a living holder."""
    driver = reach(bare, stage, orphan_after_s=20, bound_s=110)
    for machine in bare.machines:
        kill_all(pids_of_role(machine, "deadman"))
    driver.go()
    assert conclude(bare, driver) == 0


@pytest.mark.parametrize("name", BARE_NAMES)
@pytest.mark.parametrize("stage", ["outcome:arm:b1", *TOUCHED])
def test_bare_dead_man_and_coordinator_killed(stage: str, name: str, bare: Trio) -> None:
    """Red when nobody acts: the holder starts another dead-man, which restores at the time of the first."""
    driver = reach(bare, stage)
    driver.signal(signal.SIGSTOP)
    machine = host_of(bare, name)
    was_armed = pids_of_role(machine, "deadman")
    kill_all(was_armed)
    driver.kill()
    conclude(bare, driver, "alone")
    if was_armed:
        events = [event["event"] for event in bare.events(machine)]
        assert "dead-man-started-again" in events, events


@pytest.mark.parametrize("name", BARE_NAMES)
def test_bare_dead_man_that_stays_gone_ends_the_hold(name: str, bare: Trio) -> None:
    """Red when a coordinator goes on with a hold that nobody would end if it died."""
    driver = reach(bare, "note:qualified", orphan_after_s=20, bound_s=110)
    bare.tainted = True
    machine = host_of(bare, name)
    lock = f"{STATE}/holds/{driver.hold_id}/deadman.lock"
    machine.inside("sh", "-c", f"setsid flock {lock} sleep 300 </dev/null >/dev/null 2>&1 &")
    kill_all(pids_of_role(machine, "deadman"))
    time.sleep(DEAD_MAN_GRACE_S + 12)  # what the coordinator grants, and two beats
    driver.go()
    assert conclude(bare, driver) == 30, driver.log.read_text()


@pytest.mark.parametrize("name", BARE_NAMES)
@pytest.mark.parametrize("stage", ["note:all-snapshot", *TOUCHED])
def test_bare_holder_killed(stage: str, name: str, bare: Trio) -> None:
    """Red when the death of the one who keeps the locks costs production."""
    driver = reach(bare, stage)
    kill_all(pids_of_role(host_of(bare, name), "holder"))
    driver.go()
    conclude(bare, driver)


@pytest.mark.parametrize("stage", ["note:all-snapshot", *TOUCHED])
def test_bare_power_off_and_recover(stage: str, bare: Trio) -> None:
    """Red when a host that nothing restores after a reboot forgets its debt, or `recover` cannot pay it."""
    driver = reach(bare, stage)
    machine = bare.machines[1]
    machine.power_off()
    driver.kill()
    for other in (bare.machines[0], bare.machines[2]):
        wait_for(lambda host=other: bare.is_settled(host), ALONE_S, f"{other.name} ends the hold by itself")  # type: ignore[misc]
    conclude(bare, driver)
