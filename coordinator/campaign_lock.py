"""One campaign at a time per site and user: a kernel lock that ends with the process, beside a note of who has it.

The lease on the hosts is what protects the hardware; this lock protects a campaign's two windows from a second campaign
that would start between them.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from coordinator.clock import Clock
from coordinator.errors import HardwareHeld, UsageError


@contextmanager
def campaign_lock(folder: Path, what: str, clock: Clock) -> Iterator[None]:
    """Hold the lock for a ``with`` block.

    Raises:
        HardwareHeld: Another process has it; the message names it.
        UsageError: The folder cannot be made or written.
    """
    note = folder / "campaign.json"
    lock = FileLock(folder / "campaign.lock", timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock.acquire()
    except Timeout as error:
        raise HardwareHeld(
            f"another campaign runs here: {_holder(note)}",
            where=str(folder),
            next_step="wait for it, or interrupt it (Ctrl-C restores production first)",
        ) from error
    except OSError as error:
        raise UsageError(
            f"this folder cannot be used: {error.strerror}",
            where=str(folder),
            expected="a folder that you can write",
            next_step="name another one (rehearse: --state, or XDG_STATE_HOME; campaign: --store)",
        ) from error
    try:
        holder = {
            "pid": os.getpid(),
            "user": getpass.getuser(),
            "host": socket.gethostname(),
            "since": clock.utc(),
            "what": what,
        }
        note.write_text(json.dumps(holder), encoding="utf-8")
        yield
    finally:
        note.unlink(missing_ok=True)
        lock.release()


def _holder(note: Path) -> str:
    try:
        holder = json.loads(note.read_text(encoding="utf-8"))
        return f"{holder['what']} of {holder['user']}@{holder['host']}, pid {holder['pid']}, since {holder['since']}"
    except (OSError, ValueError, KeyError):
        # It took the lock a moment ago and has not written its note yet.
        return "its holder has not said who it is"
