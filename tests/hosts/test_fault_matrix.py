"""Real holds on three real hosts, each disturbed once; then production must be as it was, with one restore.

After every case: no host ever had two holders, each hold was restored at most once, every beginning has an end, the
journal replays, and an exit code that promises production back was true when it was given. ``HOSTS_PART`` chooses which
part of the matrix runs (see ``conftest``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.machine import Machine, send, wait_for
from tests.hosts.trio import NAMES, NUM_RECORDS, ORPHAN_AFTER_S, PYTHON, RESTORED_CODES, STATE, Driver, Trio

VERBS = ("acquire", "confirm", "snapshot", "arm", "stop", "run", "end-run", "restore", "close")
STAGES = (
    "outcome:acquire:h1",
    "note:all-leased",
    "note:all-snapshot",
    "outcome:arm:h1",
    "intent:stop:h1",
    "note:all-held",
    "outcome:run:h1",
    "note:qualified",
    "intent:restore:h1",
    "outcome:restore:h1",
    "outcome:close:h1",
)
BEFORE_STOP = STAGES[:4]
ALONE_S = 45.0


def conclude(trio: Trio, driver: Driver, how: str = "recover") -> int | None:
    """The end of every case: what the coordinator promised, what people do, what must be true."""
    code = driver.finish() if driver.process.poll() is None or driver.code is None else driver.code
    if code in RESTORED_CODES:
        for machine in trio.machines:
            if machine.is_up and not trio.num_boots[machine.name]:
                trio.require_restored(machine)
    trio.repair_world()
    if how == "alone":
        trio.wait_alone(ALONE_S)
    knew = any(trio.knows(machine, driver.hold_id) for machine in trio.machines)
    recovered = trio.recover(driver.hold_id or "none")
    assert recovered == (0 if knew else 2), f"recover exited {recovered}"
    for machine in trio.machines:
        trio.start_what_no_hold_owes(machine)
    trio.require_all()
    return code


def reach(trio: Trio, at: str, *, run: bool = True, **plan: Any) -> Driver:
    """A hold that stands at one record."""
    trio.prepare(**plan)
    driver = trio.drive(at, run=run)
    assert driver.until_station() is not None, driver.log.read_text()
    return driver


def host_of(trio: Trio, name: str) -> Machine:
    return trio.machines[NAMES.index(name)]


# -- the coordinator dies ---------------------------------------------------------------------------------------------


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


# -- the link ---------------------------------------------------------------------------------------------------------


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


def operations(machine: Machine) -> list[str]:
    """Operations the guard of a host has begun."""
    with contextlib.suppress(OSError):
        return os.listdir(machine.path(f"{STATE}/ops"))  # noqa: PTH208 - a plain list of names
    return []


@pytest.mark.parametrize("name", NAMES)
def test_a_short_cut_is_only_a_delay(name: str, trio: Trio) -> None:
    """Red when a link that comes back in time ends a hold."""
    driver = reach(trio, "note:all-held", orphan_after_s=20, bound_s=70)
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


# -- power ------------------------------------------------------------------------------------------------------------


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


# -- programs on the host ---------------------------------------------------------------------------------------------


def pids_of_role(machine: Machine, role: str) -> list[int]:
    """A guard's background program, or the connections of sshd."""
    if role == "sshd":
        return machine.pids("sshd:")
    found = [int(line) for unit in units_of(machine, role) for line in [main_pid(machine, unit)] if int(line)]
    init = Path(f"/proc/{machine.init_pid()}/ns/pid").readlink()
    return [pid for pid in machine.pids("guard-") if inner_pid(pid) in found and pid_namespace(pid) == init]


def units_of(machine: Machine, role: str) -> list[str]:
    shown = machine.inside("systemctl", "list-units", "--plain", "--no-legend", f"dspark-guard-{role}-*")
    return [line.split()[0] for line in shown.splitlines() if ".service" in line]


def main_pid(machine: Machine, unit: str) -> str:
    return machine.inside("systemctl", "show", "-p", "MainPID", "--value", unit).strip()


