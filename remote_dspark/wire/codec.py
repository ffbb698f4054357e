"""Frames to messages and back. Sans-IO: bytes in, values out, no state but an unfinished frame.

Rules: `encode` and `decode` are exact inverses; a frame is either decoded whole or refused by a
`RemoteProtocolError`, never anything else; nothing larger than the negotiated limits is allocated.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from remote_dspark.contract import DraftMode
from remote_dspark.wire import control, payload, v1
from remote_dspark.wire.errors import (
    BadMagicError,
    LocalProtocolError,
    RemoteProtocolError,
    TrailingBytesError,
    TruncatedFrameError,
    WrongDialectError,
)
from remote_dspark.wire.header import HEADER_BYTES, Header, parse_header, require_digest, require_length, seal
from remote_dspark.wire.kinds import FrameType
from remote_dspark.wire.layout import MAGIC
from remote_dspark.wire.limits import Limits
from remote_dspark.wire.messages import Message, Reply, State

Buffer = bytes | bytearray | memoryview


def encode(message: Message, limits: Limits | None) -> bytearray:
    """One frame; ``limits`` is None for HELLO and for an ERROR before HELLO.

    Raises:
        LocalProtocolError: the message breaks a rule that the other end would refuse it for.
    """
    try:
        if isinstance(message, Reply):
            assert limits is not None
            if limits.draft_mode is DraftMode.OFF:
                return v1.encode_v1(message)
            frame_type, frame = FrameType.REPLY, payload.pack_reply(message, limits)
        elif isinstance(message, State):
            assert limits is not None
            frame_type, frame = FrameType.STATE, payload.pack_state(message, limits)
        else:
            frame_type, pack = control.PACK[type(message)]
            frame = bytearray(HEADER_BYTES) + pack(message)
        require_length(frame_type, len(frame) - HEADER_BYTES, limits)
    except RemoteProtocolError as error:
        raise LocalProtocolError.of(error) from error
    except (struct.error, OverflowError, ValueError) as error:
        raise LocalProtocolError("bad_field", f"{type(message).__name__}: {error}") from error
    return seal(frame, frame_type)


class CheckedFrame(bytearray):
    """A whole frame from a `FrameReader`, with its header as checked under ``limits``; nobody else writes to it."""

    __slots__ = ("header", "limits")
    header: Header
    limits: Limits | None


def decode(frame: Buffer, limits: Limits | None) -> Message:
    """Exactly one frame. A `CheckedFrame` read under these very limits does not have its header checked again.

    Raises:
        RemoteProtocolError: one subclass per reason.
    """
    if type(frame) is CheckedFrame and frame.limits is limits:
        return decode_payload(frame.header, memoryview(frame)[HEADER_BYTES:], limits)
    if len(frame) < HEADER_BYTES:
        raise TruncatedFrameError(f"a frame has at least {HEADER_BYTES} bytes, found {len(frame)}")
    view = memoryview(frame)
    if bytes(view[:4]) == v1.MAGIC:
        return v1.decode_v1(frame, v1.require_off(limits))
    header = parse_header(view, limits)
    size = HEADER_BYTES + header.length
    if len(frame) < size:
        raise TruncatedFrameError(f"{header.type.name}: expected {size} bytes, found {len(frame)}")
    if len(frame) > size:
        raise TrailingBytesError(f"{header.type.name}: expected {size} bytes, found {len(frame)}")
    return decode_payload(header, view[HEADER_BYTES:], limits)


def decode_payload(header: Header, view: memoryview, limits: Limits | None) -> Message:
    """The message of a checked header and a payload of exactly its length."""
    require_digest(header, view)
    if header.type is FrameType.REPLY:
        assert limits is not None
        if limits.draft_mode is DraftMode.OFF:
            raise WrongDialectError("a v2 REPLY in a session that negotiated OFF; v1 replies are expected")
        return payload.parse_reply(view, limits)
    if header.type is FrameType.STATE:
        assert limits is not None
        return payload.parse_state(view, limits)
    return control.PARSE[header.type](view)


class FrameReader:
    """Cuts a byte stream into frames. Holds at most one unfinished frame, whose size was checked first.

    Attributes:
        limits: None until HELLO is settled; set it then.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits
        self._pending = bytearray()
        self._filled = 0
        self._target = 0
        self._header: Header | None = None

    def feed(self, data: Buffer) -> Iterator[bytearray]:
        """Takes all of ``data``; yields each finished frame (header checked, payload not yet).

        Consume it before the next `feed`; ``limits`` may change between two frames.
        """
        view = memoryview(data)
        at, size = 0, len(view)
        while at < size:
            if self._target == 0:
                taken = view[at : at + HEADER_BYTES - self._filled]
                self._pending += taken
                self._filled += len(taken)
                at += len(taken)
                if self._filled < HEADER_BYTES:
                    self._require_prefix()
                    return
                self._target = self._frame_bytes()
                # The whole frame is allocated once, after its length was accepted.
                if self._header is None:
                    self._pending.extend(bytes(self._target - HEADER_BYTES))
                else:
                    self._pending = self._checked_frame(self._header)
            taken = view[at : at + self._target - self._filled]
            self._pending[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            at += len(taken)
            if self._filled == self._target:
                frame, self._pending, self._filled, self._target = self._pending, bytearray(), 0, 0
                yield frame

    def _checked_frame(self, header: Header) -> CheckedFrame:
        frame = CheckedFrame(self._target)
        frame[:HEADER_BYTES] = self._pending
        frame.header, frame.limits = header, self.limits
        return frame

    @property
    def is_between_frames(self) -> bool:
        """Whether no frame is unfinished."""
        return self._filled == 0

    def end(self) -> None:
        """The stream ended.

        Raises:
            TruncatedFrameError: inside a frame.
        """
        if not self.is_between_frames:
            raise TruncatedFrameError(f"the stream ended after {self._filled} bytes of a frame")

    def _frame_bytes(self) -> int:
        """Length of the frame whose first 32 bytes are pending (a v1 head has 32 bytes, too)."""
        self._header = None
        if self._pending[: len(v1.MAGIC)] == v1.MAGIC:
            return v1.parse_v1_length(self._pending, v1.require_off(self.limits))
        self._header = parse_header(self._pending, self.limits)
        return HEADER_BYTES + self._header.length

    def _require_prefix(self) -> None:
        """Refuses a first byte that cannot begin a frame, without waiting for 32 of them."""
        start = bytes(self._pending[: len(MAGIC)])
        if not MAGIC.startswith(start) and not v1.MAGIC.startswith(start):
            raise BadMagicError(f"expected {MAGIC!r}, found {start!r}; is this a wire v2 peer?")
