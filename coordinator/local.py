"""The machine the coordinator itself runs on, behind the ``Host`` interface.

Commands run in their own session with closed descriptors and a bounded time; both streams are drained at once and
capped. Nothing here is simulated: the same guard zipapp runs as a process of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from coordinator.clock import Clock, SystemClock
from coordinator.errors import CoordinatorError, HostUnreachable
from coordinator.host import CommandResult, Outcome


class LocalHost:
    """This machine."""

    def __init__(self, name: str, clock: Clock | None = None) -> None:
        self._name = name
        self._clock = clock or SystemClock()

    @property
    def name(self) -> str:
        """The site file's name of the host."""
        return self._name

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float, cap_bytes: int = 4 << 20
    ) -> CommandResult:
        """Run one command in its own session; kill the whole session at the deadline."""
        start = self._clock.monotonic_ns()
        try:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                close_fds=True,
            )
        except OSError as error:
            return CommandResult(Outcome.NOT_STARTED, None, b"", str(error).encode(), False, 0)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        drains = [_Drain(process.stdout, cap_bytes), _Drain(process.stderr, cap_bytes)]
        feeder = threading.Thread(target=_feed, args=(process.stdin, stdin), daemon=True)
        feeder.start()
        timed_out = False
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for drain in drains:
            # A grandchild may keep the pipe open: what it writes later is not this command's output.
            drain.join(0.5)
        elapsed = self._clock.monotonic_ns() - start
        code = process.returncode
        outcome = Outcome.TIMED_OUT if timed_out else Outcome.SIGNALLED if code < 0 else Outcome.EXITED
        truncated = any(drain.truncated for drain in drains)
        return CommandResult(
            outcome, None if timed_out else abs(code), drains[0].data(), drains[1].data(), truncated, elapsed
        )

    def put(self, data: bytes, path: str, *, mode: int = 0o644) -> str:
        """Write through a temporary file, fsync, rename; return the sha256."""
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.chmod(mode)
            temporary.replace(target)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise HostUnreachable(f"cannot write {path}: {error.strerror}", where=self._name) from error
        return hashlib.sha256(data).hexdigest()

    def fetch(self, path: str, destination: Path, *, sha256: str, size_bytes: int) -> None:
        """Copy and verify; the destination is complete or absent."""
        temporary = destination.with_name(f".{destination.name}.part")
        destination.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(path, temporary, follow_symlinks=False)
            found = hashlib.sha256(temporary.read_bytes()).hexdigest()
            if found != sha256 or temporary.stat().st_size != size_bytes:
                raise CoordinatorError(
                    "a fetched file is not the one that was announced",
                    where=f"{self._name}:{path}",
                    expected=f"{sha256} ({size_bytes} bytes)",
                    found=f"{found} ({temporary.stat().st_size} bytes)",
                )
            temporary.replace(destination)
        finally:
            temporary.unlink(missing_ok=True)

    def read(self, path: str, *, max_bytes: int) -> bytes:
        """Read a small file."""
        try:
            with Path(path).open("rb") as stream:
                data = stream.read(max_bytes + 1)
        except OSError as error:
            raise HostUnreachable(f"cannot read {path}", where=self._name, found=str(error.strerror)) from error
        if len(data) > max_bytes:
            raise CoordinatorError(
                "a file is larger than allowed", where=f"{self._name}:{path}", expected=f"at most {max_bytes} bytes"
            )
        return data

    def fingerprint(self) -> str:
        """There is no host key on the way to oneself."""
        return "local"

    def close(self) -> None:
        """Nothing to release."""


class _Drain(threading.Thread):
    """Reads one stream to its end and keeps at most ``cap`` bytes."""

    def __init__(self, stream: IO[bytes], cap: int) -> None:
        super().__init__(daemon=True)
        self._stream = stream
        self._cap = cap
        self._chunks: list[bytes] = []
        self._size = 0
        self.truncated = False
        self.start()

    def run(self) -> None:
        with self._stream:
            # Not `read`: it waits for a full block, and loses it when a grandchild keeps the stream open.
            while chunk := os.read(self._stream.fileno(), 65536):
                room = self._cap - self._size
                self._chunks.append(chunk[:room])
                self._size += min(len(chunk), room)
                self.truncated |= len(chunk) > room

    def data(self) -> bytes:
        return b"".join(self._chunks)


def _feed(stream: IO[bytes], data: bytes) -> None:
    # A command that does not read its input is not an error of ours.
    with contextlib.suppress(BrokenPipeError, OSError), stream:
        stream.write(data)
