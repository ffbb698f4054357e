"""Holding units down: supervisors suspended, every start blocked by an assertion that one flag file decides.

The block is a drop-in in /run with ``AssertPathExists=!FLAG``: it stops manual and automatic starts alike, disappears
with a reboot, and is lifted by removing the flag, with no daemon-reload on the way back.
"""

from __future__ import annotations

import contextlib
import os

from windows.guard import files, systemd_service, units
from windows.guard.process_service import row

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Json = dict[str, Any]


def runtime_folder(scope: str) -> str:
    """/run, or this user's part of it."""
    return "/run" if scope == "system" else f"/run/user/{os.geteuid()}"


def flag_path(scope: str, hold_id: str) -> str:
    """While this file exists, held units cannot start."""
    return os.path.join(runtime_folder(scope), "dspark-guard", f"hold-{hold_id}")


def drop_in_path(scope: str, unit: str) -> str:
    """The drop-in that carries the assertion."""
    middle = "systemd/system" if scope == "system" else "systemd/user"
    return os.path.join(runtime_folder(scope), middle, f"{unit}.d", systemd_service.HOLD_DROP_IN)


def held_units(plan: Json) -> dict[str, list[str]]:
    """Scope to units: supervisors first, in their order."""
    found: dict[str, list[str]] = {}
    for service in plan["services"]:
        if service["supervisors"]:
            found.setdefault(systemd_service.scope_of(service), []).extend(service["supervisors"])
    for service in plan["services"]:
        if service["kind"].startswith("systemd-"):
            found.setdefault(systemd_service.scope_of(service), []).append(service["unit"])
    return {scope: list(dict.fromkeys(names)) for scope, names in found.items()}


def hold_down(plan: Json) -> list[Json]:
    """Block starts, then suspend supervisors; rows."""
    rows: list[Json] = []
    for scope, names in held_units(plan).items():
        flag = flag_path(scope, plan["hold_id"])
        os.makedirs(os.path.dirname(flag), mode=0o755, exist_ok=True)
        files.write_bytes(flag, b"", 0o644)
        for unit in names:
            path = drop_in_path(scope, unit)
            os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
            files.write_bytes(path, f"[Unit]\nAssertPathExists=!{flag}\n".encode(), 0o644)
        done = units.systemctl(scope, "daemon-reload")
        rows.append(
            row(
                "host",
                f"starts blocked ({scope})",
                "daemon-reload: 0",
                f"daemon-reload: {done.returncode}",
                done.returncode == 0,
            )
        )
    for service in plan["services"]:
        rows += _suspend(service)
    return rows


def _suspend(service: Json) -> list[Json]:
    rows = []
    scope = systemd_service.scope_of(service)
    for unit in service["supervisors"]:
        units.systemctl(scope, "stop", "--", unit, timeout_s=service["stop_s"])
        found = systemd_service.run_state(units.show(scope, unit))
        rows.append(row(service["name"], f"supervisor {unit}", "stopped", found, found == "stopped"))
    return rows


def release(plan: Json) -> None:
    """Lift the block."""
    for scope in held_units(plan):
        files.remove(flag_path(scope, plan["hold_id"]), sync=False)


def resume(plan: Json) -> list[Json]:
    """Start the supervisors that were running, in the reverse of the order they were suspended in; rows."""
    rows = []
    both = zip(plan["services"], plan["snapshot"]["services"])  # noqa: B905 - 3.9 has no strict
    pairs = [(service, snap) for service, snap in both if "supervisors" in snap]
    for service, snap in reversed(pairs):
        scope = systemd_service.scope_of(service)
        for before in reversed(snap["supervisors"]):
            if systemd_service.run_state(before["show"]) != "running":
                continue
            done = units.systemctl(scope, "start", "--", before["unit"], timeout_s=service["start_s"])
            rows.append(row(service["name"], f"resume {before['unit']}", 0, done.returncode, done.returncode == 0))
    return rows


def clean_up(plan: Json) -> list[str]:
    """Remove drop-ins and flag; the scopes whose manager must reload afterwards."""
    chosen = held_units(plan)
    for scope, names in chosen.items():
        for unit in names:
            path = drop_in_path(scope, unit)
            files.remove(path, sync=False)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(path))
        files.remove(flag_path(scope, plan["hold_id"]), sync=False)
    return list(chosen)
