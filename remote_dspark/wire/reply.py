"""Replies as tensors: how a drafter builds one from its outputs and how a verifier reads one.

Rules: arrays only, no bytes, no validation (``validate`` judges); entries beyond a row's count are dropped here, so
padded device buffers can be passed as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from remote_dspark.contract import TICKET_TOTAL
from remote_dspark.wire.kinds import RowKind
from remote_dspark.wire.messages import (
    Float32Array,
    Int32Array,
    Reply,
    ReplyRequest,
    Shard,
    Step,
    UInt8Array,
)

INV_TICKET_TOTAL = np.float32(1.0 / TICKET_TOTAL)
"""2**-24: multiplying counts up to 2**24 by it is exact in FP32."""


@dataclass(frozen=True, slots=True, eq=False)
class ReplyRow:
    """One position of one request: views into the reply.

    Attributes:
        kind: How q is described.
        token: The sampled global id.
        ids: int32[n] ascending (sparse), else empty.
        tickets: int64[n] counts for ``ids``, or int64[dense_width] for a dense row, or empty for a greedy row.
    """

    kind: RowKind
    token: int
    ids: Int32Array
    tickets: npt.NDArray[np.int64]


def build_reply(
    step: Step,
    shard: Shard,
    *,
    tokens: Int32Array,
    ids: Int32Array,
    q: Float32Array,
    counts: Int32Array,
) -> Reply:
    """A sparse and greedy reply to ``step`` from padded buffers.

    Args:
        step: The STEP being answered; rows of requests at temperature 0 become GREEDY.
        shard: The columns described, ``Limits.whole_vocab`` unless sharded.
        tokens: int32[B, D] sampled ids.
        ids: int32[B, D, K], ascending within the first ``counts`` entries; copied.
        q: float32[B, D, K], exact dyadics, zero counts already dropped; copied.
        counts: int32[B, D], valid entries per row; ignored for greedy rows.
    """
    num, depth, width = ids.shape
    kinds, counts = _kinds(step, RowKind.SPARSE), counts.astype(np.int32)
    for index, request in enumerate(step.requests):
        if request.draft_temperature_ppm == 0:
            counts[index] = 0
    if counts.reshape(-1).tolist().count(width) == num * depth:
        flat_ids, flat_q = ids.reshape(-1), q.reshape(-1)
    else:
        valid = np.arange(width, dtype=np.int32) < counts[:, :, None]
        flat_ids, flat_q = ids[valid], q[valid]
    return Reply(
        session=step.session,
        batch_slot=step.batch_slot,
        batch=step.batch,
        requests=reply_requests(step),
        tokens=np.ascontiguousarray(tokens, dtype=np.int32),
        kinds=kinds,
        counts=counts,
        ids=np.ascontiguousarray(flat_ids, dtype=np.int32),
        q=np.ascontiguousarray(flat_q, dtype=np.float32),
        dense=np.zeros((0, 0), dtype=np.float32),
        shard=shard,
    )


def build_dense_reply(step: Step, shard: Shard, tokens: Int32Array, dense: Float32Array) -> Reply:
    """A dense and greedy reply: ``dense`` is float32[number of non-greedy rows, dense_width], not copied."""
    return Reply(
        session=step.session,
        batch_slot=step.batch_slot,
        batch=step.batch,
        requests=reply_requests(step),
        tokens=np.ascontiguousarray(tokens, dtype=np.int32),
        kinds=_kinds(step, RowKind.DENSE),
        counts=np.zeros(tokens.shape, dtype=np.int32),
        ids=np.zeros(0, dtype=np.int32),
        q=np.zeros(0, dtype=np.float32),
        dense=dense,
        shard=shard,
    )


def greedy_reply(step: Step, shard: Shard, tokens: Int32Array) -> Reply:
    """A reply of GREEDY rows only; the one kind an OFF session can carry (as v1 bytes)."""
    empty = np.zeros((*tokens.shape, 0), dtype=np.int32)
    zero = np.zeros(tokens.shape, dtype=np.int32)
    q = empty.astype(np.float32)
    reply = build_reply(step, shard, tokens=tokens, ids=empty, q=q, counts=zero)
    reply.kinds[:] = RowKind.GREEDY
    return reply


def _kinds(step: Step, sampled: RowKind) -> UInt8Array:
    """uint8[B, D]: GREEDY where the STEP asks for temperature 0."""
    kinds, shape = bytearray(), (len(step.requests), step.depth)
    for request in step.requests:
        kinds += bytes((sampled if request.draft_temperature_ppm else RowKind.GREEDY,)) * step.depth
    return np.frombuffer(kinds, dtype=np.uint8).reshape(shape)


def reply_requests(step: Step) -> tuple[ReplyRequest, ...]:
    """The identities a reply repeats, in the STEP's order."""
    return tuple(
        ReplyRequest(r.slot, r.generation, r.round, r.anchor_position, r.context_version) for r in step.requests
    )


def reply_row(reply: Reply, request: int, position: int) -> ReplyRow:
    """Row ``position`` (0..depth-1) of request index ``request`` (0..B-1), with integer tickets."""
    row = request * reply.depth + position
    kind = RowKind(int(reply.kinds[request, position]))
    token = int(reply.tokens[request, position])
    none = np.zeros(0, dtype=np.int64)
    if kind is RowKind.SPARSE:
        start = int(reply.counts.reshape(-1)[:row].sum())
        end = start + int(reply.counts[request, position])
        return ReplyRow(kind, token, reply.ids[start:end], _tickets(reply.q[start:end]))
    if kind is RowKind.DENSE:
        index = int(np.count_nonzero(reply.kinds.reshape(-1)[:row] == RowKind.DENSE))
        return ReplyRow(kind, token, reply.ids[:0], _tickets(reply.dense[index]))
    return ReplyRow(kind, token, reply.ids[:0], none)


def padded_support(reply: Reply, width: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], Int32Array]:
    """Sparse rows as rectangular buffers: ids int32[B, D, width] (-1 padded), tickets int64[B, D, width], counts."""
    num, depth = reply.tokens.shape
    ids = np.full((num, depth, width), -1, dtype=np.int32)
    tickets = np.zeros((num, depth, width), dtype=np.int64)
    valid = np.arange(width, dtype=np.int32) < reply.counts[:, :, None]
    ids[valid] = reply.ids
    tickets[valid] = _tickets(reply.q)
    return ids, tickets, reply.counts


def tickets_to_q(tickets: npt.NDArray[np.integer]) -> Float32Array:
    """Exact FP32 values of counts in [0, 2**24]."""
    return np.multiply(tickets.astype(np.float32), INV_TICKET_TOTAL, dtype=np.float32)


def _tickets(q: Float32Array) -> npt.NDArray[np.int64]:
    return np.multiply(q, np.float32(TICKET_TOTAL), dtype=np.float32).astype(np.int64)
