"""The rules of wire v2 as three total tables. Both ends run the same tables; neither has rules of its own.

1. A connection: who may send which frame when. A frame that moves nothing still has to be allowed.
2. A slot: what one request's occupant may do next. Its generation is checked before the table is asked.
3. A batch slot: one of the two reply buffers in flight. It is free again only when its STEP has been answered *and*
   every request in it has left (by COMMIT, RESET or CANCEL), so a late reply always finds its buffer still reserved.

Each cell is the next state, or the refusal to raise. A cell that is missing is a bug: the tests walk the products.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from remote_dspark.wire import errors, refusals
from remote_dspark.wire.errors import RemoteProtocolError
from remote_dspark.wire.kinds import FrameType, Role

Refusal = type[RemoteProtocolError]


class _Cell(Enum):
    """A table's key. Members are singletons, so the identity hash is right, and it costs no Python call."""

    __hash__ = object.__hash__


class ConnectionState(_Cell):
    """Of one connection."""

    START = "start"
    OFFERED = "offered"
    READY = "ready"
    DRAINING = "draining"
    CLOSED = "closed"


CLIENT_FRAMES: Final = frozenset(
    {
        FrameType.OPEN,
        FrameType.STATE,
        FrameType.STEP,
        FrameType.COMMIT,
        FrameType.RESET,
        FrameType.CANCEL,
        FrameType.PING,
        FrameType.DRAIN,
        FrameType.ERROR,
    }
)
SERVER_FRAMES: Final = frozenset(
    {FrameType.REPLY, FrameType.COMPLETE, FrameType.PING, FrameType.DRAIN, FrameType.ERROR}
)


def _connection_table() -> dict[tuple[ConnectionState, Role, FrameType], ConnectionState | Refusal]:
    state = ConnectionState
    table: dict[tuple[ConnectionState, Role, FrameType], ConnectionState | Refusal] = {}
    for now in state:
        for role in Role:
            for frame in FrameType:
                table[now, role, frame] = errors.UnexpectedFrameError
    for frame in FrameType:
        for role in Role:
            if frame is not FrameType.HELLO:
                table[state.START, role, frame] = errors.HelloRequiredError
                table[state.OFFERED, role, frame] = errors.HelloRequiredError
    table[state.START, Role.CLIENT, FrameType.HELLO] = state.OFFERED
    table[state.OFFERED, Role.SERVER, FrameType.HELLO] = state.READY
    # A refusal of HELLO itself must be sayable.
    table[state.START, Role.SERVER, FrameType.ERROR] = state.CLOSED
    table[state.OFFERED, Role.SERVER, FrameType.ERROR] = state.CLOSED
    for now in (state.READY, state.DRAINING):
        for role, frames in ((Role.CLIENT, CLIENT_FRAMES), (Role.SERVER, SERVER_FRAMES)):
            for frame in frames:
                table[now, role, frame] = now
            table[now, role, FrameType.DRAIN] = state.DRAINING
    table[state.DRAINING, Role.CLIENT, FrameType.OPEN] = errors.DrainingError
    return table


CONNECTION: Final = _connection_table()


class SlotState(_Cell):
    """Of one slot's occupant."""

    FREE = "free"
    OPEN = "open"
    STEPPING = "stepping"
    PROPOSED = "proposed"
    INVALID = "invalid"


class SlotEvent(_Cell):
    """What can happen to a slot. FAIL: a refusal, a rejected reply, or the watchdog."""

    OPEN = "open"
    STATE = "state"
    STEP = "step"
    ANSWER = "answer"
    COMMIT = "commit"
    RESET = "reset"
    CANCEL = "cancel"
    FAIL = "fail"


SLOT: Final[dict[SlotState, dict[SlotEvent, SlotState | Refusal]]] = {
    SlotState.FREE: {
        SlotEvent.OPEN: SlotState.OPEN,
        SlotEvent.STATE: refusals.SlotNotOpenError,
        SlotEvent.STEP: refusals.SlotNotOpenError,
        SlotEvent.ANSWER: refusals.StaleReplyError,
        SlotEvent.COMMIT: refusals.SlotNotOpenError,
        SlotEvent.RESET: refusals.SlotNotOpenError,
        SlotEvent.CANCEL: refusals.SlotNotOpenError,
        SlotEvent.FAIL: SlotState.FREE,
    },
    SlotState.OPEN: {
        SlotEvent.OPEN: refusals.SlotInUseError,
        SlotEvent.STATE: SlotState.OPEN,
        SlotEvent.STEP: SlotState.STEPPING,
        SlotEvent.ANSWER: refusals.StaleReplyError,
        SlotEvent.COMMIT: refusals.CommitWithoutProposalError,
        SlotEvent.RESET: SlotState.OPEN,
        SlotEvent.CANCEL: SlotState.FREE,
        SlotEvent.FAIL: SlotState.INVALID,
    },
    SlotState.STEPPING: {
        SlotEvent.OPEN: refusals.SlotInUseError,
        SlotEvent.STATE: refusals.RoundInFlightError,
        SlotEvent.STEP: refusals.DuplicateRoundError,
        SlotEvent.ANSWER: SlotState.PROPOSED,
        SlotEvent.COMMIT: refusals.RoundInFlightError,
        SlotEvent.RESET: SlotState.OPEN,
        SlotEvent.CANCEL: SlotState.FREE,
        SlotEvent.FAIL: SlotState.INVALID,
    },
    SlotState.PROPOSED: {
        SlotEvent.OPEN: refusals.SlotInUseError,
        SlotEvent.STATE: refusals.UncommittedRoundError,
        SlotEvent.STEP: refusals.UncommittedRoundError,
        SlotEvent.ANSWER: refusals.DuplicateReplyError,
        SlotEvent.COMMIT: SlotState.OPEN,
        SlotEvent.RESET: SlotState.OPEN,
        SlotEvent.CANCEL: SlotState.FREE,
        SlotEvent.FAIL: SlotState.INVALID,
    },
    SlotState.INVALID: {
        SlotEvent.OPEN: refusals.SlotInUseError,
        SlotEvent.STATE: refusals.GenerationInvalidError,
        SlotEvent.STEP: refusals.GenerationInvalidError,
        SlotEvent.ANSWER: refusals.StaleReplyError,
        SlotEvent.COMMIT: refusals.GenerationInvalidError,
        SlotEvent.RESET: SlotState.OPEN,
        SlotEvent.CANCEL: SlotState.FREE,
        SlotEvent.FAIL: SlotState.INVALID,
    },
}