def inner_pid(pid: int) -> int:
    """A process's pid inside its host."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return 0


def pid_namespace(pid: int) -> Path | None:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/ns/pid").readlink()
    return None


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        send(pid, signal.SIGKILL)


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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stage", ["note:all-leased", "outcome:arm:h1", "note:all-held", "intent:restore:h1"])
def test_the_state_folder_is_wiped(stage: str, name: str, trio: Trio) -> None:
    """Red when a host that forgot its hold forgets its debt too, or obeys the old claim."""
    driver = reach(trio, stage)
    machine = host_of(trio, name)
    archives = machine.path(f"{STATE}/bin")
    kept = {path.name: path.read_bytes() for path in archives.glob("*.pyz")}
    machine.inside("sh", "-c", f"find {STATE} -mindepth 1 -maxdepth 1 ! -name bin -exec rm -rf {{}} +")
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


# -- other people -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES[:-1])
def test_a_second_coordinator_is_refused(stage: str, trio: Trio) -> None:
    """Red when two coordinators hold one host, or the refused one disturbs the first."""
    first = reach(trio, stage, orphan_after_s=20, bound_s=80)
    second = trio.drive(name="second")
    code = second.finish()
    assert code in (10, 11, 50), second.log.read_text()
    first.go()
    assert conclude(trio, first) == 0
    assert second.code != 0


@pytest.mark.parametrize("attempt", range(6))
def test_two_coordinators_race(attempt: int, trio: Trio) -> None:
    """Red when both get a host, or neither can ever."""
    trio.prepare(orphan_after_s=20, bound_s=80)
    drivers = [trio.drive(name="racer") for _ in range(2)]
    codes = sorted(driver.finish() or 0 for driver in drivers)
    assert set(codes) <= {0, 11, 10}, [driver.log.read_text() for driver in drivers]
    for driver in drivers:
        if driver.hold_id:
            conclude(trio, driver)


@pytest.mark.parametrize("stage", ["note:all-leased", "note:all-snapshot", "note:all-held", "outcome:run:h1"])
def test_broken_and_acquired_again(stage: str, trio: Trio) -> None:
    """Red when a broken hold's coordinator acts on the next one's hosts."""
    first = reach(trio, stage, orphan_after_s=20, bound_s=80)
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


# -- awkward hosts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["note:all-leased", "note:all-held", "intent:restore:h1"])
def test_the_guard_is_upgraded_while_held(stage: str, trio: Trio) -> None:
    """Red when another guard version takes over an open hold, or its presence ends one."""
    driver = reach(trio, stage, orphan_after_s=20, bound_s=80)
    machine = trio.machines[1]
    (old,) = machine.path(f"{STATE}/bin").glob("guard-*.pyz")
    trio.tainted = True  # the other version stays beside the first
    script = (
        "import hashlib,sys,zipfile;"
        f"p='{STATE}/bin/{old.name}';q='/srv/new.pyz';"
        "open(q,'wb').write(open(p,'rb').read());z=zipfile.ZipFile(q,'a');z.writestr('NEWER','1');z.close();"
        f"d=open(q,'rb').read();open('{STATE}/bin/guard-'+hashlib.sha256(d).hexdigest()+'.pyz','wb').write(d)"
    )
    machine.inside(PYTHON, "-I", "-c", script)
    driver.go()
    assert conclude(trio, driver) == 0


@pytest.mark.parametrize("noise", ["echo hello", "echo trouble >&2", "head -c 300000 /dev/zero", "echo '@@guard1 5 x'"])
@pytest.mark.parametrize("how", ["whole", "killed"])
def test_a_login_shell_that_talks(noise: str, how: str, trio: Trio) -> None:
    """Red when what a profile prints is taken for an answer, or hides one."""
    trio.prepare()
    trio.tainted = True
    for machine in trio.machines:
        machine.path("/root/.bashrc").write_text(noise + "\n")
    driver = trio.drive("note:all-held", run=True)
    assert driver.until_station() is not None, driver.log.read_text()
    driver.go() if how == "whole" else driver.kill()
    code = conclude(trio, driver)
    assert how == "killed" or code == 0


@pytest.mark.parametrize("at", ["", "intent:stop:h1", "outcome:stop:h1", "note:all-held"])
def test_a_service_deaf_to_sigterm(at: str, trio: Trio) -> None:
    """Red when a child that ignores SIGTERM keeps its port, or makes the stop endless."""
    trio.tainted = True
    trio.prepare(mode="deaf")
    driver = trio.drive(at, run=True)
    if at:
        assert driver.until_station() is not None, driver.log.read_text()
        driver.kill()
    code = conclude(trio, driver)
    assert at or code == 0


def edit_web(trio: Trio, machine: Machine, *commands: str) -> None:
    trio.tainted = True
    machine.inside("sh", "-c", " && ".join(commands))


@pytest.mark.parametrize("at", ["", "intent:stop:h1", "note:all-held", "outcome:restore:h1"])
def test_a_unit_that_restarts_itself(at: str, trio: Trio) -> None:
    """Red when ``Restart=always`` brings production back inside the hold, or the restore loses the setting."""
    for machine in trio.machines:
        unit = "/etc/systemd/system/web.service"
        edit_web(trio, machine, f"sed -i 's/^ExecStart/Restart=always\\nRestartSec=0\\nExecStart/' {unit}")
        machine.inside("systemctl", "daemon-reload")
    trio.prepare()
    driver = trio.drive(at, run=True)
    if at:
        assert driver.until_station() is not None, driver.log.read_text()
        if at == "note:all-held":
            machine = trio.machines[0]
            machine.inside("systemctl", "start", "web", check=False)
            assert machine.inside("systemctl", "show", "-p", "ActiveState", "--value", "web").strip() == "inactive"
        driver.kill()
    code = conclude(trio, driver)
    assert at or code == 0


@pytest.mark.parametrize("at", ["", "intent:stop:h1", "note:all-held", "outcome:restore:h1"])
def test_a_unit_that_was_disabled_stays_so(at: str, trio: Trio) -> None:
    """Red when a restore enables, or fails to start, a unit that ran without being enabled."""
    edit_web(trio, trio.machines[1], "systemctl disable -q web")
    trio.prepare()
    driver = trio.drive(at, run=True)
    if at:
        assert driver.until_station() is not None, driver.log.read_text()
        driver.kill()
    code = conclude(trio, driver)
    assert at or code == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_disabled_unit_comes_back_after_a_power_off(name: str, trio: Trio) -> None:
    """Red when the boot unit leaves to systemd what systemd does not start."""
    machine = host_of(trio, name)
    edit_web(trio, machine, "systemctl disable -q web")
    driver = reach(trio, "note:all-held")
    machine.power_off()
    driver.kill()
    conclude(trio, driver, "alone")


@pytest.mark.parametrize("name", NAMES)
def test_a_masked_unit_refuses_before_anything_is_touched(name: str, trio: Trio) -> None:
    """Red when a hold opens on production that it could not start again."""
    machine = host_of(trio, name)
    # The mask lies where systemd looks first, as `systemctl mask --runtime` of a unit of the vendor's would.
    mask = "mkdir -p /etc/systemd/system.control && ln -s /dev/null /etc/systemd/system.control/web.service"
    edit_web(trio, machine, mask, "systemctl daemon-reload")
    trio.prepare()
    starts = [trio.starts(each) for each in trio.machines]
    driver = trio.drive(run=True)
    assert conclude(trio, driver) == 10
    assert [trio.starts(each) for each in trio.machines] == starts


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", ["stopped", "edited"])
def test_unexpected_production_refuses(change: str, name: str, trio: Trio) -> None:
    """Red when "stopped" or an unloaded edit would be recorded as what to restore."""
    machine = host_of(trio, name)
    trio.prepare()
    command = {"stopped": "systemctl stop web", "edited": "echo '# new' >> /etc/systemd/system/web.service"}[change]
    edit_web(trio, machine, command, "systemctl is-system-running >/dev/null || true")
    driver = trio.drive(run=True)
    assert driver.finish() == 10, driver.log.read_text()
    for each in trio.machines:
        assert trio.status(each)["state"] == "free"
        trio.require_history(each)
        if each is not machine:
            trio.require_restored(each)


@pytest.mark.parametrize("stage", ["note:all-held", "outcome:run:h1"])
def test_production_that_cannot_start_again_is_debt_with_exit_50(stage: str, trio: Trio) -> None:
    """Red when a restore without proof is reported as anything but 50, or the debt cannot be seen."""
    driver = reach(trio, stage)
    machine = trio.machines[1]
    trio.tainted = True
    machine.path("/srv/serve.py").rename(machine.path("/srv/serve.py.away"))
    driver.go()
    assert driver.finish() == 50, driver.log.read_text()
    status = trio.status(machine)
    assert status["in_debt"], status
    assert status["state"] == "degraded"
    for other in (trio.machines[0], trio.machines[2]):
        trio.require_restored(other)
    assert trio.recover(driver.hold_id) == 50
    machine.path("/srv/serve.py.away").rename(machine.path("/srv/serve.py"))
    assert trio.recover(driver.hold_id) == 0
    trio.require_restored(machine)
