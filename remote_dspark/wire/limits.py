"""Negotiated limits, and the sizes that follow from them before anything is allocated.

Rules: pure arithmetic on HELLO fields. Identities must be equal on both ends; of each limit the smaller holds.
Sizes named in the specification's byte table are `payload_bytes`; frames add the fixed headers of ``layout``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from remote_dspark.contract import DraftMode
from remote_dspark.wire import layout
from remote_dspark.wire.errors import BadHelloError, IdentityMismatchError
from remote_dspark.wire.kinds import Role, RowKind
from remote_dspark.wire.messages import Hello, Shard

STATE_CHUNK_CEILING: Final = 1 << 20
"""DECISIONS 9: a long prefill never delays another request's STEP by more than one such chunk."""

NUM_BATCH_SLOTS: Final = 2
MAX_SHARDS: Final = 8
SLOTS_CEILING: Final = 64
REQUESTS_CEILING: Final = 8
DEPTH_CEILING: Final = 16
SUPPORT_CEILING: Final = 1024
VOCAB_CEILING: Final = 1 << 20
STATE_ROW_CEILING: Final = STATE_CHUNK_CEILING
CREDITS_CEILING: Final = 64
BOOTSTRAP_FRAME_BYTES: Final = 4096
"""The largest payload accepted before HELLO is settled."""

_IDENTITIES: Final = (
    "draft_mode",
    "vocab_size",
    "dense_width",
    "id_map_sha256",
    "draft_sha256",
    "target_sha256",
    "draft_adapted",
    "state_row_bytes",
    "q_semantics",
    "verifier",
    "target_semantics",
    "rng_abi",
    "precision",
    "shard_starts",
)
_MINIMA: Final = (
    "max_slots",
    "max_requests",
    "max_depth",
    "max_support",
    "max_state_chunk_bytes",
    "state_credits",
    "max_reply_bytes",
)


@dataclass(frozen=True)
class Limits:
    """What both ends agreed on; every bound of the codec and of the session comes from here.

    What follows from the fields is computed once: every frame asks for it.
    """

    draft_mode: DraftMode
    vocab_size: int
    dense_width: int
    state_row_bytes: int
    max_slots: int
    max_requests: int
    max_depth: int
    max_support: int
    max_state_chunk_bytes: int
    state_credits: int
    max_reply_bytes: int
    allow_dense: bool
    shard_starts: tuple[int, ...] = (0,)

    @cached_property
    def whole_vocab(self) -> Shard:
        """The one shard of an unsharded reply."""
        return Shard(0, 1, 0, self.vocab_size)

    def shard(self, index: int) -> Shard:
        """Global column range of shard ``index``."""
        ends = (*self.shard_starts[1:], self.vocab_size)
        return Shard(index, len(self.shard_starts), self.shard_starts[index], ends[index])

    @property
    def rows_per_chunk(self) -> int:
        """STATE rows that fit one frame."""
        return self.max_state_chunk_bytes // self.state_row_bytes

    @cached_property
    def max_reply_payload_bytes(self) -> int:
        """Headers plus the larger of all-sparse and, where negotiated, all-dense rows."""
        rows = self.max_requests * self.max_depth
        widest = layout.REPLY_ENTRY.size * self.max_support
        if self.allow_dense:
            widest = max(widest, layout.DENSE_DTYPE.itemsize * self.dense_width)
        requests = self.max_requests * layout.REPLY_REQUEST.size
        return layout.REPLY.size + requests + rows * (layout.REPLY_ROW.size + widest)


def negotiate(client: Hello, server: Hello) -> Hello:
    """The agreed HELLO (role SERVER, the server's session id).

    Raises:
        IdentityMismatchError: an identity differs; names the field, both values.
    """
    for name in _IDENTITIES:
        expected, found = getattr(server, name), getattr(client, name)
        if expected != found:
            raise IdentityMismatchError(name, _show(expected), _show(found))
    agreed = {name: min(getattr(client, name), getattr(server, name)) for name in _MINIMA}
    return replace(server, role=Role.SERVER, allow_dense=client.allow_dense and server.allow_dense, **agreed)


def check_answer(offer: Hello, answer: Hello) -> None:
    """Client side: the server's HELLO must be `negotiate`'s result for what we offered.

    Raises:
        IdentityMismatchError: an identity differs from ours.
        BadHelloError: a limit exceeds what we offered, or no session id was given.
    """
    for name in _IDENTITIES:
        expected, found = getattr(offer, name), getattr(answer, name)
        if expected != found:
            raise IdentityMismatchError(name, _show(expected), _show(found))
    for name in _MINIMA:
        if getattr(answer, name) > getattr(offer, name):
            raise BadHelloError(f"{name}: offered {getattr(offer, name)}, server answered {getattr(answer, name)}")
    if answer.allow_dense and not offer.allow_dense:
        raise BadHelloError("allow_dense: offered False, server answered True")
    if answer.session == 0:
        raise BadHelloError("session: expected a nonzero id from the server, found 0")


def limits_of(hello: Hello) -> Limits:
    """Limits of an agreed HELLO."""
    return Limits(
        draft_mode=hello.draft_mode,
        vocab_size=hello.vocab_size,
        dense_width=hello.dense_width,
        state_row_bytes=hello.state_row_bytes,
        max_slots=hello.max_slots,
        max_requests=hello.max_requests,
        max_depth=hello.max_depth,
        max_support=hello.max_support,
        max_state_chunk_bytes=hello.max_state_chunk_bytes,
        state_credits=hello.state_credits,
        max_reply_bytes=hello.max_reply_bytes,
        allow_dense=hello.allow_dense,
        shard_starts=hello.shard_starts,
    )


def payload_bytes(kind: RowKind, *, num_requests: int, depth: int, width: int) -> int:
    """Bytes of q alone, headers excluded: 8 per sparse entry (id + value), 4 per dense column, 0 for greedy.

    Args:
        kind: Row representation.
        num_requests: Requests of the batch.
        depth: Positions per request.
        width: Support size (sparse) or columns (dense).
    """
    per_entry = {RowKind.SPARSE: 8, RowKind.DENSE: 4, RowKind.GREEDY: 0}[kind]
    return num_requests * depth * width * per_entry


def _show(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
