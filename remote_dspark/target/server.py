"""The target server's process: configuration, engine, HTTP, signals, exit code.

Exit codes: 0 drained after a signal, 2 the configuration is wrong, 3 it could not become READY, 4 the engine failed.
It listens before the model is loaded, so that ``/health`` tells what the boot is doing.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn

from remote_dspark.contract import ServerState
from remote_dspark.target.app import build_app
from remote_dspark.target.config import load_config
from remote_dspark.target.engine import Engine
from remote_dspark.target.errors import ConfigError, TargetError
from remote_dspark.target.identity import read_identity
from remote_dspark.target.metrics import Counters

EXIT_CONFIG = 2
EXIT_NOT_READY = 3
EXIT_POISONED = 4
CLOSE_TIMEOUT_S = 5

SignalHandler = Callable[[int, FrameType | None], None]


def serve(path: Path) -> int:
    """Run until a signal; returns the exit code."""
    try:
        config = load_config(path)
        identity = read_identity(config)
    except ConfigError as cause:
        return _refuse(EXIT_CONFIG, cause)
    except TargetError as cause:
        return _refuse(EXIT_NOT_READY, cause)
    try:
        listener = _listen(config.host, config.port)
    except OSError as cause:
        return _refuse(EXIT_NOT_READY, TargetError(f"listen {config.host}:{config.port}: {cause}"))
    counters = Counters(config.depth)
    engine = Engine(identity, counters, on_stopped=lambda: setattr(server, "should_exit", True))
    app = build_app(engine, identity, counters)
    settings = uvicorn.Config(
        app,
        lifespan="off",
        log_level="warning",
        access_log=False,
        ws="none",
        # By then the engine has ended every request; what is left is a client that does not read.
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
    )
    server = uvicorn.Server(settings)
    server.handle_exit = _drain_first(engine, server.handle_exit)
    # Uvicorn raises the signals it caught again after it has stopped; these handlers make that a normal end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    engine.start()
    server.run(sockets=[listener])
    listener.close()
    if engine.boot_error is not None:
        return _refuse(EXIT_NOT_READY, engine.boot_error)
    return EXIT_POISONED if engine.state is ServerState.POISONED else 0


def _listen(host: str, port: int) -> socket.socket:
    """Bind first, so that a taken port refuses before a model is loaded; says where on stdout."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    sys.stdout.write(json.dumps({"event": "listening", "host": host, "port": listener.getsockname()[1]}) + "\n")
    sys.stdout.flush()
    return listener


def _drain_first(engine: Engine, stop_now: SignalHandler) -> SignalHandler:
    """The first signal drains, and ``/health`` says so meanwhile; a second one, or a poisoned engine, stops at once."""

    def handle(number: int, frame: FrameType | None) -> None:
        if engine.state in (ServerState.POISONED, ServerState.DRAINING):
            stop_now(number, frame)
        engine.drain()

    return handle


def _refuse(code: int, cause: TargetError) -> int:
    sys.stderr.write(f"target server: {cause}\n")
    return code
