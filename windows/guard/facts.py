"""Facts of this host for ``hello`` and ``facts``: read, never judged. What cannot be read is null or ``unknown``."""

from __future__ import annotations

import contextlib
import os
import stat
import sys

from windows.guard import PROTOCOL, VERSION, clock, devices, files, proc, units

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from windows.guard.state import State

    Json = dict[str, Any]


def hello(state: State, digest: str) -> Json:
    """Who answers, from which file, with which powers."""
    return {
        "protocol": PROTOCOL,
        "version": VERSION,
        "digest": digest,
        "incarnation": state.incarnation(),
        "boot_id": clock.boot_id(),
        "uid": os.geteuid(),
        "user": units.user_name(),
        "systemd": units.manager(),
        "linger": units.has_linger(),
        "state_dir": state.folder,
        "python": sys.version.split()[0],
    }


def facts(state: State) -> Json:
    """Everything the preflight compares between hosts."""
    memory = proc.memory_info()
    disk = os.statvfs(state.folder)
    kernel = os.uname()
    return {
        "machine_id": _line("/etc/machine-id"),
        "boot_id": clock.boot_id(),
        "hostname": kernel.nodename,
        "kernel": f"{kernel.release} {kernel.machine}",
        "os": _os_name(),
        "cpu": {"model": _cpu_model(), "count": os.cpu_count()},
        "memory_total": memory["MemTotal"],
        "memory_available": memory["MemAvailable"],
        "swap_total": memory.get("SwapTotal", 0),
        "swap_free": memory.get("SwapFree", 0),
        "disk_free_bytes": disk.f_bavail * disk.f_frsize,
        "filesystem": files.filesystem_of(state.folder),
        "utc": clock.utc_now(),
        "monotonic_ns": clock.monotonic_ns(),
        "boottime_ns": clock.boottime_ns(),
        "gpus": devices.gpus(),
        "gpu_processes": devices.gpu_processes() or [],
        "shm_leftovers": shared_memory_leftovers(),
        "remove_ipc": _remove_ipc(),
        "linger": units.has_linger(),
        "systemd": units.manager(),
        "python": sys.version.split()[0],
    }


def _line(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.readline().strip() or None
    except OSError:
        return None


def _os_name() -> str:
    with contextlib.suppress(OSError), open("/etc/os-release", encoding="utf-8", errors="replace") as handle:
        for line in handle:
            if line.startswith("PRETTY_NAME="):
                return line.partition("=")[2].strip().strip('"')
    return "unknown"


def _cpu_model() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as handle:
        for line in handle:
            if line.lower().startswith(("model name", "cpu part")):
                return line.partition(":")[2].strip()
    return "unknown"


def shared_memory_leftovers(folder: str = "/dev/shm") -> list[Json]:
    """Shared memory that nobody uses any more: leftovers there turn one crash into a loop of them.

    A file is used while a process has it mapped (known by device and inode, whatever a container calls it) or open.
    Root sees every user's files and processes, anybody else only their own.
    """
    found: dict[tuple[int, int], Json] = {}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                info = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(info.st_mode) and os.geteuid() in (0, info.st_uid):
                    item = {"name": entry.name, "size_bytes": info.st_size, "uid": info.st_uid}
                    found[info.st_dev, info.st_ino] = item
    opened: set[str] = set()
    for process in proc.all_processes() if found else ():
        opened |= proc.open_paths(process.pid)
        for mapped in proc.mapped_files(process.pid):
            found.pop(mapped, None)
    left = [item for item in found.values() if f"{folder}/{item['name']}" not in opened]
    return sorted(left, key=lambda item: str(item["name"]))


def _remove_ipc() -> str:
    """RemoveIPC of logind: with it, semaphores of a user die with the user's last session. systemd's default is yes."""
    if not units.under_systemd():
        return "no"
    value = "yes"
    paths = ["/etc/systemd/logind.conf"]
    for folder in ("/usr/lib/systemd/logind.conf.d", "/run/systemd/logind.conf.d", "/etc/systemd/logind.conf.d"):
        with contextlib.suppress(OSError):
            paths += [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(".conf")]
    for path in paths:
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as handle:
            for line in handle:
                if line.strip().startswith("RemoveIPC="):
                    value = line.partition("=")[2].strip().lower()
    return {
        "yes": "yes",
        "true": "yes",
        "1": "yes",
        "on": "yes",
        "no": "no",
        "false": "no",
        "0": "no",
        "off": "no",
    }.get(value, "unknown")
