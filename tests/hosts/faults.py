"""What every case of the fault matrix shares: how far a hold goes before it is disturbed, and how each case ends.

After every case: no host ever had two holders, each hold was restored at most once, every beginning has an end, the
journal replays, and an exit code that promises production back was true when it was given. ``HOSTS_PART`` chooses which
part of the matrix runs (see ``conftest``).
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

from tests.hosts.estate import STATE
from tests.hosts.machine import Machine, send
from tests.hosts.trio import PLAIN_RUN, RESTORED_CODES, Driver, Trio

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


def reach(trio: Trio, at: str, *, run: bool = True, script: str = PLAIN_RUN, **plan: Any) -> Driver:
    """A hold that stands at one record."""
    trio.prepare(**plan)
    driver = trio.drive(at, run=run, script=script)
    assert driver.until_station() is not None, driver.log.read_text()
    return driver


def host_of(trio: Trio, name: str) -> Machine:
    return next(machine for machine in trio.machines if machine.name == name)


def operations(machine: Machine) -> list[str]:
    """Operations the guard of a host has begun."""
    with contextlib.suppress(OSError):
        return os.listdir(machine.path(f"{STATE}/ops"))  # noqa: PTH208 - a plain list of names
    return []


def pids_of_role(machine: Machine, role: str) -> list[int]:
    """A guard's background program, or the connections of sshd."""
    return machine.pids("sshd:" if role == "sshd" else f"--internal {role}")


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        send(pid, signal.SIGKILL)


def edit_web(trio: Trio, machine: Machine, *commands: str) -> None:
    trio.tainted = True
    machine.inside("sh", "-c", " && ".join(commands))
