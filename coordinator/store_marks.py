"""High-water marks: the furthest head of every log that was ever accepted here. Kept beside the user, not the store.

A store that was put back to an older state is whole in itself; only somebody who remembers can tell. Marks live in the
state folder of the user's account entry, so that neither the working directory nor the environment can move them.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from filelock import FileLock

from coordinator.store_files import read_file, sync, write_new
from receipts.chain import Head, parse_head


def state_folder() -> Path | None:
    """``~/.local/state/dspark-coordinator`` of this process's account; None for an account without an entry."""
    try:
        home = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        # Containers run under numbers that no account has. Then nothing is remembered, and `live` says so.
        return None
    return Path(home) / ".local" / "state" / "dspark-coordinator"


class Marks:
    """The marks under one state folder, one file per log."""

    def __init__(self, folder: Path | None = None) -> None:
        root = folder or state_folder()
        self._folder = root / "high-water" if root is not None else None

    def get(self, log: str) -> Head | None:
        """The furthest head of a log that was accepted; None when this log was never accepted here.

        Raises:
            receipts.errors.ReceiptError: The mark's file is not a head: a damaged memory must not read as none.
        """
        if self._folder is None:
            return None
        path = self._folder / f"{log}.json"
        return parse_head(read_file(path, 4096), str(path)) if path.exists() else None

    def advance(self, head: Head) -> None:
        """Remember a head that was accepted; one that is not further than the known one changes nothing.

        Raises:
            OSError: The folder cannot be written.
        """
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(self._folder / ".lock", fallback_to_soft=False):
            known = self.get(head.log)
            if known is not None and known.count >= head.count:
                return
            fresh = self._folder / f"{head.log}.new"
            write_new(fresh, head.encode(), mode=0o600, replace=True)
            sync(fresh)
            fresh.rename(self._folder / f"{head.log}.json")
            sync(self._folder)
