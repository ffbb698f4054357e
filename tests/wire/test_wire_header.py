"""Headers and rows by somebody who can compute check values: honest digests must not buy a wrong frame.

Turns red when: a reserved byte or one byte too many is let through, a header checked under other limits is trusted,
or many entries wrap a 32-bit sum; a reply whose completion failed is handed out; a full socket loses bytes or has no
deadline.
"""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest
from wire_kit import VOCAB, make_hello, make_limits, make_reply, make_state, make_step
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from remote_dspark.wire import layout
from remote_dspark.wire.channel import Channel
from remote_dspark.wire.codec import CheckedFrame, FrameReader, decode, encode
from remote_dspark.wire.errors import RemoteProtocolError
from remote_dspark.wire.header import CHECKED_BYTES, max_payload_bytes
from remote_dspark.wire.kinds import FrameType, Role, Status
from remote_dspark.wire.mailbox import Mailbox
from remote_dspark.wire.messages import WIRE_VERSION, Complete, Open, Ping
from remote_dspark.wire.reply import build_dense_reply, build_reply
from remote_dspark.wire.session import Session
from remote_dspark.wire.shards import split_reply
from remote_dspark.wire.validate import require_rows

LIMITS = make_limits()


def frame_with(frame_type: FrameType, payload: bytes, *, reserved: int = 0, length: int | None = None) -> bytes:
    """A frame with a right check value and digest, whatever it says."""
    size = len(payload) if length is None else length
    fields = (layout.MAGIC, WIRE_VERSION, frame_type, reserved, size)
    check = xxh3_64_intdigest(layout.HEADER.codec.pack(*fields, 0, b"")[:CHECKED_BYTES]) & 0xFFFFFFFF
    return layout.HEADER.codec.pack(*fields, check, xxh3_128_digest(payload, check)) + payload


def code_of(call, *arguments) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        call(*arguments)
    return caught.value.code


def test_a_reserved_header_byte_is_refused_even_with_a_right_check():
    payload = bytes(encode(Ping(9, 1), LIMITS))[layout.HEADER.size :]
    assert decode(frame_with(FrameType.PING, payload), LIMITS) == Ping(9, 1)
    assert code_of(decode, frame_with(FrameType.PING, payload, reserved=1), LIMITS) == "bad_header"


@pytest.mark.parametrize("frame_type", sorted(layout.VARIABLE))
def test_one_byte_above_the_negotiated_length_is_refused_by_the_header_alone(frame_type):
    most = max_payload_bytes(frame_type, LIMITS)
    assert list(FrameReader(LIMITS).feed(frame_with(frame_type, b"", length=most))) == []
    head = frame_with(frame_type, b"", length=most + 1)
    assert code_of(lambda: list(FrameReader(LIMITS).feed(head))) == "frame_too_large"


def test_a_header_checked_under_other_limits_is_checked_again():
    wide, narrow = make_limits(), make_limits(max_state_chunk_bytes=make_hello().state_row_bytes)
    (frame,) = FrameReader(wide).feed(encode(make_state(9, 0, 1, 0, [1, 2, 3]), wide))
    assert type(frame) is CheckedFrame
    assert decode(frame, wide).token_ids.tolist() == [1, 2, 3]
    assert code_of(decode, frame, narrow) == "frame_too_large"


def test_a_sum_that_wraps_32_bits_is_no_distribution():
    limits, width = make_limits(max_support=300), 257
    ids = np.arange(width, dtype=np.int32).reshape(1, 1, width)
    ones = np.ones((1, 1, width), dtype=np.float32)
    tokens, counts = np.zeros((1, 1), np.int32), np.full((1, 1), width, np.int32)
    reply = build_reply(make_step(1, 1), limits.whole_vocab, tokens=tokens, ids=ids, q=ones, counts=counts)
    assert code_of(require_rows, reply, limits) == "wrong_mass"


def test_shared_masses_cannot_be_changed_by_whoever_gets_them():
    reply = make_reply(make_step(), LIMITS, ragged=False)
    with pytest.raises(ValueError, match="read-only"):
        require_rows(reply, LIMITS)[0] = 1


@pytest.mark.parametrize("start", [b"G", b"DSX", b"\x16\x03\x01"])
def test_a_start_that_no_frame_has_is_refused_without_waiting_for_a_header(start):
    assert code_of(lambda: list(FrameReader().feed(start))) == "bad_magic"


