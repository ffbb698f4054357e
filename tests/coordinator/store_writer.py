"""A writer process for crash tests: appends to a real store and is killed at a chosen step.

Reads one JSON request a line from stdin, forks a child that does it, prints the child's end. The child kills itself
with SIGKILL right before its n-th operation on a file of the store (opens, links, renames, removals, folder listings:
everything CPython reports to audit hooks, and every fsync), or in the middle of a write, when it may write only so many
bytes to one file (RLIMIT_FSIZE with SIGXFSZ at its default, which ends the process).
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parents[0]), str(TESTS / "receipts")]

from receipt_kit import draft, raw_sample, signer  # noqa: E402 - needs the path above

from coordinator.store import Store  # noqa: E402
from receipts.fields import Kind  # noqa: E402

WATCHED = {"open", "os.link", "os.rename", "os.remove", "os.scandir", "os.listdir", "os.mkdir", "os.truncate"}


def kill_at(root: str, step: int) -> list[str]:
    """Arm the hook; returns the list that collects the operations so far."""
    seen: list[str] = []

    def count(name: str, path: object) -> None:
        seen.append(f"{name} {path}")
        if len(seen) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in WATCHED and args and str(args[0]).startswith(root):
            count(event, args[0])

    fsync = os.fsync

    def counted_fsync(descriptor: int) -> None:
        count("fsync", descriptor)
        fsync(descriptor)

    os.fsync = counted_fsync
    sys.addaudithook(hook)
    return seen


def work(request: dict[str, Any]) -> int:
    """Do one request in this (forked) process; returns the number of steps it took."""
    root = Path(request["store"])
    if request.get("max_bytes") is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["max_bytes"], request["max_bytes"]))
    seen = kill_at(str(root), request.get("step", 0))
    store = Store(root)
    if request["do"] == "append":
        raw = Path(request["raw"])
        made = draft(
            Kind.HOST_FACTS,
            argv=("writer", str(request["who"])),
            samples=(raw_sample("rounds.jsonl", raw.read_bytes()),),
        )
        for _ in range(request.get("times", 1)):
            store.append(made, samples={"rounds.jsonl": raw}, signer=signer())
    else:
        store.countersign(request["receipt"], signer("auditor"))
    return len(seen)


def main() -> None:
    """Serve requests until stdin ends."""
    for line in sys.stdin:
        request = json.loads(line)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.write(writer, str(work(request)).encode())
                code = 0
            except BaseException as error:  # noqa: BLE001 - the child's end, whatever it is, goes to the parent
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
            finally:
                os._exit(code)
        os.close(writer)
        if request.get("wait", True):
            _, status = os.waitpid(child, 0)
            steps = os.read(reader, 64).decode()
            os.close(reader)
            answer = {"code": os.waitstatus_to_exitcode(status), "steps": int(steps or 0)}
        else:
            os.close(reader)
            answer = {"pid": child}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
