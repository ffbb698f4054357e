"""What the wire costs: encode and validated decode against msgpack doing the same job, dense throughput, loopback.

Every ratio is taken within one run, alternating the two sides. Goals are those of the project's wire issue. The
loopback server runs in its own process and answers from memory.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from xxhash import xxh3_128_digest

from remote_dspark.contract import Q_FLOOR_FIRST, TICKET_TOTAL, DraftMode
from remote_dspark.wire import codec, validate
from remote_dspark.wire.address import tune
from remote_dspark.wire.client import DrafterClient
from remote_dspark.wire.kinds import Role, RowKind
from remote_dspark.wire.limits import limits_of
from remote_dspark.wire.messages import Cancel, Commit, Hello, Open, Reply, State, Step, StepRequest
from remote_dspark.wire.prefix import extend_prefix, prefix_digest
from remote_dspark.wire.reply import build_dense_reply, build_reply, reply_requests, tickets_to_q
from remote_dspark.wire.server import serve_wire
from remote_dspark.wire.spin import spinning_loop

SPIN_S = 0.002
"""For the second loopback figure: how long each end looks before it sleeps."""
REQUESTS, DEPTH, SUPPORT, VOCAB = 4, 5, 32, 129_280
HELLO = Hello(
    role=Role.CLIENT,
    draft_mode=DraftMode.ON,
    vocab_size=VOCAB,
    dense_width=VOCAB,
    id_map_sha256=b"\x01" * 32,
    draft_sha256=b"\x02" * 32,
    target_sha256=b"\x03" * 32,
    state_row_bytes=40_960,
    q_semantics=Q_FLOOR_FIRST,
    allow_dense=True,
)
LIMITS = limits_of(HELLO)


def _step(session: int = 1, batch: int = 1, round_: int = 0) -> Step:
    prefix = prefix_digest([7])
    requests = tuple(StepRequest(slot, 1, round_, 0, 7, prefix, 700_000, SUPPORT) for slot in range(REQUESTS))
    return Step(session, batch % 2, batch, DEPTH, requests)


def _sparse_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    rows = REQUESTS * DEPTH
    ids = np.sort(np.stack([rng.choice(VOCAB, SUPPORT, replace=False) for _ in range(rows)]), axis=1).astype(np.int32)
    q = tickets_to_q(rng.multinomial(TICKET_TOTAL - SUPPORT, np.full(SUPPORT, 1 / SUPPORT), size=rows) + 1)
    shape = (REQUESTS, DEPTH, SUPPORT)
    counts = np.full((REQUESTS, DEPTH), SUPPORT, dtype=np.int32)
    return {"ids": ids.reshape(shape), "q": q.reshape(shape), "counts": counts, "tokens": ids[:, 3].reshape(shape[:2])}


def _dense_reply() -> Reply:
    rng = np.random.default_rng(6)
    rows = REQUESTS * DEPTH
    tickets = rng.multinomial(TICKET_TOTAL, np.full(VOCAB, 1 / VOCAB), size=rows)
    dense = tickets_to_q(tickets)
    return build_dense_reply(
        _step(), LIMITS.whole_vocab, dense.argmax(axis=1).astype(np.int32).reshape(REQUESTS, DEPTH), dense
    )


def _medians_us(repeats: int, *functions: Callable[[], Any]) -> list[float]:
    """Median of each, alternating, so that a change of clock or load meets all of them."""
    samples: list[list[int]] = [[] for _ in functions]
    for _ in range(20):
        for function in functions:
            function()
    for _ in range(repeats):
        for function, times in zip(functions, samples, strict=True):
            start = time.perf_counter_ns()
            function()
            times.append(time.perf_counter_ns() - start)
    return [statistics.median(times) / 1000 for times in samples]


# -- the peers: msgpack with the same fields and the same checks ----------------------------------------------------


def _msgpack_lists(reply: Reply) -> bytes:
    rows, at = [], 0
    tokens, counts = reply.tokens.reshape(-1).tolist(), reply.counts.reshape(-1).tolist()
    ids, q = reply.ids.tolist(), reply.q.tolist()
    for token, count in zip(tokens, counts, strict=True):
        rows.append([token, 1, ids[at : at + count], q[at : at + count]])
        at += count
    return _sealed(msgpack.packb([*_identity(reply), rows], use_bin_type=True))


def _msgpack_lists_decode(data: bytes) -> list[Any]:
    """Every invariant, as a careful Python author would write it over lists."""
    message: list[Any] = msgpack.unpackb(_opened(data), raw=False)
    for token, kind, ids, q in message[-1]:
        if kind != 1 or not 0 < len(ids) <= SUPPORT or len(ids) != len(q):
            raise ValueError("shape")
        total, hit, last = 0, False, -1
        for token_id, value in zip(ids, q, strict=True):
            tickets = value * TICKET_TOTAL
            if token_id <= last or token_id >= VOCAB or not 0 < tickets <= TICKET_TOTAL or tickets != int(tickets):
                raise ValueError("row")
            total, hit, last = total + int(tickets), hit or token_id == token, token_id
        if total != TICKET_TOTAL or not hit:
            raise ValueError("mass")
    return message


def _msgpack_arrays(reply: Reply) -> bytes:
    arrays = (reply.tokens, reply.kinds, reply.counts, reply.ids, reply.q)
    body = [array.tobytes() for array in arrays]
    return _sealed(msgpack.packb([*_identity(reply), *body], use_bin_type=True))


def _msgpack_arrays_decode(data: bytes) -> Reply:
    """Byte arrays judged by our own vectorised checks, so only the container differs."""
    message = msgpack.unpackb(_opened(data), raw=False)
    tokens, kinds, counts, ids, q = message[-5:]
    shape = (REQUESTS, DEPTH)
    reply = Reply(
        session=message[0],
        batch_slot=message[1],
        batch=message[2],
        requests=reply_requests(_step()),
        tokens=np.frombuffer(tokens, np.int32).reshape(shape),
        kinds=np.frombuffer(kinds, np.uint8).reshape(shape),
        counts=np.frombuffer(counts, np.int32).reshape(shape),
        ids=np.frombuffer(ids, np.int32),
        q=np.frombuffer(q, np.float32),
        dense=np.zeros((0, 0), np.float32),
        shard=LIMITS.whole_vocab,
    )
    validate.require_rows(reply, LIMITS)
    return reply


def _sealed(data: bytes) -> bytes:
    """The same protection against corruption that our frames have."""
    return xxh3_128_digest(data) + data


def _opened(data: bytes) -> memoryview:
    view = memoryview(data)
    if xxh3_128_digest(view[16:]) != view[:16]:
        raise ValueError("digest")
    return view[16:]


def _identity(reply: Reply) -> list[Any]:
    requests = [[r.slot, r.generation, r.round, r.anchor_position, r.context_version] for r in reply.requests]
    return [reply.session, reply.batch_slot, reply.batch, requests]


# -- loopback -------------------------------------------------------------------------------------------------------


class _Memory:
    """Answers every STEP from memory."""

    def __init__(self) -> None:
        self.arrays = _sparse_arrays()

    def on_step(self, message: Step) -> Reply:
        return build_reply(message, LIMITS.whole_vocab, **self.arrays)

    def on_open(self, message: Open) -> None: ...

    def on_state(self, message: State) -> None: ...

    def on_commit(self, message: Commit) -> None: ...

    def on_reset(self, message: Any) -> None: ...

    def on_cancel(self, message: Cancel) -> None: ...

    def on_disconnect(self, session: int) -> None: ...


STEP_BYTES, ANSWER_BYTES = len(codec.encode(_step(), LIMITS)), 5_872
"""Of one STEP, and of a REPLY with its COMPLETE: what the bare exchange carries."""


class _Bare(asyncio.Protocol):
    """The floor under any protocol: as many bytes back for as many bytes, nothing looked at."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._seen, self._answer = transport, 0, bytes(ANSWER_BYTES)
        tune(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        self._seen += len(data)
        while self._seen >= STEP_BYTES:
            self._seen -= STEP_BYTES
            self._transport.write(self._answer)


async def _serve() -> None:
    server = await serve_wire("127.0.0.1:0", _Memory(), HELLO)
    loop = asyncio.get_running_loop()
    bare = await loop.create_server(_Bare, "127.0.0.1", 0)
    print(server.address, bare.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    bare.close()
    await server.close()


def _bare_us(sock: socket.socket, buffer: memoryview) -> float:
    start = time.perf_counter_ns()
    sock.sendall(buffer[:STEP_BYTES])
    missing = ANSWER_BYTES
    while missing:
        missing -= sock.recv_into(buffer[:missing])
    return (time.perf_counter_ns() - start) / 1000


@contextmanager
def memory_drafter(spin_s: float = 0.0) -> Iterator[tuple[DrafterClient, int, int]]:
    """A client of a drafter in its own process, that process's id, and its port of bare exchanges."""
    argv = [sys.executable, "-m", "benchmarks.wire", "--serve", str(spin_s)]
    root = Path(__file__).resolve().parents[1]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            address, bare_port = process.stdout.readline().split()
            with DrafterClient.connect(address, HELLO, spin_s=spin_s) as client:
                yield client, process.pid, int(bare_port)
        finally:
            process.stdin.close()


def loopback_us(rounds: int, spin_s: float = 0.0) -> tuple[list[float], list[float]]:
    """STEP to validated and complete REPLY of each round (4 requests, depth 5, support 32), and a bare exchange each.

    Both alternate with the same two processes, so that load from elsewhere meets both.
    """
    ours, bare, buffer = [], [], memoryview(bytearray(ANSWER_BYTES))
    with memory_drafter(spin_s) as (client, _, port), socket.create_connection(("127.0.0.1", port)) as sock:
        tune(sock)
        for elapsed in round_times_us(client, rounds):
            ours.append(elapsed)
            bare.append(_bare_us(sock, buffer))
    return ours, bare


def round_times_us(client: DrafterClient, rounds: int) -> Iterator[float]:
    """Plays whole rounds: STEP (timed), COMMIT, and the STATE of the next position, for every request."""
    session = client.session
    for slot in range(REQUESTS):
        client.open(Open(session, slot, 1, 3, 700_000, SUPPORT, DEPTH))
    template = _step(session)
    prefix = prefix_digest([7])
    row = np.zeros((1, HELLO.state_row_bytes), np.uint8)
    anchor = np.array([7], np.int32)
    for number in range(rounds):
        requests = tuple(
            r._replace(round=number, anchor_position=number, prefix_digest=prefix) for r in template.requests
        )
        step = Step(session, number % 2, client.next_batch(), DEPTH, requests)
        start = time.perf_counter_ns()
        client.step(step)
        yield (time.perf_counter_ns() - start) / 1000
        client.commit([Commit(session, slot, 1, number, 0, 7, False, number + 1) for slot in range(REQUESTS)])
        for slot in range(REQUESTS):
            client.state(State(session, slot, 1, number, anchor, row))
        # The worker has digested the states before the next STEP is timed.
        client.ping()
        prefix = extend_prefix(prefix, (7,))


# -- results --------------------------------------------------------------------------------------------------------


def _result(
    name: str, value: float, unit: str, goal: float | None, *, less: bool = True, **peer: Any
) -> dict[str, Any]:
    met = None if goal is None else (value <= goal if less else value >= goal)
    return {
        "name": name,
        "value": round(value, 3),
        "unit": unit,
        "goal": None if goal is None else f"{'<=' if less else '>='} {goal:g}",
        "met": met,
        "peer": peer.get("peer"),
        "ratio": round(peer["ratio"], 2) if "ratio" in peer else None,
    }


def measure(*, rounds: int = 20_000) -> list[dict[str, Any]]:
    """Every figure, in under a minute."""
    reply = build_reply(_step(), LIMITS.whole_vocab, **_sparse_arrays())
    frame, as_lists, as_arrays = codec.encode(reply, LIMITS), _msgpack_lists(reply), _msgpack_arrays(reply)
    ours, lists, arrays, encode_us, decode_us = _medians_us(
        1500,
        lambda: codec.decode(codec.encode(reply, LIMITS), LIMITS),
        lambda: _msgpack_lists_decode(_msgpack_lists(reply)),
        lambda: _msgpack_arrays_decode(_msgpack_arrays(reply)),
        lambda: codec.encode(reply, LIMITS),
        lambda: codec.decode(frame, LIMITS),
    )
    results = [
        _result(
            "wire sparse encode + validated decode, 4x5x32", ours, "us", 80, peer="msgpack lists", ratio=lists / ours
        ),
        _result("same, against byte arrays", ours, "us", 80, peer="msgpack byte arrays", ratio=arrays / ours),
        _result("wire sparse encode", encode_us, "us", None),
        _result("wire sparse validated decode", decode_us, "us", None),
        _result("wire sparse frame", len(frame), "bytes", None, peer="msgpack lists", ratio=len(as_lists) / len(frame)),
        _result("same frame", len(frame), "bytes", None, peer="msgpack byte arrays", ratio=len(as_arrays) / len(frame)),
    ]
    dense = codec.encode(_dense_reply(), LIMITS)
    (dense_us,) = _medians_us(40, lambda: codec.decode(dense, LIMITS))
    rate = len(dense) / dense_us / 1000
    results.append(_result("wire dense validated decode, 4x5x129280, one thread", rate, "GB/s", 1.5, less=False))
    spun = _loopback_results(rounds, SPIN_S, ", both ends spin")
    return results + _loopback_results(rounds, 0.0, "") + spun


def _loopback_results(rounds: int, spin_s: float, what: str) -> list[dict[str, Any]]:
    times, bare = map(sorted, loopback_us(rounds, spin_s))
    results = []
    for percent, goal in ((50, 400), (99, 1500)):
        ours, floor = times[rounds * percent // 100], bare[rounds * percent // 100]
        name = f"loopback STEP to complete REPLY p{percent}, {rounds} rounds{what}"
        peer = f"bare exchange of the same bytes, {floor:.0f} us"
        results.append(_result(name, ours, "us", goal, peer=peer, ratio=floor / ours))
    return results


assert int(RowKind.SPARSE) == 1  # the peers above write the kind as a literal

if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        with asyncio.Runner(loop_factory=lambda: spinning_loop(float(sys.argv[2]))) as runner:
            runner.run(_serve())
    else:
        for line in measure():
            print(line)
