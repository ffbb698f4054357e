"""What every body of a hold shares: run a program on the host of its role, time it, and leave its receipt.

A program is judged here by its own checks and its end only; what an arm or a plan makes of it is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from coordinator.arm_values import hold_values
from coordinator.campaign_result import HoldResult
from coordinator.errors import GateFailed
from coordinator.evidence import PASS, Clockings, verdict
from coordinator.hold_receipts import hold_position
from coordinator.programs import ProgramRecord, ProgramRunner
from coordinator.session import HostSession
from coordinator.store import ReceiptId
from coordinator.window import Window
from receipts import bodies
from receipts.fields import Kind, Outcome, Row, Subject
from remote_dspark.contract import ObservationKind
from windows.commands import Program, Topology
from windows.plan import StepKind
from windows.site import Role

if TYPE_CHECKING:
    from coordinator.campaign import Campaign

_SCOPES = {
    Kind.PAIR_QUALIFICATION: (
        "that the two ranks of this drafter pair draw the same tokens from the same exact q, on this compute"
    ),
    Kind.WORKER_MEASUREMENT: "what a drafter worker or its kernels did and took on this compute, by the raw samples",
}
_KINDS = {
    ObservationKind.PAIR.value: Kind.PAIR_QUALIFICATION,
    ObservationKind.WHOLE_WORKER.value: Kind.WORKER_MEASUREMENT,
}


class HoldPrograms:
    """Programs of one open hold and their receipts."""

    def __init__(self, campaign: Campaign, window: Window, result: HoldResult) -> None:
        self._campaign = campaign
        self._window = window
        self._result = result
        self._plan = campaign.compiled.plan
        self._by_name = {session.name: session for session in window.sessions}
        self._runner = ProgramRunner(
            window=window,
            keep=campaign.keep / window.hold_id,
            interrupt=campaign.interrupt,
            values=hold_values(campaign.compiled, window.hold_id, window.number),
        )

    def _qualify_with(self, program: Program, name: str, step: StepKind, topology: Topology) -> ReceiptId:
        """Run a program once, leave its receipt, and insist that all its checks hold.

        Raises:
            GateFailed: They do not; the receipt is written, restore follows.
        """
        session = self._leader(program.role)
        self._campaign.reporter.step(name, host=session.name, left_s=self._window.remaining_s())
        started = self._campaign.writer.now()
        record = self._timed(step, lambda: self._runner.run(session, program, name, {}))
        rows = check_rows(record)
        receipt = self._write_observed(name, topology, session, record, rows, started)
        if rows_outcome(record, rows) is not Outcome.PASS:
            wrong = [row for row in rows if row.ok is not True]
            raise GateFailed(
                f"{name} did not pass",
                where=session.name,
                expected="; ".join(f"{row.field}: {row.expected}" for row in wrong) or "an observation with checks",
                found="; ".join(row.found for row in wrong) or describe_end(record),
                next_step=f"read {self._runner.keep / name}",
            )
        return receipt

    def _write_observed(
        self,
        name: str,
        topology: Topology,
        session: HostSession,
        record: ProgramRecord,
        rows: tuple[Row, ...],
        started: Clockings,
    ) -> ReceiptId:
        """The receipt that the observation's kind asks for, or that of a failed program."""
        writer = self._campaign.writer
        kind = _KINDS.get(str(record.observation["kind"])) if record.observation else None
        if record.observation is None or kind is None:
            return self._write_failed_program(name, record, session, started)
        body: Any = bodies.PairQualificationBody(observations=(embed(record),), gates=rows)
        if kind is Kind.WORKER_MEASUREMENT:
            body = bodies.WorkerMeasurementBody(topology=topology, observations=(embed(record),), gates=rows)
        outcome = rows_outcome(record, rows)
        reasons = [f"{row.field}: expected {row.expected}, found {row.found}" for row in rows if row.ok is not True]
        return writer.write(
            kind,
            body,
            started=started,
            scope=_SCOPES[kind],
            not_claimed=not_claimed(record),
            also=PASS if outcome is Outcome.PASS else verdict(outcome, *(reasons or [describe_end(record)])),
            evidence=writer.computation_evidence([record.observation]),
            sessions=[session],
            position=hold_position(writer, self._window),
            parents=self._campaign.evidence_parents(),
            subjects=[Subject(name="remote_dspark", sha256=record.observation["source_sha256"])],
            samples=record.samples,
            exit=record.exit,
        )

    def _write_failed_program(
        self, stage: str, record: ProgramRecord, session: HostSession, started: Clockings
    ) -> ReceiptId:
        writer = self._campaign.writer
        return writer.write(
            Kind.ATTEMPT,
            bodies.AttemptBody(
                command="campaign",
                stage=stage.replace(" ", "-"),
                exit_code=30,
                error_code="program-failed",
                message=describe_end(record),
            ),
            started=started,
            scope=f"that {stage} was run and how its program ended",
            not_claimed=("any measurement",),
            evidence=writer.procedure_evidence(),
            sessions=[session],
            position=hold_position(writer, self._window),
            exit=record.exit,
        )

    def _require_time(self, need_s: int, what: str) -> None:
        left = self._window.remaining_s()
        if left < need_s:
            raise GateFailed(
                f"{what} does not fit what is left of the hold", expected=f"{need_s} s", found=f"{left:.0f} s"
            )

    def _leader(self, role: Role) -> HostSession:
        return self._by_name[self._campaign.compiled.hosts_of(role)[0].name]

    def _timed(self, kind: StepKind, action: Callable[[], ProgramRecord]) -> ProgramRecord:
        start = self._campaign.clock.monotonic_ns()
        try:
            return action()
        finally:
            elapsed = self._campaign.clock.monotonic_ns() - start
            self._window.step_ns[kind] = max(self._window.step_ns.get(kind, 0), elapsed)


