"""Writes receipts: turns what hosts and guards reported into predicates and appends them to the store.

The evidence class is computed here from host facts and never typed by a person: what ran on a CPU is EMULATED, what ran
on stand-in hosts is REHEARSED, and nothing derived is stronger than its weakest parent.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator import __version__
from coordinator.clock import Clock
from coordinator.guard_client import Json
from coordinator.session import HostSession
from coordinator.store import ReceiptId, Signer, Store
from receipts.build import build_receipt
from receipts.fields import (
    Evidence,
    Exit,
    ExitKind,
    Fence,
    Gpu,
    Host,
    Kind,
    Outcome,
    Parent,
    Position,
    Sample,
    Subject,
    Tool,
    Verdict,
)
from receipts.model import PREDICATES
from receipts.verdict import combine, conclude
from remote_dspark.contract import ComputeKind

ENVIRONMENT_ALLOW_LIST = ("LANG", "LC_ALL", "TZ", "PYTHONHASHSEED", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")
"""Variables that may be recorded; every other one could hold a secret (DECISIONS 19)."""

PASS = Verdict(outcome=Outcome.PASS)


def verdict(outcome: Outcome, *reasons: str) -> Verdict:
    """A verdict with its reasons."""
    return Verdict(outcome=outcome, reasons=reasons)


@dataclass(frozen=True)
class Clockings:
    """When something began, for the three time fields of a receipt."""

    utc: str
    monotonic_ns: int


@dataclass
class EvidenceWriter:
    """Appends the receipts of one command to one store.

    Attributes:
        store: Where they go.
        source_sha256: Tree digest of the coordinator's own package.
        plan_sha256: Digest of the compiled plan, once there is one.
        campaign: Name of the campaign; part of every window id.
        is_rehearsal: Whether the hosts stand in for others.
        signer: Signs every receipt; None writes unsigned ones.
    """

    store: Store
    source_sha256: str
    clock: Clock
    campaign: str
    is_rehearsal: bool
    plan_sha256: str | None = None
    signer: Signer | None = None
    written: list[tuple[Kind, ReceiptId]] = field(default_factory=list)

    def now(self) -> Clockings:
        """Mark the start of something."""
        return Clockings(self.clock.utc(), self.clock.monotonic_ns())

    def write(
        self,
        kind: Kind,
        body: Any,
        *,
        started: Clockings,
        scope: str,
        not_claimed: Sequence[str],
        evidence: Evidence,
        also: Verdict | None = None,
        sessions: Sequence[HostSession] = (),
        position: Position | None = None,
        parents: Sequence[Parent] = (),
        subjects: Sequence[Subject] = (),
        samples: Mapping[str, tuple[Sample, Path]] | None = None,
        exit: Exit | None = None,
        argv: Sequence[str] | None = None,
    ) -> ReceiptId:
        """Build, append, remember; returns the id that children name as a parent.

        The verdict is what the body's own records lead to, as a verifier recomputes it; ``also`` can only weaken it.
        """
        ended = exit or Exit(kind=ExitKind.EXITED, code=0)
        verdicts = [conclude(kind, body), conclude_exit_of(ended), *([also] if also is not None else [])]
        model: Any = PREDICATES[(kind, 1)]
        predicate = model(
            tool=Tool(name="coordinator", version=__version__, source_sha256=self.source_sha256),
            plan_sha256=self.plan_sha256,
            position=position or Position(window=None),
            hosts=tuple(host_block(session) for session in sessions),
            fences=tuple(
                Fence(host=s.name, epoch=s.guard.claim["epoch"]) for s in sessions if s.guard.claim is not None
            ),
            argv=tuple(argv if argv is not None else command_line()),
            environment={name: os.environ[name] for name in ENVIRONMENT_ALLOW_LIST if name in os.environ},
            started_utc=started.utc,
            ended_utc=self.clock.utc(),
            elapsed_ns=self.clock.monotonic_ns() - started.monotonic_ns,
            exit=ended,
            samples=tuple(sample for sample, _ in (samples or {}).values()),
            parents=tuple(parents),
            evidence=evidence,
            scope=scope,
            not_claimed=tuple(not_claimed),
            verdict=combine(verdicts),
            body=body,
        )
        draft = build_receipt(kind, predicate, subjects or [Subject(name="coordinator", sha256=self.source_sha256)])
        paths = {name: path for name, (_, path) in (samples or {}).items()}
        receipt = self.store.append(draft, samples=paths, signer=self.signer)
        self.written.append((kind, receipt))
        return receipt

    def procedure_evidence(self) -> Evidence:
        """The class of what was done to hosts (holds, recoveries): real, or a rehearsal of it."""
        return Evidence.REHEARSED if self.is_rehearsal else Evidence.MEASURED

    def computation_evidence(self, observations: Sequence[Json]) -> Evidence:
        """The class of numbers that programs on hosts computed."""
        if not observations or any(document["compute"] != ComputeKind.CUDA.value for document in observations):
            return Evidence.EMULATED
        return self.procedure_evidence()

    def window(self, hold_number: int) -> str:
        """The window id of a hold."""
        return f"{self.campaign}/hold-{hold_number}"


def command_line() -> tuple[str, ...]:
    """Our own command as run. Values never travel in it: secrets are named by file (DECISIONS 19)."""
    return (Path(sys.argv[0]).name, *sys.argv[1:])


def host_block(session: HostSession) -> Host:
    """The host block of a receipt, from the guard's facts."""
    facts = session.facts
    return Host(
        name=session.name,
        machine_id=str(facts["machine_id"]),
        boot_id=str(facts["boot_id"]),
        host_key=None if session.spec.transport == "local" else session.host.fingerprint(),
        kernel=str(facts.get("kernel", "")) or None,
        gpus=tuple(gpu_block(gpu) for gpu in facts.get("gpus", ())),
        labels={
            "hostname": str(facts.get("hostname", "")),
            "os": str(facts.get("os", "")),
            "cpu": str((facts.get("cpu") or {}).get("model", "")),
            "guard_sha256": session.guard_sha256,
        },
    )


def gpu_block(gpu: Json) -> Gpu:
    """One GPU from the guard's facts; what the driver does not say stays absent."""

    def text(name: str) -> str | None:
        value = gpu.get(name)
        return None if value is None else str(value)

    clocks = {name: value for name, value in (gpu.get("clocks") or {}).items() if isinstance(value, int)}
    power = gpu.get("power_limit_mw")
    return Gpu(
        uuid=str(gpu["uuid"]),
        pci=text("pci"),
        name=text("name"),
        driver=text("driver"),
        vbios=text("vbios"),
        ecc=text("ecc"),
        mig=text("mig"),
        compute_mode=text("compute_mode"),
        persistence=text("persistence"),
        clocks_mhz=clocks,
        power_limit_mw=power if isinstance(power, int) else None,
    )


def conclude_exit_of(ended: Exit) -> Verdict:
    """What the exit alone allows: only exit status 0 can be a PASS, an outcome nobody saw is UNKNOWN."""
    if ended.kind is ExitKind.EXITED and ended.code == 0:
        return PASS
    seen = ended.kind in (ExitKind.EXITED, ExitKind.SIGNALLED, ExitKind.TIMED_OUT)
    return verdict(
        Outcome.FAIL if seen else Outcome.UNKNOWN,
        f"ended: {ended.kind.value} {ended.code or ended.signal or ''}".strip(),
    )


def weakest(*classes: Evidence) -> Evidence:
    """The weakest of some evidence classes."""
    return min(classes, key=lambda evidence: evidence.strength)
