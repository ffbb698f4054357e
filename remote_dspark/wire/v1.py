"""Wire v1, frozen: a greedy reply that carries token ids and nothing else.

What a session that negotiated ``DraftMode.OFF`` answers a STEP with; byte for byte the same for ever, pinned by
``tests/vectors/wire/v1_*.bin``. Rules: a fixed 32-byte head whose first bytes differ from v2's, one 40-byte part per
request, then int32 ids in request-major order. Nothing in this file may change; a change is v3.

``check`` is the low 32 bits of xxh3-64 over the whole frame with ``check`` taken as zero.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
from xxhash import xxh3_64_intdigest

from remote_dspark.contract import DraftMode
from remote_dspark.wire import refusals
from remote_dspark.wire.errors import (
    BadDigestError,
    BadFieldError,
    BadMagicError,
    BadSizeError,
    HelloRequiredError,
    TrailingBytesError,
    TruncatedFrameError,
    WrongDialectError,
)
from remote_dspark.wire.kinds import RowKind
from remote_dspark.wire.limits import DEPTH_CEILING, NUM_BATCH_SLOTS, REQUESTS_CEILING, Limits
from remote_dspark.wire.messages import Reply, ReplyRequest

MAGIC: Final = b"DSV1"
HEAD: Final = struct.Struct("<4sIQQBBBBI")
"""magic, length of the whole frame, session, batch, num_requests, depth, batch_slot, reserved, check."""

REQUEST: Final = struct.Struct("<QQQQII")
"""generation, round, anchor_position, context_version, slot, reserved."""

HEAD_BYTES: Final = HEAD.size
_CHECK_AT: Final = 28


def frame_bytes(num_requests: int, depth: int) -> int:
    """Length of a v1 reply."""
    return HEAD.size + num_requests * REQUEST.size + 4 * num_requests * depth


def encode_v1(reply: Reply) -> bytearray:
    """A reply of GREEDY rows as v1 bytes.

    Raises:
        WrongRowKindError: a row is sampled; v1 cannot carry q.
    """
    num, depth = reply.tokens.shape
    if not (reply.kinds == RowKind.GREEDY).all() or reply.ids.size or reply.dense.size:
        raise refusals.WrongRowKindError("an OFF session carries GREEDY rows only, found sampled rows")
    if not 1 <= num <= REQUESTS_CEILING or not 1 <= depth <= DEPTH_CEILING or len(reply.requests) != num:
        raise refusals.WrongReplyShapeError(f"v1 carries 1..8 requests of depth 1..16, found {num} of {depth}")
    frame = bytearray(frame_bytes(num, depth))
    HEAD.pack_into(frame, 0, MAGIC, len(frame), reply.session, reply.batch, num, depth, reply.batch_slot, 0, 0)
    at = HEAD.size
    for r in reply.requests:
        REQUEST.pack_into(frame, at, r.generation, r.round, r.anchor_position, r.context_version, r.slot, 0)
        at += REQUEST.size
    np.frombuffer(frame, "<i4", num * depth, at)[:] = reply.tokens.reshape(-1)
    struct.pack_into("<I", frame, _CHECK_AT, xxh3_64_intdigest(frame) & 0xFFFFFFFF)
    return frame


def parse_v1_length(head: bytes | bytearray | memoryview, limits: Limits) -> int:
    """Length of the frame that these 32 bytes begin, bounded by ``limits`` before anything is allocated."""
    magic, length, _, _, num, depth, _, _, _ = HEAD.unpack_from(head)
    if magic != MAGIC:
        raise BadMagicError(f"expected {MAGIC!r}, found {bytes(magic)!r}")
    if not 1 <= num <= limits.max_requests or not 1 <= depth <= limits.max_depth or length != frame_bytes(num, depth):
        raise BadSizeError(
            f"v1 reply: expected {frame_bytes(num, depth)} bytes for {num} requests of depth {depth} (at most "
            f"{limits.max_requests} of {limits.max_depth}), found {length}"
        )
    return int(length)


def decode_v1(frame: bytes | bytearray | memoryview, limits: Limits) -> Reply:
    """Exactly one v1 reply, as a `Reply` of GREEDY rows."""
    if len(frame) < HEAD.size:
        raise TruncatedFrameError(f"a v1 reply has at least {HEAD.size} bytes, found {len(frame)}")
    length = parse_v1_length(frame, limits)
    if len(frame) < length:
        raise TruncatedFrameError(f"v1 reply: expected {length} bytes, found {len(frame)}")
    if len(frame) > length:
        raise TrailingBytesError(f"v1 reply: expected {length} bytes, found {len(frame)}")
    _, _, session, batch, num, depth, batch_slot, reserved, check = HEAD.unpack_from(frame)
    zeroed = bytearray(frame)
    zeroed[_CHECK_AT : _CHECK_AT + 4] = bytes(4)
    if check != xxh3_64_intdigest(zeroed) & 0xFFFFFFFF:
        raise BadDigestError(f"v1 reply: check value {check:#010x} does not match its bytes")
    if reserved or batch_slot >= NUM_BATCH_SLOTS:
        raise BadFieldError(f"v1 reply: batch slot {batch_slot}, reserved {reserved}")
    ids_at = HEAD.size + num * REQUEST.size
    requests = []
    for generation, round_, position, context, slot, rest in REQUEST.iter_unpack(memoryview(frame)[HEAD.size : ids_at]):
        if rest:
            raise BadFieldError(f"v1 request reserved: expected 0, found {rest}")
        requests.append(ReplyRequest(slot, generation, round_, position, context))
    tokens = np.frombuffer(frame, "<i4", num * depth, ids_at).reshape(num, depth).astype(np.int32)
    if int(tokens.min()) < 0 or int(tokens.max()) >= limits.vocab_size:
        error = refusals.TokenOutOfRangeError(f"v1 reply: tokens in [0, {limits.vocab_size}), found {tokens.tolist()}")
        error.batch_slot = batch_slot
        raise error
    return Reply(
        session=session,
        batch_slot=batch_slot,
        batch=batch,
        requests=tuple(requests),
        tokens=tokens,
        kinds=np.full((num, depth), RowKind.GREEDY, dtype=np.uint16),
        counts=np.zeros((num, depth), dtype=np.int32),
        ids=np.zeros(0, dtype=np.int32),
        q=np.zeros(0, dtype=np.float32),
        dense=np.zeros((0, 0), dtype=np.float32),
        shard=limits.whole_vocab,
    )


def require_off(limits: Limits | None) -> Limits:
    """A v1 reply is legal only after HELLO agreed on OFF."""
    if limits is None:
        raise HelloRequiredError("v1 bytes before HELLO: what a session carries is negotiated, never guessed")
    if limits.draft_mode is not DraftMode.OFF:
        raise WrongDialectError(f"a v1 reply in a session that negotiated {limits.draft_mode.value}")
    return limits
