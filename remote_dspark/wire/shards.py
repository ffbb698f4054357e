"""Replies that describe one vocabulary shard each, joined to the whole distribution.

A shard's rows hold only its own columns, with global ids, and their masses need not be 2**24; the whole's must. Rules:
joining never renormalises; what does not add up is refused by the same checks as an unsharded reply.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from remote_dspark.wire import refusals
from remote_dspark.wire.limits import Limits
from remote_dspark.wire.messages import Reply
from remote_dspark.wire.validate import require_rows


def join_shards(parts: Sequence[Reply], limits: Limits) -> Reply:
    """The unsharded reply.

    Args:
        parts: One validated reply per negotiated shard, in shard order, all to the same STEP.
        limits: Negotiated limits.

    Raises:
        WrongShardError: shards are missing, repeated or out of order.
        WrongReplyIdentityError: they answer different rounds, or disagree on a token or a row's kind.
        RemoteProtocolError: the union is not a distribution (wrong mass, token without q, support too large).
    """
    expected = [limits.shard(index) for index in range(len(limits.shard_starts))]
    if [part.shard for part in parts] != expected:
        raise refusals.WrongShardError(f"expected {expected}, found {[part.shard for part in parts]}")
    first = parts[0]
    for part in parts[1:]:
        same_rows = np.array_equal(part.tokens, first.tokens) and np.array_equal(part.kinds, first.kinds)
        if (part.batch_slot, part.batch, part.requests) != (first.batch_slot, first.batch, first.requests):
            raise refusals.WrongReplyIdentityError(f"shard {part.shard.index} answers another round than shard 0")
        if not same_rows:
            raise refusals.WrongReplyIdentityError(f"shard {part.shard.index} disagrees on tokens or row kinds")
    counts = np.stack([part.counts for part in parts]).sum(axis=0).astype(np.int32)
    ids, q = _interleave(parts)
    # Each column belongs to one shard and is +0.0 in all others, so adding changes no bit.
    dense = np.stack([part.dense for part in parts]).sum(axis=0).astype(np.float32)
    whole = Reply(
        session=first.session,
        batch_slot=first.batch_slot,
        batch=first.batch,
        requests=first.requests,
        tokens=first.tokens,
        kinds=first.kinds,
        counts=counts,
        ids=ids,
        q=q,
        dense=dense,
        shard=limits.whole_vocab,
    )
    require_rows(whole, limits)
    return whole


def split_reply(reply: Reply, limits: Limits) -> list[Reply]:
    """Inverse of `join_shards`: what each shard of the worker would send."""
    parts = []
    row_of = np.repeat(np.arange(reply.counts.size), reply.counts.reshape(-1))
    for index in range(len(limits.shard_starts)):
        shard = limits.shard(index)
        own = (reply.ids >= shard.start) & (reply.ids < shard.end)
        counts = np.bincount(row_of[own], minlength=reply.counts.size).astype(np.int32).reshape(reply.counts.shape)
        dense = np.zeros_like(reply.dense)
        dense[:, shard.start : shard.end] = reply.dense[:, shard.start : shard.end]
        parts.append(
            Reply(
                session=reply.session,
                batch_slot=reply.batch_slot,
                batch=reply.batch,
                requests=reply.requests,
                tokens=reply.tokens,
                kinds=reply.kinds,
                counts=counts,
                ids=reply.ids[own],
                q=reply.q[own],
                dense=dense,
                shard=shard,
            )
        )
    return parts


def _interleave(parts: Sequence[Reply]) -> tuple[np.ndarray, np.ndarray]:
    """Entries of all shards in row order; within a row shard order is ascending id order."""
    rows = [np.repeat(np.arange(part.counts.size), part.counts.reshape(-1)) for part in parts]
    order = np.argsort(np.concatenate(rows), kind="stable")
    ids = np.concatenate([part.ids for part in parts])[order]
    q = np.concatenate([part.q for part in parts])[order]
    return ids.astype(np.int32, copy=False), q.astype(np.float32, copy=False)
