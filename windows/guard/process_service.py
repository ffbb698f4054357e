"""Production that is a process: started by the guard, owned by record, stopped as a tree, started again as recorded.

A process the guard did not start is never signalled: it is reported as ``foreign``. Secret values are read from their
files at each start, go into the new process's environment, and nowhere else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal

from windows.guard import clock, files, launch, proc, spawn
from windows.guard.errors import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from windows.guard.state import State

    Json = dict[str, Any]

ALIVE_S = 0.3
"""How long a service without port and probe must live to count as started."""


def row(service: str, field: str, expected: object, found: object, ok: bool | None) -> Json:
    """One line of a proof."""
    return {"service": service, "field": field, "expected": str(expected)[:300], "found": str(found)[:300], "ok": ok}


def _record_path(state: State, name: str) -> str:
    return state.path("services", f"{name}.json")


def identity_of(service: Json) -> str:
    """Digest of what makes this service this service (secret *paths*, never values)."""
    keys = ("start", "cwd", "env", "secret_env", "log")
    return hashlib.sha256(json.dumps([service[key] for key in keys], sort_keys=True).encode()).hexdigest()


def look(state: State, service: Json) -> Json:
    """``{state, pid, start_ticks, argv}``: running (ours), stopped, or foreign (a port is taken by someone else)."""
    record = files.read_json(_record_path(state, service["name"]))
    tree = proc.tree_of(record)
    if record and tree:
        return {
            "state": "running",
            "pid": record["pid"],
            "start_ticks": record["start_ticks"],
            "argv": record["argv"],
            "identity": record["identity"],
            "leader_alive": proc.is_alive(record["pid"], record["start_ticks"]),
        }
    taken = sorted(port for port, inodes in proc.listening_inodes(service["ports"]).items() if inodes)
    nobody = {"pid": None, "start_ticks": None, "argv": None, "identity": None, "leader_alive": False}
    return dict(nobody, state="foreign" if taken else "stopped", taken_ports=taken)


def check_expected(state: State, service: Json) -> list[Json]:
    """Rows that compare production now with what the site file expects."""
    found = look(state, service)
    rows = [row(service["name"], "state", service["expected"], found["state"], found["state"] == service["expected"])]
    if found["state"] == "running":
        same = found["identity"] == identity_of(service)
        rows.append(row(service["name"], "command", service["start"], found["argv"], same))
        rows.append(row(service["name"], "leader", "alive", found["leader_alive"], bool(found["leader_alive"])))
    return rows


def check_restorable(state: State, service: Json) -> list[Json]:
    """Rows that say whether this service could be started again right now."""
    name = service["name"]
    program = spawn.find_program(service["start"][0], _path_of(service))
    rows = [
        row(name, "program", f"{service['start'][0]} executable", program, program is not None),
        row(name, "cwd", "a folder", service["cwd"], os.path.isdir(service["cwd"])),
        row(name, "log", "a writable folder", service["log"], os.access(os.path.dirname(service["log"]), os.W_OK)),
    ]
    for variable, path in sorted(service["secret_env"].items()):
        rows.append(row(name, f"secret {variable}", "readable file", path, os.access(path, os.R_OK)))
    if service["supervisors"]:
        rows.append(row(name, "supervisors", "units of a service manager", "none for kind process", False))
    return rows


def _path_of(service: Json) -> str:
    return str(service["env"].get("PATH") or spawn.base_environment()["PATH"])


def snapshot(state: State, service: Json) -> Json:
    """What restore puts back. Holds names of secrets, never values."""
    found = look(state, service)
    record = files.read_json(_record_path(state, service["name"])) or {}
    resident = proc.resident_bytes(proc.tree_of(record))
    return {
        "name": service["name"],
        "kind": "process",
        "state": found["state"],
        "pid": found["pid"],
        "start_ticks": found["start_ticks"],
        "argv": found["argv"],
        "identity": found["identity"],
        "ports": service["ports"] if found["state"] == "running" else [],
        "base_env": record.get("base_env"),
        "resident_bytes": resident,
        "taken_ticks": clock.boottime_ns() * os.sysconf("SC_CLK_TCK") // 1_000_000_000,
    }


def start(state: State, service: Json, base: dict[str, str] | None = None) -> Json:
    """Start the service unless exactly this one runs already; returns its ownership record.

    It runs already when the recorded first process lives and was started with the same program, folder and environment;
    anything else under its name is neither taken over nor replaced.

    Args:
        state: The state folder.
        service: What to start.
        base: The allow-listed environment of its first start, so that a restore from another shell changes nothing.

    Raises:
        Refusal: ``START_FAILED``, or ``NOT_OURS`` when something else has its name or its port.
    """
    found = look(state, service)
    if found["state"] == "running":
        _require_this_one(service, found)
        return files.read_json(_record_path(state, service["name"])) or {}
    if found["state"] == "foreign":
        raise Refusal(
            "NOT_OURS",
            f"a process the guard did not start listens on {service['name']}'s port",
            "ports free",
            str(found["taken_ports"]),
            "find it with ss -ltnp and end it yourself; the guard never ends what it did not start",
        )
    base = spawn.base_environment() if base is None else base
    if launch.in_units():
        return _start_in_unit(state, dict(service, base_env=base))
    environment, log, extra = _prepare(service, base)
    try:
        path = _record_path(state, service["name"])
        cookie = os.urandom(16).hex()
        return spawn.start_detached(service["start"], environment, service["cwd"], path, cookie, (log, log), extra)
    finally:
        os.close(log)


def _require_this_one(service: Json, found: Json) -> None:
    if found["identity"] != identity_of(service):
        text = f"pid {found['pid']}: {' '.join(found['argv'])}"
        raise Refusal(
            "NOT_OURS",
            f"another program runs under the name {service['name']}",
            " ".join(service["start"])[:300],
            text[:300],
            "stop it by service-stop, or give this service another name",
        )
    if not found["leader_alive"]:
        raise Refusal(
            "START_FAILED",
            f"the first process of {service['name']} is gone, but programs that it started live",
            "the whole tree, or nothing of it",
            f"no pid {found['pid']}",
            "end them by service-stop, then start it again",
        )


def _prepare(service: Json, base: dict[str, str]) -> tuple[dict[str, str], int, Json]:
    """Environment with secrets, descriptor of the log, further fields of the ownership record."""
    environment = dict(base, **service["env"])
    for variable, path in service["secret_env"].items():
        environment[variable] = _read_secret(service["name"], variable, path)
    log = os.open(service["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    extra = {"argv": service["start"], "identity": identity_of(service), "name": service["name"], "base_env": base}
    return environment, log, extra


def _start_in_unit(state: State, service: Json) -> Json:
    """Under systemd the service gets a control group of its own, so that no end of a session or unit takes it along."""
    name = service["name"]
    for secret, path in service["secret_env"].items():
        _read_secret(name, secret, path)
    report = state.path("services", f"{name}.start")
    for path in (_record_path(state, name), report):
        files.remove(path, sync=False)
    files.write_json(state.path("services", f"{name}.spec"), service)
    launch.background(state, "service", name, _record_path(state, name))
    failure = b""
    clock.wait_until(lambda: os.path.exists(report), 2.0)
    with contextlib.suppress(OSError), open(report, "rb") as handle:
        failure = handle.read().partition(b"\n")[2]
    if failure:
        text = failure.decode("utf-8", "replace")[:300]
        raise Refusal(
            "START_FAILED", f"{service['start'][0]} could not be started", "a started program", text, "run it by hand"
        )
    return files.read_json(_record_path(state, name)) or {}


def become(state: State, name: str) -> None:
    """The program of the service's own unit: turn into the service."""
    service = files.read_json(state.path("services", f"{name}.spec")) or {}
    environment, log, extra = _prepare(service, service["base_env"])
    report = state.path("services", f"{name}.start")
    spawn.become(service["start"], environment, service["cwd"], _record_path(state, name), (log, log), extra, report)


