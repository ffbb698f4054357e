"""Starts coordinators of the fault matrix from a process that has imported everything already.

Importing is most of what a short coordinator costs, and there is one for each case. Each coordinator is still a process
of its own, forked before it has done anything, that can be killed or frozen by itself.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).parents[2]
_MAX_REQUEST_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1


class Started:
    """One coordinator: what the tests use of ``subprocess.Popen``."""

    def __init__(self, pid: int, stdin: TextIO, stdout: TextIO) -> None:
        self.pid = pid
        self.stdin, self.stdout = stdin, stdout
        try:
            self._handle = os.pidfd_open(pid)
        except ProcessLookupError:
            self._handle = -1

    def poll(self) -> int | None:
        """None while it runs; which exit code it had is in what it printed."""
        return self._ended(0.0)

    def wait(self, timeout_s: float) -> None:
        """Until it has ended.

        Raises:
            TimeoutError: It did not within ``timeout_s``.
        """
        if self._ended(timeout_s) is None:
            raise TimeoutError(f"coordinator {self.pid} runs on after {timeout_s} s")

    def kill(self) -> None:
        """It dies as it stands."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing when it has ended."""
        if self._ended(0.0) is None:
            signal.pidfd_send_signal(self._handle, number)

    def close(self) -> None:
        """End it and release what belongs to it here."""
        if self._handle >= 0:
            self.kill()
            self.wait(30)
            os.close(self._handle)
            self._handle = -1
        for stream in (self.stdin, self.stdout):
            stream.close()

    def _ended(self, timeout_s: float) -> int | None:
        if self._handle < 0:
            return 0
        ready, _, _ = select.select([self._handle], [], [], timeout_s)
        return 0 if ready else None


class WarmServer:
    """The process that forks them; it ends when this object is closed or this process dies."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.hosts.warm", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
            )

    def start(self, argv: Sequence[str], log: Path) -> Started:
        """A coordinator with the driver's arguments ``argv`` and its stderr in ``log``."""
        in_read, in_write = os.pipe()
        out_read, out_write = os.pipe()
        with log.open("wb") as errors:
            fds = [in_read, out_write, errors.fileno()]
            socket.send_fds(self._socket, ["\0".join(argv).encode()], fds)
            answer = self._socket.recv(64)
        for descriptor in (in_read, out_write):
            os.close(descriptor)
        assert answer, "the process that starts coordinators has died"
        return Started(int(answer), os.fdopen(in_write, "w"), os.fdopen(out_read))

    def close(self) -> None:
        """End it."""
        self._socket.close()
        self._process.wait(30)


def serve(link: socket.socket) -> None:
    """Fork one driver for each request, until the other side is gone."""
    # Imported here: whoever asks needs none of it.
    import coordinator.ssh  # noqa: F401 - a driver imports it when it connects
    from tests.hosts import driver

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them: what they print is their result
    while True:
        request, fds, _, _ = socket.recv_fds(link, _MAX_REQUEST_BYTES, 3)
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _die_with_parent()
            link.close()
            for number, descriptor in enumerate(fds):
                os.dup2(descriptor, number)
                os.close(descriptor)
            os._exit(driver.run(request.decode().split("\0")))
        for descriptor in fds:
            os.close(descriptor)
        link.send(str(pid).encode())


def _die_with_parent() -> None:
    """A coordinator that waits at a record, or is frozen, does not outlive a killed test process."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as inherited:
        serve(inherited)
