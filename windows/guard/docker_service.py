"""Production that is a docker container, through the docker command line.

The container is stopped and started, never removed or recreated; its restart policy is taken away for the hold and put
back after it runs. A container started with ``--rm`` would vanish with its stop, and an orchestrator would put another
in its place, so both are refused before. Supervisors are units: of the system for root, else of the user's manager.
"""

from __future__ import annotations

import hashlib
import json
import os

from windows.guard import clock, proc, systemd_service, units
from windows.guard.process_service import memory_row, row

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from windows.guard.state import State

    Json = dict[str, Any]

COMPARED = "state", "id", "container name", "image", "path", "args", "restart", "settings", "networks", "ports"
ORCHESTRATED = frozenset(["com.docker.swarm.task.id", "io.kubernetes.pod.uid", "io.kubernetes.pod.name"])
"""Labels of containers that somebody else starts again, as others."""


def inspect(container: str) -> Json:
    """What docker says about the container; empty when it cannot be asked."""
    done = units.command(["docker", "inspect", "--type=container", container])
    try:
        found = json.loads(done.stdout) if done.returncode == 0 else []
    except ValueError:
        return {}
    return dict(found[0]) if found else {}


def _state(shown: Json) -> str:
    status = str(shown.get("State", {}).get("Status", "unknown"))
    return {"running": "running", "exited": "stopped", "created": "stopped"}.get(status, status)


def _policy(shown: Json) -> str:
    policy = shown.get("HostConfig", {}).get("RestartPolicy", {})
    count = policy.get("MaximumRetryCount") or 0
    return f"{policy.get('Name') or 'no'}:{count}" if count else str(policy.get("Name") or "no")


def check_expected(state: State, service: Json) -> list[Json]:
    """Rows that compare the container now with what the site file expects."""
    found = _state(inspect(service["container"]))
    return [row(service["name"], "state", service["expected"], found, found == service["expected"])]


def check_restorable(state: State, service: Json) -> list[Json]:
    """Rows that say whether this container survives its own stop, and whether nobody replaces it meanwhile."""
    shown, name = inspect(service["container"]), service["name"]
    removes = shown.get("HostConfig", {}).get("AutoRemove")
    # docker would make an empty folder in its place, and the container would start without what it needs
    gone = [m["Source"] for m in shown.get("Mounts") or [] if m.get("Type") == "bind" and not _exists(m["Source"])]
    labels = shown.get("Config", {}).get("Labels") or {}
    owners = sorted(label for label in labels if label in ORCHESTRATED)
    rows = [
        row(name, "container", "known to docker", service["container"], bool(shown)),
        row(name, "--rm", False, removes, removes is False),
        row(name, "bind mounts", "present", gone or "present", not gone),
        row(name, "orchestrator", "none", owners or "none", not owners),
    ]
    if service["supervisors"]:
        manager = units.manager()
        rows.append(row(name, "supervisors", "a service manager", manager, manager != "none"))
        scope = systemd_service.scope_of(service)
        for unit in service["supervisors"]:
            rows += systemd_service.unit_restorable(name, unit, units.show(scope, unit))
    return rows


def _exists(path: str) -> bool:
    """False only when it is known to be gone: an ordinary user may not see it."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def snapshot(state: State, service: Json) -> Json:
    """What restore puts back; the container's environment is not read."""
    shown, scope = inspect(service["container"]), systemd_service.scope_of(service)
    settings = {key: value for key, value in shown.get("HostConfig", {}).items() if key != "RestartPolicy"}
    return {
        "name": service["name"],
        "kind": "docker",
        "container": service["container"],
        "state": _state(shown),
        "id": shown.get("Id"),
        "container name": shown.get("Name"),
        "image": shown.get("Image"),
        "path": shown.get("Path"),
        "args": shown.get("Args"),
        "restart": _policy(shown),
        "settings": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest(),
        "networks": sorted(shown.get("NetworkSettings", {}).get("Networks") or {}),
        "pid": shown.get("State", {}).get("Pid"),
        "started_at": shown.get("State", {}).get("StartedAt"),
        "ports": _listening(service["ports"]),
        "supervisors": [systemd_service.describe(scope, unit) for unit in service["supervisors"]],
    }


