"""The worker's configuration: one TOML file into one frozen object.

Rules: unknown keys and wrong types refuse, naming file, field, value and expectation; the sampled path is enabled by
``modes`` here and nowhere else, and its default is OFF; relative paths are relative to the file. No secrets live in it.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from remote_dspark.config_table import ConfigTable
from remote_dspark.contract import (
    MAX_PRODUCTION_REQUESTS,
    PRODUCTION_DEPTHS,
    Q_FLOOR_FIRST,
    Q_SEMANTICS,
    SUPPORT_K,
    DraftMode,
)
from remote_dspark.drafter.shapes import SHAPES
from remote_dspark.serve.errors import ConfigError
from remote_dspark.wire.spin import MAX_SPIN_US
from remote_dspark.wire.tls import TlsConfig

DEVICE: Final = re.compile(r"cpu|cuda(:\d{1,2})?")
"""Where a worker drafts: the torch reference on the CPU, or captured kernels on one CUDA device."""

PAIR_DEVICE: Final = re.compile(r"cuda:\d{1,2}")
EMULATED_PAIR: Final = ("cpu", "cpu")
"""Ranks that are processes of the interpreter: for rehearsals of the procedure, never for speed."""


@dataclass(frozen=True)
class WorkerConfig:
    """Everything the worker is told.

    Attributes:
        path: The file it came from.
        sha256: Digest of that file's bytes, the worker's configuration identity.
        mode: OFF (greedy, ids only) or ON (token and exact q).
        synthetic: Name of a shape with synthetic weights (`drafter.shapes`), or None; then the folders are not read.
        model: Folder of the drafter checkpoint.
        target: Folder of the target checkpoint it was trained for: hashed for HELLO, never loaded.
        tokenizer: ``tokenizer.json`` whose digest is the id map's identity.
        device: ``cpu``, ``cuda`` or ``cuda:N``; of a pair that of rank 0.
        devices: That of every rank: one, or two different CUDA devices, or `EMULATED_PAIR`.
        dtype: Compute dtype of the backbone, ``float32`` or ``bfloat16``; a CUDA device computes in ``bfloat16`` only.
        threads: torch intra-op threads.
        listen_address: ``host:port`` or ``unix:/path`` of the wire; port 0 picks one, which is logged.
        spin_us: How long the event loop looks for bytes before it sleeps; 0 sleeps at once (`wire.spin`).
        metrics_host: Address of ``/health``, ``/metrics`` and ``/identity``.
        metrics_port: Its port; 0 picks one.
        peer_bound_ns: Longest wait of a rank for its peer.
        max_positions: Committed positions of a seat at most; the model's own limit by default (0).
        max_requests: Requests of one STEP, slots of one session, and seats in all.
        depth: Draft tokens per request at most.
        support: Entries of a sampled row.
        q_semantics: Ticket allocation.
        markov_cache_bytes: Bound of cached bias rows.
        max_connections: Verifier connections at once.
        idle_s: A connection silent for this long is closed and its seats are freed.
        wedge_after_s: An engine call in flight for this long is WEDGED.
        drain_timeout_s: Bound of finishing requests after SIGTERM.
        tls: Pinned mutual TLS, or None on loopback and Unix sockets.
    """

    path: Path
    sha256: str
    mode: DraftMode
    synthetic: str | None
    model: Path
    target: Path
    tokenizer: Path
    device: str
    devices: tuple[str, ...]
    dtype: str
    threads: int
    listen_address: str
    spin_us: int
    metrics_host: str
    metrics_port: int
    peer_bound_ns: int
    max_positions: int
    max_requests: int
    depth: int
    support: int
    q_semantics: str
    markov_cache_bytes: int
    max_connections: int
    idle_s: float
    wedge_after_s: float
    drain_timeout_s: float
    tls: TlsConfig | None

    @property
    def is_pair(self) -> bool:
        """Whether two ranks draft."""
        return len(self.devices) > 1

    @property
    def has_engine_thread(self) -> bool:
        """Whether the engine has a thread of its own: steps on a CPU are long, a device's are about a millisecond."""
        return self.device == "cpu"

    @property
    def is_emulated(self) -> bool:
        """Whether those ranks are emulated."""
        return self.devices == EMULATED_PAIR


