"""Real holds on three real hosts, disturbed from outside: the coordinator dies, the link breaks, the power goes."""

from __future__ import annotations

import signal
import time

import pytest

from tests.hosts.faults import ALONE_S, STAGES, VERBS, conclude, host_of, operations, reach
from tests.hosts.machine import wait_for
from tests.hosts.trio import NAMES, NUM_RECORDS, Trio


@pytest.mark.parametrize("how", ["recover", "alone"])
@pytest.mark.parametrize("record", range(NUM_RECORDS))
def test_coordinator_killed_after_a_journal_entry(record: int, how: str, trio: Trio) -> None:
    """Red when any moment of its death loses production, a record or the lease."""
    driver = reach(trio, str(record))
    driver.kill()
    conclude(trio, driver, how)


@pytest.mark.parametrize("stage", STAGES)
def test_coordinator_frozen_for_longer_than_its_lease(stage: str, trio: Trio) -> None:
    """Red when a coordinator that wakes up late acts on hosts that went on without it."""
    driver = reach(trio, stage)
    driver.signal(signal.SIGSTOP)
    trio.wait_alone(ALONE_S)
    starts = [trio.starts(machine) for machine in trio.machines]
    driver.signal(signal.SIGCONT)
    driver.go()
    code = conclude(trio, driver)
    assert [trio.starts(machine) for machine in trio.machines] == starts, "the late one started something"
    assert code != 0 or stage in STAGES[8:]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("moment", ["before", "during", "after"])
@pytest.mark.parametrize("verb", VERBS)
def test_link_cut_around_a_remote_action(verb: str, moment: str, name: str, trio: Trio) -> None:
    """Red when an unknown outcome is guessed, or one host's silence costs another its production."""
    driver = reach(trio, f"{'outcome' if moment == 'after' else 'intent'}:{verb}:{name}")
    machine = host_of(trio, name)
    if moment != "during":
        machine.cut()
        driver.go()
    else:
        known = set(operations(machine))
        driver.go()
        wait_for(lambda: set(operations(machine)) - known, 20, f"{name} begins {verb}")
        machine.cut()
    code = conclude(trio, driver)
    assert code != 0 or verb in ("restore", "close")


@pytest.mark.parametrize("name", NAMES)
def test_a_short_cut_is_only_a_delay(name: str, trio: Trio) -> None:
    """Red when a link that comes back in time ends a hold."""
    driver = reach(trio, "note:all-held", orphan_after_s=20, bound_s=110)
    machine = host_of(trio, name)
    machine.cut()
    driver.go()
    time.sleep(1.5)  # the length of the fault itself
    machine.heal()
    assert conclude(trio, driver) == 0


@pytest.mark.parametrize("name", NAMES)
def test_one_host_ends_before_the_others(name: str, trio: Trio) -> None:
    """Red when the others are not restored, or the early one is restored twice."""
    driver = reach(trio, "note:all-held")
    machine = host_of(trio, name)
    machine.cut()
    trio.wait_state(machine, lambda status: status["state"] == "free", ALONE_S, "restores by itself")
    machine.heal()
    driver.go()
    assert conclude(trio, driver) not in (0, None)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stage", STAGES)
def test_power_off_and_on(stage: str, name: str, trio: Trio) -> None:
    """Red when a reboot resumes a hold, forgets its debt, or keeps the other hosts from production."""
    driver = reach(trio, stage.replace("h1", name))
    machine = host_of(trio, name)
    machine.power_off()
    trio.reboot(machine)
    driver.go()
    conclude(trio, driver)


@pytest.mark.parametrize("stage", STAGES)
def test_power_off_and_nobody_comes(stage: str, trio: Trio) -> None:
    """Red when a rebooted host, or its peers, wait for a person."""
    driver = reach(trio, stage)
    trio.machines[1].power_off()
    driver.kill()
    conclude(trio, driver, "alone")


@pytest.mark.parametrize("stage", ["note:all-snapshot", "intent:stop:h1", "note:all-held", "intent:restore:h1"])
def test_all_hosts_lose_power(stage: str, trio: Trio) -> None:
    """Red when restoring after a power cut needs a peer or the coordinator."""
    driver = reach(trio, stage)
    for machine in trio.machines:
        machine.power_off()
    driver.kill()
    conclude(trio, driver, "alone")
