"""What restores when the dead-man's own process cannot: a deadline timer, a boot unit, and a path without Python.

Written and enabled before the first stop, removed after the proof. Timer and boot unit call the same restore as
everyone else; only when that cannot even run does systemd start the fallback: remove the flag, start the units.
"""

from __future__ import annotations

import contextlib
import os

from windows.guard import by_hand, clock, files, holding, launch, spawn, units

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from windows.guard.state import State

    Json = dict[str, Any]

PREFIX = "dspark-guard-"


def unit_folder() -> str:
    """Where units that survive a reboot live."""
    if units.manager() == "system":
        return "/etc/systemd/system"
    return os.path.join(os.path.expanduser("~"), ".config/systemd/user")


def _target() -> str:
    return "multi-user.target" if units.manager() == "system" else "default.target"


def names(state: State, hold_id: str) -> dict[str, str]:
    """Unit names of this hold's backstops."""
    return {role: launch.unit_name(state, role, hold_id) for role in ("boot", "fallback", "deadline")}


def arm(state: State, record: Json) -> list[Json]:
    """Write and enable boot unit and fallback, start the deadline timer; checks."""
    scope, chosen, folder = units.manager(), names(state, record["hold_id"]), unit_folder()
    wants = os.path.join(folder, _target() + ".wants")
    os.makedirs(wants, mode=0o755, exist_ok=True)
    files.require_private(state.debt_folder)
    script = os.path.join(state.debt_folder, "fallback.sh")
    files.write_bytes(script, _fallback_script(record).encode("utf-8", "replace"), 0o600)
    boot_path = os.path.join(folder, chosen["boot"] + ".service")
    files.write_bytes(os.path.join(folder, chosen["fallback"] + ".service"), _fallback_unit(script).encode(), 0o644)
    files.write_bytes(boot_path, _boot_unit(state, record, chosen["fallback"]).encode(), 0o644)
    link = os.path.join(wants, chosen["boot"] + ".service")
    with contextlib.suppress(FileExistsError):
        os.symlink(boot_path, link)
    files.sync_folder(wants)
    units.systemctl(scope, "daemon-reload")
    enabled = units.show(scope, chosen["boot"] + ".service").get("UnitFileState", "unknown")
    timer = _start_timer(state, record, chosen)
    return [
        {"check": "boot-restore", "expected": "enabled", "found": enabled, "ok": enabled == "enabled"},
        {"check": "deadline timer", "expected": "active", "found": timer, "ok": timer == "active"},
    ]


def _start_timer(state: State, record: Json, chosen: dict[str, str]) -> str:
    scope = units.manager()
    units.systemctl(scope, "stop", chosen["deadline"] + ".timer")
    left_s = max(0.1, (record["deadline_ns"] - clock.boottime_ns()) / 1e9)
    argv = spawn.internal_argv(state.folder, "fire", record["hold_id"])
    call = ["systemd-run", "--quiet", "--collect", "--no-ask-password", f"--unit={chosen['deadline']}"]
    call += ["--user"] if scope == "user" else []
    call += [f"--on-active={left_s:.3f}", "--timer-property=AccuracySec=100ms"]
    call += [f"--property=OnFailure={chosen['fallback']}.service", "--property=TimeoutStartSec=infinity"]
    done = units.command([*call, "--", *(part.replace("$", "$$").replace("%", "%%") for part in argv)])
    if done.returncode != 0:
        return done.stderr.strip()[-200:]
    return str(units.show(scope, chosen["deadline"] + ".timer").get("ActiveState", "unknown"))


def _fallback_script(record: Json) -> str:
    lines = ["# starts what was running before the hold, without the guard"]
    lines += [f"rm -f '{holding.flag_path(scope, record['hold_id'])}'" for scope in holding.held_units(record)]
    lines += by_hand.start_commands(record)
    return "\n".join(lines) + "\n"


def _fallback_unit(script: str) -> str:
    return (
        "[Unit]\nDescription=dspark guard: start production without the guard\n\n"
        f"[Service]\nType=oneshot\nKillMode=none\nExecStart={units.exec_line(['/bin/sh', script])}\n"
    )


def _boot_unit(state: State, record: Json, fallback: str) -> str:
    debt = os.path.join(state.debt_folder, "debt.json")
    named = [s["unit"] for s in record["services"] if s["kind"].startswith("systemd-")]
    return (
        "[Unit]\nDescription=dspark guard: restore production after a reboot inside a hold\n"
        f"ConditionPathExists={debt.replace('%', '%%')}\nOnFailure={fallback}.service\n"
        f"After=network.target dbus.service docker.service {' '.join(named)}\n\n"
        "[Service]\nType=oneshot\nTimeoutStartSec=infinity\n"
        f"ExecStart={units.exec_line(spawn.internal_argv(state.folder, 'boot', record['hold_id']))}\n\n"
        f"[Install]\nWantedBy={_target()}\n"
    )


def disarm(state: State, hold_id: str) -> None:
    """Remove this hold's backstops, after the proof. The running service of a timer is left to end by itself."""
    scope, chosen, folder = units.manager(), names(state, hold_id), unit_folder()
    units.systemctl(scope, "stop", chosen["deadline"] + ".timer")
    for path in (
        os.path.join(folder, _target() + ".wants", chosen["boot"] + ".service"),
        os.path.join(folder, chosen["boot"] + ".service"),
        os.path.join(folder, chosen["fallback"] + ".service"),
        os.path.join(state.debt_folder, "fallback.sh"),
    ):
        with contextlib.suppress(OSError):
            files.remove(path)
    # a unit that failed before (no Python at boot) would be listed as failed for ever
    failed = [chosen["boot"] + ".service", chosen["fallback"] + ".service", chosen["deadline"] + ".service"]
    units.systemctl(scope, "reset-failed", *failed)


def unit_files() -> list[str]:
    """Every unit file of the guard on this host, for uninstall."""
    folder = unit_folder()
    found = []
    for place in (folder, os.path.join(folder, _target() + ".wants")):
        with contextlib.suppress(OSError):
            found += [os.path.join(place, name) for name in sorted(os.listdir(place)) if name.startswith(PREFIX)]
    return found
