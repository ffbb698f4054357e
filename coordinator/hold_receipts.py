"""The receipts of one hold: what its guards proved, and how the hold went from open to close."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from coordinator.errors import CoordinatorError
from coordinator.evidence import PASS, Clockings, EvidenceWriter, verdict
from coordinator.guard_client import Json
from coordinator.hold_commands import guard_row
from coordinator.session import HostSession
from coordinator.store import ReceiptId
from coordinator.window import Window
from receipts import bodies
from receipts.errors import ReceiptError
from receipts.fields import Exit, ExitKind, Kind, Outcome, Parent, Position, Row, Subject
from windows.compiled import CompiledPlan
from windows.exit_codes import ExitCode
from windows.hold_table import HostPhase
from windows.plan import StepKind

NOT_CLAIMED = (
    "host attestation: a root user of a host can lie about that host",
    "the state of anything the site file does not name",
)


def write_hold(writer: EvidenceWriter, window: Window, started: Clockings, parents: list[Parent]) -> ReceiptId:
    """The hold receipt; also for a hold that was refused or ended early, because every attempt leaves one."""
    state = window.journal.state
    code = window.exit_code
    body = bodies.HoldBody(
        hold_id=window.hold_id,
        final_state=state.phase.value.upper(),
        deadline_ns=window.compiled.plan.bound_s * 10**9,
        restore_reserve_ns=window.compiled.plan.restore_reserve_s * 10**9,
        timeline=tuple(
            bodies.StateChange(state=change.state, monotonic_ns=change.monotonic_ns, reason=change.reason)
            for change in window.timeline
        ),
        hosts=tuple(held_host(window, session.name, session.guard_sha256) for session in window.sessions),
    )
    also = PASS if state.has_ended_well else verdict(outcome_of(code), *reasons_of(window))
    return writer.write(
        Kind.HOLD,
        body,
        started=started,
        scope=f"hold {window.number} of plan {window.compiled.plan.name}: production stopped, held and put back",
        not_claimed=NOT_CLAIMED,
        also=also,
        evidence=writer.procedure_evidence(),
        sessions=window.sessions,
        position=hold_position(writer, window),
        parents=parents,
        subjects=[Subject(name="plan", sha256=window.compiled.sha256)],
        exit=Exit(kind=ExitKind.EXITED, code=int(code)),
    )


def outcome_of(code: ExitCode) -> Outcome:
    """A hold whose production is not proven, or whose end nobody saw, is UNKNOWN or FAIL, never PASS."""
    return Outcome.UNKNOWN if code in (ExitCode.LINK_LOST, ExitCode.DONE) else Outcome.FAIL


def reasons_of(window: Window) -> list[str]:
    """What ended the hold early, in order."""
    said = [f"{change.state}: {change.reason}"[:2000] for change in window.timeline if change.reason]
    return said or [f"exit {int(window.exit_code)}: {window.exit_code.meaning}"]


def hold_position(writer: EvidenceWriter, window: Window, arm: str | None = None) -> Position:
    """Where in the campaign a receipt of this hold belongs."""
    return Position(window=writer.window(window.number), hold_id=window.hold_id, hold_number=window.number, arm=arm)


def held_host(window: Window, name: str, guard_sha256: str) -> bodies.HeldHost:
    """One host's part of the hold receipt."""
    record = window.records[name]
    state = window.journal.state.host(name)
    return bodies.HeldHost(
        host=name,
        guard_sha256=guard_sha256,
        epoch=record.epoch,
        snapshot_sha256=record.snapshot_sha256,
        stop_proof=tuple(guard_row(row) for row in record.stop_rows),
        restore_proof=tuple(guard_row(row) for row in record.restore_rows),
        debt=state.is_in_debt,
        restored_by=record.restored_by,
        witness_open=witness_block(name, record.witness_open),
        witness_close=witness_block(name, record.witness_close),
    )


def witness_block(host: str, said: Json) -> bodies.Witness | None:
    """The chain head a guard keeps, or None when it keeps none yet."""
    if not said.get("head"):
        return None
    return bodies.Witness(host=host, log=said["log"], sequence=int(said["sequence"]), head=said["head"])


