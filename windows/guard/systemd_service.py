"""Production that is a systemd unit, of the system or of this user's own manager.

State is what ``systemctl show`` says. A unit is stopped with its own stop settings within our bounds, proven gone by
its control group, and started again only as the unit it was; unit files are compared by digest, never written. The
sub-state of timers is not compared: it changes by itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os

from windows.guard import clock, proc, units
from windows.guard.process_service import memory_row, row

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from windows.guard.state import State

    Json = dict[str, Any]

HOLD_DROP_IN = "90-dspark-hold.conf"
COMPARED = ("LoadState", "ActiveState", "SubState", "UnitFileState", "FragmentPath", "Restart")
_CGROUP_ROOTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd")


def scope_of(service: Json) -> str:
    """``system`` or ``user``: where the service's units are, or those that supervise its container."""
    is_users = service["kind"] == "systemd-user" or (service["kind"] == "docker" and os.geteuid() != 0)
    return "user" if is_users else "system"


def describe(scope: str, unit: str) -> Json:
    """Everything restore compares: properties, and digests of the unit's files."""
    shown = units.show(scope, unit)
    paths = [shown.get("FragmentPath", ""), *shown.get("DropInPaths", "").split()]
    drop_ins = [path for path in paths[1:] if os.path.basename(path) != HOLD_DROP_IN]
    main = int(shown.get("MainPID", "0") or 0)
    return {
        "unit": unit,
        "show": dict(shown, DropInPaths=" ".join(drop_ins)),
        "files": {path: _digest(path) for path in [paths[0], *drop_ins] if path},
        "argv": proc.argv_of(main) if main else [],
    }


def _digest(path: str) -> str:
    try:
        with open(path, "rb") as handle:
            return hashlib.sha256(handle.read()).hexdigest()
    except OSError as error:
        return f"unreadable: {type(error).__name__}"


def run_state(shown: Json) -> str:
    """``running``, ``stopped`` or what systemd calls it in between."""
    active = str(shown.get("ActiveState", "unknown"))
    return {"active": "running", "inactive": "stopped", "failed": "stopped"}.get(active, active)


def check_expected(state: State, service: Json) -> list[Json]:
    """Rows that compare the unit now with what the site file expects."""
    found = run_state(units.show(scope_of(service), service["unit"]))
    return [row(service["name"], "state", service["expected"], found, found == service["expected"])]


def check_restorable(state: State, service: Json) -> list[Json]:
    """Rows that say whether this unit, once stopped, could be started as it was."""
    scope, name = scope_of(service), service["name"]
    rights = os.geteuid() == 0 if scope == "system" else os.path.exists(f"/run/user/{os.geteuid()}/systemd/private")
    rows = [row(name, "rights", f"root, or the running manager of the user ({scope})", f"uid {os.geteuid()}", rights)]
    for unit in [service["unit"], *service["supervisors"]]:
        shown = units.show(scope, unit)
        rows += unit_restorable(name, unit, shown)
        triggers = [t for t in shown.get("TriggeredBy", "").split() if t not in service["supervisors"]]
        awake = [t for t in triggers if run_state(units.show(scope, t)) == "running"]
        if unit == service["unit"]:
            rows.append(
                row(name, f"{unit} triggered by", "named in supervisors", " ".join(awake) or "nothing else", not awake)
            )
    return rows


def unit_restorable(name: str, unit: str, shown: Json) -> list[Json]:
    """Rows that say whether this unit, once stopped, could be started as it was."""
    if run_state(shown) == "stopped" and shown.get("LoadState") in ("loaded", "masked"):
        return [row(name, f"{unit} load state", "loaded or masked, stopped", shown["LoadState"], True)]
    path = shown.get("FragmentPath", "")
    return [
        row(name, f"{unit} load state", "loaded", shown.get("LoadState"), shown.get("LoadState") == "loaded"),
        row(name, f"{unit} transient", "no", shown.get("Transient"), shown.get("Transient") == "no"),
        row(name, f"{unit} unit file", "present", path or "none", bool(path) and os.path.isfile(path)),
        row(
            name, f"{unit} changed on disk", "no", shown.get("NeedDaemonReload"), shown.get("NeedDaemonReload") == "no"
        ),
        row(
            name,
            f"{unit} masked",
            "no",
            shown.get("UnitFileState"),
            not shown.get("UnitFileState", "").startswith("masked"),
        ),
    ]


def snapshot(state: State, service: Json) -> Json:
    """What restore puts back."""
    scope = scope_of(service)
    found = describe(scope, service["unit"])
    return dict(
        found,
        name=service["name"],
        kind=service["kind"],
        state=run_state(found["show"]),
        ports=service["ports"] if run_state(found["show"]) == "running" else [],
        resident_bytes=proc.resident_bytes(tree(state, service)),
        supervisors=[describe(scope, unit) for unit in service["supervisors"]],
    )


def tree(state: State, service: Json) -> list[proc.Process]:
    """Every living process in the unit's control group."""
    return processes_in(units.show(scope_of(service), service["unit"]).get("ControlGroup", ""))


