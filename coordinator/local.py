"""The machine the coordinator itself runs on, behind the ``Host`` interface.

Commands run in their own session with closed descriptors and a bounded time; both streams are drained at once and
capped. Nothing here is simulated: the same guard zipapp runs as a process of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
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

_CHUNK = 65536
_LATE_OUTPUT_NS = 500_000_000


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
        exchange = _Exchange(process, stdin, cap_bytes, self._clock)
        timed_out = exchange.run(start + int(timeout_s * 1e9))
        elapsed = self._clock.monotonic_ns() - start
        code = process.returncode
        outcome = Outcome.TIMED_OUT if timed_out else Outcome.SIGNALLED if code < 0 else Outcome.EXITED
        return CommandResult(
            outcome,
            None if timed_out else abs(code),
            bytes(exchange.out),
            bytes(exchange.err),
            exchange.truncated,
            elapsed,
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


class _Exchange:
    """One command: feeds its input, drains both streams, keeps the deadline, and wakes for nothing else.

    Asleep until something happens: with many hosts at once, each that looks every few milliseconds whether its command
    has ended costs all of them the processor.

    Args:
        cap: Bytes of each stream that are kept; the rest is read and dropped.
    """

    def __init__(self, process: subprocess.Popen[bytes], stdin: bytes, cap: int, clock: Clock) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.out = bytearray()
        self.err = bytearray()
        self.truncated = False
        self._process = process
        self._pending = memoryview(stdin)
        self._cap = cap
        self._clock = clock
        self._input = process.stdin.fileno()
        self._buffers = {process.stdout.fileno(): self.out, process.stderr.fileno(): self.err}
        self._files: dict[int, IO[bytes]] = {
            stream.fileno(): stream for stream in (process.stdin, process.stdout, process.stderr)
        }
        self._poll = select.poll()

    def run(self, deadline_ns: int) -> bool:
        """Until it has ended; whether it had to be killed at the deadline."""
        handle = os.pidfd_open(self._process.pid)
        try:
            self._poll.register(handle, select.POLLIN)
            for fd in self._files:
                os.set_blocking(fd, False)
                self._poll.register(fd, select.POLLOUT if fd == self._input else select.POLLIN)
            timed_out = not self._turn_until(deadline_ns, handle)
            if timed_out:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._turn_until(None, handle)
            # A grandchild may keep a pipe open: what it writes later is not this command's output.
            self._turn_until(self._clock.monotonic_ns() + _LATE_OUTPUT_NS, None)
            return timed_out
        finally:
            os.close(handle)
            for fd in list(self._files):
                self._drop(fd)

    def _turn_until(self, deadline_ns: int | None, handle: int | None) -> bool:
        """Move bytes until the process has ended (``handle``), or else both streams; false at the deadline."""
        while handle is not None or self._buffers.keys() & self._files.keys():
            left_ms = None
            if deadline_ns is not None:
                left_ms = (deadline_ns - self._clock.monotonic_ns()) / 1e6
                if left_ms <= 0:
                    return False
            for fd, _ in self._poll.poll(left_ms):
                if fd == handle:
                    self._poll.unregister(fd)
                    self._process.wait()
                    return True
                self._feed() if fd == self._input else self._drain(fd)
        return True

    def _feed(self) -> None:
        # A command that does not read its input is not an error of ours.
        with contextlib.suppress(BlockingIOError):
            try:
                self._pending = self._pending[os.write(self._input, self._pending[:_CHUNK]) :]
            except BrokenPipeError:
                self._pending = self._pending[:0]
        if not self._pending:
            self._drop(self._input)

    def _drain(self, fd: int) -> None:
        chunk, buffer = os.read(fd, _CHUNK), self._buffers[fd]
        room = self._cap - len(buffer)
        buffer += chunk[:room]
        self.truncated |= len(chunk) > room
        if not chunk:
            self._drop(fd)

    def _drop(self, fd: int) -> None:
        with contextlib.suppress(KeyError):
            self._poll.unregister(fd)
        self._files.pop(fd).close()
