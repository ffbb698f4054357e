"""Golden frames. Red when any byte of any frame changes, or when a damaged one is accepted."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from wire_vectors import vector_script

from remote_dspark.wire.codec import FrameReader, decode, encode
from remote_dspark.wire.errors import RemoteProtocolError, TruncatedFrameError

VECTORS = Path(__file__).parents[1] / "vectors" / "wire"
MANIFEST = json.loads((VECTORS / "manifest.json").read_text())
NAMES = sorted(MANIFEST)
make_vectors = vector_script()


def load(name):
    return (VECTORS / name).read_bytes(), make_vectors.LIMITS.get(MANIFEST[name]["limits"])


def test_the_script_makes_exactly_these_files():
    made = make_vectors.frames()
    assert sorted(made) == NAMES == sorted(path.name for path in VECTORS.glob("*.bin"))
    assert make_vectors.manifest(made) == (VECTORS / "manifest.json").read_text()
    for name, (_, data) in made.items():
        assert data == (VECTORS / name).read_bytes(), name


@pytest.mark.parametrize("name", NAMES)
def test_decoding_and_encoding_gives_the_same_bytes(name):
    data, limits = load(name)
    assert hashlib.sha256(data).hexdigest() == MANIFEST[name]["sha256"]
    assert bytes(encode(decode(data, limits), limits)) == data


@pytest.mark.parametrize("name", NAMES)
def test_every_truncation_is_refused(name):
    data, limits = load(name)
    for size in range(len(data)):
        with pytest.raises(RemoteProtocolError):
            decode(data[:size], limits)
        reader = FrameReader(limits)
        assert list(reader.feed(data[:size])) == []
        if size:
            with pytest.raises(TruncatedFrameError):
                reader.end()


@pytest.mark.parametrize("name", NAMES)
def test_trailing_bytes_are_refused(name):
    data, limits = load(name)
    with pytest.raises(RemoteProtocolError, match="expected"):
        decode(data + b"\0", limits)


@pytest.mark.parametrize("name", NAMES)
def test_every_single_bit_flip_is_refused(name):
    data, limits = load(name)
    damaged = bytearray(data)
    for bit in range(8 * len(data)):
        damaged[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(RemoteProtocolError):
            decode(damaged, limits)
        damaged[bit // 8] ^= 1 << (bit % 8)


@pytest.mark.parametrize("name", NAMES)
def test_no_flip_makes_a_reader_wait_for_more(name):
    """A damaged header is refused at once: a longer length is never waited for."""
    data, limits = load(name)
    for bit in range(8 * 32):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(RemoteProtocolError):
            read_one(damaged, limits)


def read_one(data, limits):
    frames = list(FrameReader(limits).feed(data))
    assert frames, "the reader waits for more"
    return decode(frames[0], limits)


@pytest.mark.parametrize("name", NAMES)
def test_byte_by_byte(name):
    data, limits = load(name)
    reader = FrameReader(limits)
    frames = [frame for byte in data + data for frame in reader.feed(bytes([byte]))]
    assert [bytes(frame) for frame in frames] == [data, data]


def test_v1_and_v2_differ_from_the_first_bytes_on():
    v1, _ = load("v1_reply.bin")
    v2, _ = load("reply_sparse.bin")
    assert v1[:4] == b"DSV1"
    assert v2[:4] == b"DSW2"


def test_v1_is_refused_before_hello_and_in_a_sampled_session():
    data, _ = load("v1_reply.bin")
    for limits, code in ((None, "hello_required"), (make_vectors.LIMITS["on"], "wrong_dialect")):
        with pytest.raises(RemoteProtocolError) as caught:
            decode(data, limits)
        assert caught.value.code == code
        with pytest.raises(RemoteProtocolError) as caught:
            list(FrameReader(limits).feed(data))
        assert caught.value.code == code


def test_a_sampled_reply_is_refused_in_an_off_session():
    data, _ = load("reply_sparse.bin")
    with pytest.raises(RemoteProtocolError) as caught:
        decode(data, make_vectors.LIMITS["off"])
    assert caught.value.code == "wrong_dialect"