def _read_secret(name: str, variable: str, path: str) -> str:
    try:
        with open(path, encoding="utf-8") as handle:
            return handle.read().rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        # the message carries path and reason, never content
        raise Refusal(
            "START_FAILED",
            f"secret {variable} of {name} cannot be read",
            f"a readable text file {path}",
            type(error).__name__,
            "restore the file, then recover",
        ) from None


def wait_listening(state: State, service: Json, timeout_s: float) -> list[Json]:
    """Wait until the started service listens on its ports (or just lives, when it has none)."""
    name = service["name"]
    record = files.read_json(_record_path(state, name)) or {}

    def alive() -> bool:
        return proc.is_alive(record.get("pid"), record.get("start_ticks"))

    def listening() -> list[int]:
        mine = proc.socket_inodes(proc.tree_of(record))
        return sorted(port for port, inodes in proc.listening_inodes(service["ports"]).items() if inodes & mine)

    wanted = sorted(service["ports"])
    if wanted:
        clock.wait_until(lambda: not alive() or listening() == wanted, timeout_s, 0.1)
        got = listening()
        return [
            row(name, "process", "alive", "alive" if alive() else "gone", alive()),
            row(name, "ports", wanted, got, got == wanted),
        ]
    clock.wait_until(lambda: not alive(), ALIVE_S)
    return [row(name, "process", "alive", "alive" if alive() else "gone", alive())]


