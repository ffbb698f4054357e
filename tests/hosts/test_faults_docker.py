"""Real holds on a real host whose production is a container of a real docker daemon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.conftest import finish_trio
from tests.hosts.docker_host import (
    answer,
    box,
    docker,
    fill_docker_disk,
    run_box,
    seen,
    state_of,
    why_not,
)
from tests.hosts.estate import STATE
from tests.hosts.faults import ALONE_S, conclude
from tests.hosts.lab import Lab
from tests.hosts.machine import Machine, wait_for
from tests.hosts.trio import Driver, Trio

LONG = {"orphan_after_s": 25, "bound_s": 120, "restore_reserve_s": 25}
STOP_BOUNDS = {"preflight": 10, "lease": 12, "snapshot": 8, "arm-dead-man": 12, "stop": 20}


@pytest.fixture
def docked(lab: Lab, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Trio]:
    """One host with a docker daemon."""
    reason = why_not()
    if reason is not None:
        pytest.skip(f"NOT RUN: {reason}")
    trio = Trio(lab, tmp_path, names=("d0",), image=fill_docker_disk)
    trio.added = [box()]
    yield from finish_trio(trio, request)


def reach(trio: Trio, at: str, **plan: object) -> Driver:
    trio.prepare(step_bounds_s=STOP_BOUNDS, **{"restore_reserve_s": 25, "bound_s": 120, **plan})
    driver = trio.drive(at)
    assert driver.until_station() is not None, driver.log.read_text()
    return driver


def require_stopped(machine: Machine) -> None:
    assert state_of(machine) == ("exited", "no")
    assert answer(machine) == ""


def require_back(machine: Machine, before: str) -> None:
    wait_for(lambda: "served by box" in answer(machine), 20, "the container serves again")
    assert seen(machine) == before


@pytest.mark.parametrize("policy", ["no", "always", "unless-stopped", "on-failure:3"])
def test_a_container_is_stopped_and_comes_back_as_it_was(policy: str, docked: Trio) -> None:
    """Red when a container runs inside a hold, or comes back with another id, policy, setting or not at all."""
    (machine,) = docked.machines
    run_box(machine, f"--restart={policy}")
    before = seen(machine)
    driver = reach(docked, "note:all-held", **LONG)
    require_stopped(machine)
    driver.go()
    assert conclude(docked, driver) == 0, driver.log.read_text()
    require_back(machine, before)


@pytest.mark.parametrize("how", ["recover", "alone"])
@pytest.mark.parametrize("at", ["intent:stop:d0", "outcome:stop:d0", "intent:restore:d0"])
def test_the_coordinator_dies_and_the_container_comes_back(at: str, how: str, docked: Trio) -> None:
    """Red when a container, or its restart policy, waits for a coordinator that is dead."""
    (machine,) = docked.machines
    run_box(machine, "--restart=always")
    before = seen(machine)
    driver = reach(docked, at)
    driver.kill()
    conclude(docked, driver, how)
    require_back(machine, before)


def test_the_daemon_starts_again_inside_a_hold(docked: Trio) -> None:
    """Red when a daemon that starts again brings production back inside the hold."""
    (machine,) = docked.machines
    run_box(machine, "--restart=always")
    before = seen(machine)
    driver = reach(docked, "note:all-held", **LONG)
    machine.inside("systemctl", "restart", "docker")
    wait_for(lambda: docker(machine, "ps", "-aq", check=False).strip(), 20, "the daemon answers again")
    require_stopped(machine)
    driver.go()
    assert conclude(docked, driver) == 0, driver.log.read_text()
    require_back(machine, before)


def test_a_power_off_inside_a_hold(docked: Trio) -> None:
    """Red when the boot unit does not wait for the daemon, or leaves the policy that the hold set."""
    (machine,) = docked.machines
    run_box(machine, "--restart=always")
    before = seen(machine)
    driver = reach(docked, "note:all-held")
    machine.power_off()
    driver.kill()
    conclude(docked, driver, "alone")
    require_back(machine, before)


def test_the_path_without_python_brings_the_policy_back_too(docked: Trio) -> None:
    """Red when what systemd starts if the guard cannot run forgets the restart policy."""
    (machine,) = docked.machines
    run_box(machine, "--restart=always")
    before = seen(machine)
    driver = reach(docked, "note:all-held", **LONG)
    # The container's lines only: a process that is started by hand is nobody's, and its hold ends in debt.
    lines = f"grep docker {STATE}.debt/fallback.sh | sh -e"
    machine.inside("env", "PATH=/usr/local/bin:/usr/bin:/bin", "sh", "-c", lines)
    require_back(machine, before)
    driver.go()
    assert conclude(docked, driver) == 0, driver.log.read_text()
    require_back(machine, before)


def test_a_container_deaf_to_sigterm(docked: Trio) -> None:
    """Red when a container that ignores its stop signal keeps its port, or makes the stop endless."""
    (machine,) = docked.machines
    run_box(machine, "--restart=always", mode="deaf")
    before = seen(machine)
    driver = reach(docked, "note:all-held", **LONG)
    require_stopped(machine)
    driver.go()
    assert conclude(docked, driver) == 0, driver.log.read_text()
    require_back(machine, before)


def add_healer(machine: Machine) -> None:
    """A timer that starts the container every second, as a home-made watchdog does."""
    units = machine.path("/etc/systemd/system")
    (units / "healer.service").write_text("[Service]\nType=oneshot\nExecStart=/usr/local/bin/docker start box\n")
    (units / "healer.timer").write_text(
        "[Timer]\nOnActiveSec=1\nOnUnitActiveSec=1\nAccuracySec=50ms\n[Install]\nWantedBy=timers.target\n"
    )
    machine.inside("systemctl", "daemon-reload")
    machine.inside("systemctl", "enable", "-q", "--now", "healer.timer")


def test_a_self_healer_is_suspended_and_resumed_last(docked: Trio) -> None:
    """Red when a watchdog starts the container inside the hold, or does not watch any more afterwards."""
    (machine,) = docked.machines
    docked.tainted = True
    run_box(machine)
    add_healer(machine)
    before = seen(machine)
    docked.added = [box(supervisors=["healer.timer"])]
    driver = reach(docked, "note:all-held", **LONG)
    require_stopped(machine)
    assert machine.inside("systemctl", "is-active", "healer.timer", check=False).strip() == "inactive"
    driver.go()
    assert conclude(docked, driver) == 0, driver.log.read_text()
    require_back(machine, before)
    assert machine.inside("systemctl", "is-active", "healer.timer").strip() == "active"


def test_a_self_healer_that_nobody_named_ends_the_stop(docked: Trio) -> None:
    """Red when a container that something starts again passes for stopped."""
    (machine,) = docked.machines
    docked.tainted = True
    run_box(machine)
    add_healer(machine)
    docked.added = [box(watch_s=3)]
    docked.prepare(step_bounds_s=STOP_BOUNDS, **LONG)
    driver = docked.drive()
    assert driver.finish() == 30, driver.log.read_text()
    assert "ghost" in driver.log.read_text() or "container is running" in driver.log.read_text()
    wait_for(lambda: docked.is_settled(machine), ALONE_S, "the hold is over")
    assert "served by box" in answer(machine)


@pytest.mark.parametrize("why", ["--rm", "bind", "swarm", "stopped", "paused", "unknown"])
def test_production_that_would_not_come_back_is_refused_untouched(why: str, docked: Trio) -> None:
    """Red when a hold opens on a container that its stop would lose, or that is not as expected."""
    (machine,) = docked.machines
    options = {"--rm": ["--rm"], "bind": ["-v", "/srv/data:/data"], "swarm": ["--label=com.docker.swarm.task.id=x"]}
    run_box(machine, *options.get(why, []))
    if why == "bind":
        machine.path("/srv/data").rmdir()
    if why in ("stopped", "paused"):
        docker(machine, {"stopped": "stop", "paused": "pause"}[why], "box")
    if why == "unknown":
        docked.added = [box(container="nobody")]
    before = seen(machine)
    docked.prepare(step_bounds_s=STOP_BOUNDS, **LONG)
    driver = docked.drive()
    assert driver.finish() == 10, driver.log.read_text()
    assert seen(machine) == before
    docked.require_all()
    if why == "paused":
        docker(machine, "unpause", "box")
