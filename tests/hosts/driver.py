"""A coordinator that opens one hold and can be stopped at any journal record: the victim of the fault matrix.

It is the real window, heartbeat and journal; only the journal's file writer is subclassed here, to announce each record
after its fsync and to wait for a word where the test asked for it. Runs as a process of its own, so that the test can
kill or freeze it there.

Talk: ``# HOLD_ID`` out; ``@ 12 intent:stop:h1`` out after record 12 and then a line in, when 12 or that label
was asked for.
The last line out is ``= CODE HOLD_ID``.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import coordinator.window
from coordinator.clock import SystemClock
from coordinator.errors import CoordinatorError
from coordinator.guard_client import GuardRefusal, as_coordinator_error
from coordinator.journal import Journal
from coordinator.production import require_free
from coordinator.render import Reporter
from coordinator.session import HostSession, open_sessions
from coordinator.show_plan import compile_files
from coordinator.window import Window
from windows.hold_records import Intent, Note, Opened, Outcome, Record
from windows.hold_table import HoldEvent


class Stations(Journal):
    """A journal that stops where the test asked it to."""

    at: str = ""

    def _append(self, record: Record) -> None:
        super()._append(record)
        if isinstance(record, Opened):
            print(f"# {record.hold_id}", flush=True)
        label = self._label(record)
        if self.at in (str(record.seq), label):
            print(f"@ {record.seq} {label}", flush=True)
            sys.stdin.readline()

    def _label(self, record: Record) -> str:
        if isinstance(record, Note):
            return f"note:{record.event.value}"
        if isinstance(record, Intent):
            return f"intent:{record.step or record.action.value}:{record.host}"
        if isinstance(record, Outcome):
            op = next(op for op in self.state.open_ops if op.op == record.op)
            return f"outcome:{op.step or op.action.value}:{op.host}"
        return record.type


def hold(window: Window, sessions: list[HostSession], *, run: str) -> None:
    """One whole hold; with ``run``, a shell script, an owned program on each host in the middle."""
    with window:
        window.open()
        window.note(HoldEvent.QUALIFY_STARTED)
        if run:
            for session in sessions:
                _run(window, session, run)
        window.note(HoldEvent.QUALIFIED)
        window.prove_ownership()


def _run(window: Window, session: HostSession, script: str) -> None:
    args = {
        "name": "probe",
        "argv": ["/bin/sh", "-c", script],
        "env": {},
        "cwd": "/",
        "timeout_s": 5,
        "memory_max_bytes": None,
        "output_dir": f"/srv/work/{window.hold_id}",
        "stdout_cap_bytes": 4096,
    }
    run = window.act(session, "run", args)["run"]
    window.act(session, "end-run", {"run": run})


def cost_of(window: Window) -> str:
    """Time of all steps, and the longest any host spent waiting for its services, which hosts do at once."""
    service_ns = max(record.service_ns for record in window.records.values())
    return json.dumps({"steps_ns": sum(window.step_ns.values()), "service_ns": service_ns})


def run(argv: Sequence[str]) -> int:
    """As a program of its own would: the hold's exit code, or a traceback and 1."""
    try:
        return main(argv)
    except Exception:  # noqa: BLE001 - what ends a program with a traceback
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def main(argv: Sequence[str]) -> int:
    """Returns the hold's exit code."""
    parser = argparse.ArgumentParser(description="opens one hold, as the tests want it")
    parser.add_argument("--folder", type=Path, required=True, help="with site.toml and plan.toml; gets journals/")
    parser.add_argument("--at", default="", help="number or label of the record to stop after")
    parser.add_argument("--run", default="", help="shell script of an owned program on each host")
    options = parser.parse_args(argv)
    Stations.at = options.at
    vars(coordinator.window)["Journal"] = Stations
    clock = SystemClock()
    reporter = Reporter(clock.utc, quiet=False)
    compiled = compile_files(options.folder / "site.toml", options.folder / "plan.toml")
    code, hold_id = 0, "-"
    try:
        with open_sessions(compiled.site, clock) as sessions:
            require_free(sessions)
            window = Window(
                compiled,
                1,
                sessions,
                options.folder / "journals",
                clock=clock,
                reporter=reporter,
                reason="fault matrix",
            )
            hold_id = window.hold_id
            try:
                hold(window, sessions, run=options.run)
            finally:
                code = int(window.exit_code)
            print(f"cost {cost_of(window)}", flush=True)
    except (CoordinatorError, GuardRefusal) as caught:
        error = as_coordinator_error(caught) if isinstance(caught, GuardRefusal) else caught
        reporter.error(error.lines())
        code = code or int(error.exit_code)
    print(f"= {code} {hold_id}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
