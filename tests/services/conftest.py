"""A rehearsal as its user starts it: the installed command, in a folder of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

COORDINATOR = [sys.executable, "-m", "coordinator"]
POLL_S = 0.1


@dataclass
class Rehearsals:
    """Starts commands against one private folder and state, and ends what they left."""

    root: Path
    processes: list[subprocess.Popen[str]]

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def latest(self) -> Path:
        return self.root / "run" / "latest"

    def start(self, *extra: str) -> subprocess.Popen[str]:
        argv = [
            *COORDINATOR,
            "rehearse",
            "--quick",
            "--dir",
            str(self.root / "run"),
            "--state",
            str(self.state),
            *extra,
        ]
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self.processes.append(process)
        return process

    def command(self, *argv: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*COORDINATOR, *argv], capture_output=True, text=True, timeout=timeout_s, check=False)

    def status(self) -> dict[str, Any]:
        done = self.command("hold", "status", "--site", str(self.latest / "site.toml"), "--json")
        host: dict[str, Any] = json.loads(done.stdout)["hosts"]["here"]
        return host

    def journal_text(self) -> str:
        return "".join(path.read_text() for path in sorted(self.latest.glob("journals/*.jsonl")))


def wait_until(what: str, condition: Callable[[], bool], timeout_s: float) -> None:
    """Poll a condition; fail with its name when it does not come."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"{what}: not within {timeout_s} s")
        time.sleep(POLL_S)


@pytest.fixture
def rehearsals(tmp_path: Path) -> Iterator[Rehearsals]:
    found = Rehearsals(tmp_path, [])
    (tmp_path / "state").mkdir(mode=0o700)
    yield found
    for process in found.processes:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    end_production(found)


def end_production(found: Rehearsals) -> None:
    """End the production services a killed rehearsal left running, through the guard that owns them."""
    from coordinator.clock import SystemClock
    from coordinator.config import read_site
    from coordinator.session import open_sessions

    site_file = found.latest / "site.toml"
    if not site_file.exists():
        return
    site, _ = read_site(site_file)
    with open_sessions(site, SystemClock()) as sessions:
        for session in sessions:
            if session.guard.call("status")["state"] != "free":
                continue
            for service in session.spec.services:
                session.guard.call("service-stop", {"service": service.to_guard()}, timeout_s=60)
