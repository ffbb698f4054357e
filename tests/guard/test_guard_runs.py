"""Owned runs: every ending is named, every stream drained and capped, and nothing outlives the hold.

Red when: a limit is not enforced, output blocks a program, an escaped grandchild survives, or the environment leaks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Json = dict[str, Any]


@pytest.fixture
def held(host: Any, make_service: Callable[..., Json]) -> Any:
    host.to("held", [make_service(expected="stopped", probe=None)])
    return host


def run(host: Any, code: str, wait_s: float = 20, **changes: Any) -> Json:
    args = {
        "name": "arm",
        "argv": [host.python, "-c", code],
        "env": {},
        "cwd": "/",
        "timeout_s": 30,
        "memory_max_bytes": None,
        "output_dir": str(host.folder / "out"),
        "stdout_cap_bytes": 100_000,
    }
    ident = host.ask("run", dict(args, **changes))["run"]
    return dict(host.ask("wait", {"run": ident, "wait_s": wait_s}, op=None), run=ident)


def test_how_programs_end(held: Any) -> None:
    done = run(held, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)")
    assert (done["state"], done["code"], done["signal"]) == ("exited", 7, None)
    assert (done["stdout_tail"], done["stderr_tail"]) == ("out\n", "err\n")
    done = run(held, "import os; os.kill(os.getpid(), 9)")
    assert (done["state"], done["code"], done["signal"]) == ("signalled", None, 9)
    done = run(held, "import time; time.sleep(60)", timeout_s=0.5)
    assert done["state"] == "timed-out"
    error = held.refuse("run", {**run_args(held), "argv": ["/nonexistent/program"]})
    assert error["code"] == "START_FAILED"
    error = held.refuse("run", {**run_args(held), "timeout_s": 10_000})
    assert error["code"] == "DEADLINE"
    assert error["details"]["run_remaining_s"] < 120


def run_args(host: Any) -> Json:
    return {
        "name": "arm",
        "argv": ["true"],
        "env": {},
        "cwd": "/",
        "timeout_s": 5,
        "memory_max_bytes": None,
        "output_dir": str(host.folder / "out"),
        "stdout_cap_bytes": 10,
    }


def test_ten_megabytes_on_both_streams(held: Any) -> None:
    code = "import sys\nfor s in (sys.stderr, sys.stdout):\n for _ in range(160): s.write('x' * 65536)"
    done = run(held, code, stdout_cap_bytes=1000)
    assert (done["state"], done["code"]) == ("exited", 0)
    assert done["stdout_bytes"] == done["stderr_bytes"] == 160 * 65536
    assert Path(done["folder"], "stderr").stat().st_size == 1000


def test_environment_stdin_and_no_shell(held: Any) -> None:
    code = "import json, os, sys; print(json.dumps([dict(os.environ), sys.stdin.read(), sys.argv]))"
    argv = [held.python, "-c", code, "$HOME; echo `id` %n"]
    os.environ["LEAK_ME"] = "leaked"
    try:
        done = run(held, "", argv=argv, env={"GIVEN": "a b"}, timeout_s=10)
    finally:
        del os.environ["LEAK_ME"]
    environment, stdin, seen = json.loads(done["stdout_tail"])
    assert stdin == ""
    assert seen[1:] == ["$HOME; echo `id` %n"]
    assert environment["GIVEN"] == "a b"
    assert environment["DSPARK_HOLD_ID"] == held.claim["hold_id"]
    assert environment["DSPARK_HOLD_EPOCH"] == str(held.claim["epoch"])
    assert environment["DSPARK_GUARD"] == str(held.archive)
    assert environment["DSPARK_GUARD_STATE"] == str(held.state)
    assert environment["DSPARK_OUTPUT_DIR"] == str(held.folder / "out")
    assert "LEAK_ME" not in environment
    for name in ("DSPARK_HOLD_ID", "1BAD", "A=B"):
        assert held.refuse("run", {**run_args(held), "env": {name: "x"}})["code"] == "BAD_REQUEST"


def test_a_tree_that_resists_ends_with_its_run(held: Any) -> None:
    code = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = 'import os, time; os.fork() and os._exit(0); os.setsid(); '\n"
        f"child += 'print(\"{held.folder}\"); time.sleep(600)'\n"
        "subprocess.Popen([sys.executable, '-c', child])\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    ident = run(held, code, wait_s=0)["run"]
    stdout = held.state / "holds" / held.claim["hold_id"] / "runs" / ident / "stdout"
    held.wait_for(lambda: stdout.exists() and "ready" in stdout.read_text() and held.pids_with("os.setsid()"))
    done = held.ask("end-run", {"run": ident})
    assert (done["state"], done["note"]) == ("signalled", "end-run")
    assert not held.pids_with(f'print("{held.folder}")')


def test_memory_limit(held: Any) -> None:
    code = "import time\nx = bytearray(200 << 20)\nx[::4096] = b'1' * len(x[::4096])\ntime.sleep(30)"
    done = run(held, code, memory_max_bytes=64 << 20)
    assert (done["state"], done["memory_exceeded"]) == ("signalled", True)


def test_runs_end_at_the_run_deadline(host: Any, make_service: Callable[..., Json]) -> None:
    host.to("held", [make_service(expected="stopped", probe=None)], deadline_s=65, restore_reserve_s=55)
    # its own limit would end it later than the hold's: the guard refuses that, so let it be as long as is allowed
    left = host.ask("heartbeat", {"step_bound_s": None}, op=None)["run_remaining_s"]
    args = {**run_args(host), "argv": ["sleep", "600"], "timeout_s": left - 2}
    ident = host.ask("run", args)["run"]
    done = host.ask("wait", {"run": ident, "wait_s": 15}, op=None)
    assert done["state"] in ("timed-out", "ended-with-hold")
    assert host.refuse("run", run_args(host))["code"] == "DEADLINE"


def test_restore_ends_runs_first(held: Any) -> None:
    ident = run(held, "import time; time.sleep(600)", wait_s=0)["run"]
    result = held.ask("restore")
    assert result["proven"]
    assert held.ask("wait", {"run": ident, "wait_s": 0}, op=None)["state"] == "ended-with-hold"
    assert held.refuse("run", run_args(held))["code"] == "WRONG_STATE"
    held.ask("close")
    assert held.refuse("wait", {"run": "nobody-1", "wait_s": 0}, op=None)["code"] == "NO_SUCH_RUN"


def test_a_program_whose_supervisor_was_killed_does_not_live_on(held: Any) -> None:
    ident = run(held, f"import time; '{held.folder}'; time.sleep(600)", wait_s=0)["run"]
    for pid in held.pids_with(f"{held.state} --internal run"):
        os.kill(pid, 9)
    held.wait_for(lambda: not held.pids_with(f"import time; '{held.folder}'"), 20)
    assert held.ask("wait", {"run": ident, "wait_s": 10}, op=None)["state"] == "unknown"
