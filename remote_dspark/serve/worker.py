"""The worker's process: configuration, boot, wire server, signals, exit code. What boots is `serve.boot`.

Exit codes: 0 drained after a signal, 2 the configuration is wrong, 3 it could not become READY, 4 it was poisoned.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from remote_dspark.contract import ServerState
from remote_dspark.drafter.shapes import synthetic_identity
from remote_dspark.serve.config import WorkerConfig, load_config
from remote_dspark.serve.errors import BootError, ConfigError, ServeError
from remote_dspark.serve.health import Health
from remote_dspark.serve.http import StatusServer
from remote_dspark.serve.log import log_event
from remote_dspark.serve.timings import StepLog
from remote_dspark.wire.spin import spinning_loop

if TYPE_CHECKING:
    from remote_dspark.drafter.engine import DraftEngine
    from remote_dspark.serve.handler import WorkerHandler
    from remote_dspark.serve.identity import WorkerIdentity
    from remote_dspark.wire.server import WireServer

EXIT_CONFIG: Final = 2
EXIT_NOT_READY: Final = 3
EXIT_POISONED: Final = 4
DRAIN_POLL_S: Final = 0.02


def serve(path: Path) -> int:
    """Serve until a signal; returns the exit code."""
    try:
        config = load_config(path)
        with asyncio.Runner(loop_factory=lambda: spinning_loop(config.spin_us / 1e6)) as runner:
            return runner.run(Worker(config).run())
    except ConfigError as cause:
        return _refuse(EXIT_CONFIG, cause)
    except ServeError as cause:
        return _refuse(EXIT_NOT_READY, cause)


class Worker:
    """One worker: built from a configuration, runs once."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        weights = "checkpoint" if config.synthetic is None else synthetic_identity(config.synthetic).label
        self.health = Health(time.monotonic_ns, config.wedge_after_s, weights)
        self.timings = StepLog()
        self._identity: WorkerIdentity | None = None
        self._engine: DraftEngine | None = None
        self._handler: WorkerHandler | None = None
        self._wire: WireServer | None = None

    async def run(self) -> int:
        """Boot, serve, drain.

        Raises:
            BootError: It could not become READY.
        """
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        status = StatusServer(
            self._config.metrics_host,
            self._config.metrics_port,
            health=self.health,
            identity=self._identity_document,
            metrics=self._metrics,
            timings=self.timings.to_document,
        )
        log_event("booting", health=status.address, mode=self._config.mode.value)
        try:
            with ExitStack() as stack:
                thread: ThreadPoolExecutor | None = None
                if self._config.has_engine_thread:
                    thread = stack.enter_context(ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine"))
                await self._on_engine(thread, self._boot)
                await self._listen(thread)
                await stop.wait()
                await self._drain()
                await self._on_engine(thread, self._end_compute)
        finally:
            status.close()
        return EXIT_POISONED if self.health.state is ServerState.POISONED else 0

    async def _on_engine(self, thread: ThreadPoolExecutor | None, work: Callable[[], None]) -> None:
        """Where every engine call runs: a device is current, and a sequence captured, in one thread."""
        if thread is None:
            work()
        else:
            await asyncio.get_running_loop().run_in_executor(thread, work)

    def _boot(self) -> None:
        """Load and warm the model; runs on the engine's thread. torch is imported here, after ``/health`` answers."""
        import torch

        from remote_dspark.serve.boot import build_engine, load_model
        from remote_dspark.serve.identity import read_identity

        config = self._config
        torch.set_num_threads(config.threads)
        model = load_model(config)
        self._identity = read_identity(config, model)
        self.health.enter(ServerState.WARMING)
        self._engine = build_engine(config, model)

    def _end_compute(self) -> None:
        """Ranks of a pair end together; runs on the engine's thread."""
        if self._engine is not None:
            self._engine.shutdown()

    async def _listen(self, thread: ThreadPoolExecutor | None) -> None:
        from remote_dspark.serve.handler import WorkerHandler
        from remote_dspark.wire.errors import ProtocolError
        from remote_dspark.wire.server import ServerDeadlines, serve_wire

        if self._engine is None or self._identity is None:
            raise BootError("expected a loaded engine, found none")
        config = self._config
        self._handler = WorkerHandler(self._engine, config, self.health, thread, self.timings)
        try:
            self._wire = await serve_wire(
                config.listen_address,
                self._handler,
                self._identity.hello(),
                tls=config.tls,
                deadlines=ServerDeadlines(idle_s=config.idle_s),
                max_connections=config.max_connections,
            )
        except (ProtocolError, OSError) as cause:
            raise BootError(f"listen.address {config.listen_address}: {cause}") from cause
        self.health.enter(ServerState.READY)
        log_event("ready", wire=self._wire.address, draft_sha256=self._identity.draft_sha256)

    async def _drain(self) -> None:
        """Refuse new requests, wait for the ones in use within the bound, then close."""
        if self._wire is None or self._handler is None:
            return
        self.health.enter(ServerState.DRAINING)
        log_event("draining", seats=self._handler.num_held)
        await self._wire.drain("worker is stopping")
        deadline = time.monotonic() + self._config.drain_timeout_s
        while self._handler.num_held and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        num_left = self._handler.num_held
        await self._wire.close()
        log_event("stopped", seats_cut_off=num_left)

    def _identity_document(self) -> Mapping[str, Any]:
        identity = self._identity
        return {"program": "remote_dspark.serve"} if identity is None else identity.to_document()

    def _metrics(self) -> str:
        from remote_dspark.serve.metrics import render_codes, render_engine, render_state

        parts = [render_state(self.health.state)]
        if self._engine is not None and self._handler is not None and self._wire is not None:
            parts += [
                render_engine(self._engine),
                render_codes("refusals", self._handler.refusals),
                render_codes("wire", self._wire.counters),
            ]
        return "".join(parts)


def _refuse(code: int, cause: ServeError) -> int:
    log_event("refused", detail=str(cause), exit_code=code)
    sys.stderr.write(f"drafter worker: {cause}\n")
    return code
