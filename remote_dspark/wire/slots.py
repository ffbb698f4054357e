"""What a session remembers of each slot and each batch slot, and the checks that need that memory.

Rules: ``require_x`` only looks; ``Slot.move`` and ``Batch.move`` are the only writers of a state, through ``table``.
Everything is checked before anything moves, so a refused frame changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from remote_dspark.contract import DraftMode
from remote_dspark.wire import refusals
from remote_dspark.wire.kinds import RowKind, Status
from remote_dspark.wire.limits import Limits
from remote_dspark.wire.messages import Commit, Complete, Open, Reply, Reset, State, Step, StepRequest
from remote_dspark.wire.prefix import EMPTY_PREFIX, extend_prefix
from remote_dspark.wire.table import BATCH, SLOT, BatchEvent, BatchState, SlotEvent, SlotState

LAST_U64: Final = 2**64 - 1
"""Never used as a generation or batch: exhaustion refuses instead of wrapping."""

ROUND_END: Final = 2**32
POSITION_END: Final = 2**32
"""The RNG counter holds round and position as u32 (contract.RNG_KEY_TAG)."""

_GREEDY: Final = int(RowKind.GREEDY)


@dataclass(slots=True)
class Slot:
    """One seat.

    Attributes:
        index: Number of the seat.
        state: Where its occupant stands.
        generation: Current or last occupant; the next must be greater. -1 before the first.
        next_round: The only round number that STEP may have.
        position: STATE rows delivered, which is the next missing position.
        prefix: Digest of the tokens at those positions.
        opened: The occupant's OPEN.
        context_version: Greatest seen in this generation.
        committed: (position, token) of the last COMMIT: the next anchor, unless the target went on alone.
        batch_slot: Where its round is in flight or held.
        anchor_position: Of the round in flight.
        depth: Of the round in flight.
    """

    index: int
    state: SlotState = SlotState.FREE
    generation: int = -1
    next_round: int = 0
    position: int = 0
    prefix: bytes = EMPTY_PREFIX
    opened: Open | None = None
    context_version: int = 0
    committed: tuple[int, int] | None = None
    batch_slot: int | None = None
    anchor_position: int = 0
    depth: int = 0

    def next_state(self, event: SlotEvent) -> SlotState:
        """The table's answer.

        Raises:
            RemoteProtocolError: the cell's refusal.
        """
        cell = SLOT[self.state][event]
        if isinstance(cell, SlotState):
            return cell
        error = cell(f"slot {self.index} is {self.state.value}: {event.value} is not allowed now")
        error.slot, error.batch_slot = self.index, self.batch_slot
        raise error

    def move(self, event: SlotEvent) -> None:
        """Takes the transition."""
        self.state = self.next_state(event)

    def require_generation(self, generation: int) -> None:
        """The message is about the current occupant."""
        if self.state is SlotState.FREE:
            raise refusals.SlotNotOpenError(f"slot {self.index} is free")
        if generation != self.generation:
            raise refusals.StaleGenerationError(
                f"slot {self.index}: expected generation {self.generation}, found {generation}"
            )

    def require_new_generation(self, generation: int) -> None:
        """A new occupant's number is greater than every earlier one."""
        if generation == LAST_U64:
            raise refusals.ExhaustedCounterError(f"slot {self.index}: generation {generation} would be the last")
        if generation <= self.generation:
            raise refusals.StaleGenerationError(
                f"slot {self.index}: expected a generation above {self.generation}, found {generation}"
            )


@dataclass(slots=True)
class Batch:
    """One of the two reply buffers.

    Attributes:
        index: 0 or 1.
        state: Where it stands.
        step: The STEP it serves.
        members: (slot, generation) that have not left.
        last: Number of its last STEP; -1 before the first.
        reply_size_bytes: Of the reply frame received or sent.
        reply_digest: xxh3-128 of that frame.
    """

    index: int
    state: BatchState = BatchState.FREE
    step: Step | None = None
    members: set[tuple[int, int]] = field(default_factory=set)
    last: int = -1
    reply_size_bytes: int = 0
    reply_digest: bytes = b""

    def next_state(self, event: BatchEvent) -> BatchState:
        """The table's answer.

        Raises:
            RemoteProtocolError: the cell's refusal.
        """
        cell = BATCH[self.state][event]
        if isinstance(cell, BatchState):
            return cell
        error = cell(f"batch slot {self.index} is {self.state.value}: {event.value} is not allowed now")
        error.batch_slot = self.index
        raise error

    def move(self, event: BatchEvent) -> None:
        """Takes the transition, and frees the buffer once it is answered and empty."""
        self.state = self.next_state(event)
        if not self.members and self.state in (BatchState.READY, BatchState.FAILED):
            self.state = BatchState.FREE

    def leave(self, slot: int, generation: int) -> None:
        """One request is done with this buffer."""
        self.members.discard((slot, generation))
        if not self.members:
            self.move(BatchEvent.LEFT)


