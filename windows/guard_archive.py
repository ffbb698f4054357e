"""Builds the guard's zipapp: bytes in, bytes out, the same bytes from the same sources everywhere.

The coordinator stages the result as ``guard-<sha256>.pyz``. Pure but for reading the package's own source files: no
clock (fixed timestamps), no compression (nothing depends on a zlib version), names sorted.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping
from importlib import resources
from typing import Final

FIXED_TIME: Final = (1980, 1, 1, 0, 0, 0)
_ENTRY: Final = b"from windows.guard.preload import run\n\nrun()\n"
_PACKAGE: Final = b'"""Holds only the guard, in this archive."""\n'


def guard_sources() -> dict[str, bytes]:
    """Archive name to content of every source file of the guard."""
    package = resources.files("windows.guard")
    names = sorted(entry.name for entry in package.iterdir() if entry.name.endswith(".py"))
    return {f"windows/guard/{name}": package.joinpath(name).read_bytes() for name in names}


def build_archive() -> bytes:
    """The zipapp's bytes."""
    return zip_bytes({"__main__.py": _ENTRY, "windows/__init__.py": _PACKAGE, **guard_sources()})


def zip_bytes(members: Mapping[str, bytes]) -> bytes:
    """A zip whose bytes depend on names and contents alone.

    Args:
        members: Name in the archive to content.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(members):
            info = zipfile.ZipInfo(name, FIXED_TIME)
            info.external_attr = 0o644 << 16
            info.create_system = 3
            archive.writestr(info, members[name])
    return buffer.getvalue()


def archive_name(archive: bytes) -> str:
    """``guard-<sha256>.pyz``: the only name the guard is staged and run under."""
    return f"guard-{hashlib.sha256(archive).hexdigest()}.pyz"
