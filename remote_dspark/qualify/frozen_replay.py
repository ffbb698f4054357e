"""Replay a recorded session: ``python -m remote_dspark.qualify.frozen_replay --trace FILE --address ADDRESS``.

The trace is frozen: its states, anchors, seeds and outcomes are sent again, frame by frame, to a running worker, and
what the worker produces *now* is compared with what was recorded and with the oracle's draw from the very q it sent.
HELLO repeats the recorded identities, so another checkpoint or mode refuses. Rows that differ are counted and their
distance is kept raw, in tickets; exit 0 means "observed". OFF sessions carry no q and are refused.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from remote_dspark.contract import ComputeKind, DraftMode, ObservationKind
from remote_dspark.observe import ObserveError, Recorder, output_folder
from remote_dspark.oracle.philox import Key, derive_key, proposal_draw
from remote_dspark.oracle.tickets import draw_token
from remote_dspark.qualify.hold import prove_hold
from remote_dspark.qualify.worker_client import compute_of, read_status
from remote_dspark.wire.capture import read_capture, replay_capture
from remote_dspark.wire.client import DrafterClient
from remote_dspark.wire.errors import ProtocolError
from remote_dspark.wire.kinds import Role, RowKind
from remote_dspark.wire.messages import Cancel, Commit, Hello, Message, Open, Reply, Reset, State, Step
from remote_dspark.wire.reply import ReplyRow, reply_row

PROGRAM: Final = "remote_dspark.qualify.frozen_replay"
EXIT_REFUSED: Final = 2
EXIT_INCOMPLETE: Final = 3


@dataclass
class ReplayResult:
    """What a replay found.

    Attributes:
        distances: Per sampled row, half the sum of absolute ticket differences: total variation in units of 2**-24.
        step_ns: Duration of each STEP.
        num_rounds: (request, STEP) pairs.
        num_rows: Rows of any kind.
        num_tokens_changed: Rows whose token differs from the recorded one.
        num_wrong_draws: Sampled tokens that are not the oracle's draw from the q that came with them.
    """

    distances: list[int] = field(default_factory=list)
    step_ns: list[int] = field(default_factory=list)
    num_rounds: int = 0
    num_rows: int = 0
    num_tokens_changed: int = 0
    num_wrong_draws: int = 0


@dataclass(frozen=True)
class Trace:
    """A decoded trace: the client's offer, its messages in order, and the recorded reply of each batch."""

    hello: Hello
    sent: tuple[Message, ...]
    replies: dict[int, Reply]


def read_trace(data: bytes) -> Trace:
    """Decode a whole trace.

    Raises:
        ObserveError: Cut short, changed, of an OFF session, or without a round.
    """
    try:
        messages = [(record.sender, message) for record, message in replay_capture(read_capture(data))]
    except ProtocolError as cause:
        raise ObserveError(f"trace: expected a whole session of wire v2, found {cause}") from cause
    hello = next((m for sender, m in messages if isinstance(m, Hello) and sender is Role.CLIENT), None)
    if hello is None or hello.draft_mode is not DraftMode.ON:
        raise ObserveError(
            f"trace: expected a session of mode {DraftMode.ON.value}, found {hello and hello.draft_mode}"
        )
    sent = tuple(m for sender, m in messages if sender is Role.CLIENT and not isinstance(m, Hello))
    replies = {m.batch: m for _, m in messages if isinstance(m, Reply)}
    if not replies:
        raise ObserveError("trace: expected at least one reply, found none")
    return Trace(hello, sent, replies)


def replay(trace: Trace, client: DrafterClient) -> ReplayResult:
    """Send the trace again and compare.

    Raises:
        ProtocolError: The worker refused something that was accepted when the trace was recorded.
    """
    result = ReplayResult()
    seeds: dict[int, int] = {}
    for message in trace.sent:
        if isinstance(message, Open):
            seeds[message.slot] = message.seed
            client.open(replace(message, session=client.session))
        elif isinstance(message, State):
            client.state(replace(message, session=client.session))
        elif isinstance(message, Commit):
            client.commit([replace(message, session=client.session)])
        elif isinstance(message, Reset):
            client.reset(replace(message, session=client.session))
        elif isinstance(message, Cancel):
            client.cancel(replace(message, session=client.session))
        elif isinstance(message, Step) and message.batch in trace.replies:
            _replay_step(message, trace.replies[message.batch], seeds, client, result)
    return result