def reserved_places() -> list[tuple[str, bytes, int]]:
    """(name, frame, offset) of each reserved field of the frames with repeated parts."""
    step = make_step()
    messages = (
        (step, layout.STEP, layout.STEP_REQUEST),
        (make_reply(step, LIMITS), layout.REPLY, layout.REPLY_REQUEST),
        (make_state(9, 0, 1, 0, [1]), layout.STATE, None),
    )
    places = []
    for message, fixed, repeated in messages:
        frame, base = bytes(encode(message, LIMITS)), layout.HEADER.size
        for table in (fixed, repeated):
            for offset, _, _, name in table.rows() if table else ():
                if name == "reserved":
                    places.append((f"{table.name} at {offset}", frame, base + offset))
            base += table.size if table else 0
    return places


@pytest.mark.parametrize(("name", "frame", "offset"), reserved_places(), ids=[place[0] for place in reserved_places()])
def test_every_reserved_field_is_refused_even_with_a_right_digest(name, frame, offset):
    payload = bytearray(frame[layout.HEADER.size :])
    payload[offset - layout.HEADER.size] = 1
    assert code_of(decode, frame_with(FrameType(frame[6]), bytes(payload)), LIMITS) == "bad_field", name


def test_a_zero_entry_among_equally_wide_rows_is_refused():
    reply = make_reply(make_step(), LIMITS, ragged=False)
    row = reply.q[:32]
    # Not the proposed token's entry, so that nothing else is wrong with the row.
    source, sink = (i for i in np.argsort(row)[:3] if reply.ids[i] != reply.tokens[0, 0]), int(np.argmax(row))
    chosen = next(source)
    row[sink] += row[chosen]
    row[chosen] = 0.0
    assert code_of(require_rows, reply, LIMITS) == "zero_entry"


@pytest.mark.parametrize("token_id", [-1, LIMITS.vocab_size])
def test_state_rows_of_ids_outside_the_vocabulary_are_refused(token_id):
    frame = bytes(encode(make_state(9, 0, 1, 0, [1]), LIMITS))
    payload = bytearray(frame[layout.HEADER.size :])
    start = layout.STATE.size
    payload[start : start + 4] = token_id.to_bytes(4, "little", signed=True)
    assert code_of(decode, frame_with(FrameType.STATE, bytes(payload)), LIMITS) == "bad_field"


@pytest.mark.parametrize(("shard", "column"), [(0, 200), (1, 0), (1, 149), (1, VOCAB)])
def test_a_dense_shard_is_zero_outside_its_columns(shard, column):
    limits = make_limits(shard_starts=(0, 150))
    dense = np.zeros((1, limits.dense_width), np.float32)
    dense[0, [10, 160]] = 0.5
    whole = build_dense_reply(make_step(1, 1), limits.whole_vocab, np.array([[10]], np.int32), dense)
    part = split_reply(whole, limits)[shard]
    require_rows(part, limits)
    damaged = part.dense.copy()
    damaged[0, column] = 2.0**-24
    assert code_of(require_rows, part._replace(dense=damaged), limits) == "nonzero_tail"


def test_a_reply_whose_completion_failed_is_not_handed_out():
    mailbox, server = Mailbox(make_hello()), Session(Role.SERVER, make_hello(role=Role.SERVER, session=9))
    server.receive(mailbox.encode(make_hello()))
    mailbox.feed(server.send(server.agreed))
    server.receive(mailbox.encode(Open(9, 0, 1, 3, 700_000, 32, 3)))
    mailbox.feed(server.send(Complete(9, FrameType.OPEN, slot=0, generation=1)))
    step = make_step(1)
    server.receive(mailbox.encode(step))
    mailbox.feed(server.send(make_reply(step, LIMITS)))
    mailbox.feed(server.send(Complete(9, FrameType.STEP, Status.FAILED, batch=step.batch, generation=1)))
    assert code_of(mailbox.round_of, step) == "failed_completion"


def test_a_full_socket_is_waited_for_and_loses_nothing():
    ours, theirs = socket.socketpair()
    channel, data = Channel(ours), bytes(range(256)) * (1 << 14)
    received = bytearray()

    def read() -> None:
        while part := theirs.recv(1 << 16):
            received.extend(part)

    reader = threading.Thread(target=read)
    # What fits the buffers goes at once; the rest needs the reader, who starts when nothing fits any more.
    with theirs, pytest.raises(TimeoutError, match="did not take"):
        channel.send(data, time.monotonic() + 0.2)
    channel.close()
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    with theirs:
        reader.start()
        channel.send(data, time.monotonic() + 10)
        channel.close()
        reader.join(10)
    assert received == data
