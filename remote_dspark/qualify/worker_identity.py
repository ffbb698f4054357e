"""What a whole worker proposes for inputs that follow from a seed, as digests: two workers are compared by one file.

Chunks of rounds go through every kind of row and every batch; a chunk is one line of ``identity.jsonl`` with the
SHA-256 of its ids, of its q (as tickets) and of its tokens, each as eight 32-bit words because raw samples are
integers. The file holds nothing else, no time and no name of a device: workers that propose the same have the same
file, and the digest of the file stands in their receipts. A line that differs says where.

Rules: generations, seeds and states follow from the configuration alone; a chunk's requests start afresh.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from remote_dspark.observe import ObserveError, Recorder
from remote_dspark.qualify.worker_client import ProbeSeat, WorkerProbe
from remote_dspark.qualify.worker_draws import count_wrong_draws, probe_seat
from remote_dspark.wire.messages import Reply
from remote_dspark.wire.reply import reply_row

IDENTITY_FILE: Final = "identity.jsonl"
CONTEXT: Final = 64
"""Committed positions before a chunk's first round; fewer where the configuration says so."""

FIRST_GENERATION: Final = 1 << 33
PARTS: Final = ("ids", "q", "tokens")


@dataclass(frozen=True)
class IdentityInputs:
    """What the proposals follow from.

    Attributes:
        positions: At least so many are compared.
        kinds: Kinds of rows, in turn.
        batches: Requests of a step, in turn.
        depth: Positions of a request in a step.
        rounds: Of a chunk.
        context: Committed positions before the first round.
        seed: Of tokens, states and draws.
    """

    positions: int
    kinds: tuple[str, ...]
    batches: tuple[int, ...]
    depth: int
    rounds: int
    context: int
    seed: int

    def chunks(self) -> Iterator[tuple[str, int]]:
        """Kind and batch of each chunk: every pair in turn, until there are enough positions."""
        done, number = 0, 0
        pairs = [(kind, batch) for batch in sorted(self.batches, reverse=True) for kind in self.kinds]
        while done < self.positions:
            kind, batch = pairs[number % len(pairs)]
            yield kind, batch
            done += batch * self.depth * self.rounds
            number += 1


class _Digests:
    """Running digests of one chunk's replies."""

    def __init__(self) -> None:
        self._parts = {name: hashlib.sha256() for name in PARTS}
        self.positions = 0

    def add(self, reply: Reply, num_requests: int) -> None:
        for request in range(num_requests):
            for position in range(reply.depth):
                row = reply_row(reply, request, position)
                # the number of entries delimits them
                self._parts["ids"].update(np.int64(len(row.ids)).tobytes() + row.ids.astype("<i4").tobytes())
                self._parts["q"].update(np.int64(len(row.tickets)).tobytes() + row.tickets.astype("<i8").tobytes())
                self._parts["tokens"].update(row.token.to_bytes(8, "little"))
                self.positions += 1

    def words(self) -> dict[str, int]:
        return {
            f"{name}.{index}": int.from_bytes(part.digest()[4 * index : 4 * index + 4], "big")
            for name, part in self._parts.items()
            for index in range(8)
        }


def record_identity(inputs: IdentityInputs, probe: WorkerProbe, recorder: Recorder, expected: Path | None) -> None:
    """Propose for every chunk and record the digests; compare them with another worker's file.

    Args:
        inputs: What to propose for.
        probe: A session.
        recorder: Gets file, counts and checks.
        expected: ``identity.jsonl`` of a worker that must have proposed the same, or None.

    Raises:
        ObserveError: ``expected`` is not such a file.
    """
    known = None if expected is None else _read(expected)
    lines, positions, wrong = [], 0, 0
    for number, (kind, batch) in enumerate(inputs.chunks()):
        seats = [_seat(inputs, number, slot, kind) for slot in range(batch)]
        for seat in seats:
            probe.open(seat, inputs.context, inputs.depth)
        digests = _Digests()
        for _ in range(inputs.rounds):
            reply = probe.step(seats, inputs.depth)
            digests.add(reply, batch)
            wrong += count_wrong_draws(reply, seats)
            probe.reject_all(seats)
        probe.close_seats(seats)
        positions += digests.positions
        lines.append(
            {"chunk": number, "kind": inputs.kinds.index(kind), "batch": batch, "positions": digests.positions}
            | digests.words()
        )
    sample = recorder.samples(IDENTITY_FILE, "mixed", lines)
    recorder.label("identity.sha256", sample.sha256)
    recorder.label("identity.kinds", ",".join(inputs.kinds))
    recorder.value("identity.positions", positions)
    for name in ("depth", "rounds", "context", "seed"):
        recorder.value(f"identity.{name}", getattr(inputs, name))
    recorder.check("identity.draws", expected=0, found=wrong)
    if known is not None:
        data, theirs = known
        theirs_sha256 = hashlib.sha256(data).hexdigest()
        same = theirs_sha256 == sample.sha256
        found = sample.sha256 if same else f"{sample.sha256[:16]}, {first_difference(theirs, lines)}"
        recorder.check("identity.same", expected=theirs_sha256, found=found, ok=same)


def first_difference(expected: Sequence[dict[str, int]], found: Sequence[dict[str, int]]) -> str:
    """Where two files differ first: the chunk, what it drafts, and the parts that differ."""
    for one, other in zip(expected, found, strict=False):
        if one != other:
            keys = one.keys() | other.keys()
            names = sorted({name.split(".")[0] for name in keys if one.get(name) != other.get(name)})
            return f"chunk {one.get('chunk')} of batch {one.get('batch')}: other {', '.join(names)}"
    return f"expected {len(expected)} chunks, found {len(found)}"


def _seat(inputs: IdentityInputs, chunk: int, slot: int, kind: str) -> ProbeSeat:
    return probe_seat(inputs.seed, slot, FIRST_GENERATION + chunk, kind, number=4 * chunk + slot)


def _read(path: Path) -> tuple[bytes, list[dict[str, int]]]:
    try:
        data = path.read_bytes()
        return data, [dict(json.loads(line)) for line in data.splitlines()]
    except (OSError, ValueError, TypeError) as cause:
        raise ObserveError(f"{path}: expected the {IDENTITY_FILE} of a measured worker, found {cause}") from cause
