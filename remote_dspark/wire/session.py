"""One end of a connection, without I/O: messages in, frames out, and the other way round.

Rules: both ends run the same code over the tables of ``table``; `send` refuses what the peer would refuse, and
changes nothing when it refuses; `receive` either returns a message that may be acted on, or raises. What a refusal
costs is its ``scope``: the connection, a proposal (its generations are invalid from here on), or just one late frame.
Not thread-safe; time comes from outside (`expire`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remote_dspark.wire import errors, refusals, slots
from remote_dspark.wire.codec import Buffer, decode, encode
from remote_dspark.wire.counters import count, new_counters
from remote_dspark.wire.errors import LocalProtocolError, RemoteProtocolError, Scope
from remote_dspark.wire.header import frame_digest, require_reply_buffer
from remote_dspark.wire.kinds import FrameType, Role, Status
from remote_dspark.wire.limits import NUM_BATCH_SLOTS, Limits, check_answer, limits_of, negotiate
from remote_dspark.wire.messages import (
    FRAME_TYPE_OF,
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
from remote_dspark.wire.prefix import EMPTY_PREFIX, extend_prefix
from remote_dspark.wire.slots import Batch, Slot
from remote_dspark.wire.table import CONNECTION, BatchEvent, BatchState, ConnectionState, SlotEvent, SlotState
from remote_dspark.wire.unanswered import Unanswered


class Session:
    """The state machine of one connection, seen from ``role``.

    Attributes:
        role: Which end this is.
        hello: What this end offers.
        state: Of the connection.
        session: Session id, 0 until the server gave one.
        counters: Refusals by code and traffic.
        credits: STATE frames the client may still send.
    """

    def __init__(self, role: Role, hello: Hello, counters: dict[str, int] | None = None) -> None:
        self.role = role
        self.peer = Role.SERVER if role is Role.CLIENT else Role.CLIENT
        self.hello = hello
        self.state = ConnectionState.START
        self.session = 0
        self.counters = new_counters() if counters is None else counters
        self.credits = 0
        self.slots: list[Slot] = []
        self.batches = [Batch(index) for index in range(NUM_BATCH_SLOTS)]
        self._limits: Limits | None = None
        self._agreed: Hello | None = None
        self._unanswered = Unanswered()
        self._apply: dict[FrameType, Callable[[Any, Role], None]] = {
            FrameType.HELLO: self._hello,
            FrameType.OPEN: self._open,
            FrameType.STATE: self._state,
            FrameType.STEP: self._step,
            FrameType.REPLY: self._reply,
            FrameType.COMPLETE: self._complete,
            FrameType.COMMIT: self._commit,
            FrameType.RESET: self._reset,
            FrameType.CANCEL: self._cancel,
            FrameType.PING: self._nothing,
            FrameType.DRAIN: self._nothing,
            FrameType.ERROR: self._error,
        }

    # -- what the outside calls -----------------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        """Negotiated limits; only after HELLO."""
        if self._limits is None:
            raise LocalProtocolError("hello_required", "limits are known only after HELLO")
        return self._limits

    @property
    def codec_limits(self) -> Limits | None:
        """For a `FrameReader`: None until HELLO is settled."""
        return self._limits

    @property
    def agreed(self) -> Hello:
        """The settled HELLO; what the server answers with."""
        assert self._agreed is not None
        return self._agreed

    def send(self, message: Message) -> bytearray:
        """The frame to write for ``message``, after checking that it is allowed now.

        Raises:
            LocalProtocolError: with the code of the refusal the peer would raise; nothing has changed.
        """
        frame_type = FRAME_TYPE_OF[type(message)]
        try:
            after = self._next_connection_state(self.role, frame_type)
            self._require_session(message)
            frame = encode(message, None if frame_type is FrameType.HELLO else self._limits)
            if isinstance(message, Reply):
                self._note_reply(message, frame, self.role)
            self._apply[frame_type](message, self.role)
        except RemoteProtocolError as error:
            raise LocalProtocolError.of(error) from error
        self.state = ConnectionState.CLOSED if isinstance(message, Error) and message.is_fatal else after
        count(self.counters, "frames_out")
        count(self.counters, "bytes_out", len(frame))
        return frame

    def receive(self, frame: Buffer) -> Message:
        """The message of one whole frame, after checking that the peer may send it now.

        Raises:
            RemoteProtocolError: counted; ``scope`` says what is lost. A lost proposal's generations are already
                invalid when this raises.
        """
        count(self.counters, "frames_in")
        count(self.counters, "bytes_in", len(frame))
        message: Message | None = None
        try:
            message = decode(frame, self._limits)
            frame_type = FRAME_TYPE_OF[type(message)]
            after = self._next_connection_state(self.peer, frame_type)
            self._require_session(message)
            if isinstance(message, Reply):
                self._note_reply(message, frame, self.peer)
            self._apply[frame_type](message, self.peer)
        except RemoteProtocolError as error:
            error.refused = message
            self._account(error, message)
            raise
        self.state = after
        return message

    def expire(self, batch_slot: int) -> None:
        """The watchdog: no complete reply in time. Invalidates every generation in the batch, before anything else."""
        batch = self.batches[batch_slot]
        self._fail_members(batch)
        batch.move(BatchEvent.EXPIRE)
        count(self.counters, refusals.StepTimeoutError.code)

    def farewell(self, error: RemoteProtocolError) -> bytearray:
        """The fatal ERROR frame for a connection that ends, whatever state it is in."""
        self.state = ConnectionState.CLOSED
        return encode(self.refuse(error), self._limits)

    def refuse(self, error: RemoteProtocolError, message: object = None) -> Error:
        """The ERROR frame that answers ``message`` (or an undecodable frame)."""
        detail = "".join(c if c.isascii() and c.isprintable() else "?" for c in str(error))[:240]
        is_fatal = error.scope is Scope.CONNECTION
        if isinstance(message, Step):
            return Error(
                self.session, error.code, detail, FrameType.STEP, message.batch_slot, message.batch, is_fatal=is_fatal
            )
        slot, generation = getattr(message, "slot", 0), getattr(message, "generation", 0)
        generation = message.new_generation if isinstance(message, Reset) else generation
        acknowledges = int(FRAME_TYPE_OF.get(type(message), 0))
        return Error(
            self.session, error.code, detail, acknowledges, slot=slot, generation=generation, is_fatal=is_fatal
        )

    # -- HELLO ----------------------------------------------------------------------------------------------------

    def _hello(self, message: Hello, sender: Role) -> None:
        if message.role is not sender:
            raise errors.BadHelloError(f"role: expected {sender.name}, found {message.role.name}")
        if sender is Role.CLIENT:
            if self.role is Role.SERVER:
                self._agree(negotiate(message, self.hello))
            return
        if self.role is Role.CLIENT:
            check_answer(self.hello, message)
            self._agree(message)
        self._limits = limits_of(message)

    def _agree(self, agreed: Hello) -> None:
        limits = limits_of(agreed)
        require_reply_buffer(limits)
        self._agreed = agreed
        self.session = agreed.session
        self.slots = [Slot(index) for index in range(limits.max_slots)]
        self.credits = limits.state_credits

    # -- frames about one slot ------------------------------------------------------------------------------------

    def _open(self, message: Open, sender: Role) -> None:
        slot = self._slot(message.slot)
        slots.require_open(slot, message, self.limits)
        slot.move(SlotEvent.OPEN)
        self._occupy(slot, message.generation)
        slot.opened, slot.context_version = message, message.context_version
        self._unanswered.add(FrameType.OPEN, slot.index, slot.generation)

    def _state(self, message: State, sender: Role) -> None:
        slot = self._slot(message.slot)
        slots.require_state(slot, message)
        if self.credits == 0:
            raise errors.CreditExceededError(f"{self.limits.state_credits} STATE frames are unacknowledged")
        self.credits -= 1
        slot.prefix = extend_prefix(slot.prefix, message.token_ids)
        slot.position += int(message.token_ids.size)
        self._unanswered.add(FrameType.STATE, slot.index, slot.generation)

    def _commit(self, message: Commit, sender: Role) -> None:
        slot = self._slot(message.slot)
        slots.require_commit(slot, message, self.limits)
        slot.move(SlotEvent.COMMIT)
        slot.next_round += 1
        slot.committed = (message.committed_position, message.next_token)
        self._leave(slot)

    def _reset(self, message: Reset, sender: Role) -> None:
        slot = self._slot(message.slot)
        slots.require_reset(slot, message)
        slot.move(SlotEvent.RESET)
        self._leave(slot)
        position, prefix = slot.position, slot.prefix
        self._occupy(slot, message.new_generation)
        if message.keep_position:
            slot.position, slot.prefix = position, prefix
        self._unanswered.add(FrameType.RESET, slot.index, slot.generation)

    def _cancel(self, message: Cancel, sender: Role) -> None:
        slot = self._slot(message.slot)
        slot.require_generation(message.generation)
        slot.move(SlotEvent.CANCEL)
        self._leave(slot)
        self._unanswered.add(FrameType.CANCEL, slot.index, slot.generation)

    def _occupy(self, slot: Slot, generation: int) -> None:
        slot.generation, slot.next_round = generation, 0
        slot.position, slot.prefix, slot.committed = 0, EMPTY_PREFIX, None

    def _leave(self, slot: Slot) -> None:
        if slot.batch_slot is not None:
            self.batches[slot.batch_slot].leave(slot.index, slot.generation)
            slot.batch_slot = None

    # -- a round --------------------------------------------------------------------------------------------------

    def _step(self, message: Step, sender: Role) -> None:
        limits, batch = self.limits, self.batches[message.batch_slot]
        if len(message.requests) > limits.max_requests or message.depth > limits.max_depth:
            raise refusals.WrongPolicyError(
                f"STEP: at most {limits.max_requests} requests of depth {limits.max_depth} were negotiated"
            )
        slots.require_batch(batch, message)
        chosen = [self._slot(request.slot) for request in message.requests]
        if len({slot.index for slot in chosen}) != len(chosen):
            raise refusals.DuplicateSlotError("STEP names one slot twice")
        for slot, request in zip(chosen, message.requests, strict=True):
            slots.require_step_request(slot, request, message.depth, limits)
        batch.move(BatchEvent.STEP)
        batch.step, batch.members = message, {(slot.index, slot.generation) for slot in chosen}
        batch.last = message.batch
        for slot, request in zip(chosen, message.requests, strict=True):
            slot.move(SlotEvent.STEP)
            slot.batch_slot, slot.depth = batch.index, message.depth
            slot.anchor_position, slot.context_version = request.anchor_position, request.context_version

    def _note_reply(self, message: Reply, frame: Buffer, sender: Role) -> None:
        """Checks the reply against its STEP while its bytes are at hand."""
        batch = self.batches[message.batch_slot]
        try:
            slots.require_reply(batch, message)
        except RemoteProtocolError as error:
            error.batch_slot = batch.index
            raise
        batch.reply_size_bytes, batch.reply_digest = len(frame), frame_digest(frame)

    def _reply(self, message: Reply, sender: Role) -> None:
        self.batches[message.batch_slot].move(BatchEvent.REPLY)

    def _complete(self, message: Complete, sender: Role) -> None:
        if message.acknowledges is FrameType.STEP:
            self._complete_step(message)
            return
        self._unanswered.require(message.acknowledges, message.slot, message.generation)
        self._unanswered.settle(message.acknowledges, message.slot, message.generation)
        if message.acknowledges is FrameType.STATE:
            self._return_credits(message.credits)

    def _return_credits(self, credits: int) -> None:
        if self.credits + credits > self.limits.state_credits:
            raise errors.CreditExceededError(f"{credits} credits returned, {self.credits} were left")
        self.credits += credits

    def _complete_step(self, message: Complete) -> None:
        batch = self.batches[message.batch_slot]
        try:
            slots.require_completion(batch, message)
        except RemoteProtocolError as error:
            error.batch_slot = batch.index
            raise
        if message.status is Status.FAILED:
            self._fail_members(batch)
            batch.move(BatchEvent.COMPLETE_FAILED)
            return
        batch.move(BatchEvent.COMPLETE_OK)
        if batch.state is BatchState.READY:
            for index, _ in batch.members:
                self.slots[index].move(SlotEvent.ANSWER)

    def _error(self, message: Error, sender: Role) -> None:
        if message.is_fatal:
            if sender is self.peer:
                raise errors.PeerFaultError(f"{message.code}: {message.detail}")
            return
        if message.acknowledges == FrameType.STEP:
            if message.batch_slot < NUM_BATCH_SLOTS:
                self._fail_step(self.batches[message.batch_slot], message.batch)
            return
        if message.acknowledges == FrameType.STATE:
            self.credits = min(self.credits + 1, self.limits.state_credits)
        if message.slot >= len(self.slots) or self.slots[message.slot].generation != message.generation:
            return
        slot = self.slots[message.slot]
        self._unanswered.settle(message.acknowledges, slot.index, slot.generation)
        is_refused_open = message.acknowledges == FrameType.OPEN and slot.state is SlotState.OPEN
        slot.move(SlotEvent.CANCEL if is_refused_open else SlotEvent.FAIL)

    def _fail_step(self, batch: Batch, number: int) -> None:
        if batch.step is None or batch.step.batch != number:
            return
        self._fail_members(batch)
        if batch.state in (BatchState.STEPPING, BatchState.REPLIED, BatchState.DEAD):
            batch.move(BatchEvent.COMPLETE_FAILED)

    # -- failing --------------------------------------------------------------------------------------------------

    def _fail_members(self, batch: Batch) -> None:
        for index, generation in batch.members:
            if self.slots[index].generation == generation:
                self.slots[index].move(SlotEvent.FAIL)

    def _account(self, error: RemoteProtocolError, message: Message | None) -> None:
        """Counts a refusal and takes away what it costs."""
        count(self.counters, error.code)
        if error.scope is Scope.CONNECTION:
            self.state = ConnectionState.CLOSED
        elif error.scope is Scope.PROPOSAL:
            if isinstance(message, Reply | Complete) or message is None:
                if error.batch_slot is not None:
                    batch = self.batches[error.batch_slot]
                    self._fail_members(batch)
                    batch.move(BatchEvent.REJECT)
                return
            self._fail_named(message)

    def _fail_named(self, message: Message) -> None:
        """A refused request frame invalidates the occupants it names, and nobody else."""
        named = message.requests if isinstance(message, Step) else () if isinstance(message, Open) else (message,)
        for part in named:
            index, generation = getattr(part, "slot", None), getattr(part, "generation", None)
            if isinstance(index, int) and index < len(self.slots) and self.slots[index].generation == generation:
                self.slots[index].move(SlotEvent.FAIL)

    # -- small things ---------------------------------------------------------------------------------------------

    def _nothing(self, message: Ping | Drain, sender: Role) -> None:
        """PING and DRAIN move nothing but the connection."""

    def _slot(self, index: int) -> Slot:
        if index >= len(self.slots):
            raise refusals.SlotOutOfRangeError(f"slot {index}: {len(self.slots)} slots were negotiated")
        return self.slots[index]

    def _next_connection_state(self, sender: Role, frame_type: FrameType) -> ConnectionState:
        cell = CONNECTION[self.state, sender, frame_type]
        if isinstance(cell, ConnectionState):
            return cell
        raise cell(f"{frame_type.name} from the {sender.name.lower()} while the connection is {self.state.value}")

    def _require_session(self, message: Message) -> None:
        if isinstance(message, Hello) or (isinstance(message, Error) and self.session == 0):
            return
        if message.session != self.session:
            raise errors.WrongSessionError(f"expected session {self.session:#x}, found {message.session:#x}")
