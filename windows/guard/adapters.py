"""Which adapter serves which kind, and the steps that concern all services at once.

An adapter is a module with ``check_expected``, ``check_restorable``, ``snapshot``, ``stop``, ``ghosts``, ``restore``,
``compare``, ``tree`` and ``is_running``; rows in, rows out.
"""

from __future__ import annotations

import contextlib

from windows.guard import backstop, docker_service, files, holding, process_service, systemd_service, units

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from windows.guard.state import State

    Json = dict[str, Any]

ADAPTERS: dict[str, Any] = {
    "process": process_service,
    "systemd-system": systemd_service,
    "systemd-user": systemd_service,
    "docker": docker_service,
}


def of(service: Json) -> Any:
    """The adapter module of a service."""
    return ADAPTERS[service["kind"]]


def ask(question: str, state: State, service: Json) -> list[Json]:
    """Rows of ``check_expected`` or ``check_restorable``."""
    rows: list[Json] = getattr(of(service), question)(state, service)
    return rows


def arm(state: State, record: Json) -> list[Json]:
    """What must exist before the first stop besides the dead-man itself; checks."""
    if units.manager() == "none":
        found = "no service manager: after a reboot, recover restores"
        return [{"check": "boot-restore", "expected": "enabled unit", "found": found, "ok": None}]
    return backstop.arm(state, record)


def hold_down(state: State, record: Json) -> list[Json]:
    """Suspend supervisors and block starts, before the first stop; rows."""
    return holding.hold_down(record) + docker_service.hold_down(record)


def release(state: State, plan: Json) -> None:
    """Lift the block on starts."""
    holding.release(plan)


def resume(state: State, plan: Json) -> list[Json]:
    """Bring restart policies and then supervisors back, last; rows."""
    return docker_service.resume(plan) + holding.resume(plan)


def clean_up(state: State, plan: Json) -> None:
    """Remove what holding down and arming left behind, after the proof or by a person's decision."""
    scopes = set(holding.clean_up(plan))
    if units.manager() != "none":
        backstop.disarm(state, plan["hold_id"])
        scopes.add(units.manager())
    for scope in sorted(scopes):
        units.systemctl(scope, "daemon-reload")


def uninstall(state: State) -> list[str]:
    """Remove every unit file the guard wrote; their paths."""
    if units.manager() == "none":
        return []
    removed = backstop.unit_files()
    for path in removed:
        with contextlib.suppress(OSError):
            files.remove(path)
    if removed:
        units.systemctl(units.manager(), "daemon-reload")
    return removed