def _listening(ports: list[int]) -> list[int]:
    """Those of the ports that a socket of this host listens on; one that docker forwards by address has none."""
    return sorted(port for port, inodes in proc.listening_inodes(ports).items() if inodes)


def hold_down(plan: Json) -> list[Json]:
    """Take the restart policies away, so that docker does not start what we stop; rows."""
    rows = []
    for service in plan["services"]:
        if service["kind"] == "docker":
            done = units.command(["docker", "update", "--restart=no", service["container"]])
            rows.append(row(service["name"], "restart policy", "no", done.stderr.strip() or "no", done.returncode == 0))
    return rows


def resume(plan: Json) -> list[Json]:
    """Put the restart policies back; rows."""
    rows = []
    for snap in plan["snapshot"]["services"]:
        if snap["kind"] == "docker":
            done = units.command(["docker", "update", f"--restart={snap['restart']}", snap["container"]])
            rows.append(
                row(
                    snap["name"],
                    "restart policy",
                    snap["restart"],
                    done.stderr.strip() or snap["restart"],
                    done.returncode == 0,
                )
            )
    return rows


def tree(state: State, service: Json) -> list[proc.Process]:
    """Every living process of the container."""
    done = units.command(["docker", "top", service["container"], "-o", "pid"])
    pids = [int(line) for line in done.stdout.split()[1:] if line.isdigit()] if done.returncode == 0 else []
    found = (proc.read_process(pid) for pid in pids)
    return [process for process in found if process is not None]


def stop(state: State, service: Json) -> list[Json]:
    """Stop the container within its bounds and prove it."""
    name, processes = service["name"], tree(state, service)
    resident, available = proc.resident_bytes(processes), proc.memory_info()["MemAvailable"]
    drain = max(1, int(service["drain_s"]))
    units.command(["docker", "stop", "-t", str(drain), service["container"]], max(5.0, service["stop_s"]))
    clock.wait_until(lambda: _state(inspect(service["container"])) == "stopped", 5.0, 0.5)
    found = _state(inspect(service["container"]))
    left = [p.pid for p in processes if proc.is_alive(p.pid, p.start_ticks)]
    taken = _listening(service["ports"])
    return [
        row(name, "container", "stopped", found, found == "stopped"),
        row(name, "process tree", "gone", left or "gone", not left),
        row(name, "ports", "free", taken or "free", not taken),
        memory_row(name, resident, available),
    ]


def ghosts(state: State, service: Json, snap: Json) -> list[str]:
    """Signs that something starts the container again."""
    found = _state(inspect(service["container"]))
    signs = [] if found == "stopped" else [f"container is {found}"]
    return signs + [f"port {port}" for port in _listening(service["ports"])]


def restore(state: State, service: Json, snap: Json) -> list[Json]:
    """Bring the container to its recorded state; rows."""
    now = _state(inspect(service["container"]))
    verb = "start" if snap["state"] == "running" else "stop"
    rows = []
    if now != snap["state"]:
        done = units.command(["docker", verb, service["container"]], service["start_s"])
        found = f"exit {done.returncode} {done.stderr.strip()[-200:]}".strip()
        rows.append(row(service["name"], verb, "exit 0", found, done.returncode == 0))
    wanted = snap["ports"] if snap["state"] == "running" else []

    def serves() -> bool:
        return set(wanted) <= set(_listening(wanted)) or not is_running(state, service)

    clock.wait_until(serves, service["start_s"], 0.2)
    got = _listening(wanted)
    return [*rows, row(service["name"], "ports", wanted, got, got == wanted)]


def is_running(state: State, service: Json) -> bool:
    """True while docker calls the container running."""
    return _state(inspect(service["container"])) == "running"


def compare(state: State, service: Json, snap: Json) -> list[Json]:
    """Recorded against now, field by field."""
    now = snapshot(state, service)
    rows = [row(service["name"], field, snap[field], now[field], snap[field] == now[field]) for field in COMPARED]
    for before, after in zip(snap["supervisors"], now["supervisors"]):  # noqa: B905 - 3.9 has no strict
        rows += systemd_service.compare_unit(service["name"], before, after, False)
    return rows
