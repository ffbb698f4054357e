"""Fixtures of the guard's tests: the real zipapp as real processes, real services, real deadlines of seconds."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from windows.guard import framing
from windows.guard_archive import archive_name, build_archive

Json = dict[str, Any]

SERVICE = """
import http.server, os, signal, subprocess, sys
port, mode = int(sys.argv[1]), sys.argv[2]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        secret = b"secret-ok" if os.environ.get("API_KEY") else b""
        self.wfile.write(b"completion " + os.environ.get("KIND", "").encode() + b" " + secret)
    do_POST = do_GET
    def log_message(self, *a): pass
class Server(http.server.ThreadingHTTPServer):
    allow_reuse_address = True
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "child":
    escape = "import os, time; os.fork() and os._exit(0); os.setsid(); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", escape, sys.argv[0]])
Server(("127.0.0.1", port), Handler).serve_forever()
"""


def python39() -> str | None:
    """A Python 3.9 of this machine: the oldest the guard promises to run on; None when there is none."""
    candidates = [shutil.which("python3.9")]
    roots = [Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"]
    candidates += [str(path) for root in roots if root.is_dir() for path in sorted(root.glob("3.9.*/bin/python"))]
    for candidate in candidates:
        if candidate is None or not os.access(candidate, os.X_OK):
            continue
        shown = subprocess.run([candidate, "-V"], capture_output=True, text=True, check=False)
        if shown.returncode == 0 and " 3.9." in shown.stdout:
            return candidate
    return None


INTERPRETERS = [sys.executable] + ([python39()] if python39() else [])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout_s} s: {condition}")


def pids_with(text: str) -> list[int]:
    """Pids of living processes (not zombies) with ``text`` in their arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
            stat = (entry / "stat").read_text()
        except OSError:
            continue
        if text.encode() in line and stat.rpartition(")")[2].split()[0] != "Z":
            found.append(int(entry.name))
    return found


class GuardHost:
    """One state folder and the guard that serves it."""

    # reachable through the fixture, because test modules cannot import this file
    wait_for = staticmethod(wait_for)
    pids_with = staticmethod(pids_with)
    interpreters = INTERPRETERS

    def __init__(self, folder: Path, archive: Path, python: str) -> None:
        self.folder, self.archive, self.python = folder, archive, python
        self.state = folder / "state"
        self.claim: Json | None = None

    def argv(self, *extra: str) -> list[str]:
        return [self.python, "-I", "-S", str(self.archive), "--state", str(self.state), *extra]

    def raw(self, request: bytes) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(self.argv(), input=request, capture_output=True, timeout=120, check=False)

    def request(self, verb: str, args: Json | None = None, claim: Json | None = None, op: str | None = "new") -> bytes:
        op = secrets.token_hex(8) if op == "new" else op
        return json.dumps({"protocol": 1, "verb": verb, "op": op, "claim": claim, "args": args or {}}).encode()

    def reply(self, verb: str, args: Json | None = None, claim: Json | None = None, op: str | None = "new") -> Json:
        done = self.raw(self.request(verb, args, claim, op))
        assert done.returncode == 0, done.stderr.decode()
        return framing.parse_reply(done.stdout)

    def ask(self, verb: str, args: Json | None = None, op: str | None = "new") -> Json:
        """The result with the current claim, or an assertion."""
        reply = self.reply(verb, args, self.claim, op)
        assert reply["ok"], json.dumps(reply["error"], indent=1)
        return reply["result"]

    def refuse(self, verb: str, args: Json | None = None, op: str | None = "new", claim: Json | None = None) -> Json:
        """The error, or an assertion."""
        reply = self.reply(verb, args, claim or self.claim, op)
        assert not reply["ok"], reply["result"]
        return reply["error"]

    def acquire_args(self, services: list[Json], **changes: Any) -> Json:
        args = {
            "hold_id": f"h-{secrets.token_hex(4)}",
            "owner": "tester@bench",
            "reason": "test",
            "plan_sha256": "0" * 64,
            "devices": ["cpu:0"],
            "provisional_s": 60,
            "deadline_s": 120,
            "restore_reserve_s": 10,
            "orphan_after_s": 100,
            "services": services,
            "notify": None,
        }
        return dict(args, **changes)

    def acquire(self, services: list[Json], **changes: Any) -> Json:
        result = self.ask("acquire", self.acquire_args(services, **changes))
        self.claim = result["claim"]
        return result

    def to(self, state: str, services: list[Json], **changes: Any) -> None:
        """Bring the host into a state of the table by its real verbs."""
        self.acquire(services, **changes)
        for verb, reached in (
            ("confirm", "leased"),
            ("snapshot", "snapshotted"),
            ("arm", "armed"),
            ("stop", "held"),
            ("restore", "restored"),
        ):
            if self.ask("status", op=None)["state"] == state:
                return
            self.ask(verb)
            if reached == state:
                return

    def files(self) -> list[Path]:
        return [
            p for root in (self.state, Path(f"{self.state}.debt"), self.folder) for p in root.rglob("*") if p.is_file()
        ]


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = build_archive()
    path = tmp_path_factory.mktemp("guard") / archive_name(data)
    path.write_bytes(data)
    return path


@pytest.fixture(params=INTERPRETERS, ids=lambda p: "py" + ("39" if p != sys.executable else "now"))
def any_python(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make_host(tmp_path: Path, archive: Path, python: str) -> Iterator[GuardHost]:
    host = GuardHost(tmp_path, archive, python)
    yield host
    # end what this test started, by its own folder's name in the command line
    for _ in range(3):
        for pid in pids_with(str(tmp_path)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.fixture
def host(tmp_path: Path, archive: Path) -> Iterator[GuardHost]:
    """The guard under the oldest interpreter this machine has for it."""
    yield from make_host(tmp_path, archive, INTERPRETERS[-1])


@pytest.fixture
def host_any(tmp_path: Path, archive: Path, any_python: str) -> Iterator[GuardHost]:
    """The guard under each interpreter in turn."""
    yield from make_host(tmp_path, archive, any_python)


@pytest.fixture
def make_service(tmp_path: Path) -> Callable[..., Json]:
    """Describes a small HTTP service; nothing is started."""
    program = tmp_path / "service.py"
    program.write_text(SERVICE)

    def make(name: str = "target", mode: str = "plain", **changes: Any) -> Json:
        port = free_port()
        service = {
            "name": name,
            "kind": "process",
            "start": [sys.executable, "-I", str(program), str(port), mode],
            "cwd": str(tmp_path),
            "env": {"KIND": name},
            "log": str(tmp_path / f"{name}.log"),
            "drain_s": 3,
            "stop_s": 6,
            "start_s": 20,
            "ports": [port],
            "watch_s": 0.3,
            "probe": {
                "url": f"http://127.0.0.1:{port}/v1/completions",
                "method": "POST",
                "body": "{}",
                "expect_contains": "completion",
            },
        }
        return dict(service, **changes)

    return make
