"""systemctl and systemd-run: the only file that talks to a service manager.

State is read with ``systemctl show``, never from exit codes. Arguments that systemd would rewrite (``$``, ``%``) are
escaped. Nothing here knows what a hold is.
"""

from __future__ import annotations

import os
import subprocess

from windows.guard import spawn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NamedTuple

    Json = dict[str, Any]

    class Done(NamedTuple):
        """What a command gave."""

        returncode: int
        stdout: str
        stderr: str
else:
    from collections import namedtuple

    Done = namedtuple("Done", "returncode stdout stderr")

SHOWN = (
    "Id",
    "LoadState",
    "ActiveState",
    "SubState",
    "UnitFileState",
    "FragmentPath",
    "DropInPaths",
    "MainPID",
    "ExecMainStartTimestampMonotonic",
    "NeedDaemonReload",
    "Transient",
    "ControlGroup",
    "Restart",
    "NRestarts",
    "Result",
    "TriggeredBy",
)


def manager() -> str:
    """``system`` for root under systemd, ``user`` for a lingering user of it, otherwise ``none``."""
    if not os.path.isdir("/run/systemd/system"):
        return "none"
    if os.geteuid() == 0:
        return "system"
    return "user" if has_linger() and os.path.exists(f"/run/user/{os.geteuid()}/systemd/private") else "none"


def under_systemd() -> bool:
    """True when systemd is this host's init."""
    return os.path.isdir("/run/systemd/system")


def has_linger() -> bool:
    """True when this user's manager outlives its sessions (root needs none)."""
    return os.geteuid() == 0 or os.path.exists(f"/var/lib/systemd/linger/{user_name()}")


def user_name() -> str:
    """Login name of this uid; the number when it has none."""
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _environment() -> dict[str, str]:
    environment = dict(spawn.base_environment(), LC_ALL="C")
    if os.geteuid() != 0:
        environment["XDG_RUNTIME_DIR"] = f"/run/user/{os.geteuid()}"
    return environment


def command(argv: list[str], timeout_s: float = 30.0) -> Done:
    """Run one program to its end, streams captured, no shell; a timeout reads as exit 124."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env=_environment(),
        )
    except subprocess.TimeoutExpired:
        return Done(124, "", f"{argv[0]} took longer than {timeout_s} s")
    except OSError as error:
        return Done(127, "", str(error))
    return Done(done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))


def systemctl(scope: str, *arguments: str, timeout_s: float = 30.0) -> Done:
    """``systemctl`` of the system (``scope`` system) or of this user's manager (user)."""
    return command(["systemctl", *(["--user"] if scope == "user" else []), "--no-ask-password", *arguments], timeout_s)


def show(scope: str, unit: str) -> Json:
    """The unit's properties (strings); empty when systemd cannot be asked."""
    done = systemctl(scope, "show", "-p", ",".join(SHOWN), "--", unit)
    if done.returncode != 0:
        return {}
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


def escape(argument: str) -> str:
    """One argument as systemd must read it to see it unchanged on a command line."""
    text = argument.replace("%", "%%").replace("$", "$$")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def exec_line(argv: list[str]) -> str:
    """An ``Exec…=`` value for these arguments."""
    return " ".join(escape(part) for part in argv)


def run_transient(name: str, properties: list[str], argv: list[str], environment: dict[str, str]) -> Done:
    """Start a transient service in the manager that belongs to us."""
    call = ["systemd-run", "--quiet", "--collect", "--no-ask-password", f"--unit={name}"]
    if manager() == "user":
        call.append("--user")
    call += [f"--property={value}" for value in properties]
    call += [f"--setenv={key}={value}" for key, value in sorted(environment.items())]
    # systemd-run takes the program literally and expands only the arguments
    return command([*call, "--", *(part.replace("$", "$$").replace("%", "%%") for part in argv)])