def processes_in(control_group: str) -> list[proc.Process]:
    """Living processes of a control group and those below it."""
    pids: set[int] = set()
    for root in _CGROUP_ROOTS if control_group.strip("/") else ():
        for folder, _, names in os.walk(root + control_group):
            if "cgroup.procs" in names:
                with (
                    contextlib.suppress(OSError),
                    open(os.path.join(folder, "cgroup.procs"), encoding="ascii") as handle,
                ):
                    pids |= {int(line) for line in handle if line.strip() != "0"}
    found = (proc.read_process(pid) for pid in sorted(pids))
    return [process for process in found if process is not None]


def stop(state: State, service: Json) -> list[Json]:
    """Stop the unit within its bounds and prove it: rows for unit, processes, ports, memory."""
    scope, unit, name = scope_of(service), service["unit"], service["name"]
    before = units.show(scope, unit)
    group = before.get("ControlGroup", "")
    resident, available = proc.resident_bytes(processes_in(group)), proc.memory_info()["MemAvailable"]
    if run_state(before) != "stopped":
        done = units.systemctl(
            scope, "stop", "--", unit, timeout_s=max(0.1, min(service["drain_s"], service["stop_s"]))
        )
        if done.returncode == 124:
            units.systemctl(scope, "kill", "-s", "KILL", "--kill-who=all", "--", unit)
            left_s = max(2.0, service["stop_s"] - service["drain_s"])
            clock.wait_until(lambda: run_state(units.show(scope, unit)) == "stopped", left_s, 0.2)
    after = units.show(scope, unit)
    clock.wait_until(lambda: not processes_in(group), 2.0)
    left = [process.pid for process in processes_in(group)]
    taken = sorted(port for port, inodes in proc.listening_inodes(service["ports"]).items() if inodes)
    return [
        row(
            name,
            "unit",
            "stopped",
            f"{after.get('ActiveState')} ({after.get('Result')})",
            run_state(after) == "stopped",
        ),
        row(name, "control group", "empty", left or "empty", not left),
        row(name, "ports", "free", taken or "free", not taken),
        memory_row(name, resident, available),
    ]


def ghosts(state: State, service: Json, snap: Json) -> list[str]:
    """Signs that something starts the stopped unit again."""
    shown = units.show(scope_of(service), service["unit"])
    signs = [] if run_state(shown) == "stopped" else [f"{service['unit']} is {shown.get('ActiveState')}"]
    return signs + [f"port {port}" for port, inodes in proc.listening_inodes(service["ports"]).items() if inodes]


def restore(state: State, service: Json, snap: Json) -> list[Json]:
    """Bring the unit to its recorded state; rows."""
    scope, unit, name = scope_of(service), service["unit"], service["name"]
    now = run_state(units.show(scope, unit))
    if snap["state"] != "running":
        if now == "running":
            units.systemctl(scope, "stop", "--", unit, timeout_s=service["stop_s"])
        return []
    if now != "running":
        # a stop by KILL leaves "failed" and counts against the start limit
        units.systemctl(scope, "reset-failed", "--", unit)
        done = units.systemctl(scope, "start", "--", unit, timeout_s=service["start_s"])
        if done.returncode != 0:
            return [row(name, "start", "exit 0", f"{done.returncode}: {done.stderr.strip()[-200:]}", False)]
    wanted = sorted(snap["ports"])

    def listening() -> list[int]:
        mine = proc.socket_inodes(tree(state, service))
        return sorted(port for port, inodes in proc.listening_inodes(wanted).items() if inodes & mine)

    clock.wait_until(lambda: listening() == wanted or not is_running(state, service), service["start_s"], 0.2)
    got = listening()
    return [row(name, "ports", wanted, got, got == wanted)]


def is_running(state: State, service: Json) -> bool:
    """True while systemd calls the unit active."""
    return run_state(units.show(scope_of(service), service["unit"])) == "running"


def compare(state: State, service: Json, snap: Json) -> list[Json]:
    """Recorded against now, field by field, the supervisors too."""
    scope = scope_of(service)
    rows = compare_unit(service["name"], snap, describe(scope, service["unit"]), True)
    for before in snap["supervisors"]:
        rows += compare_unit(service["name"], before, describe(scope, before["unit"]), False)
    return rows


def compare_unit(name: str, before: Json, now: Json, with_argv: bool) -> list[Json]:
    """A unit recorded against now, field by field."""
    rows = []
    fields = [field for field in COMPARED if field != "SubState" or before["unit"].endswith(".service")]
    for field in (*fields, "DropInPaths"):
        was, found = before["show"].get(field), now["show"].get(field)
        rows.append(row(name, f"{before['unit']} {field}", was, found, was == found))
    rows.append(
        row(name, f"{before['unit']} file digests", before["files"], now["files"], before["files"] == now["files"])
    )
    if with_argv and before["argv"]:
        rows.append(row(name, f"{before['unit']} argv", before["argv"], now["argv"], before["argv"] == now["argv"]))
    return rows
