"""The one interface to a host: run a short command, move files by digest, read a file.

Implemented by ``local.LocalHost`` and ``ssh.SshHost``; one contract suite runs against both. A command here is short
and bounded: everything long runs under the host's guard, so a lost link never decides an outcome. An effect returns a
record, never a bool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol


class Outcome(StrEnum):
    """How a command ended, as far as this side knows."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    TIMED_OUT = "timed-out"
    LINK_LOST = "link-lost"
    NOT_STARTED = "not-started"


@dataclass(frozen=True)
class CommandResult:
    """What is known of one command.

    Attributes:
        outcome: Its class; ``code`` means something only for EXITED (exit code) and SIGNALLED (signal number).
        code: Exit code or signal number, else None.
        stdout: Captured bytes, cut at the cap.
        stderr: Captured bytes, cut at the cap.
        truncated: True when either stream was longer than its cap.
        elapsed_ns: Monotonic duration as seen here.
    """

    outcome: Outcome
    code: int | None
    stdout: bytes
    stderr: bytes
    truncated: bool
    elapsed_ns: int


class Host(Protocol):
    """A machine the coordinator can act on."""

    @property
    def name(self) -> str:
        """The site file's name of the host."""

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float, cap_bytes: int = 4 << 20
    ) -> CommandResult:
        """Run one bounded command; its argv is never parsed by a shell."""

    def put(self, data: bytes, path: str, *, mode: int = 0o644) -> str:
        """Write a file whole or not at all (temp, digest, rename); return its sha256."""

    def fetch(self, path: str, destination: Path, *, sha256: str, size_bytes: int) -> None:
        """Copy a file here and refuse it unless its digest and size are as stated."""

    def read(self, path: str, *, max_bytes: int) -> bytes:
        """Read a small file; refuses a larger one."""

    def fingerprint(self) -> str:
        """``SHA256:…`` of the host key this connection proved, or ``local``."""

    def close(self) -> None:
        """Release the connection."""
