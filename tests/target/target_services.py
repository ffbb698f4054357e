"""A real drafter worker and a real target server, each its own process, over the trained example pair."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "examples" / "tiny"
START_S = 60.0
STOP_S = 20.0
POLL_S = 0.05


class Service:
    """One process, ended by its own pid."""

    def __init__(self, module: str, config: Path, log: Path) -> None:
        self.log = log
        with log.open("wb") as stderr:
            command = [sys.executable, "-m", module, "--config", str(config)]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr)

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code


class ServerPair:
    """Worker and target of one mode. ``start`` returns when the target is READY."""

    def __init__(self, mode: str, folder: Path) -> None:
        self.mode = mode
        self.folder = folder
        # A socket path has at most 107 bytes, and test folders are long.
        self._sockets = tempfile.TemporaryDirectory(prefix="dspark-")
        self.address = f"unix:{self._sockets.name}/w"
        self.worker: Service | None = None
        self.target: Service | None = None
        self.port = 0
        self.target_model = TINY / "target"

    def start(self) -> ServerPair:
        self.start_worker()
        self.start_target()
        self.await_state("ready")
        return self

    def start_worker(self, extra: str = "") -> None:
        config = self.folder / "worker.toml"
        config.write_text(
            f'modes = ["{self.mode}"]\n[model]\npath = "{TINY}/drafter"\ntarget = "{self.target_model}"\n'
            f'tokenizer = "{TINY}/target/tokenizer.json"\n[listen]\naddress = "{self.address}"\n'
            f'[metrics]\naddress = "127.0.0.1:0"\n{extra}\n'
        )
        if self.worker is not None:
            self.worker.stop()
        self.worker = Service("remote_dspark.serve", config, self.folder / "worker.log")

    def start_target(self, extra: str = "", drafter: str = "") -> None:
        config = self.folder / "target.toml"
        config.write_text(
            f'mode = "{self.mode}"\n[model]\npath = "{self.target_model}"\nname = "tiny"\n[listen]\nport = 0\n'
            f'[drafter]\naddress = "{self.address}"\ncheckpoint = "{TINY}/drafter"\n{drafter}\n{extra}\n'
        )
        if self.target is not None:
            self.target.stop()
        self.target = Service("remote_dspark.target", config, self.folder / "target.log")
        assert self.target.process.stdout is not None
        line = self.target.process.stdout.readline()
        self.port = int(json.loads(line)["port"]) if line else 0

    def await_state(self, state: str, timeout_s: float = START_S) -> None:
        deadline = time.monotonic() + timeout_s
        found: Any = None
        while time.monotonic() < deadline:
            if self.target.process.poll() is not None:
                break
            try:
                found = json.loads(self.get("/health")[1])["state"]
            except OSError as cause:
                found = repr(cause)
            if found == state:
                return
            time.sleep(POLL_S)
        log = self.target.log.read_text() + self.worker.log.read_text()
        raise AssertionError(f"expected state {state}, found {found}\n{log}")

    def stop(self) -> None:
        for service in (self.target, self.worker):
            if service is not None:
                service.stop()
        self._sockets.cleanup()

    # -- HTTP ------------------------------------------------------------------------------------------------------

    def get(self, path: str) -> tuple[int, bytes]:
        return self._exchange("GET", path, None)

    def post(self, **fields: object) -> tuple[int, dict[str, Any]]:
        status, body = self._exchange("POST", "/v1/completions", json.dumps(fields).encode())
        return status, json.loads(body)

    def complete(self, **fields: object) -> dict[str, Any]:
        status, document = self.post(**fields)
        assert status == 200, document
        return document

    def stream(self, **fields: object) -> list[dict[str, Any]]:
        status, body = self._exchange("POST", "/v1/completions", json.dumps({**fields, "stream": True}).encode())
        assert status == 200, body
        lines = [line[6:] for line in body.decode().split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def metrics(self) -> dict[str, int]:
        from remote_dspark.target.metrics import parse_metrics

        return parse_metrics(self.get("/metrics")[1].decode())

    def _exchange(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()
