"""The client's half above a `Session`: bytes in, answers sorted by who waits for them. Shared by both clients.

Rules: no I/O, no waiting, no threads; the caller serialises access. A proposal is handed out only when its reply was
validated *and* its COMPLETE matched; until then, and on any refusal, there is nothing to hand out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from remote_dspark.wire import refusals
from remote_dspark.wire.codec import Buffer, FrameReader
from remote_dspark.wire.counters import count
from remote_dspark.wire.errors import ProtocolError, RemoteProtocolError, Scope
from remote_dspark.wire.kinds import FrameType, Role, Status
from remote_dspark.wire.messages import (
    Cancel,
    Commit,
    Complete,
    Drain,
    Error,
    Hello,
    Message,
    Open,
    Ping,
    Reply,
    Reset,
    State,
    Step,
)
from remote_dspark.wire.session import Session

Tap = Callable[[Role, bytes | bytearray], None]
"""Sees every frame as (sender, bytes); for `capture`."""

AckKey = tuple[FrameType, int, int]


class Mailbox:
    """Answers of one connection.

    Attributes:
        session: The state machine.
        failure: Why the connection is over, or None.
        is_draining: Whether the worker said DRAIN.
    """

    def __init__(self, hello: Hello, tap: Tap | None = None) -> None:
        self.session = Session(Role.CLIENT, hello)
        self.failure: Exception | None = None
        self.is_draining = False
        self._reader = FrameReader()
        self._tap = tap
        self._replies: dict[int, Reply] = {}
        self._rounds: dict[int, Reply | ProtocolError | None] = {}
        self._acks: dict[AckKey, ProtocolError | bool | None] = {}
        self._pongs: set[int] = set()

    # -- sending --------------------------------------------------------------------------------------------------

    def encode(self, message: Message) -> bytearray:
        """The frame for ``message``; whoever waits for its answer asks with `round_of` or `ack_of`."""
        frame = self.session.send(message)
        if isinstance(message, Step):
            self._rounds[message.batch] = None
        elif isinstance(message, Open):
            self._acks[FrameType.OPEN, message.slot, message.generation] = None
        elif isinstance(message, Reset):
            self._acks[FrameType.RESET, message.slot, message.new_generation] = None
        elif isinstance(message, Cancel):
            self._acks[FrameType.CANCEL, message.slot, message.generation] = None
        if self._tap is not None:
            self._tap(Role.CLIENT, frame)
        return frame

    def encode_commits(self, commits: Iterable[Commit]) -> bytearray:
        """Several COMMIT frames in one buffer."""
        return bytearray().join(self.encode(commit) for commit in commits)

    def chunks(self, message: State) -> Iterable[State]:
        """``message`` cut into frames within the negotiated chunk size."""
        rows = self.session.limits.rows_per_chunk
        for start in range(0, int(message.token_ids.size), rows):
            yield replace(
                message,
                position=message.position + start,
                token_ids=message.token_ids[start : start + rows],
                rows=message.rows[start : start + rows],
            )

    # -- receiving ------------------------------------------------------------------------------------------------

    def feed(self, data: Buffer) -> None:
        """Takes bytes from the peer; empty means the end of the stream. Sets `failure` instead of raising."""
        try:
            if not data:
                self._reader.end()
                raise ConnectionError("the drafter closed the connection")
            for frame in self._reader.feed(data):
                if self._tap is not None:
                    self._tap(Role.SERVER, frame)
                self._take(frame)
                self._reader.limits = self.session.codec_limits
        except RemoteProtocolError as error:
            # Header refusals happen before the session sees a frame.
            count(self.session.counters, error.code)
            self.failure = self.failure or error
        except ConnectionError as error:
            self.failure = self.failure or error

    def _take(self, frame: bytearray) -> None:
        try:
            message = self.session.receive(frame)
        except RemoteProtocolError as error:
            if error.scope is Scope.CONNECTION:
                self.failure = self.failure or error
            elif error.scope is Scope.PROPOSAL and error.batch_slot is not None:
                step = self.session.batches[error.batch_slot].step
                if step is not None:
                    self._settle(step.batch, error)
            return
        if isinstance(message, Reply):
            self._replies[message.batch] = message
        elif isinstance(message, Complete):
            self._complete(message)
        elif isinstance(message, Error):
            self._refused(message)
        elif isinstance(message, Ping):
            self._pongs.add(message.token)
        elif isinstance(message, Drain):
            self.is_draining = True

    def _complete(self, message: Complete) -> None:
        if message.acknowledges is not FrameType.STEP:
            key = (message.acknowledges, message.slot, message.generation)
            if key in self._acks:
                self._acks[key] = True
            return
        reply = self._replies.pop(message.batch, None)
        if message.status is Status.OK and reply is not None:
            self._settle(message.batch, reply)
        else:
            self._settle(message.batch, refusals.FailedCompletionError(f"batch {message.batch}: the worker gave up"))

    def _refused(self, message: Error) -> None:
        count(self.session.counters, refusals.DrafterRefusedError.code)
        error = refusals.DrafterRefusedError(f"{message.code}: {message.detail}", message.code)
        if message.acknowledges == FrameType.STEP:
            self._settle(message.batch, error)
            return
        for key in self._acks:
            if key == (message.acknowledges, message.slot, message.generation):
                self._acks[key] = error

    def _settle(self, batch: int, outcome: Reply | ProtocolError) -> None:
        self._replies.pop(batch, None)
        if batch in self._rounds and self._rounds[batch] is None:
            self._rounds[batch] = outcome

    # -- answers --------------------------------------------------------------------------------------------------

    def round_of(self, step: Step) -> Reply | None:
        """The complete reply, or None while it is due.

        Raises:
            ProtocolError: the proposal is lost.
        """
        outcome = self._rounds[step.batch]
        if outcome is None:
            return None
        del self._rounds[step.batch]
        if isinstance(outcome, ProtocolError):
            raise outcome
        return outcome

    def ack_of(self, key: AckKey) -> bool:
        """Whether the frame was acknowledged.

        Raises:
            ProtocolError: it was refused.
        """
        outcome = self._acks[key]
        if outcome is None:
            return False
        del self._acks[key]
        if isinstance(outcome, ProtocolError):
            raise outcome
        return True

    def pong_of(self, token: int) -> bool:
        """Whether the PING was answered."""
        if token not in self._pongs:
            return False
        self._pongs.discard(token)
        return True

    def expire(self, step: Step) -> ProtocolError:
        """The watchdog for one STEP: its generations are invalid when this returns the error to raise."""
        self._rounds.pop(step.batch, None)
        self._replies.pop(step.batch, None)
        batch = self.session.batches[step.batch_slot]
        if batch.step is step:
            self.session.expire(step.batch_slot)
        slots = ", ".join(str(request.slot) for request in step.requests)
        return refusals.StepTimeoutError(
            f"batch {step.batch}: no complete reply before the deadline; reset or cancel slots {slots}"
        )

    def require_alive(self) -> None:
        """Raises the reason when the connection is over."""
        if self.failure is not None:
            raise self.failure
