"""Drives one HOLD over its hosts: lease, snapshot, dead-man, stop; then restore and release.

Rules: every remote action is journalled before and after, under one operation id, and the hold machine refuses what the
tables do not allow; hosts act in parallel under one deadline; leases are taken in one fixed order, all or nothing;
whatever goes wrong after the first lease leads back to production; only the guards' proof closes the hold.
"""

from __future__ import annotations

import getpass
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from coordinator.clock import Clock
from coordinator.errors import (
    CoordinatorError,
    LinkLost,
    NotRestored,
)
from coordinator.guard_client import GuardRefusal, Json, as_coordinator_error
from coordinator.heartbeat import Heartbeat
from coordinator.journal import Journal
from coordinator.render import Reporter
from coordinator.session import HostSession, in_parallel
from coordinator.window_record import ACTIONS, CAUSES, HostRecord, StateChange
from windows.compiled import CompiledPlan
from windows.exit_codes import ExitCode
from windows.hold import exit_code
from windows.hold_table import GONE, TOUCHED, HoldEvent, HostFact, Moment, Phase
from windows.plan import StepKind

ASK_EVERY_S = 0.5


class Window:
    """One hold, as a context manager: inside call ``open`` and run programs; leaving always goes back to production.

    Args:
        compiled: The frozen plan.
        number: Which hold of it.
        sessions: Connected hosts, programs staged.
        journals: Folder that gets this hold's journal.
        reason: Why, for a person at 3 a.m.
        recover: The command that a person is told to run when production is not proven.
        head: Returns ``log``, ``head`` and ``sequence`` of the receipt store, or None while it is empty.
    """

    def __init__(
        self,
        compiled: CompiledPlan,
        number: int,
        sessions: Sequence[HostSession],
        journals: Path,
        *,
        clock: Clock,
        reporter: Reporter,
        reason: str,
        head: Callable[[], Json | None] | None = None,
        recover: str = "coordinator hold recover",
    ) -> None:
        self.compiled = compiled
        self.number = number
        order = compiled.lease_order()
        self.sessions = sorted(sessions, key=lambda session: order.index(session.name))
        self.hold_id = f"{compiled.plan.name.replace('.', '-').replace('_', '-')[:40]}-{number}-{secrets.token_hex(6)}"
        self.records = {session.name: HostRecord() for session in sessions}
        self.timeline: list[StateChange] = []
        self.step_ns: dict[StepKind, int] = {}
        self._clock = clock
        self._reporter = reporter
        self._reason = reason
        self._head = head
        self._recover = recover
        self._opened_ns = clock.monotonic_ns()
        self._heartbeat: Heartbeat | None = None
        self.journal = Journal(
            journals / f"{self.hold_id}.jsonl",
            clock,
            hold_id=self.hold_id,
            hold_number=number,
            plan_sha256=compiled.sha256,
            hosts=tuple(session.name for session in self.sessions),
        )

    @property
    def exit_code(self) -> ExitCode:
        """What the state of the hold means to the caller of the command."""
        return exit_code(self.journal.state)

    def __enter__(self) -> Window:
        """Nothing is touched until ``open``."""
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, cause: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Finish; the error that ended the block goes on to the caller."""
        self.finish(cause)

    # -- opening -----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Lease to proven stop. After an error ``finish`` releases or restores whatever was reached.

        Raises:
            CoordinatorError: What refused or failed.
        """
        self.note(HoldEvent.ADMITTED)
        self._timed(StepKind.LEASE, self._lease)
        self.note(HoldEvent.ALL_LEASED)
        self._witness("witness_open")
        self._timed(StepKind.SNAPSHOT, self._snapshot)
        self.note(HoldEvent.ALL_SNAPSHOT)
        # Every dead-man is armed before any host stops anything (DECISIONS 33).
        self._timed(StepKind.ARM_DEAD_MAN, lambda: self._on_all("arm"))
        self._timed(StepKind.STOP, self._stop)
        self.note(HoldEvent.ALL_HELD)

    def _lease(self) -> None:
        self._heartbeat = Heartbeat(self.compiled.plan.orphan_after_s, self._clock)
        for session in self.sessions:
            result = self.act(session, "acquire", self._acquire_args(session), with_claim=False)
            session.guard.claim = result["claim"]
            self.records[session.name].epoch = int(result["claim"]["epoch"])
            self._heartbeat.add(session)
        self._on_all("confirm")

    def _acquire_args(self, session: HostSession) -> Json:
        plan = self.compiled.plan
        return {
            "hold_id": self.hold_id,
            "owner": f"{getpass.getuser()}@{socket.gethostname()}",
            "reason": self._reason,
            "plan_sha256": self.compiled.sha256,
            "devices": list(session.spec.devices),
            "provisional_s": plan.provisional_s,
            "deadline_s": plan.bound_s,
            "restore_reserve_s": plan.restore_reserve_s,
            "orphan_after_s": plan.orphan_after_s,
            "services": [service.to_guard() for service in session.spec.services],
            "notify": list(self.compiled.site.notify) or None,
        }

    def _snapshot(self) -> None:
        def one(session: HostSession) -> None:
            self.records[session.name].snapshot_sha256 = self.act(session, "snapshot")["sha256"]

        in_parallel(self.sessions, one)

    def _stop(self) -> None:
        bound = self.compiled.plan.step_bounds_s[StepKind.STOP]

        def one(session: HostSession) -> None:
            record = self.records[session.name]
            try:
                result = self.act(session, "stop", timeout_s=bound + 30)
            except GuardRefusal as refusal:
                record.stop_rows = list(refusal.details.get("rows", ()))
                raise
            record.stop_rows = list(result["rows"])
            record.service_ns += int(result["service_ns"])

        self.step_bound(bound)
        in_parallel(self.sessions, one)
        self.step_bound(None)

    # -- inside ------------------------------------------------------------------------------------------------

    def act(
        self,
        session: HostSession,
        verb: str,
        args: Json | None = None,
        *,
        with_claim: bool = True,
        timeout_s: float = 60.0,
    ) -> Json:
        """One journalled guard call.

        Raises:
            GuardRefusal: The guard's refusal; journalled as failed.
            CoordinatorError: The outcome is unknown here; journalled as unknown.
        """
        op = self.journal.intent(session.name, ACTIONS[verb], verb)
        try:
            result = session.guard.call(verb, args, op=op, with_claim=with_claim, timeout_s=timeout_s)
        except GuardRefusal as refusal:
            self.journal.outcome(op, Moment.FAILED, detail=f"{refusal.code}: {refusal.message}")
            raise
        except CoordinatorError as error:
            self.journal.outcome(op, Moment.UNKNOWN, detail=error.message)
            raise
        done = verb != "restore" or result["proven"] is True
        epoch = int(result["claim"]["epoch"]) if verb == "acquire" else None
        self.journal.outcome(op, Moment.DONE if done else Moment.FAILED, epoch=epoch)
        return result

    def note(self, event: HoldEvent, reason: str = "", arm: str | None = None) -> None:
        """Record an event; the hold machine refuses one that does not fit."""
        before = self.journal.state.phase
        state = self.journal.note(event, reason, arm)
        if state.phase is not before or reason:
            self.timeline.append(StateChange(state.phase.value, self._clock.monotonic_ns() - self._opened_ns, reason))

    def check_ownership(self) -> None:
        """A safe point.

        Raises:
            OwnershipLost: A guard no longer accepts our claim, or a foreign process took a device.
            LinkLost: A host has not answered for longer than it waits for us.
        """
        if self._heartbeat is not None:
            self._heartbeat.check()

    def prove_ownership(self) -> None:
        """As `check_ownership`, by what the hosts answer now: what a program measured counts only after this.

        Raises:
            OwnershipLost: As there; also what happened since the last beat.
            LinkLost: As there.
        """
        if self._heartbeat is not None:
            self._heartbeat.beat_now()
        self.check_ownership()

    def step_bound(self, bound_s: int | None) -> None:
        """Tell the guards how long the step that begins now may stay silent; None ends it."""
        if self._heartbeat is not None:
            self._heartbeat.set_step_bound(bound_s)

    def remaining_s(self) -> float:
        """Seconds until owned runs are ended for the restore."""
        used = (self._clock.monotonic_ns() - self._opened_ns) / 1e9
        return self.compiled.plan.bound_s - self.compiled.plan.restore_reserve_s - used

    # -- ending ------------------------------------------------------------------------------------------------

    def finish(self, cause: BaseException | None) -> None:
        """The way back, whatever happened: restore what was touched, release what is held, close the journal.

        Does nothing to hosts that are no longer ours, and nothing can skip it: errors are recorded in the hold's state,
        whose ``exit_code`` is the command's.

        Args:
            cause: What ended the hold early, or None.
        """
        try:
            self._record_cause(cause)
            if self.journal.state.phase is Phase.RESTORING:
                self.step_bound(self.compiled.plan.restore_reserve_s)
                self._timed(StepKind.RESTORE, self._restore_touched)
                self._witness_at_close()
                self._timed(StepKind.CLOSE, self._release)
            elif self.journal.state.is_degraded:
                self._each(self.sessions, self._ask_whether_ended)
        finally:
            if self._heartbeat is not None:
                self._heartbeat.stop()
                self._heartbeat = None
            self.journal.close()

    def _witness_at_close(self) -> None:
        """Best effort: a guard that cannot keep the head must not keep production from being released."""
        try:
            self._witness("witness_close")
        except GuardRefusal as refusal:
            self._reporter.error(as_coordinator_error(refusal).lines())
        except CoordinatorError as error:
            self._reporter.error(error.lines())

    def _record_cause(self, cause: BaseException | None) -> None:
        if cause is None:
            self.note(HoldEvent.RESTORE_STARTED)
            return
        if isinstance(cause, GuardRefusal):
            cause = as_coordinator_error(cause)
        event = next((event for kind, event in CAUSES if isinstance(cause, kind)), HoldEvent.STEP_FAILED)
        if event is HoldEvent.OWNERSHIP_LOST and self.journal.state.phase is Phase.PLANNED:
            event = HoldEvent.REFUSED
        self.note(event, str(cause) or type(cause).__name__)

    def _restore_touched(self) -> None:
        touched = [s for s in self.sessions if self.journal.state.host(s.name).phase in TOUCHED]
        errors = self._each(touched, self._restore_one)
        failed = [error for error in errors if error is not None]
        for error in failed:
            self._reporter.error(error.lines())
        if any(not isinstance(error, LinkLost) for error in failed):
            self.note(HoldEvent.RESTORE_UNPROVEN, "; ".join(error.message for error in failed))

    def _restore_one(self, session: HostSession) -> None:
        record = self.records[session.name]
        try:
            result = self.act(session, "restore", timeout_s=self.compiled.plan.restore_reserve_s + 30)
        except GuardRefusal as refusal:
            if refusal.code != "HOLD_ENDED" or not self._take_proof(session, refusal.details):
                raise
            return
        record.restore_rows = list(result["rows"])
        record.service_ns += int(result["service_ns"])
        if result["proven"] is not True:
            wrong = [row for row in record.restore_rows if row["ok"] is not True]
            raise NotRestored(
                f"{session.name}: production is not proven restored",
                where=session.name,
                expected="; ".join(f"{row['service']}.{row['field']} = {row['expected']}" for row in wrong),
                found="; ".join(str(row["found"]) for row in wrong),
                next_step=f"look at the host, then `{self._recover} --hold {self.hold_id}`",
            )
        record.restored_by = "close"

    def _take_proof(self, session: HostSession, outcome: Json) -> bool:
        """Whether ``outcome`` says that exactly this hold ended there with production proven; then it is recorded."""
        state = self.journal.state.host(session.name)
        ours = (outcome.get("hold_id"), outcome.get("epoch")) == (self.hold_id, state.epoch)
        if not ours or outcome.get("proven") is not True or state.phase in GONE:
            return False
        self.records[session.name].restore_rows = list(outcome.get("rows", ()))
        self.journal.found(
            session.name, HostFact.FOUND_RELEASED, epoch=state.epoch, detail=f"the host says: {outcome.get('outcome')}"
        )
        return True

    def _ask_whether_ended(self, session: HostSession) -> None:
        """Reads only: a hold that is no longer ours is restored by its host, and then nothing is owed.

        Asks until the host has ended the hold, or has had its time for that, or somebody else owes the proof.
        """
        status = session.guard.call("status", with_claim=False)
        until_ns = self._clock.monotonic_ns() + int(self._time_to_end_s(status) * 1e9)
        while not self._take_proof(session, status.get("last_outcome") or {}):
            hold, debt = status.get("hold") or {}, status.get("debt") or {}
            is_ours = (hold or debt).get("hold_id") == self.hold_id
            is_stuck = bool(hold) and status["state"] == "degraded"
            if not is_ours or is_stuck or self._clock.monotonic_ns() > until_ns:
                return
            self._clock.sleep(ASK_EVERY_S)
            status = session.guard.call("status", with_claim=False)

    def _time_to_end_s(self, status: Json) -> float:
        """How long a host may need to end this hold by itself: its dead-man's time, then a restore."""
        fires_s = (status.get("hold") or {}).get("fires_in_s") or 0.0
        return max(float(fires_s), 0.0) + self.compiled.plan.restore_reserve_s

    def _release(self) -> None:
        held = [s for s in self.sessions if self.journal.state.host(s.name).phase not in GONE | TOUCHED]
        for error in self._each(held, lambda session: self.act(session, "close")):
            if error is not None:
                self._reporter.error(error.lines())
        state = self.journal.state
        if state.phase is Phase.RESTORING and all(host.phase in GONE for host in state.hosts):
            self.note(HoldEvent.ALL_RELEASED)

    # -- small parts -------------------------------------------------------------------------------------------

    def _witness(self, moment: Literal["witness_open", "witness_close"]) -> None:
        """Have every guard keep the store's chain head: a second witness beside the store's owner (DECISIONS 39)."""
        if self._head is None:
            return
        head = self._head()
        if head is None:
            return
        for session in self.sessions:
            setattr(self.records[session.name], moment, self.act(session, "witness", head))

    def _on_all(self, verb: str) -> None:
        in_parallel(self.sessions, lambda session: self.act(session, verb))

    def _each(
        self, sessions: Sequence[HostSession], action: Callable[[HostSession], object]
    ) -> list[CoordinatorError | None]:
        """Run on all at once and keep each host's error: one that fails must not stop the others' restore."""

        def guarded(session: HostSession) -> CoordinatorError | None:
            try:
                action(session)
            except GuardRefusal as refusal:
                return as_coordinator_error(refusal)
            except CoordinatorError as error:
                return error
            return None

        return in_parallel(sessions, guarded)

    def _timed(self, kind: StepKind, action: Callable[[], None]) -> None:
        self._reporter.step(kind.value, left_s=self.remaining_s())
        start = self._clock.monotonic_ns()
        try:
            action()
        except GuardRefusal as refusal:
            raise as_coordinator_error(refusal) from refusal
        finally:
            self.step_ns[kind] = self._clock.monotonic_ns() - start
