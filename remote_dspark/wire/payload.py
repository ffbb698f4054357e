"""Payloads of the two large frames, STATE and REPLY: fixed parts packed, arrays placed in one buffer.

Rules: sizes are checked before a view is taken; a decoded message's large arrays (STATE rows, dense q) are views of
the frame, everything else is a small copy. ``pack_x`` writes a whole frame buffer with room for the header.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Final

import numpy as np
from xxhash import xxh3_64_intdigest

from remote_dspark.wire import layout, refusals
from remote_dspark.wire.errors import BadFieldError, BadSizeError, FrameTooLargeError, RemoteProtocolError
from remote_dspark.wire.header import HEADER_BYTES, max_payload_bytes
from remote_dspark.wire.kinds import FrameType, RowKind
from remote_dspark.wire.limits import NUM_BATCH_SLOTS, Limits
from remote_dspark.wire.messages import Reply, ReplyRequest, Shard, State
from remote_dspark.wire.validate import require_rows, row_masses

_EMPTY_DENSE: Final = np.zeros((0, 0), dtype=np.float32)
_DENSE: Final = int(RowKind.DENSE)


# -- STATE ----------------------------------------------------------------------------------------------------------


def pack_state(message: State, limits: Limits) -> bytearray:
    """A STATE frame without its header."""
    num_rows = int(message.token_ids.size)
    if message.rows.dtype != np.uint8 or message.rows.shape != (num_rows, limits.state_row_bytes) or not num_rows:
        raise BadFieldError(
            f"STATE rows: expected uint8[{num_rows or '1 or more'}, {limits.state_row_bytes}], "
            f"found {message.rows.dtype}{list(message.rows.shape)}"
        )
    size = layout.STATE.size + num_rows * (4 + limits.state_row_bytes)
    if size > max_payload_bytes(FrameType.STATE, limits):
        raise FrameTooLargeError(f"STATE of {num_rows} rows: at most {limits.rows_per_chunk} fit one chunk")
    _require_token_ids(message, limits)
    frame = bytearray(HEADER_BYTES + size)
    layout.STATE.codec.pack_into(
        frame,
        HEADER_BYTES,
        message.session,
        message.generation,
        message.position,
        message.slot,
        0,
        num_rows,
        limits.state_row_bytes,
        0,
    )
    start = HEADER_BYTES + layout.STATE.size
    np.frombuffer(frame, layout.TOKEN_DTYPE, num_rows, start)[:] = message.token_ids
    body = np.frombuffer(frame, np.uint8, num_rows * limits.state_row_bytes, start + 4 * num_rows)
    body.reshape(num_rows, limits.state_row_bytes)[:] = message.rows
    return frame


def parse_state(payload: memoryview, limits: Limits) -> State:
    """Inverse of `pack_state`; the arrays are views of ``payload``."""
    session, generation, position, slot, r0, num_rows, row_bytes, r1 = layout.STATE.codec.unpack_from(payload)
    if r0 or r1 or not num_rows or row_bytes != limits.state_row_bytes:
        raise BadFieldError(
            f"STATE: expected zero reserved fields, rows of {limits.state_row_bytes} bytes and at least one; "
            f"found {r0}, {r1}, {row_bytes}, {num_rows}"
        )
    expected = layout.STATE.size + num_rows * (4 + row_bytes)
    if len(payload) != expected:
        raise BadSizeError(f"STATE of {num_rows} rows: expected {expected} payload bytes, found {len(payload)}")
    start = layout.STATE.size
    token_ids = np.frombuffer(payload, layout.TOKEN_DTYPE, num_rows, start)
    rows = np.frombuffer(payload, np.uint8, num_rows * row_bytes, start + 4 * num_rows).reshape(num_rows, row_bytes)
    message = State(session, slot, generation, position, token_ids, rows)
    _require_token_ids(message, limits)
    return message


def _require_token_ids(message: State, limits: Limits) -> None:
    ids = message.token_ids
    if int(ids.min()) < 0 or int(ids.max()) >= limits.vocab_size:
        raise BadFieldError(
            f"STATE token ids: expected [0, {limits.vocab_size}), found {int(ids.min())}..{int(ids.max())}"
        )


# -- REPLY ----------------------------------------------------------------------------------------------------------


def pack_reply(message: Reply, limits: Limits) -> bytearray:
    """A REPLY frame without its header. Sizes are checked; whether q is a distribution is ``validate``'s business."""
    num, depth = message.tokens.shape
    _require_shape(num, depth, limits)
    if len(message.requests) != num or message.kinds.shape != (num, depth) or message.counts.shape != (num, depth):
        raise refusals.WrongReplyShapeError(
            f"expected {num} identities, kinds and counts of shape {(num, depth)}, found {len(message.requests)}, "
            f"{message.kinds.shape} and {message.counts.shape}"
        )
    kinds, counts = message.kinds.reshape(-1).tolist(), message.counts.reshape(-1).tolist()
    _require_arrays(message, kinds, counts, limits)
    num_rows, entries, dense = num * depth, int(message.ids.size), message.dense
    rows_at = HEADER_BYTES + layout.REPLY.size + num * layout.REPLY_REQUEST.size
    entries_at = rows_at + num_rows * layout.REPLY_ROW.size
    dense_at = entries_at + entries * layout.REPLY_ENTRY.size
    width = dense.shape[1] if dense.shape[0] else 0
    frame = bytearray(dense_at + 4 * dense.shape[0] * width)
    shard = message.shard
    layout.REPLY.codec.pack_into(
        frame,
        HEADER_BYTES,
        message.session,
        message.batch,
        message.batch_slot,
        num,
        depth,
        shard.index,
        shard.num,
        0,
        shard.start,
        shard.end,
        entries,
        dense.shape[0],
        width,
        0,
    )
    offset = HEADER_BYTES + layout.REPLY.size
    for r in message.requests:
        layout.REPLY_REQUEST.codec.pack_into(
            frame, offset, r.generation, r.round, r.anchor_position, r.context_version, r.slot, 0, 0
        )
        offset += layout.REPLY_REQUEST.size
    if entries:
        area = np.frombuffer(frame, layout.ENTRY_DTYPE, entries, entries_at)
        area["id"] = message.ids
        area["q"] = message.q
    if width:
        np.frombuffer(frame, layout.DENSE_DTYPE, dense.size, dense_at).reshape(dense.shape)[:] = dense
    checksums = _row_checksums(memoryview(frame)[entries_at:], kinds, counts, width)
    columns = zip(
        checksums, message.tokens.reshape(-1).tolist(), row_masses(message, kinds), counts, kinds, strict=True
    )
    _rows_codec(num_rows).pack_into(frame, rows_at, *chain.from_iterable(columns))
    return frame


