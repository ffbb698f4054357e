"""The target server's configuration: one TOML file into one frozen object.

Rules: unknown keys and wrong types refuse, naming file, field, value and expectation; the sampled path is enabled by
``mode`` here and nowhere else, and its default is OFF. Relative paths are relative to the file. No secrets live in it.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Final

from remote_dspark.config_table import ConfigTable
from remote_dspark.contract import (
    DRAFT_TEMPERATURE,
    MAX_PRODUCTION_REQUESTS,
    PRODUCTION_DEPTHS,
    Q_FLOOR_FIRST,
    Q_SEMANTICS,
    SUPPORT_K,
    DraftMode,
)
from remote_dspark.target.errors import ConfigError
from remote_dspark.wire.spin import MAX_SPIN_US
from remote_dspark.wire.tls import TlsConfig

PPM: Final = 1_000_000


@dataclass(frozen=True)
class TargetConfig:
    """Everything the server is told.

    Attributes:
        path: The file it came from.
        sha256: Digest of that file's bytes, the server's configuration identity.
        mode: OFF (greedy drafts) or ON (sampled drafts).
        model: Folder of the target checkpoint.
        tokenizer: ``tokenizer.json``.
        model_name: What clients call the model.
        dtype: ``float32`` or ``bfloat16``.
        device: torch device.
        threads: torch intra-op threads.
        host: Listening address.
        port: Listening port; 0 picks one, which is printed.
        drafter_address: ``host:port`` or ``unix:/path`` of the drafter worker.
        drafter: Folder of the drafter checkpoint: its identity and the target layers it reads; no weights are loaded.
        depth: Draft tokens per round, fixed before anything is drawn.
        draft_temperature_ppm: tau of sampled drafts, millionths.
        q_semantics: Ticket allocation that HELLO asks for.
        support: Entries of a sampled row.
        connect_timeout_s: Bound of the first connection; without a drafter the server does not become READY.
        step_timeout_s: Bound of one STEP, whose late reply is a failed proposal, and of every other call of a session.
        capture: File that the first session's frames are recorded to, for a frozen replay, or None. It is written when
            the session ends, and holds the prompts' hidden states: treat it like the prompts.
        max_requests: Requests served at once.
        max_queue: Requests waiting beyond those; more are refused with 503.
        wedge_after_s: No progress for this long with a request in flight is WEDGED.
        drain_timeout_s: Bound of finishing requests after SIGTERM.
        spin_us: How long a round looks for its reply before it sleeps; 0 sleeps at once (`wire.spin`).
        tls: Pinned mutual TLS to the drafter, or None on loopback and Unix sockets.
    """

    path: Path
    sha256: str
    mode: DraftMode
    model: Path
    tokenizer: Path
    model_name: str
    dtype: str
    device: str
    threads: int
    host: str
    port: int
    drafter_address: str
    drafter: Path
    depth: int
    draft_temperature_ppm: int
    q_semantics: str
    support: int
    connect_timeout_s: float
    step_timeout_s: float
    spin_us: int
    capture: Path | None
    max_requests: int
    max_queue: int
    wedge_after_s: float
    drain_timeout_s: float
    tls: TlsConfig | None


def load_config(path: Path) -> TargetConfig:
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


def parse_config(document: Mapping[str, Any], path: Path, sha256: str) -> TargetConfig:
    """Check a decoded document; see `load_config`."""
    root = _Table(path, "", document)
    mode = root.choice("mode", [m.value for m in DraftMode], DraftMode.OFF.value)
    model, listen, drafter = root.table("model"), root.table("listen"), root.table("drafter")
    limits, tls = root.table("limits", required=False), root.table("tls", required=False)
    folder = model.path("path")
    config = TargetConfig(
        path=path,
        sha256=sha256,
        mode=DraftMode(mode),
        model=folder,
        tokenizer=model.path("tokenizer", folder / "tokenizer.json"),
        model_name=model.text("name", folder.name),
        dtype=model.choice("dtype", ["float32", "bfloat16"], "float32"),
        device=model.text("device", "cpu"),
        threads=model.integer("threads", 1, low=1, high=256),
        host=listen.text("host", "127.0.0.1"),
        port=listen.integer("port", None, low=0, high=65535),
        drafter_address=drafter.text("address", None),
        drafter=drafter.path("checkpoint"),
        depth=drafter.integer("depth", 5, low=min(PRODUCTION_DEPTHS), high=max(PRODUCTION_DEPTHS)),
        draft_temperature_ppm=drafter.temperature_ppm("temperature", DRAFT_TEMPERATURE),
        q_semantics=drafter.choice("q_semantics", list(Q_SEMANTICS), Q_FLOOR_FIRST),
        support=drafter.integer("support", SUPPORT_K, low=SUPPORT_K, high=SUPPORT_K),
        connect_timeout_s=drafter.seconds("connect_timeout_s", 20.0),
        step_timeout_s=drafter.seconds("step_timeout_s", 5.0),
        spin_us=drafter.integer("spin_us", 0, low=0, high=MAX_SPIN_US),
        capture=drafter.path("capture") if "capture" in drafter else None,
        max_requests=limits.integer("max_requests", MAX_PRODUCTION_REQUESTS, low=1, high=MAX_PRODUCTION_REQUESTS),
        max_queue=limits.integer("max_queue", 64, low=0, high=4096),
        wedge_after_s=limits.seconds("wedge_after_s", 30.0),
        drain_timeout_s=limits.seconds("drain_timeout_s", 30.0),
        tls=tls.tls() if tls else None,
    )
    for table in (root, model, listen, drafter, limits, tls):
        table.require_all_read()
    return config


class _Table(ConfigTable):
    """A table of the target server's file."""

    error = ConfigError

    def take(self, key: str, default: object) -> Any:
        """The raw value; absent without a default refuses at once."""
        found = super().take(key, default)
        if found is None:
            self.refuse(key, "a value", "nothing")
        return found

    def temperature_ppm(self, key: str, default: str) -> int:
        """A decimal string, exact to a millionth: it is hashed into plans, so it is never a binary fraction."""
        found = self.take(key, default)
        try:
            ppm = Decimal(found) * PPM if isinstance(found, str) else Decimal(-1)
        except InvalidOperation:
            ppm = Decimal(-1)
        if not (ppm.is_finite() and 0 < ppm <= 10 * PPM and ppm == ppm.to_integral_value()):
            self.refuse(key, 'a decimal string above 0, at most 10, such as "0.7"', found)
        return int(ppm)
