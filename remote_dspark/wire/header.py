"""The 32-byte header: recognised, bounded and checked before anything of the payload's size is allocated.

Rules: the header's own check value is verified first, so a damaged length is refused at once and never waited for;
then the length against what this frame type may be under the limits in force.
"""

from __future__ import annotations

from typing import NamedTuple

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from remote_dspark.wire import layout
from remote_dspark.wire.errors import (
    BadDigestError,
    BadHeaderError,
    BadMagicError,
    BadSizeError,
    BufferTooSmallError,
    FrameTooLargeError,
    HelloRequiredError,
    UnknownFrameError,
    WrongVersionError,
)
from remote_dspark.wire.kinds import FrameType
from remote_dspark.wire.limits import Limits
from remote_dspark.wire.messages import WIRE_VERSION

HEADER_BYTES = layout.HEADER.size
CHECKED_BYTES = 12
_BEFORE_HELLO = frozenset({FrameType.HELLO, FrameType.ERROR})
_TYPES = {int(t): t for t in FrameType}


class Header(NamedTuple):
    """A checked header; ``length`` is the payload's."""

    type: FrameType
    length: int
    check: int
    digest: bytes


def parse_header(data: bytes | bytearray | memoryview, limits: Limits | None) -> Header:
    """Checks the first 32 bytes of a frame; ``limits`` is None before HELLO is settled.

    Raises:
        BadMagicError, WrongVersionError, BadHeaderError, UnknownFrameError, BadSizeError, FrameTooLargeError,
        HelloRequiredError: in that order of checks.
    """
    magic, version, number, reserved, length, check, digest = layout.HEADER.codec.unpack_from(data)
    if magic != layout.MAGIC:
        raise BadMagicError(f"expected {layout.MAGIC!r}, found {bytes(magic)!r}; is this port a wire v2 peer?")
    if check != xxh3_64_intdigest(data[:CHECKED_BYTES]) & 0xFFFFFFFF:
        raise BadHeaderError(f"header check value {check:#010x} does not match its 12 bytes; the stream is damaged")
    if version != WIRE_VERSION:
        raise WrongVersionError(f"expected wire version {WIRE_VERSION}, found {version}")
    if reserved:
        raise BadHeaderError(f"reserved header byte: expected 0, found {reserved}")
    frame_type = _TYPES.get(number)
    if frame_type is None:
        raise UnknownFrameError(f"frame type {number}: expected 1..{max(_TYPES)}")
    require_length(frame_type, length, limits)
    return Header(frame_type, length, check, digest)


def require_length(frame_type: FrameType, length: int, limits: Limits | None) -> None:
    """Refuses a payload length that this type cannot have under ``limits``."""
    if limits is None and frame_type not in _BEFORE_HELLO:
        raise HelloRequiredError(f"{frame_type.name} before HELLO")
    fixed = layout.FIXED[frame_type].size
    if frame_type not in layout.VARIABLE:
        if length != fixed:
            raise BadSizeError(f"{frame_type.name}: expected {fixed} payload bytes, found {length}")
        return
    assert limits is not None
    most = max_payload_bytes(frame_type, limits)
    if length > most:
        raise FrameTooLargeError(f"{frame_type.name}: at most {most} payload bytes were negotiated, found {length}")
    if length < fixed:
        raise BadSizeError(f"{frame_type.name}: at least {fixed} payload bytes, found {length}")


def max_payload_bytes(frame_type: FrameType, limits: Limits) -> int:
    """Largest payload of a frame type under ``limits``; buffers are sized with it before the first frame."""
    if frame_type is FrameType.STATE:
        return layout.STATE.size + limits.rows_per_chunk * (4 + limits.state_row_bytes)
    if frame_type is FrameType.STEP:
        return layout.STEP.size + limits.max_requests * layout.STEP_REQUEST.size
    if frame_type is FrameType.REPLY:
        return limits.max_reply_payload_bytes
    return layout.FIXED[frame_type].size


def require_reply_buffer(limits: Limits) -> None:
    """Preflight, at HELLO: the largest legal reply fits the agreed buffer.

    Raises:
        BufferTooSmallError: states both sizes.
    """
    needed = HEADER_BYTES + limits.max_reply_payload_bytes
    if needed > limits.max_reply_bytes:
        raise BufferTooSmallError(
            f"replies of {limits.max_requests} requests x {limits.max_depth} positions need {needed} bytes, "
            f"max_reply_bytes is {limits.max_reply_bytes}; raise it, or lower the other limits or allow_dense"
        )


def seal(frame: bytearray, frame_type: FrameType) -> bytearray:
    """Writes the header of a frame whose payload is already in place after `HEADER_BYTES`; returns the frame."""
    length = len(frame) - HEADER_BYTES
    layout.HEADER.codec.pack_into(frame, 0, layout.MAGIC, WIRE_VERSION, frame_type, 0, length, 0, b"")
    view = memoryview(frame)
    check = xxh3_64_intdigest(view[:CHECKED_BYTES]) & 0xFFFFFFFF
    digest = xxh3_128_digest(view[HEADER_BYTES:], check)
    layout.HEADER.codec.pack_into(frame, 0, layout.MAGIC, WIRE_VERSION, frame_type, 0, length, check, digest)
    return frame


def require_digest(header: Header, payload: memoryview) -> None:
    """Compares xxh3-128 of the payload (seeded with the header's check, so it cannot follow another header)."""
    found = xxh3_128_digest(payload, header.check)
    if found != header.digest:
        raise BadDigestError(f"{header.type.name}: payload digest {found.hex()}, header says {header.digest.hex()}")


def frame_digest(frame: bytes | bytearray | memoryview) -> bytes:
    """16 bytes, xxh3-128 of a whole frame: what COMPLETE repeats."""
    return xxh3_128_digest(frame)
