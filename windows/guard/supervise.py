"""The supervisor of one run: parent of the program, reader of its output, writer of its outcome.

It ends the program at its time limit, at the hold's run deadline, when the hold is gone, when memory is exceeded, or
when asked (the ``end`` file and SIGUSR1); always the whole tree: TERM, five seconds, KILL. It sleeps in select.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal

from windows.guard import clock, files, proc, spawn, table
from windows.guard import state as states
from windows.guard.errors import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from windows.guard.state import State

    Json = dict[str, Any]

TERM_GRACE_NS = 5_000_000_000
CHECK_S = 0.25
MEMORY_EVERY_NS = 1_000_000_000


class Supervisor:
    """One run, from start to outcome."""

    def __init__(self, state: State, hold_id: str, run: str) -> None:
        self.state = state
        self.folder = state.hold_path(hold_id, "runs", run)
        self.asked = files.read_json(os.path.join(self.folder, "run.json")) or {}
        self.child: Json = {}
        self.started_ns = clock.boottime_ns()
        self.reason = ""
        self.ending_since_ns = 0
        self.memory_exceeded = False
        self.memory_checked_ns = 0
        self.sizes = {"stdout": 0, "stderr": 0}
        self.sinks: dict[int, tuple[str, int]] = {}

    def supervise(self) -> None:
        """Run the program to its end and write ``result.json``."""
        signal.signal(signal.SIGUSR1, lambda *_: None)
        try:
            # a restore first writes its state under this lock, then ends runs: it sees this one or this one sees it
            with self.state.host_lock():
                record = self.state.record()
                if record is None or not self._is_held(record):
                    self._write("not-started", None, None, "the hold was over")
                    return
                self.deadline_ns = states.run_deadline_ns(record)
                self._start()
        except Refusal as refusal:
            self._write("not-started", None, None, f"{refusal.message}: {refusal.found}")
            return
        with contextlib.suppress(OSError):
            # the ownership record is older than exec; only this says that the program runs
            files.write_bytes(os.path.join(self.folder, "started"), b"", sync=False)
        status = self._watch()
        proc.end_tree(self.child, signal.SIGKILL, 1.0, 5.0)
        self._drain()
        self._finish(status)

    def _start(self) -> None:
        asked = self.asked
        environment = dict(
            spawn.base_environment(),
            **asked["env"],
            DSPARK_HOLD_ID=asked["hold_id"],
            DSPARK_HOLD_EPOCH=str(asked["epoch"]),
            DSPARK_GUARD=spawn.program_path(),
            DSPARK_GUARD_STATE=self.state.folder,
            DSPARK_OUTPUT_DIR=asked["output_dir"],
        )
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        for descriptor, name in ((out_read, "stdout"), (err_read, "stderr")):
            os.set_blocking(descriptor, False)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            self.sinks[descriptor] = (name, os.open(os.path.join(self.folder, name), flags, 0o600))
        record_path = os.path.join(self.folder, "child.json")
        cookie = os.urandom(16).hex()
        try:
            self.child = spawn.start_child(
                asked["argv"], environment, asked["cwd"], record_path, cookie, (out_write, err_write)
            )
        finally:
            os.close(out_write)
            os.close(err_write)

    def _watch(self) -> int:
        """Until the program ended: its wait status."""
        try:
            ended = os.pidfd_open(self.child["pid"])
        except (OSError, AttributeError):
            ended = -1
        while True:
            waiting = list(self.sinks) + ([ended] if ended >= 0 else [])
            with contextlib.suppress(InterruptedError):
                ready, _, _ = select.select(waiting, [], [], CHECK_S if ended >= 0 else 0.05)
                for descriptor in ready:
                    if descriptor in self.sinks:
                        self._pump(descriptor)
            pid, status = os.waitpid(self.child["pid"], os.WNOHANG)
            if pid:
                return status
            self._limits()

    def _limits(self) -> None:
        now = clock.boottime_ns()
        if not self.reason:
            self.reason = self._why_end(now)
            if self.reason:
                self.ending_since_ns = now
                self._signal(signal.SIGTERM)
        elif now - self.ending_since_ns > TERM_GRACE_NS:
            self._signal(signal.SIGKILL)

    def _why_end(self, now: int) -> str:
        if now - self.started_ns > self.asked["timeout_s"] * 1e9:
            return "timed-out"
        if now > self.deadline_ns:
            return "ended-with-hold"
        with contextlib.suppress(FileNotFoundError), open(os.path.join(self.folder, "end"), encoding="ascii") as handle:
            return handle.read() or "end-run"
        record = self.state.record()
        if record is None or not self._is_held(record):
            return "ended-with-hold"
        return self._why_memory(now)

    def _is_held(self, record: Json) -> bool:
        same = (record["hold_id"], record["epoch"]) == (self.asked["hold_id"], self.asked["epoch"])
        return same and record["state"] == table.HELD

    def _why_memory(self, now: int) -> str:
        limit = self.asked["memory_max_bytes"]
        if limit is None or now - self.memory_checked_ns < MEMORY_EVERY_NS:
            return ""
        self.memory_checked_ns = now
        self.memory_exceeded = proc.resident_bytes(proc.tree_of(self.child)) > limit
        return "memory" if self.memory_exceeded else ""

    def _signal(self, number: int) -> None:
        for process in proc.tree_of(self.child):
            proc.send_signal(process, number)

    def _pump(self, descriptor: int) -> bool:
        """Move what is there into the capped file; false at the end of the stream or when nothing is there."""
        name, sink = self.sinks[descriptor]
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            os.close(descriptor)
            os.close(sink)
            del self.sinks[descriptor]
            return False
        room = max(0, self.asked["stdout_cap_bytes"] - self.sizes[name])
        self.sizes[name] += len(data)
        if room:
            # a full disk costs output, never the program: it must not block on a pipe nobody reads
            with contextlib.suppress(OSError):
                os.write(sink, data[:room])
        return True

    def _drain(self) -> None:
        for descriptor in list(self.sinks):
            while self._pump(descriptor):
                pass

    def _finish(self, status: int) -> None:
        if os.WIFSIGNALED(status) and not self.reason and self.asked["memory_max_bytes"] is not None:
            self.memory_exceeded = proc.oom_kills() > 0
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        if self.reason in ("timed-out", "ended-with-hold"):
            self._write(self.reason, code, number, "")
        elif self.reason:
            self._write("signalled", code, number if number is not None else int(signal.SIGTERM), self.reason)
        elif number is not None:
            self._write("signalled", None, number, "")
        else:
            self._write("exited", code, None, "")

    def _write(self, state: str, code: int | None, number: int | None, note: str) -> None:
        result = {
            "state": state,
            "code": code,
            "signal": number,
            "elapsed_ns": clock.boottime_ns() - self.started_ns,
            "memory_exceeded": self.memory_exceeded,
            "note": note,
            "stdout_bytes": self.sizes["stdout"],
            "stderr_bytes": self.sizes["stderr"],
        }
        self.state.write(os.path.join(self.folder, "result.json"), result)
