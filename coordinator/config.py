"""Reads the site and plan files: the only place that turns TOML of the operator into models.

A file is read once; the digest that receipts carry is of those very bytes. Secrets are named by the path of a file on
the host and never read here.
"""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.errors import UsageError
from windows.errors import DocumentError
from windows.plan import WindowPlan, parse_plan
from windows.site import Site, parse_site

_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class ReadFile:
    """A parsed file beside the digest of the bytes it was parsed from."""

    path: Path
    sha256: str
    document: dict[str, Any]


def read_toml(path: Path) -> ReadFile:
    """One bounded read, then one parse of that buffer.

    Raises:
        UsageError: Missing, too large, not UTF-8 or not TOML.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}",
            where=str(path),
            next_step="`coordinator init` writes a commented site.toml and plan.toml",
        ) from error
    if len(data) > _MAX_BYTES:
        raise UsageError("the file is too large", where=str(path), expected=f"at most {_MAX_BYTES} bytes")
    try:
        document = tomllib.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"not a TOML file: {error}", where=str(path)) from error
    return ReadFile(path, hashlib.sha256(data).hexdigest(), document)


def read_site(path: Path) -> tuple[Site, str]:
    """The site file and its digest."""
    source = read_toml(path)
    try:
        return parse_site(source.document, f"site file {path}"), source.sha256
    except DocumentError as error:
        raise _refused(error, path) from error


def read_plan(path: Path) -> tuple[WindowPlan, str]:
    """The window plan and its digest."""
    source = read_toml(path)
    try:
        return parse_plan(source.document, f"plan file {path}"), source.sha256
    except DocumentError as error:
        raise _refused(error, path) from error


def _refused(error: DocumentError, path: Path) -> UsageError:
    return UsageError(
        f"{error.what} is refused: " + "; ".join(error.lines), where=str(path), next_step="correct the named fields"
    )
