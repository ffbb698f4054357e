"""What one more host costs the coordinator: CPU seconds per host of whole holds over 1, 8 and 24 guards on one machine.

Each host is a guard with a state folder and production of its own; the guards' CPU is theirs and not counted. Not
covered: the encryption of an SSH connection.
"""

from __future__ import annotations

import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

from coordinator.clock import SystemClock
from coordinator.production import production
from coordinator.rehearsal_site import first_hold_document, free_ports, write_toml
from coordinator.render import Reporter
from coordinator.session import open_sessions
from coordinator.show_plan import compile_files
from coordinator.window import Window

COUNTS = (1, 8, 24)
SERVICE = """
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=16)
while True:
    link, _ = server.accept()
    link.recv(4096)
    link.sendall(b"HTTP/1.0 200 OK" + 2 * bytes((13, 10)))
    link.close()
"""


def measure() -> list[dict[str, Any]]:
    found = {count: cpu_per_host_s(count) for count in COUNTS}
    return [row(count, value, found[COUNTS[0]]) for count, value in found.items()]


def row(count: int, value: float, of_one: float) -> dict[str, Any]:
    return {
        "name": f"coordinator CPU per host, {count} hosts",
        "value": value,
        "unit": "s",
        "goal": "constant: at most 1.2 times that of one host",
        "met": value <= 1.2 * of_one,
        "peer": "one host",
        "ratio": value / of_one,
    }


def cpu_per_host_s(count: int) -> float:
    """CPU seconds of this process for one hold over ``count`` hosts, connection and staging included."""
    clock = SystemClock()
    with tempfile.TemporaryDirectory() as folder:
        site, plan = write_files(Path(folder), count)
        compiled = compile_files(site, plan)
        reporter = Reporter(clock.utc, quiet=True)
        with open_sessions(compiled.site, clock) as services, production(services, reporter):
            before = own_cpu_s()
            with open_sessions(compiled.site, clock) as sessions:
                window = Window(
                    compiled, 1, sessions, Path(folder) / "journals", clock=clock, reporter=reporter, reason="benchmark"
                )
                with window:
                    window.open()
            used = own_cpu_s() - before
    if window.exit_code:
        raise SystemExit(f"hold over {count} hosts exited {int(window.exit_code)}")
    return used / count


def own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def write_files(folder: Path, count: int) -> tuple[Path, Path]:
    """A site of ``count`` guards, each with one small HTTP service, and the plan that stops and restores them."""
    program = folder / "service.py"
    program.write_text(SERVICE)
    hosts = [host(folder, program, f"host{number}", port) for number, port in enumerate(free_ports(count))]
    site = {"schema": "coordinator/site/v1", "name": "many", "memory_tolerance_bytes": 1 << 40, "hosts": hosts}
    plan = first_hold_document() | {"orphan_after_s": 120, "provisional_s": 120}
    return write_toml(folder / "site.toml", site), write_toml(folder / "plan.toml", plan)


def host(folder: Path, program: Path, name: str, port: int) -> dict[str, Any]:
    root = folder / name
    (root / "state").mkdir(mode=0o700, parents=True)
    (root / "work").mkdir()
    service = {
        "name": f"web-{name}",
        "kind": "process",
        "start": [sys.executable, "-I", "-S", str(program), str(port)],
        "cwd": str(root),
        "log": str(root / "web.log"),
        "ports": [port],
        "drain_s": 5,
        "stop_s": 10,
        "start_s": 60,
        "watch_s": 0,
        "probe": {"url": f"http://127.0.0.1:{port}/"},
    }
    return {
        "name": name,
        "transport": "local",
        "python": sys.executable,
        "state_dir": str(root / "state"),
        "work_dir": str(root / "work"),
        "roles": ["target", "drafter"],
        "devices": ["cpu0"],
        "services": [service],
    }
