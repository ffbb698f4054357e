"""Real holds on three real hosts, disturbed by people: a second coordinator, breaks, aborts, the same moment."""

from __future__ import annotations

import signal
import time

import pytest

from tests.hosts.estate import ORPHAN_AFTER_S
from tests.hosts.faults import STAGES, conclude, reach
from tests.hosts.trio import Trio


@pytest.mark.parametrize("stage", STAGES[:-1])
def test_a_second_coordinator_is_refused(stage: str, trio: Trio) -> None:
    """Red when two coordinators hold one host, or the refused one disturbs the first."""
    first = reach(trio, stage, orphan_after_s=20, bound_s=110)
    second = trio.drive(name="second")
    code = second.finish()
    assert code in (10, 11, 50), second.log.read_text()
    first.go()
    assert conclude(trio, first) == 0
    assert second.code != 0


@pytest.mark.parametrize("attempt", range(6))
def test_two_coordinators_race(attempt: int, trio: Trio) -> None:
    """Red when both get a host, or neither can ever."""
    trio.prepare(orphan_after_s=20, bound_s=110)
    drivers = [trio.drive(name="racer") for _ in range(2)]
    codes = sorted(driver.finish() or 0 for driver in drivers)
    assert set(codes) <= {0, 11, 10}, [driver.log.read_text() for driver in drivers]
    for driver in drivers:
        if driver.hold_id:
            conclude(trio, driver)


@pytest.mark.parametrize("stage", ["note:all-leased", "note:all-snapshot", "note:all-held", "outcome:run:h1"])
def test_broken_and_acquired_again(stage: str, trio: Trio) -> None:
    """Red when a broken hold's coordinator acts on the next one's hosts."""
    first = reach(trio, stage, orphan_after_s=20, bound_s=110)
    assert trio.recover(first.hold_id, "break") == 0
    in_debt = any(trio.status(machine)["in_debt"] for machine in trio.machines)
    if in_debt:
        refused = trio.drive(name="too-early")
        assert refused.finish() == 50
        assert trio.recover(first.hold_id) == 0
    second = trio.drive("note:all-held", name="second")
    assert second.until_station() is not None, second.log.read_text()
    first.go()
    assert first.finish() in (40, 50)
    assert all(trio.status(machine)["hold"]["hold_id"] == second.hold_id for machine in trio.machines)
    second.go()
    assert conclude(trio, second) == 0


@pytest.mark.parametrize("early_ms", [1500, 1000, 500, 250, 0, -250, -500, -1000])
@pytest.mark.parametrize("verb", ["restore", "close"])
def test_dead_man_and_coordinator_at_the_same_moment(verb: str, early_ms: int, trio: Trio) -> None:
    """Red when both restore, or one ends the hold under the other."""
    driver = reach(trio, f"intent:{verb}:h1")
    driver.signal(signal.SIGSTOP)
    time.sleep(ORPHAN_AFTER_S - early_ms / 1000)  # around the dead-man's time: the race is the case
    driver.signal(signal.SIGCONT)
    driver.go()
    conclude(trio, driver)


@pytest.mark.parametrize("stage", ["note:all-leased", "note:all-snapshot", "note:all-held", "outcome:run:h1"])
def test_abort_under_a_living_coordinator(stage: str, trio: Trio) -> None:
    """Red when `abort` from another machine does not end the hold, or its coordinator does not notice."""
    driver = reach(trio, stage)
    assert trio.recover(driver.hold_id, "abort") == 0
    for machine in trio.machines:
        trio.require_restored(machine)
    driver.go()
    assert conclude(trio, driver) != 0
