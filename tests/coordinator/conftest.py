"""A small real site: one local host, one real HTTP service as production, the real guard."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from coordinator.clock import SystemClock
from coordinator.production import production, require_free
from coordinator.rehearsal_site import first_hold_document, free_ports, write_toml
from coordinator.render import Reporter
from coordinator.session import HostSession, open_sessions
from coordinator.show_plan import compile_files
from coordinator.window import Window
from windows.compiled import CompiledPlan

SERVICE = """
import hashlib, http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = hashlib.sha256(os.environ.get("SERVICE_KEY", "").encode()).hexdigest().encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@dataclass
class SmallSite:
    """Everything a test of a real hold needs."""

    root: Path
    port: int
    extra: dict[str, Any] = field(default_factory=dict)

    def write(self) -> tuple[Path, Path]:
        program = self.root / "service.py"
        program.write_text(SERVICE)
        (self.root / "state").mkdir(mode=0o700, exist_ok=True)
        (self.root / "work").mkdir(exist_ok=True)
        service = {
            "name": "web",
            "kind": "process",
            "start": [sys.executable, str(program), str(self.port)],
            "cwd": str(self.root),
            "log": str(self.root / "web.log"),
            "ports": [self.port],
            "drain_s": 5,
            "stop_s": 10,
            "start_s": 30,
            "watch_s": 0,
            "probe": {"url": f"http://127.0.0.1:{self.port}/"},
            **self.extra,
        }
        host = {
            "name": "here",
            "transport": "local",
            "python": sys.executable,
            "state_dir": str(self.root / "state"),
            "work_dir": str(self.root / "work"),
            "roles": ["target", "drafter"],
            "devices": ["cpu0"],
            "services": [service],
        }
        site = {"schema": "coordinator/site/v1", "name": "small", "memory_tolerance_bytes": 1 << 40, "hosts": [host]}
        return (
            write_toml(self.root / "site.toml", site),
            write_toml(self.root / "plan.toml", first_hold_document()),
        )

    @contextmanager
    def running(self) -> Iterator[tuple[CompiledPlan, list[HostSession]]]:
        compiled = compile_files(*self.write())
        clock = SystemClock()
        with open_sessions(compiled.site, clock) as sessions:
            require_free(sessions)
            with production(sessions, Reporter(clock.utc, quiet=True)):
                yield compiled, sessions

    def window(self, compiled: CompiledPlan, sessions: list[HostSession]) -> Window:
        clock = SystemClock()
        reporter = Reporter(clock.utc, quiet=True)
        return Window(compiled, 1, sessions, self.root / "journals", clock=clock, reporter=reporter, reason="test")


@pytest.fixture
def small_site(tmp_path: Path) -> SmallSite:
    return SmallSite(tmp_path, free_ports(1)[0])
