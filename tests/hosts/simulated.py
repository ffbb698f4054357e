"""A host behind a link that tests break: this machine's own commands and files, any answer of which can get lost.

It keeps the contract of every other way to a host (``test_host_contract``), and loses exactly the answers it was told
to lose: before the command ran, or after. What runs is real; only the link is simulated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from coordinator.errors import HostUnreachable, LinkLost
from coordinator.host import CommandResult, Outcome
from coordinator.local import LocalHost

BEFORE, AFTER = "before", "after"


class SimulatedHost:
    """This machine, over a link that breaks on demand."""

    def __init__(self, name: str) -> None:
        self._inner = LocalHost(name)
        self._was_reached = False
        self.is_cut = False
        self._losses: list[tuple[str, str]] = []
        self.lost: list[str] = []

    def lose(self, verb: str, moment: str) -> None:
        """Lose the next answer to this verb of the guard: with the request (before), or only the reply (after)."""
        self._losses.append((verb, moment))

    @property
    def name(self) -> str:
        """The site file's name of the host."""
        return self._inner.name

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float, cap_bytes: int = 4 << 20
    ) -> CommandResult:
        """Run one command here, unless the link is cut."""
        self._require_first_contact()
        lost = CommandResult(Outcome.LINK_LOST, None, b"", b"", False, 0)
        verb = _verb(stdin)
        if self.is_cut or self._is_lost(verb, BEFORE):
            return lost
        result = self._inner.run(argv, stdin=stdin, timeout_s=timeout_s, cap_bytes=cap_bytes)
        return lost if self.is_cut or self._is_lost(verb, AFTER) else result

    def put(self, data: bytes, path: str, *, mode: int = 0o644) -> str:
        """Write a file whole or not at all."""
        self._require_link()
        return self._inner.put(data, path, mode=mode)

    def fetch(self, path: str, destination: Path, *, sha256: str, size_bytes: int) -> None:
        """Copy a file, refused unless it is as stated."""
        self._require_link()
        self._inner.fetch(path, destination, sha256=sha256, size_bytes=size_bytes)

    def read(self, path: str, *, max_bytes: int) -> bytes:
        """Read a small file."""
        self._require_link()
        return self._inner.read(path, max_bytes=max_bytes)

    def fingerprint(self) -> str:
        """It has no key."""
        return self._inner.fingerprint()

    def close(self) -> None:
        """Nothing is kept open."""
        self._inner.close()

    def _is_lost(self, verb: str, moment: str) -> bool:
        if (verb, moment) not in self._losses:
            return False
        self._losses.remove((verb, moment))
        self.lost.append(f"{verb} {moment}")
        return True

    def _require_first_contact(self) -> None:
        if self.is_cut and not self._was_reached:
            raise HostUnreachable("nobody answers", where=self.name)
        self._was_reached = True

    def _require_link(self) -> None:
        self._require_first_contact()
        if self.is_cut:
            raise LinkLost("the link is cut", where=self.name)


def _verb(stdin: bytes) -> str:
    """The verb of a guard's request; empty for any other command."""
    try:
        request = json.loads(stdin)
    except ValueError:
        return ""
    return str(request.get("verb", "")) if isinstance(request, dict) else ""