def load_config(path: Path) -> WorkerConfig:
    """Read and check one configuration file.

    Raises:
        ConfigError: Unreadable, not TOML, or a field that is missing, unknown or out of range.
    """
    try:
        data = path.read_bytes()
        document = tomllib.loads(data.decode("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as cause:
        raise ConfigError(f"{path}: expected a readable TOML file, found {cause}") from cause
    return parse_config(document, path, hashlib.sha256(data).hexdigest())


def parse_config(document: Mapping[str, Any], path: Path, sha256: str) -> WorkerConfig:
    """Check a decoded document; see `load_config`."""
    root = _Table(path, "", document)
    model, listen, metrics = root.table("model"), root.table("listen"), root.table("metrics")
    limits, tls = root.table("limits", required=False), root.table("tls", required=False)
    synthetic = model.synthetic()
    folder = model.path("path") if synthetic is None else path.parent
    devices, dtype = model.devices()
    metrics_host, metrics_port = metrics.host_port("address")
    config = WorkerConfig(
        path=path,
        sha256=sha256,
        mode=root.only_mode("modes"),
        synthetic=synthetic,
        model=folder,
        target=model.path("target", folder.parent / "target"),
        tokenizer=model.path("tokenizer", folder.parent / "tokenizer.json"),
        device=devices[0],
        devices=devices,
        dtype=dtype,
        threads=model.integer("threads", 1, low=1, high=256),
        listen_address=listen.text("address"),
        spin_us=listen.integer("spin_us", 0, low=0, high=MAX_SPIN_US),
        metrics_host=metrics_host,
        metrics_port=metrics_port,
        peer_bound_ns=1_000_000 * limits.integer("peer_bound_ms", 50, low=1, high=1000),
        max_positions=limits.integer("max_positions", 0, low=0, high=1 << 24),
        max_requests=limits.integer("max_requests", MAX_PRODUCTION_REQUESTS, low=1, high=MAX_PRODUCTION_REQUESTS),
        depth=limits.integer("depth", max(PRODUCTION_DEPTHS), low=min(PRODUCTION_DEPTHS), high=max(PRODUCTION_DEPTHS)),
        support=limits.integer("support", SUPPORT_K, low=SUPPORT_K, high=SUPPORT_K),
        q_semantics=limits.choice("q_semantics", list(Q_SEMANTICS), Q_FLOOR_FIRST),
        markov_cache_bytes=limits.integer("markov_cache_bytes", 16 << 20, low=0, high=1 << 36),
        max_connections=limits.integer("max_connections", 4, low=1, high=64),
        idle_s=limits.seconds("idle_s", 600.0),
        wedge_after_s=limits.seconds("wedge_after_s", 30.0),
        drain_timeout_s=limits.seconds("drain_timeout_s", 8.0),
        tls=tls.tls() if tls else None,
    )
    for table in (root, model, listen, metrics, limits, tls):
        table.require_all_read()
    return config


class _Table(ConfigTable):
    """A table of the worker's file."""

    error = ConfigError

    def only_mode(self, key: str) -> DraftMode:
        """A worker's HELLO names one mode, so a list of two could only be guessed about."""
        allowed = [mode.value for mode in DraftMode]
        found = self.take(key, [DraftMode.OFF.value])
        if not isinstance(found, list) or len(found) != 1 or found[0] not in allowed:
            self.refuse(key, f"a list of exactly one of {allowed}", found)
        return DraftMode(found[0])

    def synthetic(self) -> str | None:
        """The name of a synthetic shape, which excludes a checkpoint."""
        found: str | None = self.take("synthetic", None)
        if found is not None and found not in SHAPES:
            self.refuse("synthetic", f"one of {sorted(SHAPES)}", found)
        return found

    def devices(self) -> tuple[tuple[str, ...], str]:
        """The device of every rank, and their compute dtype; kernels have one."""
        if "devices" in self:
            return self._pair(), self.choice("dtype", ["bfloat16"], "bfloat16")
        device = self.text("device", "cpu")
        if not DEVICE.fullmatch(device):
            self.refuse("device", "cpu, cuda or cuda:N", device)
        allowed = ["float32", "bfloat16"] if device == "cpu" else ["bfloat16"]
        return (device,), self.choice("dtype", allowed, allowed[0])

    def _pair(self) -> tuple[str, ...]:
        found = tuple(self.texts("devices"))
        if "device" in self:
            self.refuse("devices", "either device or devices", found)
        if len(found) != 2:
            self.refuse("devices", "two devices, which is what the peer kernels exchange between", found)
        is_physical = len(set(found)) == 2 and all(PAIR_DEVICE.fullmatch(device) for device in found)
        if not is_physical and found != EMULATED_PAIR:
            self.refuse("devices", 'two different "cuda:N", or "cpu" twice', found)
        return found

    def host_port(self, key: str) -> tuple[str, int]:
        """``host:port``."""
        found = self.text(key)
        host, _, port = found.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            self.refuse(key, "host:port", found)
        return host, int(port)
