"""A verifier's end without a model: sessions with a running worker, fed with seeded hidden states.

The states are random bf16 rows: what a worker computes from them is a proposal like any other, and its cost does not
depend on their values. Every reply has passed the wire's validation before it gets here. No torch.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from remote_dspark.contract import SUPPORT_K, ComputeKind, DraftMode
from remote_dspark.drafter.config import DSparkConfig, read_config
from remote_dspark.drafter.errors import DrafterError
from remote_dspark.drafter.shapes import synthetic_config, synthetic_identity
from remote_dspark.observe import ObserveError, file_digest
from remote_dspark.target.errors import ModelError
from remote_dspark.target.identity import checkpoint_digest
from remote_dspark.wire.client import DrafterClient
from remote_dspark.wire.errors import ProtocolError
from remote_dspark.wire.kinds import Role
from remote_dspark.wire.messages import Cancel, Commit, Hello, Open, Reply, State, Step, StepRequest
from remote_dspark.wire.prefix import EMPTY_PREFIX, extend_prefix


@dataclass(frozen=True)
class WorkerPaths:
    """Where the identities of a worker come from: folders of both checkpoints, and the tokenizer file."""

    drafter: Path
    target: Path
    tokenizer: Path


def build_hello(source: WorkerPaths | str, mode: DraftMode, q_semantics: str, depth: int, max_requests: int) -> Hello:
    """The client's HELLO for a worker that serves these checkpoints, or a synthetic shape of this name.

    Raises:
        ObserveError: A checkpoint or the tokenizer is missing.
    """
    try:
        config, (draft, target, tokenizer) = _identities(source)
        return Hello(
            role=Role.CLIENT,
            draft_mode=mode,
            vocab_size=config.vocab_size,
            dense_width=config.vocab_size,
            id_map_sha256=bytes.fromhex(tokenizer),
            draft_sha256=bytes.fromhex(draft),
            target_sha256=bytes.fromhex(target),
            state_row_bytes=config.fused_width * 2,
            q_semantics=q_semantics,
            max_slots=max_requests,
            max_requests=max_requests,
            max_depth=depth,
            max_support=SUPPORT_K,
        )
    except (DrafterError, ModelError, OSError) as cause:
        raise ObserveError(f"worker identity: {cause}") from cause


def _identities(source: WorkerPaths | str) -> tuple[DSparkConfig, tuple[str, str, str]]:
    """Configuration, and digests of drafter, target and tokenizer."""
    if isinstance(source, str):
        synthetic = synthetic_identity(source)
        digests = (synthetic.draft_sha256, synthetic.target_sha256, synthetic.tokenizer_sha256)
        return synthetic_config(source), digests
    digests = (checkpoint_digest(source.drafter), checkpoint_digest(source.target), file_digest(source.tokenizer))
    return read_config(source.drafter), digests


def read_status(address: str, path: str, timeout_s: float) -> dict[str, Any]:
    """A JSON document of a worker's status server.

    Args:
        address: ``host:port``.
        path: ``/identity`` or ``/timings``.
        timeout_s: Bound of the whole call.

    Raises:
        ObserveError: No answer, or no JSON object.
    """
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port) if port.isdecimal() else 0, timeout=timeout_s)
    try:
        connection.request("GET", path)
        document = json.loads(connection.getresponse().read())
    except (OSError, http.client.HTTPException, ValueError) as cause:
        raise ObserveError(f"worker status {address}{path}: expected a JSON object, found {cause!r}") from cause
    finally:
        connection.close()
    if not isinstance(document, dict):
        raise ObserveError(f"worker status {address}{path}: expected a JSON object, found {type(document).__name__}")
    return document


def compute_of(identity: Mapping[str, Any]) -> ComputeKind:
    """Where a worker's numbers come from, as its ``/identity`` says."""
    return ComputeKind.CUDA if str(identity.get("device", "")).startswith("cuda") else ComputeKind.CPU


