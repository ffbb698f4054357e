"""``/health``, ``/metrics``, ``/identity`` and ``/timings`` on a thread of the standard library's HTTP server.

It starts before torch is imported, so that a booting worker can be told from a dead one. Read-only; GET only.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from remote_dspark.contract import ServerState
from remote_dspark.serve.errors import BootError
from remote_dspark.serve.health import Health

SLOW_CLIENT_S: Final = 5.0

IdentitySource = Callable[[], Mapping[str, Any]]
MetricsSource = Callable[[], str]


class StatusServer:
    """The running HTTP server.

    Args:
        host: Address to listen on.
        port: Port, 0 picks one.
        health: What ``/health`` reports.
        identity: What ``/identity`` reports, called per request.
        metrics: What ``/metrics`` reports, called per request.
        timings: What ``/timings`` reports, called per request.

    Raises:
        BootError: The address is taken.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        health: Health,
        identity: IdentitySource,
        metrics: MetricsSource,
        timings: IdentitySource,
    ) -> None:
        sources = {"health": health, "identity": identity, "metrics": metrics, "timings": timings}
        handler = type("Handler", (_Handler,), sources)
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except OSError as cause:
            raise BootError(f"metrics.address {host}:{port}: expected a free address, found {cause}") from cause
        self._server.daemon_threads = True
        self.address = f"{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    """One GET; the class attributes are set by `StatusServer`."""

    health: Health
    identity: IdentitySource
    metrics: MetricsSource
    timings: IdentitySource
    timeout = SLOW_CLIENT_S
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer one of the four paths."""
        kind = type(self)
        if self.path == "/health":
            document = kind.health.to_document()
            status = 200 if document["state"] == ServerState.READY.value else 503
            self._send(status, "application/json", json.dumps(document))
        elif self.path == "/metrics":
            self._send(200, "text/plain; version=0.0.4", kind.metrics())
        elif self.path == "/identity":
            self._send(200, "application/json", json.dumps(kind.identity()))
        elif self.path == "/timings":
            self._send(200, "application/json", json.dumps(kind.timings()))
        else:
            found = {"error": "expected /health, /metrics, /identity or /timings"}
            self._send(404, "application/json", json.dumps(found))

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: a prober asks every second."""

    def _send(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