@lru_cache(maxsize=128)
def _rows_codec(num_rows: int) -> struct.Struct:
    """All row headers of a reply as one struct."""
    return struct.Struct("<" + layout.REPLY_ROW.codec.format.lstrip("<") * num_rows)


def parse_reply(payload: memoryview, limits: Limits) -> Reply:
    """Inverse of `pack_reply`: sizes, then q row by row (vectorised), then the row checksums.

    Raises:
        RemoteProtocolError: its ``batch_slot`` is set once the fixed part was readable.
    """
    fixed = layout.REPLY.codec.unpack_from(payload)
    _, _, batch_slot, num, depth, _, _, r0, _, _, entries, num_dense, width, r1 = fixed
    if batch_slot >= NUM_BATCH_SLOTS or not num or not depth or r0 or r1:
        raise BadFieldError(f"REPLY: batch slot {batch_slot}, {num} requests, depth {depth}, reserved {r0}, {r1}")
    num_rows = num * depth
    tail = num_rows * layout.REPLY_ROW.size + entries * layout.REPLY_ENTRY.size + 4 * num_dense * width
    expected = layout.REPLY.size + num * layout.REPLY_REQUEST.size + tail
    if len(payload) != expected or bool(width) != bool(num_dense):
        raise BadSizeError(f"REPLY: expected {expected} payload bytes, found {len(payload)}")
    try:
        return _parse_rows(payload, fixed, limits)
    except RemoteProtocolError as error:
        error.batch_slot = batch_slot
        raise


