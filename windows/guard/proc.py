"""Processes of this host, read from /proc.

A process is named by (pid, start time) within one boot; a pid alone is never signalled. A *tree* is everything that
belongs to a started program: members of its session, every process that carries its cookie in its environment, and
their descendants. A zombie counts as gone: it holds nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal

from windows.guard import clock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NamedTuple

    class Process(NamedTuple):
        """One line of the process table; ``start_ticks`` in clock ticks since boot."""

        pid: int
        ppid: int
        pgid: int
        sid: int
        start_ticks: int
else:
    from collections import namedtuple

    Process = namedtuple("Process", "pid ppid pgid sid start_ticks")

COOKIE = "DSPARK_OWNER"
"""Environment variable that marks what the guard started; its value is a nonce, not a secret."""


def read_process(pid: int) -> Process | None:
    """The process with this pid; None when it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as handle:
            fields = handle.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if not fields or fields[0] in (b"Z", b"X", b"x"):
        return None
    return Process(pid, int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def all_processes() -> list[Process]:
    """Every process that is not a zombie."""
    found = (read_process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [process for process in found if process is not None]


def is_alive(pid: int | None, start_ticks: int | None) -> bool:
    """True when exactly this process (not a later one with its pid) lives."""
    if not pid:
        return False
    process = read_process(pid)
    return process is not None and process.start_ticks == start_ticks


def argv_of(pid: int) -> list[str]:
    """The process's arguments; empty when it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as handle:
            data = handle.read()
    except OSError:
        return []
    return [part.decode("utf-8", "surrogateescape") for part in data.split(b"\0")[:-1]]


def _has_cookie(pid: int, needle: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as handle:
            return needle in b"\0" + handle.read()
    except OSError:
        return False


def tree_of(owned: dict[str, Any] | None) -> list[Process]:
    """All living processes of an ownership record ``{boot_id, pid, start_ticks, cookie}``.

    A record of another boot owns nothing. A session is ours only while its leader's pid was not given to someone else.
    """
    if not owned or owned.get("boot_id") != clock.boot_id() or not owned.get("pid"):
        return []
    table = {process.pid: process for process in all_processes()}
    leader = table.get(owned["pid"])
    session_is_ours = leader is None or leader.start_ticks == owned["start_ticks"]
    needle = f"\0{COOKIE}={owned['cookie']}\0".encode() if owned.get("cookie") else b""
    mine = set()
    for process in table.values():
        if process.start_ticks < owned["start_ticks"]:
            continue
        in_session = session_is_ours and process.sid == owned["pid"]
        if in_session or (needle and _has_cookie(process.pid, needle)):
            mine.add(process.pid)
    _add_descendants(mine, table)
    mine.discard(os.getpid())
    return [table[pid] for pid in sorted(mine)]


def _add_descendants(mine: set[int], table: dict[int, Process]) -> None:
    grew = True
    while grew:
        children = {p.pid for p in table.values() if p.ppid in mine} - mine
        mine |= children
        grew = bool(children)


def send_signal(process: Process, number: int) -> bool:
    """Signal exactly this process; a pid that was reused meanwhile is left alone. True when it was sent."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    except (OSError, AttributeError):
        # a kernel or Python build without pidfd: check, then signal; the gap is microseconds
        if not is_alive(process.pid, process.start_ticks):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
        return True
    try:
        if not is_alive(process.pid, process.start_ticks):
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def end_tree(owned: dict[str, Any] | None, first_signal: int, drain_s: float, kill_s: float) -> bool:
    """Signal the whole tree, give it ``drain_s``, then KILL what is left. True when nothing is left."""
    if not tree_of(owned):
        return True
    for process in tree_of(owned):
        send_signal(process, first_signal)
    if clock.wait_until(lambda: not tree_of(owned), drain_s):
        return True

    def kill_rest() -> bool:
        left = tree_of(owned)
        for process in left:
            send_signal(process, signal.SIGKILL)
        return not left

    return clock.wait_until(kill_rest, kill_s)


def listening_inodes(ports: list[int]) -> dict[int, set[str]]:
    """For each port the socket inodes that listen on it (IPv4 and IPv6); an empty set when none does."""
    found: dict[int, set[str]] = {port: set() for port in ports}
    for table in ("/proc/net/tcp", "/proc/net/tcp6") if ports else ():
        with contextlib.suppress(FileNotFoundError), open(table, encoding="ascii") as handle:
            next(handle, None)
            for line in handle:
                fields = line.split()
                port = int(fields[1].rpartition(":")[2], 16)
                if fields[3] == "0A" and port in found:
                    found[port].add(fields[9])
    return found


def socket_inodes(processes: list[Process]) -> set[str]:
    """Inodes of every socket these processes hold open."""
    inodes = set()
    for process in processes:
        inodes |= {path[8:-1] for path in open_paths(process.pid) if path.startswith("socket:[")}
    return inodes


def mapped_files(pid: int) -> set[tuple[int, int]]:
    """(device, inode) of every file that a process has mapped; nothing where that may not be read."""
    found = set()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as handle:
        for line in handle:
            _, _, _, device, inode = line.split(None, 5)[:5]
            major, minor = device.split(b":")
            found.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    return found


def open_paths(pid: int) -> set[str]:
    """What a process's descriptors are called. The files are not touched: one may lie on a mount that hangs."""
    found = set()
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"{folder}/{name}"))
    return found


def resident_bytes(processes: list[Process]) -> int:
    """Sum of the processes' anonymous resident memory (shared pages are not counted)."""
    total = 0
    page = os.sysconf("SC_PAGE_SIZE")
    for process in processes:
        with contextlib.suppress(OSError), open(f"/proc/{process.pid}/statm", encoding="ascii") as handle:
            fields = handle.read().split()
            total += (int(fields[1]) - int(fields[2])) * page
    return total


def memory_info() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    result = {}
    with open("/proc/meminfo", encoding="ascii") as handle:
        for line in handle:
            name, _, rest = line.partition(":")
            fields = rest.split()
            result[name] = int(fields[0]) * (1024 if len(fields) > 1 else 1)
    return result


def marked(assignment: str) -> list[int]:
    """Pids of other living processes whose environment holds exactly ``NAME=value``."""
    needle = f"\0{assignment}\0".encode()
    return [p.pid for p in all_processes() if p.pid != os.getpid() and _has_cookie(p.pid, needle)]


def oom_kills() -> int:
    """How often the kernel killed for memory in our own control group; 0 where it does not say."""
    found = 0
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="ascii", errors="replace") as handle:
        for line in handle:
            _, controllers, group = line.rstrip("\n").split(":", 2)
            if controllers not in ("", "memory"):
                continue
            counters = f"memory{group}/memory.oom_control" if controllers else f"{group}/memory.events"
            with contextlib.suppress(OSError), open("/sys/fs/cgroup/" + counters, encoding="ascii") as text:
                found += sum(int(one.split()[1]) for one in text if one.startswith("oom_kill "))
    return found
