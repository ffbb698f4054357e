"""Owned runs: programs that live only inside the hold. The verbs ``run``, ``wait`` and ``end-run``.

A run is a folder: what was asked (``run.json``), who supervises it, who it is, what it printed, how it ended. The
outcome is written by the supervisor, never guessed by a caller; a missing outcome is ``unknown``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal

from windows.guard import clock, files, launch, proc, spec
from windows.guard import state as states
from windows.guard.errors import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from windows.guard.state import State

    Json = dict[str, Any]

TAIL_BYTES = 8 << 10
RESERVED = (
    "DSPARK_HOLD_ID",
    "DSPARK_HOLD_EPOCH",
    "DSPARK_GUARD",
    "DSPARK_GUARD_STATE",
    "DSPARK_OUTPUT_DIR",
    "DSPARK_OWNER",
)
_SHAPE = {
    "name": "str",
    "argv": "list",
    "env": "dict",
    "cwd": "str",
    "timeout_s": "num",
    "memory_max_bytes": "int?",
    "output_dir": "str",
    "stdout_cap_bytes": "int",
}


def run_id(name: str, op: str) -> str:
    """The run's id follows from the operation id, so that a repeated call finds the same run."""
    return f"{name}-{hashlib.sha256(op.encode()).hexdigest()[:12]}"


def start(state: State, record: Json, args: Json, op: str, adopt: bool) -> Json:
    """Start one owned program under its supervisor.

    Args:
        state: The state folder.
        record: The open hold, already checked.
        args: Arguments of the verb.
        op: Operation id.
        adopt: An earlier call with this id died half-way: find what it left, start nothing.

    Raises:
        Refusal: ``DEADLINE``, ``BAD_REQUEST``, ``START_FAILED``, ``OP_UNKNOWN_OUTCOME``.
    """
    _check(record, args)
    ident = run_id(args["name"], op)
    folder = state.hold_path(record["hold_id"], "runs", ident)
    if adopt:
        return _adopt(folder, ident)
    for path in (folder, args["output_dir"]):
        os.makedirs(path, mode=0o700, exist_ok=True)
    files.write_json(
        os.path.join(folder, "run.json"), dict(args, hold_id=record["hold_id"], epoch=record["epoch"], run=ident)
    )
    launch.background(
        state, "run", f"{record['hold_id']}/{ident}", os.path.join(folder, "supervisor.json"), args["memory_max_bytes"]
    )
    begun = clock.wait_until(
        lambda: any(os.path.exists(os.path.join(folder, n)) for n in ("started", "result.json")), 10.0
    )
    result = files.read_json(os.path.join(folder, "result.json"))
    if result and result["state"] == "not-started":
        raise Refusal(
            "START_FAILED",
            f"run {args['name']} could not be started",
            args["argv"][0],
            result["note"],
            "check argv and cwd on the host",
        )
    if not begun:
        raise Refusal(
            "OP_UNKNOWN_OUTCOME",
            "the run's supervisor did not report",
            "a started program",
            "nothing after 10 s",
            f"wait on {ident}, or restore",
        )
    state.event("run", record, run=ident, argv=args["argv"][:1])
    return {"run": ident}


def _check(record: Json, args: Json) -> None:
    spec.take(args, _SHAPE)
    spec.check_argv("args.argv", args["argv"])
    spec.check_environment("args.env", args["env"], RESERVED)
    if not spec.NAME.match(args["name"]):
        raise spec.bad("args.name", spec.NAME.pattern, args["name"])
    for key in ("cwd", "output_dir"):
        if not args[key].startswith("/"):
            raise spec.bad(f"args.{key}", "an absolute path", args[key])
    left_s = (states.run_deadline_ns(record) - clock.boottime_ns()) / 1e9
    if args["timeout_s"] > left_s:
        raise Refusal(
            "DEADLINE",
            "the run could not end before the restore reserve begins",
            f"timeout_s at most {max(left_s, 0):.1f}",
            str(args["timeout_s"]),
            "restore and close; a hold cannot be extended",
            {"run_remaining_s": max(left_s, 0.0)},
        )


def _adopt(folder: str, ident: str) -> Json:
    if os.path.exists(os.path.join(folder, "child.json")) or os.path.exists(os.path.join(folder, "result.json")):
        return {"run": ident}
    raise Refusal(
        "OP_UNKNOWN_OUTCOME",
        "an earlier call with this operation id died before the program was recorded",
        "a recorded program or outcome",
        "neither",
        "do not start it again in this hold; restore and close",
    )


def folder_of(state: State, hold_id: str, run: str) -> str:
    """The folder of a run.

    Raises:
        Refusal: ``NO_SUCH_RUN``.
    """
    folder = state.hold_path(hold_id, "runs", run)
    if not spec.NAME.match(run[:64]) or "/" in run or not os.path.isdir(folder):
        raise Refusal(
            "NO_SUCH_RUN", "no such run in this hold", "a run id from run", run[:100], "status lists the runs"
        )
    return folder


def find_hold(state: State, run: str) -> str:
    """The hold a run belongs to: the open one, otherwise any that has it."""
    record = state.record()
    names = [record["hold_id"]] if record else []
    with contextlib.suppress(FileNotFoundError):
        names += sorted(os.listdir(state.path("holds")))
    for hold_id in names:
        if "/" not in run and os.path.isdir(state.hold_path(hold_id, "runs", run)):
            return str(hold_id)
    raise Refusal("NO_SUCH_RUN", "no such run on this host", "a run id from run", run[:100], "status lists the runs")


