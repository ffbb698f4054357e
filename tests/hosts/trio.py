"""Three real hosts with production on them, a coordinator that holds it, and what must be true afterwards."""

from __future__ import annotations

import json
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.errors import CoordinatorError
from coordinator.hold_commands import end_hold
from coordinator.journal import read_journal
from coordinator.rehearsal_site import write_toml
from tests.hosts.estate import OP, ROOT, WORK, Owner, fill_disk, fill_user_disk, plan_document, web, worker
from tests.hosts.lab import Lab
from tests.hosts.machine import LabError, Machine, start_ticks, wait_for
from tests.hosts.warm import Started
from windows.guard.framing import parse_reply
from windows.guard.state import State
from windows.hold import replay
from windows.site import parse_site

Json = dict[str, Any]

NAMES = ("h0", "h1", "h2")
BARE_NAMES = ("b0", "b1", "b2")
USER_NAMES = ("u0", "u1", "u2")

RESTORED_CODES = frozenset({0, 10, 11, 20, 22, 30, 33, 130})
"""Exit codes that promise: production is back, or was never touched."""

PLAIN_RUN = 'echo "$DSPARK_HOLD_ID"; exec sleep 60'

NUM_RECORDS = 63
"""Records of the journal of one undisturbed hold of three hosts with a run on each."""


@dataclass
class Driver:
    """A coordinator's process."""

    process: Started
    log: Path
    hold_id: str = ""
    code: int | None = None
    words: list[str] = field(default_factory=list)
    told: dict[str, str] = field(default_factory=dict)

    def until_station(self) -> str | None:
        """The label of the record it waits at, or None when it ended without reaching it."""
        for line in self.process.stdout:
            self.words.append(line.strip())
            mark, _, rest = line.strip().partition(" ")
            if mark == "#":
                self.hold_id = rest
            elif mark == "@":
                return rest.split()[1]
            elif mark == "cost":
                self.told[mark] = rest
            elif mark == "=":
                self.code = int(rest.split()[0])
        return None

    def go(self) -> None:
        """Let it go on."""
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """It dies as it stands."""
        self.process.kill()
        self.process.wait(30)

    def signal(self, number: signal.Signals) -> None:
        """Freeze it, or let it thaw."""
        self.process.send_signal(number)

    def finish(self, timeout_s: float = 90) -> int | None:
        """Wait for its end; its exit code, None when it was killed."""
        watchdog = threading.Timer(timeout_s, self.process.kill)
        watchdog.start()
        try:
            self.until_station()
            self.process.wait(30)
        finally:
            is_late = not watchdog.is_alive()
            watchdog.cancel()
        assert not is_late, f"the coordinator did not end within {timeout_s} s: {self.log.read_text()}"
        return self.code


UNARMED_STATES = frozenset({"provisional", "leased", "snapshotted"})


