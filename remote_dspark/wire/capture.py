"""Golden traces: every frame of a connection in one file, to be replayed through the same checks later.

Layout, little-endian: 16-byte head (magic ``DSWTRACE``, version u16, six zero bytes); then records of u8 sender, three
zero bytes, u32 frame length, u64 nanoseconds since the first frame, and the frame; then a trailer whose sender is 0,
with the number of records as its time and xxh3-128 of everything before it. A file without its trailer was cut short
and is refused. Rules: writing takes a stream, reading takes bytes; time comes from outside.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

from xxhash import xxh3_128

from remote_dspark.wire.codec import decode
from remote_dspark.wire.errors import BadDigestError, BadFieldError, TruncatedFrameError
from remote_dspark.wire.kinds import Role
from remote_dspark.wire.limits import Limits, limits_of
from remote_dspark.wire.messages import Hello, Message

MAGIC: Final = b"DSWTRACE"
VERSION: Final = 1
HEAD: Final = struct.Struct("<8sH6s")
RECORD: Final = struct.Struct("<B3sIQ")
DIGEST_BYTES: Final = 16
END: Final = 0
LARGEST_FRAME: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Record:
    """One captured frame."""

    sender: Role
    elapsed_ns: int
    frame: bytes


class CaptureWriter:
    """A `Tap` that writes a trace; `close` writes the trailer. Thread-safe.

    Args:
        stream: Binary, writable, positioned at its start; closed by the caller.
        clock_ns: Monotonic nanoseconds.
    """

    def __init__(self, stream: BinaryIO, clock_ns: Callable[[], int]) -> None:
        self._stream = stream
        self._clock_ns = clock_ns
        self._digest = xxh3_128()
        self._num_records = 0
        self._started_ns: int | None = None
        self._lock = threading.Lock()
        self._put(HEAD.pack(MAGIC, VERSION, bytes(6)))

    def __call__(self, sender: Role, frame: bytes | bytearray) -> None:
        """Appends one frame."""
        with self._lock:
            now = self._clock_ns()
            self._started_ns = now if self._started_ns is None else self._started_ns
            self._put(RECORD.pack(sender, bytes(3), len(frame), now - self._started_ns))
            self._put(bytes(frame))
            self._num_records += 1

    def close(self) -> None:
        """Writes the trailer."""
        with self._lock:
            self._put(RECORD.pack(END, bytes(3), DIGEST_BYTES, self._num_records))
            self._stream.write(self._digest.digest())
            self._stream.flush()

    def _put(self, data: bytes) -> None:
        self._digest.update(data)
        self._stream.write(data)


def read_capture(data: bytes) -> list[Record]:
    """Every record of a whole trace.

    Raises:
        RemoteProtocolError: cut short, changed, or not a trace.
    """
    if len(data) < HEAD.size or HEAD.unpack_from(data) != (MAGIC, VERSION, bytes(6)):
        raise BadFieldError(f"expected a trace that begins with {MAGIC!r} version {VERSION}, found {data[:10]!r}")
    records: list[Record] = []
    at = HEAD.size
    while True:
        if at + RECORD.size > len(data):
            raise TruncatedFrameError(f"the trace ends after {len(records)} records without its trailer")
        sender, zero, length, number = RECORD.unpack_from(data, at)
        at += RECORD.size
        if zero.strip(b"\0") or length > LARGEST_FRAME or sender not in (END, Role.CLIENT, Role.SERVER):
            raise BadFieldError(f"record {len(records)}: sender {sender}, length {length}")
        if at + length > len(data):
            raise TruncatedFrameError(f"record {len(records)}: {length} bytes announced, {len(data) - at} left")
        body = data[at : at + length]
        if sender == END:
            _require_trailer(data, at, body, number, len(records))
            return records
        records.append(Record(Role(sender), number, body))
        at += length


def _require_trailer(data: bytes, at: int, digest: bytes, stated: int, found: int) -> None:
    digester = xxh3_128()
    digester.update(data[:at])
    if digest != digester.digest() or stated != found or len(data) != at + DIGEST_BYTES:
        raise BadDigestError(f"the trailer states {stated} records, found {found}; digest or length differ")


def replay_capture(records: list[Record]) -> Iterator[tuple[Record, Message]]:
    """Decodes a trace frame by frame under the limits that its own HELLOs agreed on.

    Raises:
        RemoteProtocolError: a frame is refused, as it would have been then.
    """
    limits: Limits | None = None
    for record in records:
        message = decode(record.frame, limits)
        if isinstance(message, Hello) and message.role is Role.SERVER:
            limits = limits_of(message)
        yield record, message