def wait(state: State, run: str, wait_s: float) -> Json:
    """Wait at most ``wait_s`` (capped at 300 s) for the outcome."""
    folder = folder_of(state, find_hold(state, run), run)
    clock.wait_until(lambda: outcome_of(folder)["state"] != "running", min(wait_s, 300.0))
    return describe(folder)


def outcome_of(folder: str) -> Json:
    """State of a run, without its output."""
    result = files.read_json(os.path.join(folder, "result.json"))
    if result is not None:
        return result
    supervisor = files.read_json(os.path.join(folder, "supervisor.json"))
    child = files.read_json(os.path.join(folder, "child.json"))
    base: Json = {"code": None, "signal": None, "elapsed_ns": 0, "memory_exceeded": False, "note": ""}
    if child and child["boot_id"] == clock.boot_id():
        base["elapsed_ns"] = clock.boottime_ns() - child["started_boottime_ns"]
    if (
        supervisor
        and proc.is_alive(supervisor["pid"], supervisor["start_ticks"])
        and supervisor["boot_id"] == clock.boot_id()
    ):
        return dict(base, state="running")
    # the supervisor writes the result last: look once more before calling it lost
    result = files.read_json(os.path.join(folder, "result.json"))
    if result is not None:
        return result
    return dict(base, state="unknown", note=launch.unit_outcome(folder) or "the supervisor died without a result")


def describe(folder: str) -> Json:
    """The answer of ``wait``: outcome, tails and sizes."""
    result = dict(outcome_of(folder), folder=folder)
    for stream in ("stdout", "stderr"):
        path = os.path.join(folder, stream)
        result[f"{stream}_tail"], size = _tail(path)
        result.setdefault(f"{stream}_bytes", size)
    return result


def _tail(path: str) -> tuple[str, int]:
    try:
        with open(path, "rb") as handle:
            size = handle.seek(0, os.SEEK_END)
            handle.seek(max(0, size - TAIL_BYTES))
            return handle.read().decode("utf-8", "replace"), size
    except FileNotFoundError:
        return "", 0


def end(state: State, hold_id: str, run: str, reason: str) -> Json:
    """End one run's whole tree and return its outcome. Asks the supervisor first, then does it itself."""
    folder = folder_of(state, hold_id, run)
    with contextlib.suppress(OSError):
        files.write_bytes(os.path.join(folder, "end"), reason.encode("ascii"), sync=False)
    supervisor = files.read_json(os.path.join(folder, "supervisor.json"))
    if supervisor and outcome_of(folder)["state"] == "running":
        proc.send_signal(proc.Process(supervisor["pid"], 0, 0, 0, supervisor["start_ticks"]), signal.SIGUSR1)
        clock.wait_until(lambda: outcome_of(folder)["state"] != "running", 12.0)
    # supervisor gone or deaf: the tree is still ours by record and cookie
    proc.end_tree(supervisor, signal.SIGKILL, 1.0, 5.0)
    child = files.read_json(os.path.join(folder, "child.json"))
    proc.end_tree(child, signal.SIGKILL, 1.0, 5.0)
    if not os.path.exists(os.path.join(folder, "result.json")):
        lost = dict(
            outcome_of(folder), state="unknown", note=f"ended by the guard ({reason}) after its supervisor was lost"
        )
        with contextlib.suppress(OSError):
            files.write_json(os.path.join(folder, "result.json"), lost)
    return describe(folder)


def names(state: State, hold_id: str) -> list[str]:
    """Ids of every run of a hold."""
    try:
        return sorted(os.listdir(state.hold_path(hold_id, "runs")))
    except FileNotFoundError:
        return []


def trees(state: State, hold_id: str) -> list[proc.Process]:
    """Every living process of every run of a hold."""
    found: dict[int, proc.Process] = {}
    for run in names(state, hold_id):
        child = files.read_json(state.hold_path(hold_id, "runs", run, "child.json"))
        found.update((process.pid, process) for process in proc.tree_of(child))
    return [found[pid] for pid in sorted(found)]


def summary(state: State, hold_id: str) -> list[Json]:
    """``[{run, name, state, code, signal}]`` for status and outcomes."""
    rows = []
    for run in names(state, hold_id):
        result = outcome_of(state.hold_path(hold_id, "runs", run))
        rows.append(
            {
                "run": run,
                "name": run.rpartition("-")[0],
                "state": result["state"],
                "code": result["code"],
                "signal": result["signal"],
            }
        )
    return rows


def end_all(state: State, hold_id: str) -> list[Json]:
    """End every run of a hold; rows that prove them gone (one row also when there was none)."""
    for run in names(state, hold_id):
        folder = state.hold_path(hold_id, "runs", run)
        if outcome_of(folder)["state"] in ("running", "unknown"):
            end(state, hold_id, run, "ended-with-hold")
    left = [process.pid for process in trees(state, hold_id)] + proc.marked(f"DSPARK_HOLD_ID={hold_id}")
    found = f"pids {left}" if left else "gone"
    return [{"service": "host", "field": "owned runs", "expected": "gone", "found": found, "ok": not left}]
