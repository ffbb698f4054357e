"""The objects of wire v2: one immutable class per frame. Frames are bytes (``codec``), messages are these.

Rules of this file: plain data, no bytes on a wire, no state, no I/O. Integers are Python integers; whatever has a
row per position is a numpy array, owned by the message and never modified by this package. What is made while a
verifier waits is a named tuple (a frozen dataclass takes five times as long to make). Positions are absolute
(0 is the first prompt token), ids are global vocabulary ids, generations and rounds are u64 that only grow.

One round: STATE* (rows of the newly committed positions) -> STEP -> REPLY + COMPLETE -> verification -> COMMIT.
Who sends what: `CLIENT_FRAMES` and `SERVER_FRAMES` in ``table``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from remote_dspark.contract import RNG_ABI, TARGET_SEMANTICS, VERIFIER_STANDARD, DraftMode
from remote_dspark.wire.kinds import FrameType, Role, Status

Int32Array = npt.NDArray[np.int32]
UInt8Array = npt.NDArray[np.uint8]
KindArray = npt.NDArray[np.unsignedinteger]
Float32Array = npt.NDArray[np.float32]

WIRE_VERSION: Final = 2
PPM: Final = 1_000_000
"""Temperatures travel as integers: 700_000 is 0.7; 0 is greedy."""

PRECISION_ABI: Final = "state-bf16-q-f32-v1"


@dataclass(frozen=True, slots=True)
class Shard:
    """Which vocabulary columns a reply describes: global ids in [start, end), shard ``index`` of ``num``."""

    index: int
    num: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame of each direction: identities that must be equal, and limits of which the smaller holds.

    Attributes:
        role: Sender. The server's HELLO answers the client's and carries the agreed limits.
        session: 0 from the client; the server's random nonzero u64, to be repeated in every later frame.
        draft_mode: OFF (replies are v1 frames, ids only) or ON (token and exact q). Must be equal on both ends.
        vocab_size: Real vocabulary columns; ids are in [0, vocab_size).
        dense_width: Columns of a dense row, >= vocab_size; the tail is +0.0.
        id_map_sha256: 32 bytes; digest of the tokenizer's id map. Must be equal.
        draft_sha256: 32 bytes; identity of the draft checkpoint. Must be equal.
        target_sha256: 32 bytes; identity of the target checkpoint. Must be equal.
        draft_adapted: False for a native checkpoint, True for one adapted to this target. Must be equal.
        state_row_bytes: Bytes of one STATE row: m * d * 2 (bf16), unfused. Must be equal.
        max_slots: Seats of one session.
        max_requests: Requests of one STEP.
        max_depth: Draft tokens per request of one STEP.
        max_support: Entries of a sparse row.
        max_state_chunk_bytes: Row bytes of one STATE frame, at most 1 MiB.
        state_credits: STATE frames that may be unacknowledged.
        max_reply_bytes: Size of the buffer for one reply frame; too small for the other limits is refused.
        allow_dense: Whether dense rows may be sent; False keeps reply buffers small. Both ends must say True.
        q_semantics: One of ``contract.Q_SEMANTICS``. Must be equal, like the next four.
        verifier: Standard-verifier id.
        target_semantics: How the verifier turns logits into p.
        rng_abi: Key and counter layout.
        precision: What STATE rows and q values are made of.
        shard_starts: First global id of each vocabulary shard, strictly ascending from 0; ``(0,)`` is unsharded.
    """

    role: Role
    draft_mode: DraftMode
    vocab_size: int
    id_map_sha256: bytes
    draft_sha256: bytes
    target_sha256: bytes
    state_row_bytes: int
    q_semantics: str
    session: int = 0
    dense_width: int = 0
    draft_adapted: bool = False
    max_slots: int = 8
    max_requests: int = 4
    max_depth: int = 5
    max_support: int = 32
    max_state_chunk_bytes: int = 1 << 20
    state_credits: int = 8
    max_reply_bytes: int = 1 << 24
    allow_dense: bool = False
    verifier: str = VERIFIER_STANDARD
    target_semantics: str = TARGET_SEMANTICS
    rng_abi: str = RNG_ABI
    precision: str = PRECISION_ABI
    shard_starts: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class Open:
    """Takes a slot for a request. Answered by COMPLETE or ERROR.

    Attributes:
        session: From the server's HELLO.
        slot: Seat in [0, max_slots), chosen by the client.
        generation: Occupant number; must exceed every earlier generation of this slot in this session.
        seed: Request seed (u64) of the RNG key; unseeded requests get a random one, recorded by the client.
        draft_temperature_ppm: tau of sampled drafts in millionths; 0 makes every row of this request greedy.
        support_policy: Entries kept per sampled row (32 in production).
        depth_policy: Fixed draft depth of the request.
        context_version: Version of target processors, grammar and stop context; repeated by STEP and REPLY.
    """

    session: int
    slot: int
    generation: int
    seed: int
    draft_temperature_ppm: int
    support_policy: int
    depth_policy: int
    context_version: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """Target hidden states of newly committed positions, in position order. Costs one credit, returned by COMPLETE.

    Attributes:
        session: Session id.
        slot: Seat.
        generation: Occupant.
        position: Absolute position of the first row; must be the slot's next missing position.
        token_ids: int32[num_rows], the committed tokens at those positions.
        rows: uint8[num_rows, state_row_bytes], bf16 little-endian, the m target layers concatenated (unfused).
    """

    session: int
    slot: int
    generation: int
    position: int
    token_ids: Int32Array
    rows: UInt8Array


