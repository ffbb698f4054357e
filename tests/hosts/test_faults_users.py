"""Real holds by an ordinary user: units of the user's own manager, which lives only because the user lingers."""

from __future__ import annotations

import pytest

from tests.hosts.faults import conclude, host_of, kill_all, pids_of_role, reach
from tests.hosts.trio import USER_NAMES, Trio

STAGES = ("note:all-snapshot", "note:all-held", "outcome:run:u1", "intent:restore:u1")


def test_users_whole_hold(users: Trio) -> None:
    """Red when a hold needs root for production that an ordinary user started."""
    users.prepare()
    assert conclude(users, users.drive(run=True)) == 0


@pytest.mark.parametrize("how", ["recover", "alone"])
@pytest.mark.parametrize("stage", STAGES)
def test_users_coordinator_killed(stage: str, how: str, users: Trio) -> None:
    """Red when the end of the login takes the dead-man or the holder along."""
    driver = reach(users, stage)
    driver.kill()
    conclude(users, driver, how)


@pytest.mark.parametrize("role", ["holder", "deadman", "sshd"])
@pytest.mark.parametrize("stage", STAGES[:2])
def test_users_program_killed(stage: str, role: str, users: Trio) -> None:
    """Red when the death of a program of the user's guard costs production."""
    driver = reach(users, stage)
    kill_all(pids_of_role(users.machines[1], role))
    driver.go()
    conclude(users, driver)


@pytest.mark.parametrize("stage", STAGES[1:])
def test_users_power_off(stage: str, users: Trio) -> None:
    """Red when the boot unit of a user's manager does not put production back."""
    driver = reach(users, stage)
    users.machines[1].power_off()
    driver.kill()
    conclude(users, driver, "alone")


@pytest.mark.parametrize("name", USER_NAMES)
def test_users_without_linger_are_refused(name: str, users: Trio) -> None:
    """Red when a hold opens on a host where the guard's programs would end with the login."""
    users.prepare()
    users.tainted = True
    machine = host_of(users, name)
    machine.path("/var/lib/systemd/linger/op").unlink()
    starts = [users.starts(each) for each in users.machines]
    driver = users.drive(run=True)
    assert driver.finish() == 10, driver.log.read_text()
    assert "linger" in driver.log.read_text()
    assert [users.starts(each) for each in users.machines] == starts
    for each in users.machines:
        users.require_restored(each)
        users.require_history(each)