class Trio:
    """The three hosts in one test."""

    def __init__(
        self,
        lab: Lab,
        folder: Path,
        *,
        owner: Owner = ROOT,
        is_bare: bool = False,
        names: tuple[str, ...] = (),
        image: Callable[[Path], None] | None = None,
    ) -> None:
        self._lab = lab
        self.folder = folder
        self.owner = owner
        names = names or (BARE_NAMES if is_bare else USER_NAMES if owner is OP else NAMES)
        image = image or (fill_user_disk if owner is OP else fill_disk)
        self.machines = lab.machines_named(*names, image=image, is_bare=is_bare)
        self.services = ("worker",) if is_bare else ("web", "worker")
        self.drivers: list[Driver] = []
        self.extra: dict[str, Json] = {}
        self.added: list[Json] = []
        self.tainted = False
        self.worker_of: dict[str, Json] = {}
        self._before: dict[str, str] = {}
        self._starts: dict[str, Counter[str]] = {}
        self.num_boots = dict.fromkeys(names, 0)

    # -- before ------------------------------------------------------------------------------------------------

    def prepare(self, *, mode: str = "plain", **plan: Any) -> None:
        """Production up on every host, site and plan written."""
        for machine in self.machines:
            machine.heal()
            if self.owner is OP:
                # a user's manager starts after sshd greets
                wait_for(partial(self._serves_web, machine), 30, f"{machine.name}: the user's units are up")
        hosts = [self._host(machine, mode) for machine in self.machines]
        site = {"schema": "coordinator/site/v1", "name": "trio", "memory_tolerance_bytes": 1 << 40, "hosts": hosts}
        write_toml(self.folder / "site.toml", {**site, **self.extra.get("site", {})})
        write_toml(self.folder / "plan.toml", plan_document(**plan))
        parsed = parse_site({**site, **self.extra.get("site", {})})
        for machine in self.machines:
            process = next(entry for entry in parsed.host(machine.name).services if entry.name == "worker")
            self.worker_of[machine.name] = process.to_guard()
            if mode != "plain":
                # A reused host runs the plain one.
                self.ask(machine, "service-stop", {"service": process.to_guard()})
            self.ask(machine, "service-start", {"service": process.to_guard()})
        for machine in self.machines:
            self._before[machine.name] = self.look(machine)
            self._starts[machine.name] = self.starts(machine)
            for service in self.services:
                assert f"served by {service}" in self._before[machine.name], self._before[machine.name]

    def _serves_web(self, machine: Machine) -> bool:
        return "served by web" in self.look(machine)

    def _host(self, machine: Machine, mode: str) -> Json:
        kind, body = machine.host_key
        return {
            "name": machine.name,
            "transport": "ssh",
            "address": machine.address,
            "user": self.owner.user,
            "host_key": {"type": kind, "base64": body},
            "identity_file": str(machine.identity),
            "python": self.owner.python,
            "state_dir": self.owner.state,
            "work_dir": WORK,
            "roles": ["target", "drafter"],
            "devices": ["cpu0"],
            "services": [
                *(
                    {**document, **self.extra.get(document["name"], {})}
                    for document in (web(self.owner), worker(self.owner, mode))
                    if document["name"] in self.services
                ),
                *self.added,
            ],
        }

    def drive(self, at: str = "", *, run: bool = False, script: str = PLAIN_RUN, name: str = "driver") -> Driver:
        """Start a coordinator on this site; it waits after the record ``at``; with ``run`` it runs ``script``."""
        argv = ["--folder", str(self.folder), "--at", at, *(["--run", script] if run else [])]
        log = self.folder / f"{name}-{len(self.drivers)}.log"
        process = self._lab.start_coordinator(argv, log)
        self.drivers.append(Driver(process, log))
        return self.drivers[-1]

    # -- looking -----------------------------------------------------------------------------------------------

    def ask(self, machine: Machine, verb: str, args: Json | None = None, claim: Json | None = None) -> Json:
        """One guard call on the host itself, whatever its link does."""
        state = self.owner.state
        archive = sorted(machine.path(f"{state}/bin").glob("guard-*.pyz"))[0].name
        request = {"protocol": 1, "verb": verb, "op": secrets.token_hex(8), "claim": claim, "args": args or {}}
        argv = [*self.owner.enter, self.owner.python, "-I", "-S", f"{state}/bin/{archive}", "--state", state]
        reply = parse_reply(machine.inside(*argv, stdin=json.dumps(request).encode()).encode())
        if not reply["ok"]:
            raise LabError(f"{machine.name}: {verb}: {reply['error']}")
        result: Json = reply["result"]
        return result

    def status(self, machine: Machine) -> Json:
        """The guard's own view."""
        return self.ask(machine, "status")

    def events(self, machine: Machine) -> list[Json]:
        """The guard's log of this host, read from its disk by the guard's own reader: a full disk tears lines."""
        log, found = State(str(machine.path(self.owner.state))), list[Json]()
        while page := log.events(len(found)):
            found += page
        return found

    def is_settled(self, machine: Machine) -> bool:
        """No open record and no debt, or degraded; read from the disk, so that waiting costs the host nothing."""
        try:
            record = json.loads(machine.path(f"{self.owner.state}/record.json").read_text())
        except (FileNotFoundError, ValueError):
            return not machine.path(f"{self.owner.state}.debt/debt.json").exists()
        # Nothing waits with a hold that stopped nothing, after a reboot or once its holder was killed: the next call
        # finds it void and ends it. Before the dead-man is armed nobody else is there.
        is_unwatched = self.num_boots[machine.name] > 0 or record["state"] in UNARMED_STATES
        return record["state"] == "degraded" or (is_unwatched and self.status(machine)["state"] == "free")

    def look(self, machine: Machine) -> str:
        """Production as text."""
        return machine.inside(*self.owner.enter, "bash", "-c", self.owner.look(), check=False)

    def traces(self, machine: Machine) -> str:
        """What the guard still has on the host beside its state folder."""
        return machine.inside(*self.owner.enter, "bash", "-c", self.owner.traces(), check=False)

    def starts(self, machine: Machine) -> Counter[str]:
        """How often each service was started on this disk."""
        return Counter(machine.path("/srv/starts").read_text().split())

    # -- after -------------------------------------------------------------------------------------------------

    def reboot(self, machine: Machine) -> None:
        """Power back after a power-off."""
        machine.boot()
        self.num_boots[machine.name] += 1

    def repair_world(self) -> None:
        """Links plugged in, power on: what people do, never what the hosts have to do."""
        for machine in self.machines:
            if not machine.is_up:
                machine.start()
                self.num_boots[machine.name] += 1
        for machine in self.machines:
            machine.heal()
            machine.wait_ready()

    def wait_alone(self, timeout_s: float) -> float:
        """Until every host is free or degraded by itself; how long it took."""
        begun = time.monotonic()

        wait_for(
            lambda: all(map(self.is_settled, self.machines)),
            timeout_s,
            "the hosts end the hold by themselves",
            every_s=0.1,
        )
        return time.monotonic() - begun

    def recover(self, hold_id: str | None, verb: str = "recover") -> int:
        """What a person does: `coordinator hold recover`; its exit code."""
        try:
            return end_hold(
                self.folder / "site.toml",
                self.folder / "store",
                verb=verb,
                hold_id=hold_id,
                reason="the test's person",
                json=True,
            )
        except CoordinatorError as error:
            return int(error.exit_code)

    def knows(self, machine: Machine, hold_id: str) -> bool:
        """Whether a host ever granted this hold."""
        return any(event["event"] == "acquired" and event["hold_id"] == hold_id for event in self.events(machine))

    def wait_state(self, machine: Machine, wanted: Callable[[Json], bool], timeout_s: float, what: str) -> None:
        """Poll one host's status."""
        wait_for(lambda: wanted(self.status(machine)), timeout_s, f"{machine.name}: {what}", every_s=0.1)

    def start_what_no_hold_owes(self, machine: Machine) -> None:
        """After a power-off outside a debt, a process that nobody enabled is down: a person starts it, no guard."""
        if self.num_boots[machine.name] and self.status(machine)["state"] == "free":
            self.ask(machine, "service-start", {"service": self.worker_of[machine.name]})

    def require_restored(self, machine: Machine) -> None:
        """Production is exactly as it was, and nothing of a hold is left."""
        after = self.look(machine)
        assert after == self._before[machine.name], f"{machine.name}\n--- before\n{self._before[machine.name]}\n{after}"
        # The dead-man looks twice a second whether its hold is over.
        wait_for(lambda: not self.traces(machine), 20, f"{machine.name} keeps nothing of the hold", every_s=0.3)

    def require_history(self, machine: Machine, *, wiped: bool = False) -> None:
        """Never two holders, one restore for each hold, an end for each beginning."""
        events = [] if wiped else self.events(machine)
        open_hold: str | None = None
        epoch = 0
        restored: Counter[str] = Counter()
        ended: set[str] = set()
        for event in events:
            hold = event.get("hold_id") or ""
            if event["event"] == "acquired":
                assert open_hold is None, f"{machine.name}: {hold} acquired while {open_hold} was open: {events}"
                assert event["epoch"] > epoch, f"{machine.name}: epoch {event['epoch']} after {epoch}"
                open_hold, epoch = hold, event["epoch"]
            elif event["event"] in ("ended", "broken"):
                open_hold = None
                ended.add(hold)
            elif event["event"] == "restored":
                restored[hold] += 1
        assert open_hold is None, f"{machine.name}: {open_hold} has no end: {events}"
        assert all(count == 1 for count in restored.values()), f"{machine.name}: {restored}"
        holds = {event["hold_id"] for event in events if event["event"] == "stop-begins"}
        boots = self.num_boots[machine.name]
        for name, count in (self.starts(machine) - self._starts[machine.name]).items():
            allowed = (1 if wiped else len(holds)) + boots
            assert count <= allowed, f"{machine.name}: {name} was started {count} times, expected at most {allowed}"

    def require_journals(self) -> None:
        """Every attempt has a journal that replays."""
        journals = list((self.folder / "journals").glob("*.jsonl"))
        begun = [driver for driver in self.drivers if driver.hold_id]
        assert len(journals) == len(begun)
        for path in journals:
            replay(read_journal(path))

    def require_all(self, *, wiped: Machine | None = None) -> None:
        """Everything at once, when every host should be restored."""
        for machine in self.machines:
            self.require_restored(machine)
            self.require_history(machine, wiped=machine is wiped)
        self.require_journals()

    def close(self) -> None:
        """End what still runs; a host that is not as it was is wiped, so that the next test starts clean."""
        for driver in self.drivers:
            driver.process.close()
        off = [machine for machine in self.machines if self.tainted or not self._is_clean(machine)]
        for machine in off:
            machine.power_off()
            machine.wipe()

    def _is_clean(self, machine: Machine) -> bool:
        if not machine.is_up or machine.init_pid() is None or start_ticks(machine.init_pid() or 0) is None:
            return False
        try:
            return self.is_settled(machine) and not self.traces(machine)
        except (LabError, AssertionError):
            return False