class StepRequest(NamedTuple):
    """One request of a STEP.

    Attributes:
        slot: Seat.
        generation: Occupant.
        round: Round number, exactly one more than the slot's previous round in this generation (first: 0).
        anchor_position: Absolute position of the anchor token; STATE rows exist for every earlier position.
        anchor_token: Last committed token. The first draft token is predicted for anchor_position + 1.
        prefix_digest: 32 bytes, ``prefix.extend_prefix`` over ids at positions 0..anchor_position inclusive.
        draft_temperature_ppm: tau of this round in millionths; 0 asks for GREEDY rows.
        support_policy: Entries kept per sampled row.
        context_version: Target processor, grammar and stop context version; the reply repeats it.
    """

    slot: int
    generation: int
    round: int
    anchor_position: int
    anchor_token: int
    prefix_digest: bytes
    draft_temperature_ppm: int
    support_policy: int
    context_version: int = 0


class Step(NamedTuple):
    """Asks for one proposal per request. Depth is fixed before anything is drawn.

    Attributes:
        session: Session id.
        batch_slot: 0 or 1: which of the two in-flight batch buffers the reply will use.
        batch: u64 that grows with each STEP of its batch slot.
        depth: Draft tokens per request.
        requests: 1..max_requests, slots all different.
    """

    session: int
    batch_slot: int
    batch: int
    depth: int
    requests: tuple[StepRequest, ...]


class ReplyRequest(NamedTuple):
    """Which request, round and context the rows of a reply belong to; equal to the STEP's, in the STEP's order."""

    slot: int
    generation: int
    round: int
    anchor_position: int
    context_version: int


class Reply(NamedTuple):
    """Proposals with their exact q. Built by ``reply.build_reply`` or by decoding; consumable only after COMPLETE.

    B requests, D = depth, N sparse entries in all, rows in request-major order. Equal only to itself.

    Attributes:
        session: Session id.
        batch_slot: As in the STEP.
        batch: As in the STEP.
        requests: B entries.
        tokens: int32[B, D], sampled global ids.
        kinds: unsigned[B, D] of `RowKind`.
        counts: int32[B, D], sparse entries of each row; 0 for DENSE and GREEDY rows.
        ids: int32[N], strictly ascending within a row.
        q: float32[N], tickets * 2**-24, all > 0.
        dense: float32[number of DENSE rows, dense_width], +0.0 beyond the shard's or the vocabulary's end.
        shard: Columns described here; the whole vocabulary unless shards were negotiated.
    """

    session: int
    batch_slot: int
    batch: int
    requests: tuple[ReplyRequest, ...]
    tokens: Int32Array
    kinds: KindArray
    counts: Int32Array
    ids: Int32Array
    q: Float32Array
    dense: Float32Array
    shard: Shard

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)

    @property
    def depth(self) -> int:
        """Draft tokens per request."""
        return int(self.tokens.shape[1])


