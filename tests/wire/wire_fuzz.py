"""Seeded frames that are random, mutated, or mutated and re-sealed; used by the tests and by the soak."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from wire_vectors import load_vectors

from remote_dspark.wire import layout
from remote_dspark.wire.codec import FrameReader, decode
from remote_dspark.wire.errors import RemoteProtocolError
from remote_dspark.wire.header import HEADER_BYTES, max_payload_bytes, seal
from remote_dspark.wire.kinds import FrameType
from remote_dspark.wire.limits import Limits

VECTORS = Path(__file__).parents[1] / "vectors" / "wire"
INTERESTING = (0, 1, 2, 0x7F, 0x80, 0xFF)


def largest_frame(limits: Limits | None) -> int:
    """No single buffer of the codec may be larger than this."""
    if limits is None:
        return HEADER_BYTES + layout.HELLO.size
    return HEADER_BYTES + max(max_payload_bytes(t, limits) for t in FrameType)


def cases(seed: int) -> Iterator[tuple[str, Limits | None, bytearray]]:
    """An endless stream of (kind, limits, frame)."""
    rng = np.random.default_rng(seed)
    vectors = load_vectors()
    while True:
        name, limits, data = vectors[int(rng.integers(len(vectors)))]
        frame = bytearray(data)
        kind = ("random", "mutated", "resealed", "resealed", "spliced", "header")[int(rng.integers(6))]
        if kind == "random":
            frame = bytearray(rng.bytes(int(rng.integers(0, 400))))
            if rng.integers(2):
                frame[:4] = b"DSW2"
        elif kind == "spliced":
            other = vectors[int(rng.integers(len(vectors)))][2]
            cut = int(rng.integers(len(frame)))
            frame = frame[:cut] + bytearray(other[int(rng.integers(len(other))) :])
        else:
            low, high = (0, HEADER_BYTES) if kind == "header" else (HEADER_BYTES, len(frame))
            for _ in range(int(rng.integers(1, 4))):
                at = int(rng.integers(low, high))
                frame[at] = INTERESTING[int(rng.integers(6))] if rng.integers(2) else int(rng.integers(256))
            if kind == "resealed" and data[:4] == layout.MAGIC:
                if rng.integers(8) == 0:
                    frame = frame[: HEADER_BYTES + int(rng.integers(len(frame)))]
                frame_type = int(rng.integers(0, 15)) if rng.integers(8) == 0 else data[6]
                frame = seal(frame, frame_type)
        yield f"{kind}:{name}", limits, frame


def judge(limits: Limits | None, frame: bytearray) -> str:
    """What happened: accepted, or the refusal's code. Any other exception is the bug we look for.

    The frame goes through the stream reader and through the one-shot decoder; they must agree.
    """
    outcomes = []
    try:
        decode(frame, limits)
        outcomes.append("accepted")
    except RemoteProtocolError as error:
        outcomes.append(error.code)
    reader = FrameReader(limits)
    try:
        count = 0
        for piece in reader.feed(frame):
            decode(piece, limits)
            count += 1
        reader.end()
        outcomes.append("accepted" if count == 1 else f"{count} frames")
    except RemoteProtocolError as error:
        outcomes.append(error.code)
    if ("accepted" in outcomes) and outcomes[0] != outcomes[1]:
        raise AssertionError(f"decoder says {outcomes[0]}, reader says {outcomes[1]}")
    return outcomes[0]