def require_batch(batch: Batch, message: Step) -> None:
    """STEP may use this buffer, under a number greater than all before it."""
    if message.batch == LAST_U64:
        raise refusals.ExhaustedCounterError(f"batch {message.batch} would be the last; reconnect")
    if message.batch <= batch.last:
        raise refusals.StaleBatchError(
            f"batch slot {batch.index}: expected a batch above {batch.last}, found {message.batch}"
        )
    batch.next_state(BatchEvent.STEP)


def require_open(slot: Slot, message: Open, limits: Limits) -> None:
    """OPEN against the slot and the limits."""
    slot.next_state(SlotEvent.OPEN)
    slot.require_new_generation(message.generation)
    if not 1 <= message.depth_policy <= limits.max_depth or not 1 <= message.support_policy <= limits.max_support:
        raise refusals.WrongPolicyError(
            f"OPEN: depth {message.depth_policy} (at most {limits.max_depth}), "
            f"support {message.support_policy} (at most {limits.max_support})"
        )
    if limits.draft_mode is DraftMode.OFF and message.draft_temperature_ppm:
        raise refusals.WrongPolicyError("OPEN: an OFF session drafts greedily; draft_temperature_ppm must be 0")


def require_state(slot: Slot, message: State) -> None:
    """STATE continues the slot's committed prefix."""
    slot.require_generation(message.generation)
    slot.next_state(SlotEvent.STATE)
    if message.position != slot.position:
        raise refusals.StateGapError(f"slot {slot.index}: next row is {slot.position}, found {message.position}")
    if message.position + message.token_ids.size >= POSITION_END:
        raise refusals.ExhaustedCounterError(f"slot {slot.index}: positions end at {POSITION_END}")


def require_step_request(slot: Slot, request: StepRequest, depth: int, limits: Limits) -> None:
    """One request of STEP against its slot; the order of checks is the order of blame."""
    slot.require_generation(request.generation)
    if slot.state is SlotState.OPEN and request.round != slot.next_round:
        kind = refusals.StaleRoundError if request.round < slot.next_round else refusals.RoundGapError
        raise kind(f"slot {slot.index}: expected round {slot.next_round}, found {request.round}")
    slot.next_state(SlotEvent.STEP)
    if request.round >= ROUND_END or request.anchor_position + depth >= POSITION_END:
        raise refusals.ExhaustedCounterError(f"slot {slot.index}: rounds and positions end at 2**32; RESET the slot")
    opened = slot.opened
    assert opened is not None
    policy = (request.draft_temperature_ppm, request.support_policy, depth)
    expected = (opened.draft_temperature_ppm, opened.support_policy, opened.depth_policy)
    if policy != expected:
        raise refusals.WrongPolicyError(
            f"slot {slot.index}: (temperature, support, depth) opened with {expected}, found {policy}"
        )
    if request.context_version < slot.context_version:
        raise refusals.WrongContextError(
            f"slot {slot.index}: context version was {slot.context_version}, found {request.context_version}"
        )
    _require_anchor(slot, request, limits)


def _require_anchor(slot: Slot, request: StepRequest, limits: Limits) -> None:
    if request.anchor_position != slot.position:
        raise refusals.StateGapError(
            f"slot {slot.index}: rows for positions below {slot.position} are delivered, "
            f"so the anchor is due there; found {request.anchor_position}"
        )
    if request.anchor_token >= limits.vocab_size:
        raise refusals.TokenOutOfRangeError(
            f"slot {slot.index}: anchor token below {limits.vocab_size}, found {request.anchor_token}"
        )
    if slot.committed and slot.committed[0] > request.anchor_position:
        raise refusals.StateGapError(f"slot {slot.index}: committed up to {slot.committed[0]}, anchor lies before")
    if slot.committed and slot.committed[0] == request.anchor_position and slot.committed[1] != request.anchor_token:
        raise refusals.WrongPrefixError(f"slot {slot.index}: COMMIT named another token for the anchor")
    if extend_prefix(slot.prefix, (request.anchor_token,)) != request.prefix_digest:
        raise refusals.WrongPrefixError(
            f"slot {slot.index}: the prefix digest is not that of the {slot.position} delivered tokens and the anchor"
        )


