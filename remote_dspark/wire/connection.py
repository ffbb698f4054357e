"""One client's connection on the worker: frames in, handler calls, frames out, in order.

Rules: one frame is handled at a time; while an ``async`` handler runs, further frames wait in a bounded queue and
reading pauses above it. A plain handler is called in the same turn of the loop that read its frame. Whatever way the
connection ends, ``on_disconnect`` is called exactly once, if HELLO was settled.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, cast

from remote_dspark.wire import errors, validate
from remote_dspark.wire.codec import Buffer, FrameReader
from remote_dspark.wire.counters import DEADLINE, count
from remote_dspark.wire.deadlines import ServerDeadlines, Watch
from remote_dspark.wire.errors import LocalProtocolError, ProtocolError, RemoteProtocolError, Scope
from remote_dspark.wire.handler import DrafterHandler, DrafterRefusal
from remote_dspark.wire.kinds import FrameType, Role, Status
from remote_dspark.wire.mailbox import Tap
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
from remote_dspark.wire.session import Session
from remote_dspark.wire.table import ConnectionState

log = logging.getLogger("remote_dspark.wire")

QUEUE_FRAMES = 64
"""Frames that may wait for a busy handler before reading pauses; STATE is bounded by its credits already."""

QUEUE_BYTES = 16 << 20
READ_BYTES = 1 << 18
WRITE_HIGH_WATER = 1 << 20


class Connection(asyncio.BufferedProtocol):
    """See the module's rules. ``on_end`` is called once with this connection after ``on_disconnect``."""

    def __init__(
        self,
        handler: DrafterHandler,
        session: Session,
        deadlines: ServerDeadlines,
        *,
        admit: Callable[[Connection, asyncio.Transport], None],
        on_end: Callable[[Connection], None],
        tap: Tap | None = None,
    ) -> None:
        self.session = session
        self._handler = handler
        self._methods: dict[type[Any], Callable[[Any], Any]] = {
            Open: handler.on_open,
            State: handler.on_state,
            Step: handler.on_step,
            Commit: handler.on_commit,
            Reset: handler.on_reset,
            Cancel: handler.on_cancel,
        }
        self._deadlines = deadlines
        self._admit = admit
        self._on_end = on_end
        self._tap = tap
        self._reader = FrameReader()
        # Received into in place: the plain protocol would allocate as much for every read.
        self._received = memoryview(bytearray(READ_BYTES))
        self._queue: deque[bytearray] = deque()
        self._queued_bytes = 0
        self._is_busy = False
        self._is_over = False
        self._has_ended = False
        self._is_paused = False
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._transport: asyncio.Transport | None = None
        self._reading, self._writing = Watch(self._late), Watch(self._let_go)
        self._task: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()

    # -- asyncio.BufferedProtocol ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Admits the peer, then waits for HELLO."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)
        try:
            self._admit(self, self._transport)
        except RemoteProtocolError as error:
            self._reject(error)
            return
        self._reading.arm(self._deadlines.hello_s, "no HELLO in time")

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go; `buffer_updated` leaves nothing behind in it."""
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes came."""
        self.data_received(self._received[:nbytes])

    def data_received(self, data: Buffer) -> None:
        """Cuts frames and handles them; ``data`` is not kept."""
        try:
            for frame in self._reader.feed(data):
                if self._is_over:
                    return
                self._queue.append(frame)
                self._queued_bytes += len(frame)
                self._pump()
                self._reader.limits = self.session.codec_limits
        except RemoteProtocolError as error:
            self._reject(error)
            return
        if self._is_over:
            return
        self._throttle()
        if self.session.state is not ConnectionState.START:
            between = self._reader.is_between_frames
            self._reading.arm(
                self._deadlines.idle_s if between else self._deadlines.frame_s, "no further bytes in time"
            )

    def eof_received(self) -> bool:
        """The client is done; a half frame is counted."""
        try:
            self._reader.end()
        except RemoteProtocolError as error:
            count(self.session.counters, error.code)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """However it ended."""
        self._finish()

    def pause_writing(self) -> None:
        """The client does not take our bytes: stop producing."""
        self._can_write.clear()
        self._writing.arm(self._deadlines.write_s, "the client does not read")

    def resume_writing(self) -> None:
        """It does again."""
        self._writing.cancel()
        self._can_write.set()
        self._pump()

    # -- what the server calls ------------------------------------------------------------------------------------

    def announce_drain(self, reason: str) -> None:
        """Tells the client DRAIN."""
        if self.session.state is ConnectionState.READY and not self._is_over:
            self._write(Drain(self.session.session, reason))

    def close(self) -> None:
        """Ends the connection after flushing."""
        self._is_over = True
        if self._transport is not None:
            self._transport.close()
        else:
            self._finish()

    async def finished(self) -> None:
        """Until ``on_disconnect`` has returned."""
        await self._gone.wait()

    # -- frames in, in order --------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Handles queued frames until one needs awaiting or the client does not read."""
        while self._queue and not self._is_busy and not self._is_over and self._can_write.is_set():
            frame = self._queue.popleft()
            self._queued_bytes -= len(frame)
            waiting = self._handle(frame)
            if waiting is not None:
                self._is_busy = True
                self._task = asyncio.get_running_loop().create_task(self._continue(waiting))
        self._throttle()

    async def _continue(self, waiting: Awaitable[None]) -> None:
        await waiting
        self._is_busy = False
        self._pump()

    def _handle(self, frame: bytearray) -> Awaitable[None] | None:
        """One frame; an awaitable if its handler is asynchronous."""
        if self._tap is not None:
            self._tap(Role.CLIENT, frame)
        try:
            message = self.session.receive(frame)
        except RemoteProtocolError as error:
            self._answer_refusal(error)
            return None
        if isinstance(message, Hello):
            self._write(self.session.agreed)
            return None
        if isinstance(message, Ping):
            if not message.is_answer:
                self._write(Ping(message.session, message.token, is_answer=True))
            return None
        if isinstance(message, Drain | Error):
            return None
        return self._call(message)

    def _call(self, message: Message) -> Awaitable[None] | None:
        try:
            result = self._methods[type(message)](message)
        except DrafterRefusal as refusal:
            self._refuse(message, refusal)
            return None
        except Exception as error:  # noqa: BLE001 - a handler's bug must not leave the client waiting
            self._fault(message, error)
            return None
        if result is not None and type(result) is not Reply and inspect.isawaitable(result):
            return self._finish_call(message, result)
        self._done(message, result)
        return None

    async def _finish_call(self, message: Message, pending: Awaitable[Any]) -> None:
        try:
            result = await pending
        except DrafterRefusal as refusal:
            self._refuse(message, refusal)
            return
        except Exception as error:  # noqa: BLE001 - as in _call
            self._fault(message, error)
            return
        self._done(message, result)

    # -- answers --------------------------------------------------------------------------------------------------

    def _done(self, message: Message, result: object) -> None:
        """Writes what the frame's answer is, after its handler finished."""
        if self._is_over:
            return
        session = self.session.session
        if isinstance(message, Step):
            self._reply(message, result)
        elif isinstance(message, State):
            position = message.position + int(message.token_ids.size)
            self._write(
                Complete(
                    session,
                    FrameType.STATE,
                    slot=message.slot,
                    generation=message.generation,
                    position=position,
                    credits=1,
                )
            )
        elif isinstance(message, Reset):
            self._write(Complete(session, FrameType.RESET, slot=message.slot, generation=message.new_generation))
        elif isinstance(message, Open | Cancel):
            self._write(
                Complete(session, FRAME_TYPE_OF[type(message)], slot=message.slot, generation=message.generation)
            )

    def _reply(self, step: Step, result: object) -> None:
        """REPLY, then COMPLETE, or a refusal: a wrong reply never completes, whatever the client makes of it.

        REPLY leaves first, so that this end judges the rows while the client does; nothing in it may be used before
        COMPLETE.
        """
        try:
            if not isinstance(result, Reply):
                raise LocalProtocolError("wrong_reply_shape", f"on_step returned {type(result).__name__}, not a Reply")
            self._emit(self.session.send(result))
            validate.require_rows(result, self.session.limits)
        except ProtocolError as error:
            log.error("reply to batch %d refused: %s", step.batch, error)
            self._refuse(step, DrafterRefusal(error.code, str(error)))
            return
        batch, first = self.session.batches[step.batch_slot], step.requests[0]
        done = Complete(
            session=self.session.session,
            acknowledges=FrameType.STEP,
            status=Status.OK,
            batch_slot=step.batch_slot,
            batch=step.batch,
            slot=first.slot,
            generation=first.generation,
            round=first.round,
            position=first.anchor_position,
            context_version=first.context_version,
            reply_size_bytes=batch.reply_size_bytes,
            reply_digest=batch.reply_digest,
        )
        self._write(done)

    def _refuse(self, message: Message, refusal: DrafterRefusal) -> None:
        """A worker's refusal of one frame."""
        count(self.session.counters, refusal.code)
        reason = errors.RemoteProtocolError(str(refusal))
        reason.code, reason.scope = refusal.code, Scope.PROPOSAL
        if not self._is_over:
            self._write(self.session.refuse(reason, message))

    def _fault(self, message: Message, error: Exception) -> None:
        log.exception("handler failed on %s", type(message).__name__, exc_info=error)
        self._refuse(message, DrafterRefusal("handler_fault", f"{type(error).__name__}: {error}"))

    def _answer_refusal(self, error: RemoteProtocolError) -> None:
        """The session refused a frame (and counted it)."""
        if error.scope is Scope.CONNECTION:
            self._end_with(error)
        elif error.scope is Scope.PROPOSAL:
            self._write(self.session.refuse(error, error.refused))

    def _reject(self, error: RemoteProtocolError) -> None:
        """A refusal outside the session: framing, or a peer that may not connect."""
        count(self.session.counters, error.code)
        self._end_with(error)

    def _end_with(self, error: RemoteProtocolError) -> None:
        log.warning("connection refused: %s: %s", error.code, error)
        if not self._is_over and self._transport is not None:
            self._is_over = True
            self._transport.write(self.session.farewell(error))
            self._transport.close()

    def _write(self, message: Message) -> None:
        self._emit(self.session.send(message))

    def _emit(self, frame: bytearray) -> None:
        if self._tap is not None:
            self._tap(Role.SERVER, frame)
        if self._transport is not None and not self._is_over:
            self._transport.write(frame)

    # -- bounds ---------------------------------------------------------------------------------------------------

    def _throttle(self) -> None:
        if self._transport is None or self._is_over:
            return
        is_full = len(self._queue) >= QUEUE_FRAMES or self._queued_bytes >= QUEUE_BYTES
        if is_full and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        elif self._is_paused and not is_full:
            self._is_paused = False
            self._transport.resume_reading()

    def _late(self, why: str) -> None:
        if self._is_busy or self._is_paused:
            # The silence is ours, not the client's.
            self._reading.arm(self._deadlines.idle_s, why)
            return
        self._let_go(why)

    def _let_go(self, why: str) -> None:
        if self._is_over:
            return
        log.warning("connection of session %#x ended: %s", self.session.session, why)
        count(self.session.counters, DEADLINE)
        self._is_over = True
        if self._transport is not None:
            self._transport.abort()

    def _finish(self) -> None:
        if self._has_ended:
            return
        self._has_ended = self._is_over = True
        self._queue.clear()
        self._reading.cancel()
        self._writing.cancel()
        self._task = asyncio.get_running_loop().create_task(self._disconnect(self._task))

    async def _disconnect(self, running: asyncio.Task[None] | None) -> None:
        """``on_disconnect``, after a handler that is still running."""
        if running is not None:
            await asyncio.wait([running])
        try:
            if self.session.session:
                result = self._handler.on_disconnect(self.session.session)
                if inspect.isawaitable(result):
                    await result
        except Exception as error:
            log.exception("on_disconnect failed", exc_info=error)
        finally:
            self._on_end(self)
            self._gone.set()
