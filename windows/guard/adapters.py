"""Which adapter serves which kind, and the steps that concern all services at once.

An adapter is a module with ``check_expected``, ``check_restorable``, ``snapshot``, ``stop``, ``ghosts``, ``restore``,
``compare``, ``tree`` and ``is_running``; rows in, rows out.
"""

from __future__ import annotations

from windows.guard import process_service

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from windows.guard.state import State

    Json = dict[str, Any]

ADAPTERS: dict[str, Any] = {"process": process_service}


def of(service: Json) -> Any:
    """The adapter module of a service."""
    return ADAPTERS[service["kind"]]


def ask(question: str, state: State, service: Json) -> list[Json]:
    """Rows of ``check_expected`` or ``check_restorable``."""
    rows: list[Json] = getattr(of(service), question)(state, service)
    return rows


def hold_down(state: State, record: Json) -> list[Json]:
    """Suspend supervisors and block starts, before the first stop; rows."""
    return []


def release(state: State, plan: Json) -> None:
    """Lift the block on starts."""


def resume(state: State, plan: Json) -> list[Json]:
    """Bring supervisors back, last; rows."""
    return []


def clean_up(state: State, hold_id: str) -> None:
    """Remove what holding down left behind, after the proof."""


def arm(state: State, record: Json) -> list[Json]:
    """What must exist before the first stop besides the dead-man itself; checks."""
    found = "no service manager: after a reboot, recover restores"
    return [{"check": "boot-restore", "expected": "enabled unit", "found": found, "ok": None}]


def uninstall(state: State) -> list[str]:
    """Remove every unit file the guard wrote; their paths."""
    return []
