"""Real holds on hosts that are awkward: talkative shells, deaf services, units that restart, are masked or disabled."""

from __future__ import annotations

import pytest

from tests.hosts.estate import PYTHON, STATE
from tests.hosts.faults import conclude, edit_web, host_of, reach
from tests.hosts.trio import NAMES, Trio


@pytest.mark.parametrize("stage", ["note:all-leased", "note:all-held", "intent:restore:h1"])
def test_the_guard_is_upgraded_while_held(stage: str, trio: Trio) -> None:
    """Red when another guard version takes over an open hold, or its presence ends one."""
    driver = reach(trio, stage, orphan_after_s=20, bound_s=110)
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
