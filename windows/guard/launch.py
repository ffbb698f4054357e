"""Background programs of the guard: a transient unit where systemd runs, an own session elsewhere.

A transient unit lives outside the SSH session's scope and takes its whole control group with it when it ends. Its
outcome is recorded by the unit itself, because a collected unit reads as success.
"""

from __future__ import annotations

import hashlib
import os

from windows.guard import clock, files, proc, spawn, units
from windows.guard.errors import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from windows.guard.state import State

    Json = dict[str, Any]


def in_units() -> bool:
    """True when background programs get transient units of their own."""
    return units.manager() != "none"


def unit_name(state: State, role: str, ident: str) -> str:
    """Name (without suffix) of the unit of one background program."""
    digest = hashlib.sha256(f"{state.folder}\0{ident}".encode()).hexdigest()[:16]
    return f"dspark-guard-{role}-{digest}"


def background(state: State, role: str, ident: str, record_path: str, memory_max_bytes: int | None = None) -> None:
    """Start role ``ident``; its ownership record appears at ``record_path``.

    Raises:
        Refusal: ``START_FAILED``.
    """
    argv = spawn.internal_argv(state.folder, role, ident)
    if units.manager() == "none":
        spawn.start_detached(argv, spawn.base_environment(), "/", record_path, os.urandom(16).hex())
        return
    name = unit_name(state, role, ident)
    properties = ["KillMode=control-group", "TimeoutStopSec=5", "Type=exec", "OOMPolicy=kill"]
    if role == "deadman":
        properties += ["Restart=on-failure", "RestartSec=1", "StartLimitIntervalSec=0"]
    if role == "run":
        outcome = os.path.join(os.path.dirname(record_path), "unit-outcome")
        script = 'echo "$SERVICE_RESULT $EXIT_CODE $EXIT_STATUS" > "$0"'
        properties.append("ExecStopPost=" + units.exec_line(["/bin/sh", "-c", script, outcome]))
    if memory_max_bytes is not None:
        properties += [f"MemoryMax={memory_max_bytes}", "MemorySwapMax=0"]
    done = units.run_transient(name, properties, [*argv, "--record", record_path], spawn.base_environment())
    if done.returncode != 0:
        raise Refusal(
            "START_FAILED", f"systemd-run did not start {name}", "exit 0", done.stderr[-200:], "journalctl -u " + name
        )
    if not clock.wait_until(lambda: os.path.exists(record_path), 10.0):
        raise Refusal(
            "START_FAILED", f"{name} did not report", record_path, "nothing after 10 s", "journalctl -u " + name
        )


def unit_outcome(folder: str) -> str:
    """What a run's unit recorded about its own end; empty when nothing."""
    try:
        with open(os.path.join(folder, "unit-outcome"), encoding="ascii", errors="replace") as handle:
            return "unit: " + handle.read(200).strip()
    except FileNotFoundError:
        return ""


def is_running(record_path: str) -> bool:
    """True when the background program with this record lives."""
    record = files.read_json(record_path)
    return (
        record is not None
        and record["boot_id"] == clock.boot_id()
        and proc.is_alive(record["pid"], record["start_ticks"])
    )
