"""Runs owned programs and services inside an open hold, through the guard, and fetches what they wrote.

A program is started once and never again. Its outcome is what the guard recorded, its observation is fetched by digest
before anything is torn down, and what it printed is kept beside it. Nothing here judges.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coordinator.errors import CoordinatorError, GateFailed
from coordinator.guard_client import GuardRefusal, Json, as_coordinator_error
from coordinator.session import HostSession
from coordinator.signals import InterruptFlag
from coordinator.window import Window
from receipts.fields import Exit, ExitKind, Sample
from remote_dspark.contract import OBSERVATION_SCHEMA
from windows.commands import Command, Program
from windows.template import fill, fill_argv

_WAIT_SLICE_S = 2
_OBSERVATION_FILE = "observation.json"
_MAX_OBSERVATION_BYTES = 4 << 20
_STDOUT_CAP_BYTES = 1 << 20

_EXITS = {
    "exited": ExitKind.EXITED,
    "signalled": ExitKind.SIGNALLED,
    "timed-out": ExitKind.TIMED_OUT,
    "ended-with-hold": ExitKind.TIMED_OUT,
}


@dataclass(frozen=True)
class ProgramRecord:
    """One finished program.

    Attributes:
        host: Where it ran.
        end: The guard's record of its end.
        observation: The parsed observation, or None when it wrote none.
        observation_sha256: Digest of the file's bytes as fetched.
        samples: Raw files by name, fetched and verified.
    """

    host: str
    end: Json
    observation: Json | None
    observation_sha256: str
    samples: dict[str, tuple[Sample, Path]] = field(default_factory=dict)

    @property
    def exit(self) -> Exit:
        """The end as a receipt says it; an unknown one stays unknown."""
        kind = _EXITS.get(str(self.end.get("state")), ExitKind.LINK_LOST)
        return Exit(
            kind=kind,
            code=self.end.get("code") if kind is ExitKind.EXITED else None,
            signal=self.end.get("signal") if kind is ExitKind.SIGNALLED else None,
        )

    @property
    def is_success(self) -> bool:
        """Exited 0 and wrote an observation."""
        return self.end.get("state") == "exited" and self.end.get("code") == 0 and self.observation is not None


@dataclass
class ProgramRunner:
    """Starts and awaits programs of one hold.

    Attributes:
        keep: Local folder for fetched files of this hold.
        values: Placeholders that are the same for the whole hold.
    """

    window: Window
    keep: Path
    interrupt: InterruptFlag
    values: Mapping[str, str | int]

    def start(
        self, session: HostSession, command: Command, name: str, values: Mapping[str, str | int], timeout_s: int
    ) -> str:
        """Start one owned program; returns the guard's run id."""
        output_dir = f"{session.spec.work_dir}/holds/{self.window.hold_id}/{name}"
        filled = {**self.values, **host_values(session), **values, "output_dir": output_dir}
        env = {key: fill(text, filled) for key, text in command.env.items()}
        env.setdefault("PYTHONPATH", session.package.path)
        args: Json = {
            "name": name,
            "argv": list(fill_argv(command.argv, filled)),
            "env": env,
            "cwd": fill(command.cwd, filled) if command.cwd else session.spec.work_dir,
            "timeout_s": timeout_s,
            "memory_max_bytes": command.memory_limit_bytes,
            "output_dir": output_dir,
            "stdout_cap_bytes": _STDOUT_CAP_BYTES,
        }
        if command.secret_env:
            # Paths only: the guard reads the values on the host, they never pass through here.
            args["secret_env"] = dict(command.secret_env)
        return str(self.window.act(session, "run", args)["run"])

    def run(self, session: HostSession, program: Program, name: str, values: Mapping[str, str | int]) -> ProgramRecord:
        """Start a program, wait for its end, fetch what it wrote.

        Raises:
            Interrupted: A person asked to stop; the program is ended by the restore that follows.
            OwnershipLost: The hold is no longer ours.
        """
        self.window.step_bound(program.timeout_s)
        try:
            run = self.start(session, program, name, values, program.timeout_s)
            end = self.wait(session, run)
        finally:
            self.window.step_bound(None)
        return self.collect(session, name, end)

    def wait(self, session: HostSession, run: str) -> Json:
        """Ask the guard until the run has ended; a safe point between two asks."""
        while True:
            self.interrupt.check()
            self.window.check_ownership()
            end = session.guard.call("wait", {"run": run, "wait_s": _WAIT_SLICE_S}, timeout_s=_WAIT_SLICE_S + 20)
            if end["state"] != "running":
                self.window.prove_ownership()
                return end

    def collect(self, session: HostSession, name: str, end: Json) -> ProgramRecord:
        """Fetch the observation and its raw samples by digest; keep both streams' tails beside them."""
        folder = self.keep / name
        folder.mkdir(parents=True, exist_ok=True)
        for stream in ("stdout", "stderr"):
            (folder / f"{stream}.txt").write_text(str(end.get(f"{stream}_tail", "")), encoding="utf-8")
        remote = f"{session.spec.work_dir}/holds/{self.window.hold_id}/{name}"
        try:
            data = session.host.read(f"{remote}/{_OBSERVATION_FILE}", max_bytes=_MAX_OBSERVATION_BYTES)
        except (OSError, CoordinatorError):
            return ProgramRecord(session.name, end, None, "")
        (folder / _OBSERVATION_FILE).write_bytes(data)
        document = parse_observation(data, f"{session.name}:{remote}")
        samples: dict[str, tuple[Sample, Path]] = {}
        for sample in parse_samples(document, f"{session.name}:{remote}"):
            path = folder / sample.name
            session.host.fetch(f"{remote}/{sample.name}", path, sha256=sample.sha256, size_bytes=sample.size_bytes)
            samples[sample.name] = (sample, path)
        return ProgramRecord(session.name, end, document, hashlib.sha256(data).hexdigest(), samples)

    def end(self, session: HostSession, run: str) -> Json:
        """End an owned run and its whole tree."""
        try:
            return self.window.act(session, "end-run", {"run": run})
        except GuardRefusal as refusal:
            raise as_coordinator_error(refusal) from refusal


def host_values(session: HostSession) -> dict[str, str | int]:
    """Placeholders that belong to a host."""
    return {
        **session.models,
        "python": session.spec.python,
        "work_dir": session.spec.work_dir,
        "state_dir": session.spec.state_dir,
        "host": session.name,
        "epoch": session.guard.claim["epoch"] if session.guard.claim else 0,
    }


def parse_observation(data: bytes, where: str) -> Json:
    """Parse an observation file; its fields are checked by the receipt model that embeds it.

    Raises:
        GateFailed: Not JSON, or another schema.
    """
    try:
        document: Any = json.loads(data)
    except ValueError as error:
        raise GateFailed("an observation is not JSON", where=where, found=str(error)) from error
    if not isinstance(document, dict) or document.get("schema") != OBSERVATION_SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise GateFailed("unknown observation", where=where, expected=OBSERVATION_SCHEMA, found=str(found))
    return document


def parse_samples(document: Json, where: str) -> tuple[Sample, ...]:
    """The raw files that an observation announces.

    Raises:
        GateFailed: The list is missing, or an entry is not what the schema says.
    """
    entries = document.get("samples")
    if not isinstance(entries, list):
        raise GateFailed("an observation lists no samples", where=where, expected="a list", found=str(entries)[:80])
    try:
        return tuple(Sample.model_validate(entry) for entry in entries)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise GateFailed(
            "an observation announces a raw file that does not fit its schema",
            where=f"{where}: samples.{field}",
            found=first["msg"],
        ) from error
