"""The configuration of one arm: one TOML file into one frozen object; unknown keys refuse."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remote_dspark.contract import DraftMode
from remote_dspark.observe import ObserveError


@dataclass(frozen=True)
class ArmConfig:
    """What an arm does.

    Attributes:
        sha256: Digest of the file.
        host: Of the target server.
        port: Of the target server.
        mode: Switch position this arm is about; the running server must say the same.
        manifest: Load manifest.
        concurrency: Requests in flight.
        warmup_requests: Sent and discarded first.
        greedy_requests: Completions at temperature 0 whose token ids are hashed.
        headline_requests: The measured run.
        profiled_requests: A short further run.
        max_tokens: Tokens of every completion.
        temperature: Decimal string; target temperature of all but the greedy check.
        ready_timeout_s: Bound until the server is READY.
        request_timeout_s: Bound of one socket operation.
    """

    sha256: str
    host: str
    port: int
    mode: DraftMode
    manifest: Path
    concurrency: int = 4
    warmup_requests: int = 4
    greedy_requests: int = 4
    headline_requests: int = 32
    profiled_requests: int = 4
    max_tokens: int = 48
    temperature: str = "1"
    ready_timeout_s: int = 60
    request_timeout_s: int = 60


_INTEGERS = {
    "port": (1, 65535),
    "concurrency": (1, 64),
    "warmup_requests": (1, 100_000),
    "greedy_requests": (1, 100_000),
    "headline_requests": (1, 1_000_000),
    "profiled_requests": (1, 100_000),
    "max_tokens": (2, 1 << 20),
    "ready_timeout_s": (1, 3600),
    "request_timeout_s": (1, 3600),
}


def load_arm_config(path: Path) -> ArmConfig:
    """Read one file.

    Raises:
        ObserveError: Unreadable, or a field that is missing, unknown or out of range, by name.
    """
    try:
        data = path.read_bytes()
        document = tomllib.loads(data.decode("utf-8"))
    except (OSError, ValueError) as cause:
        raise ObserveError(f"{path}: expected a readable TOML file, found {cause}") from cause
    fields: dict[str, Any] = {"host": "127.0.0.1", **document}
    for name, found in fields.items():
        _require_field(path, name, found)
    missing = [name for name in ("port", "mode", "manifest") if name not in fields]
    if missing:
        raise ObserveError(f"{path}: field {missing[0]}: expected a value, found nothing")
    fields["mode"] = DraftMode(fields["mode"])
    fields["manifest"] = (path.parent / fields["manifest"]).resolve()
    return ArmConfig(sha256=hashlib.sha256(data).hexdigest(), **fields)


def _require_field(path: Path, name: str, found: object) -> None:
    if name in _INTEGERS:
        low, high = _INTEGERS[name]
        if type(found) is not int or not low <= found <= high:
            raise ObserveError(f"{path}: field {name}: expected an integer of {low}..{high}, found {found!r}")
    elif name == "mode":
        if found not in list(DraftMode):
            raise ObserveError(f"{path}: field mode: expected one of {[m.value for m in DraftMode]}, found {found!r}")
    elif name == "temperature":
        if not isinstance(found, str) or not found.replace(".", "", 1).isdecimal():
            raise ObserveError(f'{path}: field temperature: expected a decimal string such as "1", found {found!r}')
    elif name in ("host", "manifest"):
        if not isinstance(found, str) or not found:
            raise ObserveError(f"{path}: field {name}: expected a non-empty string, found {found!r}")
    else:
        raise ObserveError(f"{path}: field {name}: not known")
