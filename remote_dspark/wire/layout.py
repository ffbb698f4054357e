"""Byte layouts of wire v2: every fixed part of every frame as a table. ``docs/wire.md`` shows the same tables.

Rules: little-endian, no implicit padding, every ``reserved`` field is zero (and refused otherwise). A frame is the
32-byte header followed by ``length`` payload bytes; a payload is one fixed part, then for STATE, STEP and REPLY the
repeated parts named here, in this order, with nothing between or after them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from remote_dspark.wire.kinds import FrameType

MAGIC: Final = b"DSW2"
SHARD_FIELDS: Final = 8


@dataclass(frozen=True)
class Layout:
    """A fixed little-endian struct.

    Attributes:
        name: As in the documentation.
        fields: (name, struct code) in order.
        codec: The compiled struct.
        size: Bytes.
    """

    name: str
    fields: tuple[tuple[str, str], ...]
    codec: struct.Struct = field(init=False, repr=False, compare=False)
    size: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", struct.Struct("<" + "".join(code for _, code in self.fields)))
        object.__setattr__(self, "size", self.codec.size)

    def rows(self) -> list[tuple[int, int, str, str]]:
        """(offset, size, struct code, name) of each field."""
        result, offset = [], 0
        for name, code in self.fields:
            size = struct.calcsize("<" + code)
            result.append((offset, size, code, name))
            offset += size
        return result


def _layout(name: str, text: str) -> Layout:
    pairs = (line.split() for line in text.split(","))
    return Layout(name, tuple((field_name, code) for field_name, code in pairs))


HEADER: Final = _layout("HEADER", "magic 4s, version H, type B, reserved B, length I, check I, digest 16s")
"""``check``: low 32 bits of xxh3-64 over the 12 bytes before it; it seeds ``digest``, xxh3-128 of the payload."""

HELLO: Final = _layout(
    "HELLO",
    "session Q, role B, draft_mode B, draft_adapted B, allow_dense B, num_shards B, reserved B, state_credits H, "
    "vocab_size I, dense_width I, state_row_bytes I, max_state_chunk_bytes I, max_reply_bytes I, "
    "max_slots H, max_requests H, max_depth H, max_support H, reserved I, "
    "id_map_sha256 32s, draft_sha256 32s, target_sha256 32s, "
    "q_semantics 32s, verifier 32s, target_semantics 32s, rng_abi 32s, precision 32s, shard_starts 8I",
)
OPEN: Final = _layout(
    "OPEN",
    "session Q, generation Q, seed Q, context_version Q, slot H, support_policy H, depth_policy H, reserved H, "
    "draft_temperature_ppm I, reserved I",
)
STATE: Final = _layout(
    "STATE", "session Q, generation Q, position Q, slot H, reserved H, num_rows I, row_bytes I, reserved I"
)
STEP: Final = _layout("STEP", "session Q, batch Q, batch_slot B, num_requests B, depth H, reserved I")
STEP_REQUEST: Final = _layout(
    "STEP request",
    "generation Q, round Q, anchor_position Q, context_version Q, prefix_digest 32s, "
    "slot H, support_policy H, draft_temperature_ppm I, anchor_token i, reserved I",
)
REPLY: Final = _layout(
    "REPLY",
    "session Q, batch Q, batch_slot B, num_requests B, depth H, shard_index B, num_shards B, reserved H, "
    "shard_start I, shard_end I, num_entries I, num_dense I, dense_width I, reserved I",
)
REPLY_REQUEST: Final = _layout(
    "REPLY request", "generation Q, round Q, anchor_position Q, context_version Q, slot H, reserved H, reserved I"
)
REPLY_ROW: Final = _layout("REPLY row", "checksum Q, token i, mass I, count H, kind H")
REPLY_ENTRY: Final = _layout("REPLY entry", "id i, q f")
COMPLETE: Final = _layout(
    "COMPLETE",
    "session Q, batch Q, generation Q, round Q, position Q, context_version Q, reply_size_bytes Q, reply_digest 16s, "
    "acknowledges B, status B, batch_slot B, reserved B, slot H, credits H",
)
COMMIT: Final = _layout(
    "COMMIT",
    "session Q, generation Q, round Q, committed_position Q, next_token i, slot H, num_accepted H, "
    "is_bonus B, reserved B, reserved H, reserved I",
)
RESET: Final = _layout(
    "RESET", "session Q, generation Q, new_generation Q, keep_position Q, slot H, reserved H, reserved I"
)
CANCEL: Final = _layout("CANCEL", "session Q, generation Q, slot H, reserved H, reserved I")
PING: Final = _layout("PING", "session Q, token Q, is_answer B, reserved B, reserved H, reserved I")
DRAIN: Final = _layout("DRAIN", "session Q, reason 64s")
ERROR: Final = _layout(
    "ERROR",
    "session Q, batch Q, generation Q, slot H, acknowledges B, batch_slot B, is_fatal B, reserved B, reserved H, "
    "code 48s, detail 240s",
)

FIXED: Final[dict[FrameType, Layout]] = {
    FrameType.HELLO: HELLO,
    FrameType.OPEN: OPEN,
    FrameType.STATE: STATE,
    FrameType.STEP: STEP,
    FrameType.REPLY: REPLY,
    FrameType.COMPLETE: COMPLETE,
    FrameType.COMMIT: COMMIT,
    FrameType.RESET: RESET,
    FrameType.CANCEL: CANCEL,
    FrameType.PING: PING,
    FrameType.DRAIN: DRAIN,
    FrameType.ERROR: ERROR,
}
"""First part of each payload; the whole payload except for STATE, STEP and REPLY."""

VARIABLE: Final = frozenset({FrameType.STATE, FrameType.STEP, FrameType.REPLY})

ROW_DTYPE: Final = np.dtype([("checksum", "<u8"), ("token", "<i4"), ("mass", "<u4"), ("count", "<u2"), ("kind", "<u2")])
ENTRY_DTYPE: Final = np.dtype([("id", "<i4"), ("q", "<f4")])
TOKEN_DTYPE: Final = np.dtype("<i4")
DENSE_DTYPE: Final = np.dtype("<f4")