def _parse_rows(payload: memoryview, fixed: tuple[int, ...], limits: Limits) -> Reply:
    session, batch, batch_slot, num, depth, index, shards, _, start, end, entries, num_dense, width, _ = fixed
    _require_shape(num, depth, limits)
    requests = _parse_requests(payload, num)
    rows_at = layout.REPLY.size + num * layout.REPLY_REQUEST.size
    rows = np.frombuffer(payload, layout.ROW_DTYPE, num * depth, rows_at)
    entries_at = rows_at + rows.nbytes
    area = np.frombuffer(payload, layout.ENTRY_DTYPE, entries, entries_at)
    dense_at = entries_at + area.nbytes
    dense = _EMPTY_DENSE
    if num_dense:
        dense = np.frombuffer(payload, layout.DENSE_DTYPE, num_dense * width, dense_at).reshape(num_dense, width)
    flat = _rows_codec(num * depth).unpack_from(payload, rows_at)
    checksums, stated, counts, kinds = flat[0::5], flat[2::5], flat[3::5], flat[4::5]
    reply = Reply(
        session=session,
        batch_slot=batch_slot,
        batch=batch,
        requests=requests,
        tokens=rows["token"].reshape(num, depth).copy(),
        kinds=rows["kind"].reshape(num, depth).copy(),
        counts=rows["count"].reshape(num, depth).astype(np.int32),
        ids=area["id"].copy(),
        q=area["q"].copy(),
        dense=dense,
        shard=_shard_of((index, shards, start, end), limits),
    )
    masses = require_rows(reply, limits).tolist()
    if list(stated) != masses:
        raise refusals.WrongMassError(f"row headers state masses {list(stated)}, found {masses}")
    if list(checksums) != _row_checksums(payload[entries_at:], kinds, counts, width):
        raise refusals.BadRowChecksumError("a row's probability checksum does not match its bytes")
    return reply


def _shard_of(fields: tuple[int, int, int, int], limits: Limits) -> Shard:
    # The usual one is made once.
    return limits.whole_vocab if fields == (0, 1, 0, limits.vocab_size) else Shard(*fields)


def _parse_requests(payload: memoryview, num: int) -> tuple[ReplyRequest, ...]:
    area = payload[layout.REPLY.size : layout.REPLY.size + num * layout.REPLY_REQUEST.size]
    parts = list(layout.REPLY_REQUEST.codec.iter_unpack(area))
    for part in parts:
        if part[5] or part[6]:
            raise BadFieldError(f"REPLY request reserved: expected 0, found {part[5]}, {part[6]}")
    return tuple([ReplyRequest(slot, *identity) for *identity, slot, _, _ in parts])


def _require_shape(num: int, depth: int, limits: Limits) -> None:
    if not 1 <= num <= limits.max_requests or not 1 <= depth <= limits.max_depth:
        raise refusals.WrongReplyShapeError(
            f"expected 1..{limits.max_requests} requests of depth 1..{limits.max_depth}, found {num} of {depth}"
        )


def _require_arrays(reply: Reply, kinds: list[int], counts: list[int], limits: Limits) -> None:
    """What packing needs: sizes that belong together and buffers within the limits."""
    if max(counts) > limits.max_support or min(counts) < 0:
        raise refusals.SupportTooLargeError(f"expected 0..{limits.max_support} entries per row, found {counts}")
    entries, dense = sum(counts), kinds.count(_DENSE)
    if entries != reply.ids.size or entries != reply.q.size or dense != reply.dense.shape[0]:
        raise refusals.MissingQError(
            f"rows claim {entries} entries and {dense} dense rows; "
            f"found {reply.ids.size} ids, {reply.q.size} values, {reply.dense.shape[0]} dense rows"
        )
    if dense and (reply.dense.shape[1] != limits.dense_width or not limits.allow_dense):
        raise refusals.WrongRowKindError(f"dense rows of {limits.dense_width} columns, only where negotiated")


def _row_checksums(area: memoryview, kinds: Sequence[int], counts: Sequence[int], width: int) -> list[int]:
    """xxh3-64 of each row's bytes as they travel; of nothing for GREEDY rows."""
    if not width and len(set(counts)) == 1 and counts[0]:
        # The common reply: every row equally wide.
        step = 8 * counts[0]
        return [xxh3_64_intdigest(area[at : at + step]) for at in range(0, step * len(counts), step)]
    result: list[int] = []
    at, dense_at = 0, 8 * sum(counts)
    for kind, count in zip(kinds, counts, strict=True):
        start = at
        if kind == _DENSE:
            start, dense_at = dense_at, dense_at + 4 * width
            result.append(xxh3_64_intdigest(area[start:dense_at]))
        else:
            at += 8 * count
            result.append(xxh3_64_intdigest(area[start:at]))
    return result
