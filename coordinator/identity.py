"""Who ran this: the tool's version and the digest of the very source trees that run.

A tree digest is the sha256 over sorted lines ``<sha256 of file>  <relative path>``: what ``sha256sum`` prints for the
tree's Python files, so a stranger can recompute it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from coordinator.errors import UsageError

PACKAGES = ("coordinator", "receipts", "windows", "remote_dspark")
_SUFFIXES = (".py",)


def package_root(package: str) -> Path:
    """The folder of an importable package of ours, without importing more than its ``__init__``."""
    from importlib.util import find_spec

    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(
            f"package {package} is not installed", next_step="install both wheels, or run from the checkout"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def tree_files(root: Path) -> list[Path]:
    """The files a tree digest covers, sorted by relative path; ``archive`` folders are data and left out."""
    found = (path for path in root.rglob("*") if path.suffix in _SUFFIXES and path.is_file())
    kept = (path for path in found if "__pycache__" not in path.parts and "archive" not in path.relative_to(root).parts)
    return sorted(kept, key=lambda path: path.relative_to(root).as_posix())


def tree_digest(root: Path, files: Iterable[Path] | None = None) -> str:
    """Hex sha256 of the tree under ``root``."""
    outer = hashlib.sha256()
    for path in files if files is not None else tree_files(root):
        inner = hashlib.sha256(path.read_bytes()).hexdigest()
        outer.update(f"{inner}  {path.relative_to(root).as_posix()}\n".encode())
    return outer.hexdigest()


def source_digests() -> dict[str, str]:
    """Tree digest of each of our packages as they are on this machine now."""
    return {package: tree_digest(package_root(package)) for package in PACKAGES}