class Complete(NamedTuple):
    """The server's acknowledgement: of a reply (then all of it is consumable), or of another frame.

    Attributes:
        session: Session id.
        acknowledges: STEP, OPEN, STATE, RESET or CANCEL.
        status: OK, or FAILED: discard everything this completes.
        batch_slot: For STEP; else 0.
        batch: For STEP; else 0.
        slot: For the others; for STEP the first request's slot.
        generation: Occupant; for STEP the first request's.
        round: For STEP the first request's; else 0.
        position: Anchor position of the first request; for STATE the next missing position.
        context_version: For STEP the first request's.
        reply_size_bytes: For STEP: exact length of the reply frame.
        reply_digest: For STEP: 16 bytes, xxh3-128 over the whole reply frame.
        credits: For STATE: chunks the client may send in addition.
    """

    session: int
    acknowledges: FrameType
    status: Status = Status.OK
    batch_slot: int = 0
    batch: int = 0
    slot: int = 0
    generation: int = 0
    round: int = 0
    position: int = 0
    context_version: int = 0
    reply_size_bytes: int = 0
    reply_digest: bytes = bytes(16)
    credits: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """Outcome of a verified round. Not acknowledged; the stream is ordered. STATE of the new positions follows.

    Attributes:
        session: Session id.
        slot: Seat.
        generation: Occupant.
        round: The round that was verified.
        num_accepted: Accepted draft tokens, 0..depth.
        next_token: Correction (num_accepted < depth) or bonus token: the next anchor.
        is_bonus: Whether every draft token was accepted.
        committed_position: Absolute position of next_token: anchor_position + num_accepted + 1.
    """

    session: int
    slot: int
    generation: int
    round: int
    num_accepted: int
    next_token: int
    is_bonus: bool
    committed_position: int


@dataclass(frozen=True, slots=True)
class Reset:
    """Ends a generation and starts another in the same slot. Answered by COMPLETE.

    Everything speculative of the old generation is dropped, and no draw of its key is ever used again.

    Attributes:
        session: Session id.
        slot: Seat.
        generation: The generation that ends.
        new_generation: Greater than ``generation``; rounds restart at 0.
        keep_position: Number of committed STATE rows to keep: the slot's next missing position, or 0 for none.
    """

    session: int
    slot: int
    generation: int
    new_generation: int
    keep_position: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Frees a slot. Answered by COMPLETE; the generation never returns."""

    session: int
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Liveness probe; the server answers with the same token and ``is_answer``."""

    session: int
    token: int
    is_answer: bool = False


@dataclass(frozen=True, slots=True)
class Drain:
    """No new OPEN is accepted from now on; slots in use finish. Either end may say it."""

    session: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Error:
    """A named refusal.

    Attributes:
        session: Session id, 0 before HELLO.
        code: A ``code`` of ``errors``, or one the handler chose: ``[a-z0-9_]``, at most 48 characters.
        detail: For people, ASCII, at most 240 characters, data and never an instruction.
        acknowledges: The refused frame's type, or 0.
        batch_slot: For a refused STEP.
        batch: For a refused STEP.
        slot: For others.
        generation: For others.
        is_fatal: The connection is over.
    """

    session: int
    code: str
    detail: str = ""
    acknowledges: int = 0
    batch_slot: int = 0
    batch: int = 0
    slot: int = 0
    generation: int = 0
    is_fatal: bool = False


Message = Hello | Open | State | Step | Reply | Complete | Commit | Reset | Cancel | Ping | Drain | Error

FRAME_TYPE_OF: Final[dict[type[Any], FrameType]] = {
    Hello: FrameType.HELLO,
    Open: FrameType.OPEN,
    State: FrameType.STATE,
    Step: FrameType.STEP,
    Reply: FrameType.REPLY,
    Complete: FrameType.COMPLETE,
    Commit: FrameType.COMMIT,
    Reset: FrameType.RESET,
    Cancel: FrameType.CANCEL,
    Ping: FrameType.PING,
    Drain: FrameType.DRAIN,
    Error: FrameType.ERROR,
}
