"""What one arm does: options of the command line over an optional TOML file, into one frozen object.

The file is for people, the options are for a plan whose placeholders a coordinator fills. Unknown keys refuse; every
refusal names the field. Server address and switch position are not part of the settings digest, so that two arms of a
campaign can be seen to have asked for the same work.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from remote_dspark.contract import DraftMode
from remote_dspark.observe import ObserveError

_SEED_LIMIT: Final = 1 << 53
_INTEGERS: Final = {
    "concurrency": (1, 64),
    "warm_up_requests": (1, 100_000),
    "greedy_requests": (1, 100_000),
    "requests": (1, 1_000_000),
    "profiled_requests": (1, 100_000),
    "max_tokens": (2, 1 << 20),
    "ready_timeout_s": (1, 3600),
    "request_timeout_s": (1, 3600),
}
_TEXTS: Final = ("url", "mode", "manifest", "temperature")


@dataclass(frozen=True)
class ArmConfig:
    """What an arm does.

    Attributes:
        url: Of the target server, ``http://host:port``.
        mode: Switch position this arm is about; the running server must say the same.
        manifest: Load manifest.
        seeds: Request seeds, used in turn; empty for those of the manifest.
        concurrency: Requests in flight.
        warm_up_requests: Sent and discarded first.
        greedy_requests: Completions at temperature 0 whose token ids are hashed.
        requests: The measured headline run.
        profiled_requests: A short further run.
        max_tokens: Tokens of every completion.
        temperature: Decimal string; target temperature of all but the greedy check.
        ready_timeout_s: Bound until the server is READY.
        request_timeout_s: Bound of one socket operation.
    """

    url: str
    mode: DraftMode
    manifest: Path
    seeds: tuple[int, ...] = ()
    concurrency: int = 4
    warm_up_requests: int = 4
    greedy_requests: int = 4
    requests: int = 32
    profiled_requests: int = 4
    max_tokens: int = 48
    temperature: str = "1"
    ready_timeout_s: int = 60
    request_timeout_s: int = 60

    @property
    def host_port(self) -> tuple[str, int]:
        """Where the server listens."""
        parts = urlsplit(self.url)
        return str(parts.hostname), int(parts.port or 80)

    def settings_sha256(self, manifest_sha256: str) -> str:
        """Digest of the work asked for: everything but the address, the switch and the manifest's place."""
        settings = {k: v for k, v in asdict(self).items() if k not in ("url", "mode", "manifest")}
        text = json.dumps({**settings, "manifest_sha256": manifest_sha256}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options; each overrides the field of the same name in ``--config``."""
    parser.add_argument("--config", type=Path, help="TOML file with any of the fields below")
    parser.add_argument("--url", help="http://host:port of the target server")
    parser.add_argument("--mode", help=f"one of {[mode.value for mode in DraftMode]}")
    parser.add_argument("--manifest", help="load manifest")
    parser.add_argument("--seeds", help="comma-separated request seeds; those of the manifest by default")
    parser.add_argument("--temperature", help="decimal string")
    for name, (low, high) in _INTEGERS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"{low}..{high}")


def read_options(args: argparse.Namespace) -> ArmConfig:
    """Merge file and options.

    Raises:
        ObserveError: Unreadable, or a field that is missing, unknown or out of range, by name.
    """
    fields: dict[str, Any] = _read_file(args.config) if args.config else {}
    for name in (*_TEXTS, *_INTEGERS):
        if getattr(args, name) is not None:
            fields[name] = getattr(args, name)
    if args.seeds is not None:
        fields["seeds"] = _parse_seeds(args.seeds)
    for name, found in fields.items():
        _require_field(name, found)
    for name in ("url", "mode", "manifest"):
        if name not in fields:
            raise ObserveError(f"arm: field {name}: expected a value, found nothing")
    fields["mode"] = DraftMode(fields["mode"])
    fields["manifest"] = Path(fields["manifest"])
    fields["seeds"] = tuple(fields.get("seeds", ()))
    return ArmConfig(**fields)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        fields = tomllib.loads(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError) as cause:
        raise ObserveError(f"{path}: expected a readable TOML file, found {cause}") from cause
    if isinstance(fields.get("manifest"), str):
        fields["manifest"] = str((path.parent / fields["manifest"]).resolve())
    return fields


def _parse_seeds(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise ObserveError(f"arm: field seeds: expected integers separated by commas, found {text!r}")
    return [int(part) for part in parts]


def _require_field(name: str, found: object) -> None:
    if name in _INTEGERS:
        low, high = _INTEGERS[name]
        is_good, expected = type(found) is int and low <= found <= high, f"an integer of {low}..{high}"
    elif name == "mode":
        is_good, expected = found in list(DraftMode), f"one of {[mode.value for mode in DraftMode]}"
    elif name == "temperature":
        is_good = isinstance(found, str) and found.replace(".", "", 1).isdecimal()
        expected = 'a decimal string such as "1"'
    elif name == "url":
        is_good, expected = _is_url(found), "http://host:port"
    elif name == "manifest":
        is_good, expected = isinstance(found, str) and bool(found), "a path"
    elif name == "seeds":
        is_good = isinstance(found, list) and all(type(seed) is int and 0 <= seed < _SEED_LIMIT for seed in found)
        expected = "a list of integers of 0..2^53-1"
    else:
        raise ObserveError(f"arm: field {name}: not known")
    if not is_good:
        raise ObserveError(f"arm: field {name}: expected {expected}, found {found!r}")


def _is_url(found: object) -> bool:
    if not isinstance(found, str):
        return False
    try:
        parts = urlsplit(found)
        return parts.scheme == "http" and bool(parts.hostname and parts.port) and parts.path in ("", "/")
    except ValueError:
        return False