def require_reply(batch: Batch, reply: Reply) -> None:
    """REPLY against its STEP: shape, identities, row kinds and support.

    Raises:
        RemoteProtocolError: StaleReplyError for another batch; otherwise a refusal that costs the proposal.
    """
    step = batch.step
    if step is None or reply.batch != step.batch:
        raise refusals.StaleReplyError(f"batch slot {batch.index}: reply to batch {reply.batch} is not awaited")
    batch.next_state(BatchEvent.REPLY)
    if len(reply.requests) != len(step.requests) or reply.depth != step.depth:
        raise refusals.WrongReplyShapeError(
            f"expected {len(step.requests)} requests of depth {step.depth}, "
            f"found {len(reply.requests)} of {reply.depth}"
        )
    counts, kinds = reply.counts.tolist(), reply.kinds.tolist()
    for index, (asked, found) in enumerate(zip(step.requests, reply.requests, strict=True)):
        if (asked.slot, asked.generation, asked.round, asked.anchor_position, asked.context_version) != (
            found.slot,
            found.generation,
            found.round,
            found.anchor_position,
            found.context_version,
        ):
            raise refusals.WrongReplyIdentityError(f"request {index}: expected {asked}, found {found}")
        greedy = kinds[index].count(_GREEDY)
        if greedy != (0 if asked.draft_temperature_ppm else step.depth):
            raise refusals.WrongRowKindError(
                f"request {index} at {asked.draft_temperature_ppm} ppm: found {greedy} GREEDY rows"
            )
        if max(counts[index]) > asked.support_policy:
            raise refusals.SupportTooLargeError(
                f"request {index}: support policy {asked.support_policy}, found {max(counts[index])} entries"
            )


def require_completion(batch: Batch, message: Complete) -> None:
    """COMPLETE of a STEP against the reply that arrived."""
    step = batch.step
    if step is None or message.batch != step.batch:
        raise refusals.StaleReplyError(f"batch slot {batch.index}: completion of batch {message.batch} is not awaited")
    is_ok = message.status is Status.OK
    batch.next_state(BatchEvent.COMPLETE_OK if is_ok else BatchEvent.COMPLETE_FAILED)
    if batch.state is not BatchState.REPLIED or not is_ok:
        return
    first = step.requests[0]
    expected = (first.slot, first.generation, first.round, first.anchor_position, first.context_version)
    found = (message.slot, message.generation, message.round, message.position, message.context_version)
    if expected != found:
        raise refusals.WrongCompletionError(f"COMPLETE: expected identity {expected}, found {found}")
    if (message.reply_size_bytes, message.reply_digest) != (batch.reply_size_bytes, batch.reply_digest):
        raise refusals.WrongCompletionError(
            f"COMPLETE: expected {batch.reply_size_bytes} bytes with digest {batch.reply_digest.hex()}, "
            f"found {message.reply_size_bytes} with {message.reply_digest.hex()}"
        )


def require_commit(slot: Slot, message: Commit, limits: Limits) -> None:
    """COMMIT against the round it ends."""
    slot.require_generation(message.generation)
    slot.next_state(SlotEvent.COMMIT)
    if message.round != slot.next_round:
        raise refusals.StaleRoundError(f"slot {slot.index}: COMMIT of round {slot.next_round}, found {message.round}")
    position = slot.anchor_position + message.num_accepted + 1
    fits = message.num_accepted <= slot.depth and message.is_bonus == (message.num_accepted == slot.depth)
    if not fits or message.committed_position != position or not 0 <= message.next_token < limits.vocab_size:
        raise refusals.WrongCommitError(
            f"slot {slot.index}: anchor {slot.anchor_position}, depth {slot.depth}; found num_accepted "
            f"{message.num_accepted}, bonus {message.is_bonus}, position {message.committed_position}, "
            f"token {message.next_token}"
        )


def require_reset(slot: Slot, message: Reset) -> None:
    """RESET against the slot."""
    slot.require_generation(message.generation)
    slot.next_state(SlotEvent.RESET)
    slot.require_new_generation(message.new_generation)
    if message.keep_position not in (0, slot.position):
        raise refusals.ResetPositionError(
            f"slot {slot.index}: keep_position must be {slot.position} or 0, found {message.keep_position}"
        )
