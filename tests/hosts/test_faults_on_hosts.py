"""Real holds on three real hosts, disturbed on a host: programs die, the disk fills, the state is wiped."""

from __future__ import annotations

import io
import zipfile

import pytest

from tests.hosts.estate import STATE
from tests.hosts.faults import ALONE_S, BEFORE_STOP, VERBS, conclude, host_of, kill_all, operations, pids_of_role, reach
from tests.hosts.machine import Machine, wait_for
from tests.hosts.trio import NAMES, Trio
from windows.guard_archive import archive_name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stage", ["note:all-snapshot", "outcome:arm:h1", "note:all-held", "intent:restore:h1"])
@pytest.mark.parametrize("role", ["holder", "deadman", "sshd"])
def test_a_program_on_the_host_is_killed(role: str, stage: str, name: str, trio: Trio) -> None:
    """Red when the holder's, the dead-man's or sshd's death costs production."""
    driver = reach(trio, stage)
    machine = host_of(trio, name)
    pids = pids_of_role(machine, role)
    assert pids or (role == "deadman" and stage == "note:all-snapshot")
    kill_all(pids)
    driver.go()
    conclude(trio, driver)


@pytest.mark.parametrize("name", ["h0", "h2"])
@pytest.mark.parametrize("verb", VERBS)
def test_the_guard_is_killed_in_the_middle_of_a_verb(verb: str, name: str, trio: Trio) -> None:
    """Red when a call that died half-way is taken as done, or its repetition does harm."""
    driver = reach(trio, f"intent:{verb}:{name}")
    machine = host_of(trio, name)
    known = set(operations(machine))
    background = set(machine.pids("guard-"))
    driver.go()
    wait_for(lambda: set(operations(machine)) - known, 20, f"{name} begins {verb}")
    kill_all([pid for pid in machine.pids("guard-") if pid not in background])
    conclude(trio, driver)


@pytest.mark.parametrize("name", ["h0", "h2"])
@pytest.mark.parametrize("stage", ["note:all-leased", "outcome:arm:h1", "note:all-held", "intent:restore:h1"])
def test_the_disk_fills_up(stage: str, name: str, trio: Trio) -> None:
    """Red when restoring needs free space."""
    driver = reach(trio, stage)
    machine = host_of(trio, name)
    machine.inside("sh", "-c", "cat /dev/zero > /srv/filler", check=False)
    driver.go()
    driver.finish()
    machine.path("/srv/filler").unlink()
    conclude(trio, driver)


@pytest.mark.parametrize("how", ["recover", "alone"])
@pytest.mark.parametrize("stage", ["note:all-held", "intent:restore:h1"])
def test_the_disk_is_full_and_the_coordinator_dead(stage: str, how: str, trio: Trio) -> None:
    """Red when the dead-man or a recovery needs free space."""
    driver = reach(trio, stage)
    machine = trio.machines[1]
    machine.inside("sh", "-c", "cat /dev/zero > /srv/filler", check=False)
    driver.kill()
    if how == "alone":
        trio.wait_alone(ALONE_S)
    else:
        assert trio.recover(driver.hold_id) == 0
    machine.path("/srv/filler").unlink()
    conclude(trio, driver)


@pytest.mark.parametrize("how", ["recover", "abort"])
@pytest.mark.parametrize("stage", ["note:all-leased", "note:all-held", "intent:restore:h1"])
def test_recover_by_another_version_on_a_full_disk(stage: str, how: str, trio: Trio) -> None:
    """Red when ending a hold begins with an upload that a full disk refuses."""
    driver = reach(trio, stage, orphan_after_s=30, bound_s=110)
    machine = trio.machines[1]
    trio.tainted = True  # the guard that opened the hold is not the one of this installation any more
    become_older(machine)
    machine.inside("sh", "-c", "cat /dev/zero > /srv/filler", check=False)
    driver.kill()
    assert trio.recover(driver.hold_id, how) == 0
    assert len(list(machine.path(f"{STATE}/bin").iterdir())) == 1, "nothing was uploaded"
    machine.path("/srv/filler").unlink()
    conclude(trio, driver)


def become_older(machine: Machine) -> None:
    """Replace the host's guard archive by another version of it, under that version's digest."""
    (path,) = machine.path(f"{STATE}/bin").glob("guard-*.pyz")
    other = io.BytesIO(path.read_bytes())
    with zipfile.ZipFile(other, "a") as archive:
        archive.writestr("OLDER", "1")
    data = other.getvalue()
    path.unlink()
    path.with_name(archive_name(data)).write_bytes(data)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stage", ["note:all-leased", "outcome:arm:h1", "note:all-held", "intent:restore:h1"])
def test_the_state_folder_is_wiped(stage: str, name: str, trio: Trio) -> None:
    """Red when a host that forgot its hold forgets its debt too, or obeys the old claim."""
    driver = reach(trio, stage)
    machine = host_of(trio, name)
    archives = machine.path(f"{STATE}/bin")
    kept = {path.name: path.read_bytes() for path in archives.glob("*.pyz")}
    # Moved, not removed: deleting takes long enough to delete what the dead-man writes while it restores.
    wipe = f"mkdir /srv/gone && find {STATE} -mindepth 1 -maxdepth 1 ! -name bin -exec mv -t /srv/gone {{}} +"
    machine.inside("sh", "-c", wipe)
    assert kept
    driver.go()
    code = driver.finish()
    trio.tainted = True  # a wiped host does not know its process any more
    if stage in BEFORE_STOP:
        assert code != 0
    wait_for(lambda: not trio.status(machine)["in_debt"], ALONE_S, f"{name} pays its debt")
    for other in trio.machines:
        if other is not machine:
            trio.wait_state(other, lambda status: status["state"] == "free", ALONE_S, "ends the hold")
            trio.require_restored(other)
            trio.require_history(other)
    shown = trio.look(machine)
    assert "served by web" in shown, shown
    assert "served by worker" in shown, shown


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stage", ["note:all-held", "outcome:run:h1", "note:qualified"])
def test_a_hold_that_lost_its_holder_ends_by_its_hosts(stage: str, name: str, trio: Trio) -> None:
    """Red when the coordinator asks once, too early, and calls production unproven that its host brings back."""
    driver = reach(trio, stage)
    kill_all(pids_of_role(host_of(trio, name), "holder"))
    driver.go()
    assert conclude(trio, driver) == 40, driver.log.read_text()