@dataclass
class ProbeSeat:
    """One request of a probe; its tokens and states follow from ``seed`` alone.

    Attributes:
        slot: Seat number.
        generation: Occupant.
        seed: Request seed; also seeds tokens and states.
        temperature_ppm: Draft temperature, 0 for greedy rows.
        round: Next round.
        position: Anchor position; states of all earlier positions have been sent.
        anchor: Anchor token.
        digest: Prefix digest over all committed ids.
    """

    slot: int
    generation: int
    seed: int
    temperature_ppm: int
    rng: np.random.Generator
    round: int = 0
    position: int = 0
    anchor: int = 0
    digest: bytes = field(default=EMPTY_PREFIX)


class WorkerProbe:
    """One session.

    Args:
        address: Of the worker.
        hello: From `build_hello`.
        timeout_s: Bound of connecting and of each call.

    Raises:
        ObserveError: No worker, or not the expected one.
    """

    def __init__(self, address: str, hello: Hello, timeout_s: float) -> None:
        try:
            self.client = DrafterClient.connect(address, hello, timeout_s=timeout_s)
        except (ProtocolError, OSError) as cause:
            raise ObserveError(f"worker {address}: expected a session, found {cause}") from cause
        self._hello = hello

    def open(self, seat: ProbeSeat, context: int, depth: int) -> None:
        """Open a seat and send ``context`` committed positions."""
        client = self.client
        client.open(Open(client.session, seat.slot, seat.generation, seat.seed, seat.temperature_ppm, SUPPORT_K, depth))
        ids = seat.rng.integers(self._hello.vocab_size, size=context).tolist()
        self._send(seat, ids)
        self._set_anchor(seat, int(seat.rng.integers(self._hello.vocab_size)))

    def step(self, seats: list[ProbeSeat], depth: int) -> Reply:
        """One proposal for all seats: validated and complete."""
        batch = self.client.next_batch()
        requests = tuple(
            StepRequest(s.slot, s.generation, s.round, s.position, s.anchor, s.digest, s.temperature_ppm, SUPPORT_K)
            for s in seats
        )
        return self.client.step(Step(self.client.session, batch % 2, batch, depth, requests))

    def reject_all(self, seats: list[ProbeSeat]) -> None:
        """Commit the round with no draft token accepted and a token of the probe's own; one new position per seat."""
        tokens = [int(seat.rng.integers(self._hello.vocab_size)) for seat in seats]
        session = self.client.session
        self.client.commit(
            [
                Commit(session, seat.slot, seat.generation, seat.round, 0, token, False, seat.position + 1)
                for seat, token in zip(seats, tokens, strict=True)
            ]
        )
        for seat, token in zip(seats, tokens, strict=True):
            seat.round += 1
            self._send(seat, [seat.anchor], is_digested=True)
            self._set_anchor(seat, token)

    def close_seats(self, seats: list[ProbeSeat]) -> None:
        """Free them."""
        for seat in seats:
            self.client.cancel(Cancel(self.client.session, seat.slot, seat.generation))

    def close(self) -> None:
        """End the session."""
        self.client.close()

    def _send(self, seat: ProbeSeat, ids: list[int], *, is_digested: bool = False) -> None:
        if ids:
            rows = random_states(seat.rng, len(ids), self._hello.state_row_bytes)
            tokens = np.array(ids, dtype=np.int32)
            self.client.state(State(self.client.session, seat.slot, seat.generation, seat.position, tokens, rows))
        if not is_digested:
            seat.digest = extend_prefix(seat.digest, ids)
        seat.position += len(ids)

    def _set_anchor(self, seat: ProbeSeat, token: int) -> None:
        seat.anchor = token
        seat.digest = extend_prefix(seat.digest, [token])


def random_states(rng: np.random.Generator, num_rows: int, row_bytes: int) -> npt.NDArray[np.uint8]:
    """uint8 ``[num_rows, row_bytes]``: bf16 little-endian values of a standard normal distribution."""
    values = rng.standard_normal((num_rows, row_bytes // 2), dtype=np.float32)
    bits = (np.ascontiguousarray(values).view(np.uint32) >> 16).astype("<u2")
    return np.ascontiguousarray(bits).view(np.uint8)
