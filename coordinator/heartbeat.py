"""Tells every guard that we are alive, one thread a host, and notices when a guard no longer agrees.

A thread of its own for each host, because waiting for one that does not answer must not silence us to the others.

A loss is terminal for the window: after it nobody renews, and the next safe point raises (coordination facts: a lease
that was lost and renewed again has two holders).
"""

from __future__ import annotations

import threading

from coordinator.clock import Clock
from coordinator.errors import CoordinatorError, GateFailed, LinkLost, OwnershipLost
from coordinator.guard_client import GuardRefusal
from coordinator.session import HostSession, in_parallel

DEAD_MAN_GRACE_S = 15.0
"""How long a dead-man may be gone: the host's own holder, or its service manager, starts it again within seconds."""


class Heartbeat:
    """The beats of a window.

    Args:
        orphan_after_s: Silence after which the hosts restore by themselves; beats come four times as often.
    """

    def __init__(self, orphan_after_s: int, clock: Clock) -> None:
        self.step_bound_s: int | None = None
        self._sessions: list[HostSession] = []
        self._orphan_after_s = orphan_after_s
        self._clock = clock
        self._ended = threading.Event()
        self._loss: CoordinatorError | None = None
        self._last_ok_ns: dict[str, int] = {}
        self._dead_man_missing_ns: dict[str, int] = {}
        self._threads: list[threading.Thread] = []

    def add(self, session: HostSession) -> None:
        """Begin to beat for a host that has just been leased: it must not take us for dead while others are leased."""
        self._last_ok_ns[session.name] = self._clock.monotonic_ns()
        self._sessions.append(session)
        thread = threading.Thread(target=self._run, args=(session,), name=f"heartbeat-{session.name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def stop(self) -> None:
        """End the threads; returns when no beat is under way."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def set_step_bound(self, bound_s: int | None) -> None:
        """The running step changed: tell the guards at once, before it begins; its end, with the next beat.

        Synchronous, because a guard that does not know the bound yet could take the step's silence for our death. One
        that knows it a little too long only waits for us a little longer.
        """
        self.step_bound_s = bound_s
        if bound_s is not None:
            self.beat_now()

    def beat_now(self) -> None:
        """Ask every host at once and wait for their answers."""
        in_parallel(self._sessions, self._beat)

    def check(self) -> None:
        """Raise what was lost, if anything was.

        Raises:
            OwnershipLost: A guard refused our claim, lost its holder, or saw a foreign process on a device.
            GateFailed: A host's dead-man is gone for good; the hold is still ours to restore.
            LinkLost: A host has not heard from us for as long as it waits.
        """
        if self._loss is not None:
            raise self._loss
        for name, last_ns in self._last_ok_ns.items():
            silent_s = (self._clock.monotonic_ns() - last_ns) / 1e9
            if silent_s > max(self._orphan_after_s, self.step_bound_s or 0):
                raise LinkLost(
                    f"{name} has not answered for {silent_s:.0f} s; it restores production by itself",
                    where=name,
                    next_step="`coordinator hold status` when the link is back, then `coordinator hold recover`",
                )

    def _run(self, session: HostSession) -> None:
        every_s = max(self._orphan_after_s / 4, 0.5)
        # The first after a pause: the host has just heard from us, when it gave the lease.
        while not self._ended.wait(every_s) and self._loss is None:
            self._beat(session)

    def _beat(self, session: HostSession) -> None:
        try:
            result = session.guard.call(
                "heartbeat",
                {"step_bound_s": self.step_bound_s},
                timeout_s=max(self._orphan_after_s / 4, 2.0),
                attempts=1,
            )
        except GuardRefusal as refusal:
            self._loss = OwnershipLost(
                f"{session.name} no longer accepts our claim: {refusal.message}",
                where=session.name,
                found=refusal.code,
                next_step="`coordinator hold status` says who has it now",
            )
            return
        except CoordinatorError:
            # Not a loss yet: `check` decides by the time since the last answer.
            return
        self._last_ok_ns[session.name] = self._clock.monotonic_ns()
        if result.get("invalidated"):
            self._loss = OwnershipLost(
                f"{session.name}: a foreign process uses a held device",
                where=session.name,
                found="; ".join(str(item) for item in result["invalidated"]),
                next_step="find out whose it is; what was measured so far is void",
            )
        elif not result.get("holder_alive", True):
            self._loss = OwnershipLost(
                f"{session.name}: the guard's holder is gone",
                where=session.name,
                next_step="the host puts production back by itself: `coordinator hold status` until it says free",
            )
        else:
            self._look_after_dead_man(session.name, is_missing=result.get("dead_man_alive") is False)

    def _look_after_dead_man(self, name: str, *, is_missing: bool) -> None:
        """A hold without a dead-man is ended while we can still restore it: if we died now, nobody would."""
        if not is_missing:
            self._dead_man_missing_ns.pop(name, None)
            return
        now = self._clock.monotonic_ns()
        gone_s = (now - self._dead_man_missing_ns.setdefault(name, now)) / 1e9
        if gone_s > DEAD_MAN_GRACE_S:
            self._loss = GateFailed(
                f"{name}: the dead-man is gone and the host does not start it again",
                where=name,
                expected="a dead-man that restores if we do not",
                found=f"none for {gone_s:.0f} s",
                next_step="nothing: production goes back now; then look at what ends programs on that host",
            )
