"""Production that is a docker container, through the docker command line. Written, not run against a daemon by us.

The container is stopped and started, never removed or recreated; its restart policy is taken away for the hold and put
back last. A container started with ``--rm`` would vanish with its stop, so it is refused before.
"""

from __future__ import annotations

import json

from windows.guard import clock, proc, units
from windows.guard.process_service import memory_row, row

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from windows.guard.state import State

    Json = dict[str, Any]


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
    """Rows that say whether this container survives its own stop."""
    shown, name = inspect(service["container"]), service["name"]
    removes = shown.get("HostConfig", {}).get("AutoRemove")
    rows = [
        row(name, "container", "known to docker", service["container"], bool(shown)),
        row(name, "--rm", False, removes, removes is False),
    ]
    if service["supervisors"]:
        rows.append(row(name, "supervisors", "none: name units with a systemd service", service["supervisors"], False))
    return rows


def snapshot(state: State, service: Json) -> Json:
    """What restore puts back; the container's environment is not read."""
    shown = inspect(service["container"])
    return {
        "name": service["name"],
        "kind": "docker",
        "container": service["container"],
        "state": _state(shown),
        "id": shown.get("Id"),
        "image": shown.get("Image"),
        "path": shown.get("Path"),
        "args": shown.get("Args"),
        "restart": _policy(shown),
        "pid": shown.get("State", {}).get("Pid"),
        "started_at": shown.get("State", {}).get("StartedAt"),
        "ports": service["ports"] if _state(shown) == "running" else [],
    }


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
    units.command(["docker", "stop", f"--time={drain}", service["container"]], max(5.0, service["stop_s"]))
    clock.wait_until(lambda: _state(inspect(service["container"])) == "stopped", 5.0, 0.5)
    found = _state(inspect(service["container"]))
    left = [p.pid for p in processes if proc.is_alive(p.pid, p.start_ticks)]
    taken = sorted(port for port, inodes in proc.listening_inodes(service["ports"]).items() if inodes)
    return [
        row(name, "container", "stopped", found, found == "stopped"),
        row(name, "process tree", "gone", left or "gone", not left),
        row(name, "ports", "free", taken or "free", not taken),
        memory_row(name, resident, available),
    ]


def ghosts(state: State, service: Json, snap: Json) -> list[str]:
    """Signs that something starts the container again."""
    found = _state(inspect(service["container"]))
    return [] if found == "stopped" else [f"container is {found}"]


def restore(state: State, service: Json, snap: Json) -> list[Json]:
    """Bring the container to its recorded state; rows."""
    now = _state(inspect(service["container"]))
    verb = "start" if snap["state"] == "running" else "stop"
    if now == snap["state"]:
        return []
    done = units.command(["docker", verb, service["container"]], service["start_s"])
    return [
        row(service["name"], verb, "exit 0", f"{done.returncode} {done.stderr.strip()[-200:]}", done.returncode == 0)
    ]


def is_running(state: State, service: Json) -> bool:
    """True while docker calls the container running."""
    return _state(inspect(service["container"])) == "running"


def compare(state: State, service: Json, snap: Json) -> list[Json]:
    """Recorded against now, field by field."""
    now = snapshot(state, service)
    fields = ("state", "id", "image", "path", "args", "restart")
    return [row(service["name"], field, snap[field], now[field], snap[field] == now[field]) for field in fields]