def stop(state: State, service: Json) -> list[Json]:
    """Stop the whole tree within its bounds and prove it: rows for process, ports, memory."""
    name = service["name"]
    record = files.read_json(_record_path(state, name))
    tree = proc.tree_of(record)
    resident, before = proc.resident_bytes(tree), proc.memory_info()["MemAvailable"]
    number = getattr(signal, "SIG" + service["stop_signal"])
    kill_s = max(2.0, service["stop_s"] - service["drain_s"])
    proc.end_tree(record, number, min(service["drain_s"], service["stop_s"]), kill_s)
    left = [process.pid for process in proc.tree_of(record)]
    clock.wait_until(lambda: not any(proc.listening_inodes(service["ports"]).values()), 2.0)
    taken = sorted(port for port, inodes in proc.listening_inodes(service["ports"]).items() if inodes)
    return [
        row(name, "process tree", "gone", left or "gone", not left),
        row(name, "ports", "free", taken or "free", not taken),
        memory_row(name, resident, before),
    ]


def memory_row(name: str, resident: int, before: int) -> Json:
    """Memory came back: half of what the tree held privately, less a tolerance of 512 MiB for the rest of the host."""
    wanted = before + resident // 2 - (512 << 20)
    clock.wait_until(lambda: proc.memory_info()["MemAvailable"] >= wanted, 5.0, 0.2)
    now = proc.memory_info()["MemAvailable"]
    text = f"{now >> 20} MiB available; {before >> 20} MiB before, {resident >> 20} MiB held"
    return row(name, "memory", f"at least {max(wanted, 0) >> 20} MiB available", text, now >= wanted)


def ghosts(state: State, service: Json, snap: Json) -> list[str]:
    """Signs that something starts the stopped service again: its tree, its port, or its command line."""
    signs = [f"pid {process.pid}" for process in proc.tree_of(files.read_json(_record_path(state, service["name"])))]
    signs += [f"port {port}" for port, inodes in proc.listening_inodes(service["ports"]).items() if inodes]
    if snap.get("argv"):
        for process in proc.all_processes():
            younger = process.start_ticks > snap["taken_ticks"]
            if younger and proc.argv_of(process.pid) == snap["argv"]:
                signs.append(f"same command as pid {process.pid}")
    return signs


def restore(state: State, service: Json, snap: Json) -> list[Json]:
    """Bring the service to its recorded state; rows. Runs again harmlessly."""
    name = service["name"]
    if snap["state"] != "running":
        found = look(state, service)
        if found["state"] == "running":
            stop(state, service)
            found = look(state, service)
        return [row(name, "state", "stopped", found["state"], found["state"] == "stopped")]
    found = look(state, service)
    if found["state"] == "running" and not found["leader_alive"]:
        stop(state, service)  # ours by record: what a crash of its first process left behind
    try:
        start(state, service, snap.get("base_env"))
    except Refusal as refusal:
        return [row(name, "start", "started", f"{refusal.message}: {refusal.found}", False)]
    except OSError as error:
        return [row(name, "start", "started", str(error), False)]
    return wait_listening(state, service, service["start_s"])


def compare(state: State, service: Json, snap: Json) -> list[Json]:
    """Recorded against now, field by field."""
    found = look(state, service)
    rows = [row(service["name"], "state", snap["state"], found["state"], found["state"] == snap["state"])]
    if snap["state"] == "running":
        same = found["identity"] == snap["identity"]
        rows.append(
            row(
                service["name"],
                "command, cwd, environment names",
                snap["identity"][:16],
                str(found["identity"])[:16],
                same,
            )
        )
        argv = proc.argv_of(found["pid"]) if found["pid"] else []
        # a program may rewrite its own arguments or exec another; only its presence is required
        rows.append(row(service["name"], "argv of the process", "present", " ".join(argv)[:200], bool(argv)))
    return rows


def forget(state: State, name: str) -> None:
    """Drop the ownership record of a stopped service."""
    with contextlib.suppress(OSError):
        files.remove(_record_path(state, name))


def tree(state: State, service: Json) -> list[proc.Process]:
    """Every living process of the service."""
    return proc.tree_of(files.read_json(_record_path(state, service["name"])))


def is_running(state: State, service: Json) -> bool:
    """True while the service's first process lives."""
    record = files.read_json(_record_path(state, service["name"])) or {}
    return proc.is_alive(record.get("pid"), record.get("start_ticks"))
