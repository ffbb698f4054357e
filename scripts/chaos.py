"""Random disturbances of real holds on three real hosts: seeded, resumable, none may be lost.

Each schedule is a pure function of (seed, number): where the hold is disturbed, by what, one to three times. Afterwards
links are healed, power is back, and one `recover` must end the hold. A schedule is *lost* when production is then not
as it was, a host had two holders or two restores of one hold, or something has no record. Needs root and overlayfs.

    python scripts/chaos.py --count 2000 --seed 1        # goes on where the last run with this seed stopped
    python scripts/chaos.py --seed 1 --jobs 4            # on four times three hosts: most of a schedule is waiting
    python scripts/chaos.py --seed 1 --only 137          # one schedule again, its files are kept
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.chaos_jobs import Jobs  # noqa: E402 - the repository's root comes first
from tests.hosts.estate import STATE  # noqa: E402
from tests.hosts.lab import Lab, why_not  # noqa: E402
from tests.hosts.machine import LabError, send  # noqa: E402
from tests.hosts.trio import NAMES, NUM_RECORDS, RESTORED_CODES, Driver, Trio  # noqa: E402

Json = dict[str, Any]

FAULTS = (
    "cut",
    "cut-and-heal",
    "power-off",
    "power-cycle",
    "kill-guard",
    "kill-sshd",
    "freeze",
    "recover",
    "abort",
    "kill-coordinator",
)
PAUSES_S = (0.0, 0.05, 0.2, 0.5, 1.0)
FREEZES_S = (0.5, 2.0, 5.0, 8.0, 10.0, 11.5, 12.5, 15.0)
SETTLE_S = 90.0
SCHEDULE_S = 900.0
"""All deadlines of a schedule together are less: a worker that takes longer hangs."""


@dataclass(frozen=True)
class Schedule:
    """What is done to one hold.

    Attributes:
        at: Number of the journal record at which the first fault comes.
        faults: (fault, host, seconds before it, seconds of a freeze).
        kills: Whether the coordinator is killed after the faults instead of going on.
        waits: Whether the hosts are left to themselves before anybody recovers.
    """

    at: int
    faults: tuple[tuple[str, str, float, float], ...]
    kills: bool
    waits: bool


def schedule(seed: int, number: int) -> Schedule:
    """The schedule of that number."""
    rng = random.Random(f"{seed}:{number}")
    count = rng.choices((1, 2, 3), (5, 3, 2))[0]
    faults = tuple(
        (rng.choice(FAULTS), rng.choice(NAMES), rng.choice(PAUSES_S), rng.choice(FREEZES_S)) for _ in range(count)
    )
    return Schedule(rng.randrange(NUM_RECORDS), faults, rng.random() < 0.4, rng.random() < 0.3)


def disturb(trio: Trio, driver: Driver, fault: str, name: str, freeze_s: float) -> None:
    """One fault."""
    machine = trio.machines[NAMES.index(name)]
    if fault in ("cut", "cut-and-heal") and machine.is_up:
        machine.cut()
    if fault == "cut-and-heal" and machine.is_up:
        time.sleep(1.0)
        machine.heal()
    if fault in ("power-off", "power-cycle") and machine.is_up:
        machine.power_off()
    if fault == "power-cycle" and not machine.is_up:
        trio.reboot(machine)
    if fault in ("kill-guard", "kill-sshd") and machine.is_up:
        for pid in machine.pids("guard-" if fault == "kill-guard" else "sshd:"):
            send(pid, signal.SIGKILL)
    if fault == "freeze" and driver.process.poll() is None:
        driver.signal(signal.SIGSTOP)
        time.sleep(freeze_s)
        driver.signal(signal.SIGCONT)
    if fault in ("recover", "abort"):
        trio.recover(driver.hold_id, fault)
    if fault == "kill-coordinator" and driver.process.poll() is None:
        driver.kill()


def run(lab: Lab, folder: Path, plan: Schedule) -> Json:
    """One schedule; the record of what came of it.

    Raises:
        AssertionError: It was lost; the message says what is wrong.
        LabError: A host did not answer to its own console, or the hold did not end in time.
    """
    trio = Trio(lab, folder)
    try:
        trio.prepare()
        driver = trio.drive(str(plan.at), run=True)
        driver.until_station()
        for number, (fault, name, pause_s, freeze_s) in enumerate(plan.faults):
            time.sleep(pause_s)
            disturb(trio, driver, fault, name, freeze_s)
            if number == 0 and not plan.kills and driver.process.poll() is None:
                driver.go()
        if plan.kills and driver.process.poll() is None:
            driver.kill()
        code = driver.finish(SETTLE_S)
        _judge(trio, driver, code, plan)
    except BaseException:
        trio.tainted = True
        _keep_states(trio, folder)
        raise
    finally:
        trio.close()
    return {"exit": code}


def _keep_states(trio: Trio, folder: Path) -> None:
    """The guards' own files, which say what happened to a lost schedule, before the hosts are wiped."""
    for machine in trio.machines:
        if machine.is_up and machine.init_pid() is not None:
            with contextlib.suppress(OSError, shutil.Error):
                shutil.copytree(
                    machine.path(STATE), folder / "hosts" / machine.name, ignore=shutil.ignore_patterns("bin")
                )


