"""RESTORE.txt: how a person puts production back with a shell alone, written before the first stop.

The commands name secret files, never their content.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys

from windows.guard import files, spawn, systemd_service

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from windows.guard.state import State

    Json = dict[str, Any]


def write(state: State, record: Json) -> None:
    """Write the file into the state folder and beside the debt."""
    text = render(state, record).encode("utf-8", "replace")
    for folder in (state.folder, state.debt_folder):
        files.write_bytes(os.path.join(folder, "RESTORE.txt"), text)


def remove(state: State) -> None:
    """Production is back: the instructions are obsolete."""
    for folder in (state.folder, state.debt_folder):
        with contextlib.suppress(OSError):
            files.remove(os.path.join(folder, "RESTORE.txt"))


def render(state: State, record: Json) -> str:
    """The text. Lines that start with ``#`` are for the reader, all others are commands."""
    guard = shlex.join([sys.executable, "-I", "-S", spawn.program_path(), "--state", state.folder, "restore-now"])
    lines = [
        f"# Hold {record['hold_id']} (epoch {record['epoch']}, {record['owner']}) stopped production on this host.",
        "# First choice, checks its work:",
        guard,
        "# If that cannot run, these lines start what was running:",
    ]
    lines += start_commands(record)
    lines.append("# Then look at production, and clear the debt:")
    lines.append(guard.replace("restore-now", f"clear-now {shlex.quote(record['hold_id'])} REASON"))
    return "\n".join(lines) + "\n"


def start_commands(record: Json) -> list[str]:
    """Shell lines that start what was running, in restore order, supervisors last."""
    lines: list[str] = []
    pairs = list(zip(record["services"], record["snapshot"]["services"]))  # noqa: B905 - 3.9 has no strict
    for service, snap in sorted(pairs, key=lambda pair: -pair[0]["stop_order"]):
        if snap["state"] == "running":
            lines += [f"# {service['name']}", *_commands(service)]
        if service["kind"] == "docker":
            lines.append(f"docker update --restart={shlex.quote(snap['restart'])} {shlex.quote(service['container'])}")
    for service, snap in pairs:
        for before in reversed(snap.get("supervisors", [])):
            if before["show"].get("ActiveState") == "active":
                lines.append(_systemctl(service, before["unit"]))
    return lines


def _systemctl(service: Json, unit: str) -> str:
    user = " --user" if systemd_service.scope_of(service) == "user" else ""
    return f"systemctl{user} start {shlex.quote(unit)}"


def _commands(service: Json) -> list[str]:
    if service["kind"] == "process":
        secrets = "".join(
            f'{name}="$(cat {shlex.quote(path)})" ' for name, path in sorted(service["secret_env"].items())
        )
        plain = "".join(f"{name}={shlex.quote(value)} " for name, value in sorted(service["env"].items()))
        start = f"{secrets}{plain}setsid {shlex.join(service['start'])}"
        return [f"( cd {shlex.quote(service['cwd'])} && {start} </dev/null >>{shlex.quote(service['log'])} 2>&1 & )"]
    if service["kind"] == "docker":
        return [f"docker start {shlex.quote(service['container'])}"]
    return [_systemctl(service, service["unit"])]
