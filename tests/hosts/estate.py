"""What the three hosts of the fault matrix run as production, the plan that holds it, and their fresh disks.

Production of each host: ``web``, an enabled systemd unit, and ``worker``, a process of the guard's; a host without a
service manager has the process only. Each start of either leaves a line on the host's disk, so "one restore" is counted
by the services themselves, not by the guard.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windows.guard_archive import archive_name, build_archive

Json = dict[str, Any]

PYTHON = os.path.realpath(sys.executable)
STATE, WORK, SERVE = "/var/lib/dspark-guard", "/srv/work", "/srv/serve.py"
WEB_PORT, WORKER_PORT = 8001, 8002
ORPHAN_AFTER_S = 12
"""Short, and still twice what a busy machine needs to lease three hosts: nobody beats before that."""

SERVE_PROGRAM = """
import os, signal, socket, sys
name, port, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open("/srv/starts", "a") as log:
    log.write(name + chr(10))
server = socket.create_server(("127.0.0.1", port), backlog=16)
while True:
    link, _ = server.accept()
    link.settimeout(5)
    try:
        link.recv(4096)
        link.sendall(b"HTTP/1.0 200 OK" + 2 * bytes((13, 10)) + b"served by " + name.encode())
    except OSError:
        pass
    link.close()
"""


@dataclass(frozen=True)
class Owner:
    """Whose production it is: root's, or an ordinary user's with a lingering manager of its own.

    Attributes:
        user: Login name; also who the coordinator logs in as.
        python: An interpreter that this user may execute.
        state: The guard's state folder.
        systemctl: How to ask the manager of the owner's units.
        run: Where that manager keeps what a reboot forgets.
        units: Where its units lie.
        target: What its units are wanted by.
        enter: Command that becomes this user on the host's console.
    """

    user: str
    python: str
    state: str
    systemctl: str
    run: str
    units: str
    target: str
    enter: tuple[str, ...] = ()

    def web_unit(self) -> str:
        """The unit file of ``web``."""
        start = f"{self.python} -I -S {SERVE} web {WEB_PORT} plain"
        return f"[Service]\nExecStart={start}\n[Install]\nWantedBy={self.target}\n"

    def look(self) -> str:
        """Script that shows production; compared before and after in one go."""
        return f"""
cd /
{self.systemctl} show web -p LoadState -p ActiveState -p SubState -p UnitFileState -p FragmentPath -p DropInPaths \\
  -p NeedDaemonReload
for port in {WEB_PORT} {WORKER_PORT}; do
  exec 3<>/dev/tcp/127.0.0.1/$port && echo x >&3 && cat <&3 | tail -1; echo
done 2>&1
"""

    def traces(self) -> str:
        """Script that shows what a hold may leave nowhere."""
        return f"""
cd /
{self.systemctl} list-units --all --plain --no-legend 'dspark-guard-*' | awk '{{print "unit", $1}}' \\
  | grep -v -- -service-
find {self.run}/dspark-guard {self.run}/systemd/*/*.d/90-dspark-hold.conf {self.units}/dspark-guard-* \\
  {self.state}.debt/debt.json -type f 2>/dev/null
"""


UID = 1000
ROOT = Owner("root", PYTHON, STATE, "systemctl", "/run", "/etc/systemd/system", "multi-user.target")
OP = Owner(
    "op",
    "/usr/bin/python3",
    "/home/op/state",
    "systemctl --user",
    f"/run/user/{UID}",
    "/home/op/.config/systemd/user",
    "default.target",
    (
        *("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"),
        *("env", "HOME=/home/op", "USER=op", "LOGNAME=op", f"XDG_RUNTIME_DIR=/run/user/{UID}"),
    ),
)


def web(owner: Owner) -> Json:
    """The unit, as the site file describes it."""
    return {
        "name": "web",
        "kind": "systemd-system" if owner is ROOT else "systemd-user",
        "unit": "web.service",
        "ports": [WEB_PORT],
        "drain_s": 2,
        "stop_s": 4,
        "start_s": 10,
        "watch_s": 0,
        "stop_order": 1,
        "probe": {"url": f"http://127.0.0.1:{WEB_PORT}/", "timeout_s": 2, "expect_contains": "served by web"},
    }


def worker(owner: Owner, mode: str = "plain") -> Json:
    """The process, as the site file describes it."""
    return {
        "name": "worker",
        "kind": "process",
        "start": [owner.python, "-I", "-S", SERVE, "worker", str(WORKER_PORT), mode],
        "cwd": "/srv",
        "log": "/srv/worker.log",
        "ports": [WORKER_PORT],
        "drain_s": 1,
        "stop_s": 4,
        "start_s": 10,
        "watch_s": 0,
        "stop_order": 2,
        "probe": {"url": f"http://127.0.0.1:{WORKER_PORT}/", "timeout_s": 2, "expect_contains": "served by worker"},
    }


def plan_document(**changes: Any) -> Json:
    """Stop and restore only, with bounds of seconds."""
    return {
        "schema": "coordinator/plan/v1",
        "name": "matrix",
        "purpose": "first-hold",
        "bound_s": 90,
        "restore_reserve_s": 15,
        "orphan_after_s": ORPHAN_AFTER_S,
        "provisional_s": 15,
        "holds": {"1": []},
        "step_bounds_s": {"preflight": 10, "lease": ORPHAN_AFTER_S, "snapshot": 5, "arm-dead-man": 8, "stop": 6},
        **changes,
    }


def fill_disk(upper: Path) -> None:
    """What a host of root's production has on its disk."""
    (upper / "srv/work").mkdir(parents=True)
    (upper / "srv/serve.py").write_text(SERVE_PROGRAM)
    _fill(upper, ROOT)


def fill_user_disk(upper: Path) -> None:
    """What a host of an ordinary user's production has: the account, lingering, and all of it its own."""
    (upper / "srv/work").mkdir(parents=True)
    (upper / "srv/serve.py").write_text(SERVE_PROGRAM)
    for name, line in (
        ("passwd", f"op:x:{UID}:{UID}::/home/op:/bin/bash"),
        ("group", f"op:x:{UID}:"),
        ("shadow", "op:*:19000:0:99999:7:::"),
    ):
        kept = [text for text in Path("/etc", name).read_text().splitlines() if f":{UID}:" not in text]
        (upper / "etc" / name).write_text("\n".join([*kept, line]) + "\n")
    linger = upper / "var/lib/systemd/linger/op"
    linger.parent.mkdir(parents=True)
    linger.write_text("")
    keys = upper / "home/op/.ssh"
    keys.mkdir(parents=True, mode=0o700)
    shutil.copyfile(upper / "root/.ssh/authorized_keys", keys / "authorized_keys")
    _fill(upper, OP)
    for folder in ("home/op", "srv"):
        os.chown(upper / folder, UID, UID)
        for path in (upper / folder).rglob("*"):
            os.chown(path, UID, UID, follow_symlinks=False)


def _fill(upper: Path, owner: Owner) -> None:
    units = upper / owner.units[1:]
    wanted = units / f"{owner.target}.wants"
    wanted.mkdir(parents=True, exist_ok=True)
    (units / "web.service").write_text(owner.web_unit())
    (wanted / "web.service").symlink_to("../web.service")
    data = build_archive()
    guard = upper / owner.state[1:] / "bin" / archive_name(data)
    guard.parent.mkdir(parents=True, mode=0o700)
    (upper / owner.state[1:]).chmod(0o700)
    guard.write_bytes(data)