def write_budget(writer: EvidenceWriter, window: Window, started: Clockings, hold: ReceiptId) -> ReceiptId:
    """The budget receipt of a hold without arms: what its steps really took against their declared bounds."""
    plan = window.compiled.plan
    bounds_s: dict[StepKind, int] = {
        kind: plan.step_bounds_s[kind] for kind in plan.step_kinds() if kind in window.step_ns
    }
    # What is left of the reserve after the restore's own bound is for proof, close and a slow link.
    bounds_s[StepKind.RESTORE] = plan.restore_reserve_s * 2 // 3
    reserve_s = plan.restore_reserve_s - bounds_s[StepKind.RESTORE]
    return writer.write(
        Kind.BUDGET,
        budget_body(bounds_s, window.step_ns, reserve_s, plan.bound_s, source=hold),
        started=started,
        scope=f"how long {', '.join(kind.value for kind in bounds_s)} took on these hosts, once",
        not_claimed=("the time of any other step", "an upper bound: it is one observation"),
        also=PASS if window.journal.state.has_ended_well else verdict(Outcome.UNKNOWN, "the hold did not end well"),
        evidence=writer.procedure_evidence(),
        sessions=window.sessions,
        position=hold_position(writer, window),
        parents=[Parent(kind=Kind.HOLD, sha256=hold, role=plan.purpose.value)],
        subjects=[Subject(name="plan", sha256=window.compiled.sha256)],
    )


def write_steps_budget(
    writer: EvidenceWriter,
    compiled: CompiledPlan,
    measured: Mapping[StepKind, int],
    started: Clockings,
    session: HostSession,
) -> ReceiptId:
    """The budget receipt of a trial: what the steps inside a hold took, once, outside one."""
    bounds_s = {kind: compiled.plan.step_bounds_s[kind] for kind in measured}
    return writer.write(
        Kind.BUDGET,
        budget_body(bounds_s, measured, compiled.plan.restore_reserve_s, compiled.plan.bound_s, source=None),
        started=started,
        scope="how long pair-qualify and the steps of one arm took on this host, once, beside running production",
        not_claimed=("anything the programs measured", "an upper bound: it is one observation"),
        evidence=writer.procedure_evidence(),
        sessions=[session],
        position=Position(window=f"{writer.campaign}/trial"),
        subjects=[Subject(name="plan", sha256=compiled.sha256)],
    )


def budget_body(
    bounds_s: Mapping[StepKind, int],
    measured: Mapping[StepKind, int],
    reserve_s: int,
    limit_s: int,
    *,
    source: ReceiptId | None,
) -> bodies.BudgetBody:
    """Bounds beside what was measured; the total is what a hold of exactly these steps may take."""
    steps = tuple(
        bodies.StepBudget(
            step=kind.value,
            bound_ns=bound * 10**9,
            measured_ns=measured.get(kind),
            basis="measured",
            source=source,
        )
        for kind, bound in bounds_s.items()
    )
    reserve_ns = reserve_s * 10**9
    return bodies.BudgetBody(
        steps=steps,
        restore_reserve_ns=reserve_ns,
        total_ns=sum(step.bound_ns for step in steps) + reserve_ns,
        limit_ns=limit_s * 10**9,
    )


def write_attempt(
    writer: EvidenceWriter, command: str, stage: str, error: CoordinatorError, started: Clockings
) -> ReceiptId:
    """The receipt of a command that was refused or failed before there was a hold to write about."""
    rows: tuple[Row, ...] = ()
    if error.expected or error.found:
        rows = (Row(field=stage, expected=error.expected[:4000], found=error.found[:4000], ok=False),)
    return writer.write(
        Kind.ATTEMPT,
        bodies.AttemptBody(
            command=command,
            stage=stage,
            exit_code=int(error.exit_code),
            error_code=type(error).__name__,
            message=error.message[:4000],
            rows=rows,
        ),
        started=started,
        scope=f"that `{command}` was tried and how it ended",
        not_claimed=("any measurement",),
        evidence=writer.procedure_evidence(),
        exit=Exit(kind=ExitKind.EXITED, code=int(error.exit_code)),
    )


@contextmanager
def refusals_kept(writer: EvidenceWriter, command: str, stage: str) -> Iterator[None]:
    """Whatever refuses inside leaves an attempt receipt: every attempt has one, also one that touched nothing."""
    started = writer.now()
    try:
        yield
    except CoordinatorError as error:
        with suppress(ReceiptError, OSError):
            # what refused matters more than that the store takes no receipt
            write_attempt(writer, command, stage, error, started)
        raise


def is_untouched(window: Window) -> bool:
    """True when no host ever granted a lease of this hold."""
    return all(window.records[s.name].epoch == 0 for s in window.sessions) and all(
        host.phase in (HostPhase.UNTOUCHED, HostPhase.RELEASED) for host in window.journal.state.hosts
    )
