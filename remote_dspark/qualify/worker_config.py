"""The configuration of a worker probe: one TOML file into one frozen object; unknown keys refuse."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from remote_dspark.contract import (
    MAX_PRODUCTION_REQUESTS,
    PRODUCTION_DEPTHS,
    Q_FLOOR_FIRST,
    Q_SEMANTICS,
    DraftMode,
)
from remote_dspark.drafter.shapes import SHAPES
from remote_dspark.observe import ObserveError
from remote_dspark.qualify.worker_client import WorkerPaths

ROUNDS: Final = 40
"""Rounds of one identity digest, each of batch times depth positions."""


@dataclass(frozen=True)
class ProbeConfig:
    """What is measured.

    Attributes:
        sha256: Digest of the file.
        address: Of the worker.
        mode: The worker's switch; HELLO refuses another.
        source: Where HELLO's digests come from: checkpoints and a tokenizer, or the name of a synthetic shape.
        status: ``host:port`` of the worker's ``/identity`` and ``/timings``, or None: then its parts stay unknown.
        q_semantics: Ticket allocation.
        depths: Draft depths.
        batches: Requests per STEP.
        context: Committed positions before the first round.
        repetitions: Measured rounds per combination.
        warmup: Discarded rounds per combination.
        seed: Of tokens, states and draws.
        timeout_s: Bound of every call.
        identity_positions: Positions whose proposals are recorded as digests; 0 records none.
        identity_rounds: Rounds of one digest.
        identity_expected: Another worker's file of digests that must be the same, or None.
    """

    sha256: str
    address: str
    mode: DraftMode
    source: WorkerPaths | str
    status: str | None
    q_semantics: str
    depths: tuple[int, ...]
    batches: tuple[int, ...]
    context: int
    repetitions: int
    warmup: int
    seed: int
    timeout_s: int
    identity_positions: int
    identity_rounds: int
    identity_expected: Path | None


class _Fields:
    """A decoded file whose fields are taken one by one; what is left over is refused."""

    def __init__(self, path: Path, document: dict[str, Any]) -> None:
        self._path = path
        self._document = document

    def take(self, name: str, expected: str, is_good: Callable[[Any], bool], default: Any = None) -> Any:
        found = self._document.pop(name, default)
        if found is None or not is_good(found):
            raise ObserveError(f"{self._path}: field {name}: expected {expected}, found {found!r}")
        return found

    def __contains__(self, name: str) -> bool:
        return name in self._document

    def text(self, name: str) -> str:
        return str(self.take(name, "a non-empty string", lambda v: isinstance(v, str) and bool(v)))

    def folder(self, name: str) -> Path:
        return (self._path.parent / self.text(name)).resolve()

    def choice(self, name: str, allowed: list[str], default: str | None = None) -> str:
        return str(self.take(name, f"one of {allowed}", lambda v: v in allowed, default))

    def integer(self, name: str, low: int, high: int, default: int) -> int:
        def is_good(found: object) -> bool:
            return type(found) is int and low <= found <= high

        return int(self.take(name, f"an integer of {low}..{high}", is_good, default))

    def integers(self, name: str, low: int, high: int, default: list[int]) -> tuple[int, ...]:
        def is_good(found: object) -> bool:
            return isinstance(found, list) and bool(found) and all(type(v) is int and low <= v <= high for v in found)

        return tuple(self.take(name, f"a list of integers of {low}..{high}", is_good, default))

    def require_empty(self) -> None:
        for name in self._document:
            raise ObserveError(f"{self._path}: field {name}: not known")


def _source(fields: _Fields) -> WorkerPaths | str:
    if "synthetic" in fields:
        return fields.choice("synthetic", sorted(SHAPES))
    return WorkerPaths(fields.folder("drafter"), fields.folder("target"), fields.folder("tokenizer"))


def load_probe_config(path: Path) -> ProbeConfig:
    """Read one file; relative paths are relative to it.

    Raises:
        ObserveError: Unreadable, or a field that is missing, unknown or out of range, by name.
    """
    try:
        data = path.read_bytes()
        fields = _Fields(path, tomllib.loads(data.decode("utf-8")))
    except (OSError, ValueError) as cause:
        raise ObserveError(f"{path}: expected a readable TOML file, found {cause}") from cause
    low, high, most = min(PRODUCTION_DEPTHS), max(PRODUCTION_DEPTHS), MAX_PRODUCTION_REQUESTS
    config = ProbeConfig(
        sha256=hashlib.sha256(data).hexdigest(),
        address=fields.text("address"),
        mode=DraftMode(fields.choice("mode", [mode.value for mode in DraftMode])),
        source=_source(fields),
        status=fields.text("status") if "status" in fields else None,
        q_semantics=fields.choice("q_semantics", list(Q_SEMANTICS), Q_FLOOR_FIRST),
        depths=fields.integers("depths", low, high, [high]),
        batches=fields.integers("batches", 1, most, list(range(1, most + 1))),
        context=fields.integer("context", 1, 1 << 20, 64),
        repetitions=fields.integer("repetitions", 1, 1_000_000, 20),
        warmup=fields.integer("warmup", 0, 1_000_000, 3),
        seed=fields.integer("seed", 0, (1 << 53) - 1, 1),
        timeout_s=fields.integer("timeout_s", 1, 600, 10),
        identity_positions=fields.integer("identity_positions", 0, 10_000_000, 0),
        identity_rounds=fields.integer("identity_rounds", 1, 10_000, ROUNDS),
        identity_expected=fields.folder("identity_expected") if "identity_expected" in fields else None,
    )
    fields.require_empty()
    if config.identity_expected is not None and not config.identity_positions:
        raise ObserveError(f"{path}: field identity_positions: expected at least 1 beside identity_expected, found 0")
    return config