def not_claimed(record: ProgramRecord) -> tuple[str, ...]:
    """What no program of a hold says, and what it does not say because of where it computed."""
    general = ("live throughput of any deployment", "GB10 or any other device than the one named")
    if record.observation is not None and record.observation["compute"] != "cuda":
        return ("anything about a GPU: it was computed on a CPU", *general)
    return general


def embed(record: ProgramRecord) -> bodies.Observation:
    """The observation as a receipt embeds it.

    Raises:
        GateFailed: The document is not what the schema says.
    """
    assert record.observation is not None
    try:
        return bodies.Observation.from_document(record.observation, host=record.host, sha256=record.observation_sha256)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise GateFailed(
            "an observation does not fit its schema", where=f"{record.host}: {where}", found=first["msg"]
        ) from error


def check_rows(record: ProgramRecord) -> tuple[Row, ...]:
    """The program's own checks as rows, and how it ended."""
    checks = record.observation["checks"] if record.observation else []
    rows = [
        Row(field=str(c["name"]).replace(" ", "-")[:200], expected=c["expected"], found=c["found"], ok=c["ok"])
        for c in checks
    ]
    return (Row(field="program", expected="exited 0", found=describe_end(record), ok=record.is_success), *rows)


def rows_outcome(record: ProgramRecord, rows: tuple[Row, ...]) -> Outcome:
    """FAIL beats UNKNOWN beats PASS; a program without checks is UNKNOWN."""
    if any(row.ok is False for row in rows):
        return Outcome.FAIL
    if record.observation is None or not record.observation["checks"] or any(row.ok is None for row in rows):
        return Outcome.UNKNOWN
    return Outcome.PASS


def describe_end(record: ProgramRecord) -> str:
    """How a program ended, with the end of what it said."""
    end = record.end
    detail = end.get("code") if end.get("code") is not None else end.get("signal")
    tail = str(end.get("stderr_tail", "")).strip().splitlines()[-1:] or [""]
    head = f"{end.get('state')}{'' if detail is None else f' {detail}'}"
    return head if record.is_success else f"{head}: {tail[0][-300:]}".rstrip(": ")