class BatchState(_Cell):
    """Of one batch slot (reply buffer)."""

    FREE = "free"
    STEPPING = "stepping"
    REPLIED = "replied"
    READY = "ready"
    """Complete and consumable; held until every request has left."""
    DEAD = "dead"
    """Rejected or expired before it was answered: what still arrives is dropped."""
    FAILED = "failed"
    """Answered, nothing to consume; held until every request has left."""


class BatchEvent(_Cell):
    """What can happen to a batch slot. LEFT: no request is in it any more."""

    STEP = "step"
    REPLY = "reply"
    COMPLETE_OK = "complete-ok"
    COMPLETE_FAILED = "complete-failed"
    REJECT = "reject"
    EXPIRE = "expire"
    LEFT = "left"


BATCH: Final[dict[BatchState, dict[BatchEvent, BatchState | Refusal]]] = {
    BatchState.FREE: {
        BatchEvent.STEP: BatchState.STEPPING,
        BatchEvent.REPLY: refusals.StaleReplyError,
        BatchEvent.COMPLETE_OK: refusals.StaleReplyError,
        BatchEvent.COMPLETE_FAILED: refusals.StaleReplyError,
        BatchEvent.REJECT: BatchState.FREE,
        BatchEvent.EXPIRE: BatchState.FREE,
        BatchEvent.LEFT: BatchState.FREE,
    },
    BatchState.STEPPING: {
        BatchEvent.STEP: refusals.BatchSlotBusyError,
        BatchEvent.REPLY: BatchState.REPLIED,
        BatchEvent.COMPLETE_OK: refusals.WrongCompletionError,
        BatchEvent.COMPLETE_FAILED: BatchState.FAILED,
        BatchEvent.REJECT: BatchState.DEAD,
        BatchEvent.EXPIRE: BatchState.DEAD,
        BatchEvent.LEFT: BatchState.DEAD,
    },
    BatchState.REPLIED: {
        BatchEvent.STEP: refusals.BatchSlotBusyError,
        BatchEvent.REPLY: refusals.DuplicateReplyError,
        BatchEvent.COMPLETE_OK: BatchState.READY,
        BatchEvent.COMPLETE_FAILED: BatchState.FAILED,
        BatchEvent.REJECT: BatchState.DEAD,
        BatchEvent.EXPIRE: BatchState.DEAD,
        BatchEvent.LEFT: BatchState.DEAD,
    },
    BatchState.READY: {
        BatchEvent.STEP: refusals.BatchSlotBusyError,
        BatchEvent.REPLY: refusals.DuplicateReplyError,
        BatchEvent.COMPLETE_OK: refusals.DuplicateReplyError,
        BatchEvent.COMPLETE_FAILED: refusals.DuplicateReplyError,
        BatchEvent.REJECT: BatchState.FAILED,
        BatchEvent.EXPIRE: BatchState.FAILED,
        BatchEvent.LEFT: BatchState.FREE,
    },
    BatchState.DEAD: {
        BatchEvent.STEP: refusals.BatchSlotBusyError,
        BatchEvent.REPLY: refusals.StaleReplyError,
        BatchEvent.COMPLETE_OK: BatchState.FAILED,
        BatchEvent.COMPLETE_FAILED: BatchState.FAILED,
        BatchEvent.REJECT: BatchState.DEAD,
        BatchEvent.EXPIRE: BatchState.DEAD,
        BatchEvent.LEFT: BatchState.DEAD,
    },
    BatchState.FAILED: {
        BatchEvent.STEP: refusals.BatchSlotBusyError,
        BatchEvent.REPLY: refusals.StaleReplyError,
        BatchEvent.COMPLETE_OK: refusals.StaleReplyError,
        BatchEvent.COMPLETE_FAILED: refusals.StaleReplyError,
        BatchEvent.REJECT: BatchState.FAILED,
        BatchEvent.EXPIRE: BatchState.FAILED,
        BatchEvent.LEFT: BatchState.FREE,
    },
}