def _judge(trio: Trio, driver: Driver, code: int | None, plan: Schedule) -> None:
    if code in RESTORED_CODES:
        for machine in trio.machines:
            if machine.is_up and not trio.num_boots[machine.name]:
                trio.require_restored(machine)
    trio.repair_world()
    if plan.waits:
        trio.wait_alone(SETTLE_S)
    knew = any(trio.knows(machine, driver.hold_id) for machine in trio.machines)
    recovered = trio.recover(driver.hold_id or "none")
    assert recovered == (0 if knew else 2), f"recover exited {recovered}"
    for machine in trio.machines:
        trio.start_what_no_hold_owes(machine)
    trio.require_all()


class Ledger:
    """Which schedules ran, on disk after each one."""

    def __init__(self, path: Path, seed: int) -> None:
        self._path = path
        self.seed = seed
        self.done: Json = {}
        if path.exists():
            kept = json.loads(path.read_text())
            if kept["seed"] != seed:
                raise SystemExit(f"{path} belongs to seed {kept['seed']}; give --state another file, or that seed")
            self.done = kept["done"]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else writes this file meanwhile.

        Raises:
            SystemExit: Somebody does.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_suffix(".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SystemExit(
                    f"another run writes {self._path}; wait for it, or give --state another file"
                ) from None
            yield

    def add(self, number: int, outcome: Json) -> None:
        """Keep one outcome."""
        self.done[str(number)] = outcome
        temporary = self._path.with_suffix(".part")
        temporary.write_text(json.dumps({"seed": self.seed, "done": self.done}, indent=1, sort_keys=True))
        temporary.replace(self._path)

    def lost(self) -> dict[str, Json]:
        """Those that did not end well."""
        return {number: outcome for number, outcome in self.done.items() if "lost" in outcome}

    def summary(self) -> str:
        """The page ``docs/chaos.md``."""
        codes: dict[str, int] = {}
        for outcome in self.done.values():
            name = (
                "lost" if "lost" in outcome else f"exit {outcome['exit']}" if outcome["exit"] is not None else "killed"
            )
            codes[name] = codes.get(name, 0) + 1
        rows = "\n".join(f"| {name} | {count} |" for name, count in sorted(codes.items()))
        lost = "\n".join(f"- {number}: {outcome['lost'].splitlines()[0]}" for number, outcome in self.lost().items())
        return (
            "# Chaos: random disturbances of real holds on three real hosts\n\n"
            f"Seed {self.seed}: {len(self.done)} schedules, {len(self.lost())} lost.\n\n"
            "Written by `scripts/chaos.py --report`; what a schedule is and when it counts as lost stands at the head\n"
            "of that file.\n\n"
            f"| how the coordinator ended | schedules |\n|---|---|\n{rows}\n" + (f"\nLost:\n{lost}\n" if lost else "")
        )


def _one(lab: Lab, seed: int, number: int, *, keep: bool) -> Json:
    """What came of one schedule."""
    folder = Path(tempfile.mkdtemp(prefix=f"chaos-{number}-"))
    begun = time.monotonic()
    try:
        # `recover` prints its document; what matters of it is the exit code.
        with contextlib.redirect_stdout(io.StringIO()):
            outcome = run(lab, folder, schedule(seed, number))
    except (AssertionError, LabError) as error:
        outcome = {"lost": str(error), "folder": str(folder)}
        keep = True
    finally:
        if not keep:
            shutil.rmtree(folder)
    return {**outcome, "s": round(time.monotonic() - begun, 1)}


def work(seed: int, *, keep: bool) -> None:
    """The worker's side: a number in, its outcome out, until the parent is gone. SIGTERM ends it and its hosts."""
    signal.signal(signal.SIGTERM, _end)
    # Nothing but answers goes to the parent: whatever else prints, here or in a child, prints on stderr.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        with Lab() as lab:
            for line in sys.stdin:
                answers.write(json.dumps(_one(lab, seed, int(line), keep=keep)) + "\n")
                answers.flush()


def _end(number: int, _frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _run_all(ledger: Ledger, wanted: list[int], options: argparse.Namespace) -> None:
    argv = [sys.executable, __file__, "--worker", "--seed", str(ledger.seed)]
    if options.only is not None:
        argv += ["--only", str(options.only)]

    def done(number: int, outcome: Json) -> None:
        ledger.add(number, outcome)
        print(number, schedule(ledger.seed, number), outcome, file=sys.stderr, flush=True)

    with ledger.held():
        jobs = Jobs(argv, options.jobs, done, SCHEDULE_S)
        jobs.run(wanted, time.monotonic() + options.minutes * 60 if options.minutes else float("inf"))


def main() -> int:
    """Exit 0: all wanted schedules ran and none is lost; 1: some are; 3: not run here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="schedules 0 to COUNT - 1")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=0, help="stop after about so long; 0: never")
    parser.add_argument("--only", type=int, help="run this one schedule, whatever ran before")
    parser.add_argument("--state", type=Path, help="default: build/chaos/SEED.json")
    parser.add_argument("--report", type=Path, help="write the summary as a page, e.g. docs/chaos.md")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many run at once, on hosts each")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"chaos: NOT RUN ({reason})", file=sys.stderr)
        return 3
    if options.worker:
        work(options.seed, keep=options.only is not None)
        return 0
    ledger = Ledger(options.state or ROOT / "build" / "chaos" / f"{options.seed}.json", options.seed)
    if options.only is not None:
        wanted = [options.only]
    else:
        wanted = [number for number in range(options.count) if str(number) not in ledger.done]
    if wanted:
        _run_all(ledger, wanted, options)
    if options.report is not None:
        options.report.write_text(ledger.summary())
    print(f"chaos: seed {ledger.seed}, {len(ledger.done)} schedules, {len(ledger.lost())} lost")
    return 1 if ledger.lost() else 0


if __name__ == "__main__":
    sys.exit(main())
