"""A pool of real hosts for tests: one bridge and one subnet for each test process, everything removed at the end.

A test process takes the first free *slot* by a lock, so workers and concurrent runs never share a bridge, an address or
a control group; whoever takes a slot first removes what a killed run left there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.hosts.machine import LabError, Machine, system
from tests.hosts.warm import Started, WarmServer

ROOT = Path("/run/coordinator-lab")
NUM_SLOTS = 16
NEEDED = ("unshare", "nsenter", "setpriv", "ip", "sshd", "ssh-keygen", "systemd-run")


def why_not() -> str | None:
    """Why no host can be booted here, or None."""
    if os.geteuid() != 0:
        return "needs root"
    if "overlay" not in Path("/proc/filesystems").read_text():
        return "needs overlayfs"
    if not Path("/lib/systemd/systemd").exists():
        return "needs systemd"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    return f"needs {', '.join(missing)}" if missing else None


class Lab:
    """The hosts of this test process. A context manager; leaving it powers everything off."""

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        ROOT.mkdir(mode=0o755, exist_ok=True)
        self.slot, self._lock = _take_slot()
        self._tag = f"cl{self.slot:02d}"
        self._bridge = f"{self._tag}br"
        self._subnet = f"10.78.{100 + self.slot}"
        self.folder = ROOT / self._tag
        self._warm: WarmServer | None = None

    def __enter__(self) -> Lab:
        for folder in sorted(self.folder.glob("*/")):
            self._machine(folder.name, 0).remove_leftovers()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        system("ip", "link", "del", self._bridge, check=False)
        system("ip", "link", "add", self._bridge, "type", "bridge")
        system("ip", "addr", "add", f"{self._subnet}.1/24", "dev", self._bridge)
        system("ip", "link", "set", self._bridge, "up")
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._warm is not None:
            self._warm.close()
        for machine in self.machines.values():
            machine.power_off()
            machine.wipe()
        system("ip", "link", "del", self._bridge, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def machines_named(
        self, *names: str, image: Callable[[Path], None] | None = None, is_bare: bool = False
    ) -> list[Machine]:
        """Hosts of these names, booted all at once when they are off; ``image`` fills their fresh disks.

        All others are powered off and keep their disks: a machine has room for a few service managers only (each takes
        inotify instances, of which a user has 128).
        """
        for name, machine in self.machines.items():
            if name not in names and machine.is_up:
                machine.power_off()
        for name in names:
            if name not in self.machines:
                self.machines[name] = self._machine(name, 10 + len(self.machines))
                self.machines[name].image = image
                self.machines[name].is_bare = is_bare
        chosen = [self.machines[name] for name in names]
        off = [machine for machine in chosen if not machine.is_up]
        for machine in off:
            machine.start()
        for machine in off:
            machine.wait_ready()
        return chosen

    def start_coordinator(self, argv: Sequence[str], log: Path) -> Started:
        """A coordinator of the fault matrix, see ``driver``; its stderr goes to ``log``."""
        if self._warm is None:
            self._warm = WarmServer()
        return self._warm.start(argv, log)

    def _machine(self, name: str, octet: int) -> Machine:
        return Machine(self._tag, self.folder, name, self._bridge, f"{self._subnet}.{octet}")


def _take_slot() -> tuple[int, int]:
    for slot in range(NUM_SLOTS):
        fd = os.open(ROOT / f"slot-{slot:02d}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            continue
        return slot, fd
    raise LabError(f"all {NUM_SLOTS} slots of {ROOT} are taken")
