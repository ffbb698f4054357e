"""Drives one HOLD over its hosts: lease, snapshot, dead-man, stop; then restore and close.

Rules: every remote action is journalled before and after, under one operation id; hosts act in parallel under one
deadline; leases are taken in one fixed order, all or nothing; whatever goes wrong after the first stop leads to restore;
only the guards' proof closes the hold. What this file knows of production it got from the guards.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from coordinator.clock import Clock
from coordinator.errors import CoordinatorError, LinkLost, NotRestored, OwnershipLost
from coordinator.guard_client import GuardRefusal, Json, as_coordinator_error
from coordinator.heartbeat import Heartbeat
from coordinator.journal import Journal
from coordinator.render import Reporter
from coordinator.session import HostSession, in_parallel, new_operation_id
from windows.compiled import CompiledPlan
from windows.hold import HoldEvent, HoldMachine, HoldState
from windows.plan import StepKind

RestoredBy = Literal["close", "recover", "abort", "dead-man", "boot", "person", "none"]


@dataclass
class HostRecord:
    """What one host reported during the hold; becomes its part of the hold receipt."""

    epoch: int = 0
    snapshot: Json = field(default_factory=dict)
    snapshot_sha256: str | None = None
    stop_rows: list[Json] = field(default_factory=list)
    restore_rows: list[Json] = field(default_factory=list)
    probes: list[Json] = field(default_factory=list)
    stop_ns: int = 0
    restore_ns: int = 0
    service_ns: int = 0
    is_stopped: bool = False
    is_restored: bool = False
    in_debt: bool = False
    restored_by: RestoredBy = "none"
    witness_open: Json = field(default_factory=dict)
    witness_close: Json = field(default_factory=dict)


@dataclass(frozen=True)
class StateChange:
    """The hold entered a state, so long after it was opened."""

    state: str
    monotonic_ns: int
    host: str | None = None
    reason: str = ""


class Window:
    """One hold. Use: ``open``, any number of steps, ``restore``, ``close``; ``restore`` after any error past ``open``.

    Args:
        compiled: The frozen plan.
        number: Which hold of it.
        sessions: Connected hosts, programs staged.
        journal: Where every action is written first.
        owner: Who holds, for a person at 3 a.m.
        reason: Why, likewise.
    """

    def __init__(
        self,
        compiled: CompiledPlan,
        number: int,
        sessions: Sequence[HostSession],
        journal: Journal,
        *,
        clock: Clock,
        reporter: Reporter,
        owner: str,
        reason: str,
    ) -> None:
        self.compiled = compiled
        self.number = number
        order = compiled.lease_order()
        self.sessions = sorted(sessions, key=lambda session: order.index(session.name))
        self.hold_id = f"{compiled.plan.name}-{number}-{secrets.token_hex(6)}"
        self.records = {session.name: HostRecord() for session in sessions}
        self.timeline: list[StateChange] = []
        self.machine = HoldMachine()
        self.overhead_ns = 0
        self.step_ns: dict[StepKind, int] = {}
        self._journal = journal
        self._clock = clock
        self._reporter = reporter
        self._owner = owner
        self._reason = reason
        self._opened_ns = clock.monotonic_ns()
        self._heartbeat: Heartbeat | None = None

    # -- opening -----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Lease to proven stop.

        Raises:
            CoordinatorError: Nothing was stopped (everything is released again), or the stop is not proven and the
                caller must ``restore``.
        """
        self._journal.write({"type": "hold", "hold_id": self.hold_id, "number": self.number, "plan": self.compiled.sha256})
        self._enter(HoldEvent.ADMIT)
        try:
            self._timed(StepKind.LEASE, self._lease)
            self._timed(StepKind.SNAPSHOT, self._snapshot)
            self._timed(StepKind.ARM_DEAD_MAN, self._arm_dead_man)
        except BaseException:
            self._release_untouched()
            raise
        self._timed(StepKind.STOP, self._stop)

    def _lease(self) -> None:
        for session in self.sessions:
            result = self.act(session, "acquire", self._acquire_args(session), with_claim=False)
            session.guard.claim = result["claim"]
            self.records[session.name].epoch = int(result["claim"]["epoch"])
        in_parallel(self.sessions, lambda session: self.act(session, "confirm"))
        self._enter(HoldEvent.LEASED)
        self._heartbeat = Heartbeat(self.sessions, self.compiled.plan.orphan_after_s, self._clock)
        self._heartbeat.start()

    def _acquire_args(self, session: HostSession) -> Json:
        plan = self.compiled.plan
        return {
            "hold_id": self.hold_id,
            "owner": self._owner,
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
            result = self.act(session, "snapshot")
            record = self.records[session.name]
            record.snapshot, record.snapshot_sha256 = result["snapshot"], result["sha256"]

        in_parallel(self.sessions, one)
        self._enter(HoldEvent.SNAPSHOT_TAKEN)

    def _arm_dead_man(self) -> None:
        # Every dead-man is armed before any host stops anything (DECISIONS 33).
        in_parallel(self.sessions, lambda session: self.act(session, "arm"))
        self._enter(HoldEvent.DEAD_MEN_ARMED)

    def _stop(self) -> None:
        bound = self.compiled.plan.step_bounds_s[StepKind.STOP]

        def one(session: HostSession) -> None:
            record = self.records[session.name]
            record.is_stopped = True
            try:
                result = self.act(session, "stop", timeout_s=bound + 30)
            except GuardRefusal as refusal:
                record.stop_rows = list(refusal.details.get("rows", ()))
                raise
            record.stop_rows, record.stop_ns = list(result["rows"]), int(result["elapsed_ns"])
            record.service_ns += int(result["service_ns"])

        in_parallel(self.sessions, one)
        self._enter(HoldEvent.STOP_PROVEN)

    def _release_untouched(self) -> None:
        """Give back what was leased before anything was stopped; errors here must not hide the first one."""
        self._stop_heartbeat()
        for session in reversed(self.sessions):
            if session.guard.claim is None:
                continue
            try:
                self.act(session, "close")
            except (CoordinatorError, GuardRefusal) as error:
                # The provisional lease, or the dead-man, ends it without us.
                self._reporter.step(f"could not release: {error}", host=session.name)
            session.guard.claim = None

    # -- inside ------------------------------------------------------------------------------------------------

    def act(
        self, session: HostSession, verb: str, args: Json | None = None, *, with_claim: bool = True, timeout_s: float = 60.0
    ) -> Json:
        """One journalled guard call under a fresh operation id.

        Raises:
            GuardRefusal: The guard's refusal; journalled.
            CoordinatorError: The outcome is unknown here; journalled as such.
        """
        op = new_operation_id()
        self._journal.write({"type": "intent", "op": op, "host": session.name, "verb": verb, "hold_id": self.hold_id})
        try:
            result = session.guard.call(verb, args, op=op, with_claim=with_claim, timeout_s=timeout_s)
        except GuardRefusal as refusal:
            self._journal.write({"type": "outcome", "op": op, "ok": False, "code": refusal.code})
            raise
        except CoordinatorError as error:
            self._journal.write({"type": "outcome", "op": op, "ok": None, "code": type(error).__name__})
            raise
        self._journal.write({"type": "outcome", "op": op, "ok": True})
        return result

    def enter(self, event: HoldEvent, reason: str = "") -> None:
        """Advance the hold machine; refuses an event the current state does not allow."""
        self._enter(event, reason)

    def check_ownership(self) -> None:
        """A safe point.

        Raises:
            OwnershipLost: A guard no longer accepts our claim, or a foreign process took a device.
            LinkLost: Heartbeats have failed for longer than the hosts wait for us.
        """
        if self._heartbeat is not None:
            self._heartbeat.check()

    def step_bound(self, bound_s: int | None) -> None:
        """Tell the guards how long the step that begins now may stay silent; None ends it."""
        if self._heartbeat is not None:
            self._heartbeat.step_bound_s = bound_s
            self._heartbeat.beat_now()

    def remaining_s(self) -> float:
        """Seconds until owned runs are ended for the restore."""
        used = (self._clock.monotonic_ns() - self._opened_ns) / 1e9
        return self.compiled.plan.bound_s - self.compiled.plan.restore_reserve_s - used

    # -- ending ------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Put production back on every host and prove it; safe to call again.

        Raises:
            NotRestored: A host could not prove it; it stays in debt and the hold is DEGRADED.
            LinkLost: A host did not answer; it restores by itself at its deadline.
        """
        if self.machine.state not in (HoldState.RESTORING, HoldState.CLOSED):
            self._enter(HoldEvent.RESTORE)
        self.step_bound(self.compiled.plan.restore_reserve_s)
        errors = [error for error in self._each(self._restore_one) if error is not None]
        if not errors:
            self._enter(HoldEvent.RESTORE_PROVEN)
            return
        lost = [error for error in errors if isinstance(error, LinkLost)]
        if lost and len(lost) == len(errors):
            raise lost[0]
        self._enter(HoldEvent.RESTORE_FAILED, "; ".join(str(error) for error in errors))
        raise next(error for error in errors if not isinstance(error, LinkLost))

    def _restore_one(self, session: HostSession) -> None:
        record = self.records[session.name]
        if session.guard.claim is None:
            return
        start = self._clock.monotonic_ns()
        result = self.act(session, "restore", timeout_s=self.compiled.plan.restore_reserve_s + 30)
        record.restore_rows, record.probes = list(result["rows"]), list(result["probes"])
        record.restore_ns = self._clock.monotonic_ns() - start
        record.service_ns += int(result["service_ns"])
        record.is_restored = bool(result["proven"])
        record.in_debt = not record.is_restored
        if not record.is_restored:
            wrong = [row for row in record.restore_rows if row["ok"] is not True]
            raise NotRestored(
                f"{session.name}: production is not proven restored",
                where=session.name,
                expected="; ".join(f"{row['service']}.{row['field']} = {row['expected']}" for row in wrong),
                found="; ".join(str(row["found"]) for row in wrong),
                next_step=f"look at the host, then `coordinator hold recover --hold {self.hold_id}`",
            )
        record.restored_by = "close"

    def close(self) -> None:
        """Release every lease against the guards' proof."""
        start = self._clock.monotonic_ns()
        self._stop_heartbeat()
        errors = [error for error in self._each(lambda session: self.act(session, "close")) if error is not None]
        if errors:
            raise errors[0]
        self._enter(HoldEvent.CLOSED)
        self.step_ns[StepKind.CLOSE] = self._clock.monotonic_ns() - start
        self._journal.write({"type": "closed", "hold_id": self.hold_id})

    def abandon(self) -> None:
        """Stop the heartbeat and touch nothing: the hosts end this hold by themselves."""
        self._stop_heartbeat()

    # -- small parts -------------------------------------------------------------------------------------------

    def _each(self, action: Callable[[HostSession], Any]) -> list[CoordinatorError | None]:
        """Run on all hosts at once and keep each host's error: one that fails must not stop the others' restore."""

        def guarded(session: HostSession) -> CoordinatorError | None:
            try:
                action(session)
            except GuardRefusal as refusal:
                return as_coordinator_error(refusal)
            except CoordinatorError as error:
                return error
            return None

        return in_parallel(self.sessions, guarded)

    def _timed(self, kind: StepKind, action: Callable[[], None]) -> None:
        self._reporter.step(kind.value, left_s=self.remaining_s())
        start = self._clock.monotonic_ns()
        try:
            action()
        except GuardRefusal as refusal:
            raise as_coordinator_error(refusal) from refusal
        finally:
            self.step_ns[kind] = self._clock.monotonic_ns() - start

    def _enter(self, event: HoldEvent, reason: str = "") -> None:
        self.machine = self.machine.after(event)
        now = self._clock.monotonic_ns() - self._opened_ns
        self.timeline.append(StateChange(self.machine.state.value, now, None, reason))
        self._journal.write({"type": "state", "state": self.machine.state.value, "event": event.value, "reason": reason})

    def _stop_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None


def require_owned(error: CoordinatorError) -> bool:
    """True when the hosts may still be touched after this error: ownership was not lost."""
    return not isinstance(error, OwnershipLost)
