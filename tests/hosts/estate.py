"""What the three hosts of the fault matrix run as production, the plan that holds it, and their fresh disks.

Production of each host: ``web``, an enabled systemd unit, and ``worker``, a process of the guard's; a host without a
service manager has the process only. Each start of either leaves a line on the host's disk, so "one restore" is counted
by the services themselves, not by the guard.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from windows.guard_archive import archive_name, build_archive

Json = dict[str, Any]

PYTHON = os.path.realpath(sys.executable)
STATE, WORK, SERVE = "/var/lib/dspark-guard", "/srv/work", "/srv/serve.py"
WEB_PORT, WORKER_PORT = 8001, 8002
ORPHAN_AFTER_S = 6
"""Short, and still longer than a busy machine needs to lease three hosts: nobody beats before that."""

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

WEB_UNIT = f"""[Service]
ExecStart={PYTHON} -I -S {SERVE} web {WEB_PORT} plain
[Install]
WantedBy=multi-user.target
"""

# What of production and of the guard's traces is compared before and after, in one go.
# Production, compared before and after in one go.
LOOK = f"""
cd /
systemctl show web -p LoadState -p ActiveState -p SubState -p UnitFileState -p FragmentPath -p DropInPaths \
  -p NeedDaemonReload
for port in {WEB_PORT} {WORKER_PORT}; do
  exec 3<>/dev/tcp/127.0.0.1/$port && echo x >&3 && cat <&3 | tail -1; echo
done 2>&1
"""

# What a hold may leave nowhere.
TRACES = f"""
cd /
systemctl list-units --all --plain --no-legend 'dspark-guard-*' | awk '{{print "unit", $1}}' | grep -v -- -service-
find /run/dspark-guard /run/systemd/system/*.d/90-dspark-hold.conf /etc/systemd/system/dspark-guard-* \
  {STATE}.debt/debt.json -type f 2>/dev/null
"""


def web() -> Json:
    """The unit, as the site file describes it."""
    return {
        "name": "web",
        "kind": "systemd-system",
        "unit": "web.service",
        "ports": [WEB_PORT],
        "drain_s": 2,
        "stop_s": 4,
        "start_s": 10,
        "watch_s": 0,
        "stop_order": 1,
        "probe": {"url": f"http://127.0.0.1:{WEB_PORT}/", "timeout_s": 2, "expect_contains": "served by web"},
    }


def worker(mode: str = "plain") -> Json:
    """The process, as the site file describes it."""
    return {
        "name": "worker",
        "kind": "process",
        "start": [PYTHON, "-I", "-S", SERVE, "worker", str(WORKER_PORT), mode],
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
        "bound_s": 60,
        "restore_reserve_s": 15,
        "orphan_after_s": ORPHAN_AFTER_S,
        "provisional_s": 15,
        "holds": {"1": []},
        "step_bounds_s": {"preflight": 10, "lease": ORPHAN_AFTER_S, "snapshot": 5, "arm-dead-man": 8, "stop": 6},
        **changes,
    }


def fill_disk(upper: Path) -> None:
    """What a host of production has on its disk."""
    units = upper / "etc/systemd/system"
    (upper / "srv/work").mkdir(parents=True)
    (upper / "srv/serve.py").write_text(SERVE_PROGRAM)
    (units / "web.service").write_text(WEB_UNIT)
    (units / "multi-user.target.wants").mkdir()
    (units / "multi-user.target.wants/web.service").symlink_to("../web.service")
    data = build_archive()
    guard = upper / STATE[1:] / "bin" / archive_name(data)
    guard.parent.mkdir(parents=True, mode=0o700)
    (upper / STATE[1:]).chmod(0o700)
    guard.write_bytes(data)