def _replay_step(
    step: Step, recorded: Reply, seeds: dict[int, int], client: DrafterClient, result: ReplayResult
) -> None:
    start_ns = time.monotonic_ns()
    found = client.step(step._replace(session=client.session))
    result.step_ns.append(time.monotonic_ns() - start_ns)
    for request, asked in enumerate(step.requests):
        key = derive_key(seeds[asked.slot], asked.generation)
        result.num_rounds += 1
        for position, (old, new) in enumerate(_rows(recorded, found, request)):
            result.num_rows += 1
            result.num_tokens_changed += old.token != new.token
            if new.kind is RowKind.SPARSE:
                result.distances.append(ticket_distance(old, new))
                place = asked.anchor_position + 1 + position
                result.num_wrong_draws += not _is_draw(new, key, asked.round, place)


def _rows(recorded: Reply, found: Reply, request: int) -> Iterator[tuple[ReplyRow, ReplyRow]]:
    for position in range(found.depth):
        yield reply_row(recorded, request, position), reply_row(found, request, position)


def _is_draw(row: ReplyRow, key: Key, round: int, position: int) -> bool:
    return draw_token(row.ids.astype(np.int64), row.tickets, proposal_draw(key, round, position)) == row.token


def ticket_distance(old: ReplyRow, new: ReplyRow) -> int:
    """Total variation of two sparse rows, in tickets; 2**24 when their supports are disjoint."""
    before = dict(zip(old.ids.tolist(), old.tickets.tolist(), strict=True))
    after = dict(zip(new.ids.tolist(), new.tickets.tolist(), strict=True))
    return sum(max(count - before.get(token, 0), 0) for token, count in after.items())


def main(argv: list[str]) -> int:
    """Parse, prove the hold, replay, write the observation."""
    parser = argparse.ArgumentParser(prog=PROGRAM)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--address", required=True, help="host:port or unix:/path of the running worker")
    parser.add_argument("--status", help="host:port of the worker's /identity; says where its numbers come from")
    parser.add_argument("--timeout-s", type=float, default=10.0)
    parser.add_argument("--output", help="folder of the observation; DSPARK_OUTPUT_DIR inside a hold")
    parser.add_argument("--require-hold", action="store_true", help="refuse to run outside an open hold")
    args = parser.parse_args(argv)
    try:
        data = args.trace.read_bytes()
        trace = read_trace(data)
        folder = output_folder(args.output, os.environ)
        hold = prove_hold(os.environ, required=args.require_hold)
        recorder = Recorder(
            ObservationKind.FROZEN_REPLAY, PROGRAM, argv=argv, compute=ComputeKind.CPU, folder=folder, hold=hold
        )
        if args.status:
            identity = read_status(args.status, "/identity", args.timeout_s)
            recorder.compute = compute_of(identity)
            recorder.label("worker.device", str(identity.get("device", "")))
        recorder.label("trace_sha256", hashlib.sha256(data).hexdigest())
        return _observe(args.address, args.timeout_s, trace, recorder)
    except (ObserveError, OSError) as cause:
        sys.stderr.write(f"frozen_replay: {cause}\n")
        return EXIT_REFUSED


def _observe(address: str, timeout_s: float, trace: Trace, recorder: Recorder) -> int:
    try:
        client = DrafterClient.connect(address, trace.hello, timeout_s=timeout_s)
    except (ProtocolError, OSError) as cause:
        raise ObserveError(f"worker {address}: expected the recorded identities, found {cause}") from cause
    recorder.label("draft_sha256", trace.hello.draft_sha256.hex())
    recorder.label("target_sha256", trace.hello.target_sha256.hex())
    recorder.label("q_semantics", trace.hello.q_semantics)
    try:
        result = replay(trace, client)
    except (ProtocolError, OSError) as cause:
        sys.stderr.write(f"frozen_replay: {cause}\n")
        recorder.check("replay.complete", expected="every recorded frame accepted", found=cause, ok=False)
        recorder.write()
        return EXIT_INCOMPLETE
    finally:
        client.close()
    recorder.check("replay.complete", expected="every recorded frame accepted", found="every recorded frame accepted")
    recorder.check("replay.draws", expected=0, found=result.num_wrong_draws)
    recorder.check("replay.same_tokens", expected=0, found=result.num_tokens_changed)
    recorder.check("replay.same_tickets", expected=0, found=max(result.distances, default=0))
    for name in ("num_rounds", "num_rows", "num_tokens_changed", "num_wrong_draws"):
        recorder.value(name, getattr(result, name))
    recorder.value("num_steps", len(result.step_ns))
    recorder.samples("ticket_distance.jsonl", "count", result.distances)
    recorder.samples("step.jsonl", "ns", result.step_ns)
    recorder.write()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
