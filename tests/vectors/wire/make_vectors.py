"""Makes the golden frames beside this file: ``python tests/vectors/wire/make_vectors.py`` (``--check`` compares).

One file per frame type and reply shape, each a whole frame, plus ``manifest.json`` with what each must decode under.
The bytes are frozen: a change of any of them is a new wire version. Everything here is written out or counted up;
no random source is involved.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from remote_dspark.contract import Q_FLOOR_FIRST, TICKET_TOTAL, DraftMode
from remote_dspark.wire.codec import encode
from remote_dspark.wire.kinds import FrameType, Role, Status
from remote_dspark.wire.limits import Limits, limits_of
from remote_dspark.wire.messages import (
    Cancel,
    Commit,
    Complete,
    Drain,
    Error,
    Hello,
    Message,
    Open,
    Ping,
    Reply,
    Reset,
    State,
    Step,
    StepRequest,
)
from remote_dspark.wire.prefix import prefix_digest
from remote_dspark.wire.reply import build_dense_reply, build_reply, greedy_reply, tickets_to_q
from remote_dspark.wire.shards import split_reply

HERE = Path(__file__).parent
SESSION = 0x1122334455667788
HELLO = Hello(
    role=Role.CLIENT,
    draft_mode=DraftMode.ON,
    vocab_size=100,
    dense_width=112,
    id_map_sha256=hashlib.sha256(b"id map").digest(),
    draft_sha256=hashlib.sha256(b"draft").digest(),
    target_sha256=hashlib.sha256(b"target").digest(),
    state_row_bytes=8,
    q_semantics=Q_FLOOR_FIRST,
    max_state_chunk_bytes=64,
    max_support=32,
    allow_dense=True,
    shard_starts=(0, 50),
)
OFF = replace(HELLO, draft_mode=DraftMode.OFF)
LIMITS = {"on": limits_of(HELLO), "off": limits_of(OFF)}


def _step(ppm: tuple[int, ...] = (700_000, 0), depth: int = 2) -> Step:
    prefix = prefix_digest([1, 2, 3, 4])
    requests = tuple(StepRequest(slot, 5 + slot, 6, 3, 4, prefix, value, 32, 9) for slot, value in enumerate(ppm))
    return Step(SESSION, 1, 77, depth, requests)


def _row(start: int, tickets: list[int]) -> tuple[list[int], list[int]]:
    """Ids ``start, start + 7, ...``; the last entry takes what is missing to 2**24."""
    rest = TICKET_TOTAL - sum(tickets)
    return [start + 7 * i for i in range(len(tickets) + 1)], [*tickets, rest]


def sparse_reply(step: Step, limits: Limits) -> Reply:
    """Ragged rows: one entry, three entries, the smallest and the largest count."""
    num, depth, width = len(step.requests), step.depth, 4
    ids = np.zeros((num, depth, width), np.int32)
    tickets = np.zeros((num, depth, width), np.int64)
    counts = np.zeros((num, depth), np.int32)
    tokens = np.zeros((num, depth), np.int32)
    patterns = [[], [1, 2], [8_388_608], [1, TICKET_TOTAL - 3, 1]]
    for row in range(num * depth):
        b, d = divmod(row, depth)
        row_ids, row_tickets = _row(row, patterns[row % len(patterns)])
        n = len(row_ids)
        ids[b, d, :n], tickets[b, d, :n], counts[b, d], tokens[b, d] = row_ids, row_tickets, n, row_ids[n // 2]
    return build_reply(step, limits.whole_vocab, tokens=tokens, ids=ids, q=tickets_to_q(tickets), counts=counts)


def dense_reply(step: Step, limits: Limits) -> Reply:
    """Two dense rows: an even one with its remainder at id 0, and a one-token one. Zero tail to column 112."""
    tickets = np.zeros((2, limits.dense_width), np.int64)
    tickets[0, :100] = TICKET_TOTAL // 100
    tickets[0, 0] += TICKET_TOTAL - int(tickets[0].sum())
    tickets[1, 99] = TICKET_TOTAL
    tokens = np.array([[50, 99], [3, 4]], np.int32)
    return build_dense_reply(step, limits.whole_vocab, tokens, tickets_to_q(tickets))


def messages() -> Iterator[tuple[str, str, Message]]:
    """(file name, limits, message); limits "none" is before HELLO."""
    on, off = LIMITS["on"], LIMITS["off"]
    yield "hello_client", "none", HELLO
    yield "hello_server", "none", replace(HELLO, role=Role.SERVER, session=SESSION)
    yield "open", "on", Open(SESSION, 1, 6, 2**64 - 1, 700_000, 32, 5, 9)
    rows = np.arange(24, dtype=np.uint8).reshape(3, 8)
    yield "state", "on", State(SESSION, 1, 6, 40, np.array([0, 99, 50], np.int32), rows)
    yield "step", "on", _step()
    yield "reply_sparse", "on", sparse_reply(_step((700_000, 700_000)), on)
    yield "reply_mixed_greedy", "on", sparse_reply(_step(), on)
    yield "reply_dense", "on", dense_reply(_step(), on)
    whole = sparse_reply(_step((700_000, 700_000)), on)
    for part in split_reply(whole, on):
        yield f"reply_shard_{part.shard.index}", "on", part
    frame = encode(whole, on)
    yield (
        "complete",
        "on",
        Complete(SESSION, FrameType.STEP, Status.OK, 1, 77, 0, 5, 6, 3, 9, len(frame), bytes(range(16)), 0),
    )
    yield "complete_state", "on", Complete(SESSION, FrameType.STATE, slot=1, generation=6, position=43, credits=1)
    yield "commit", "on", Commit(SESSION, 1, 6, 6, 2, 17, True, 46)
    yield "reset", "on", Reset(SESSION, 1, 6, 7, 43)
    yield "cancel", "on", Cancel(SESSION, 1, 7)
    yield "ping", "on", Ping(SESSION, 0xDEADBEEF)
    yield "drain", "on", Drain(SESSION, "maintenance")
    yield "error", "on", Error(SESSION, "no_free_slot", "all seats are taken", FrameType.OPEN, slot=1, generation=6)
    yield "v1_reply", "off", greedy_reply(_step((0, 0)), off.whole_vocab, np.array([[1, 2], [3, 99]], np.int32))
    yield "v1_reply_single", "off", greedy_reply(_step((0,), 1), off.whole_vocab, np.array([[0]], np.int32))


def frames() -> dict[str, tuple[str, bytes]]:
    """File name to (limits, bytes)."""
    return {f"{name}.bin": (limits, bytes(encode(message, LIMITS.get(limits)))) for name, limits, message in messages()}


def manifest(made: dict[str, tuple[str, bytes]]) -> str:
    """Sizes, digests and the limits of each file."""
    entries = {
        name: {"limits": limits, "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, (limits, data) in made.items()
    }
    return json.dumps(entries, indent=1, sort_keys=True) + "\n"


def main() -> int:
    """Writes, or compares with ``--check``."""
    made = frames()
    files = {name: data for name, (_, data) in made.items()} | {"manifest.json": manifest(made).encode()}
    if "--check" in sys.argv:
        wrong = [name for name, data in files.items() if (HERE / name).read_bytes() != data]
        sys.stderr.write(f"differ: {wrong}\n" if wrong else "")
        return 1 if wrong else 0
    for name, data in files.items():
        (HERE / name).write_bytes(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
