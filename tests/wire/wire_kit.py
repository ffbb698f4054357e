"""What the wire tests share: a small vocabulary, valid messages, a drafter that answers from memory, a live server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from remote_dspark.contract import Q_FLOOR_FIRST, TICKET_TOTAL, DraftMode
from remote_dspark.wire.handler import DrafterRefusal
from remote_dspark.wire.kinds import Role
from remote_dspark.wire.limits import Limits, limits_of
from remote_dspark.wire.messages import (
    Cancel,
    Commit,
    Hello,
    Open,
    Reply,
    Reset,
    State,
    Step,
    StepRequest,
)
from remote_dspark.wire.prefix import EMPTY_PREFIX, extend_prefix
from remote_dspark.wire.reply import build_reply, greedy_reply, tickets_to_q
from remote_dspark.wire.server import WireServer, serve_wire

ROW_BYTES = 16
VOCAB = 300
TEMPERATURE = 700_000


def make_hello(**changes: Any) -> Hello:
    base = Hello(
        role=Role.CLIENT,
        draft_mode=DraftMode.ON,
        vocab_size=VOCAB,
        dense_width=320,
        id_map_sha256=b"\x01" * 32,
        draft_sha256=b"\x02" * 32,
        target_sha256=b"\x03" * 32,
        state_row_bytes=ROW_BYTES,
        q_semantics=Q_FLOOR_FIRST,
        max_slots=8,
        max_requests=4,
        max_depth=5,
        max_support=32,
        max_state_chunk_bytes=4 * ROW_BYTES,
        state_credits=3,
        allow_dense=True,
    )
    return replace(base, **changes)


def make_limits(**changes: Any) -> Limits:
    return limits_of(make_hello(**changes))


def make_request(slot: int = 0, **changes: Any) -> StepRequest:
    base = StepRequest(
        slot=slot,
        generation=1,
        round=0,
        anchor_position=0,
        anchor_token=7,
        prefix_digest=extend_prefix(EMPTY_PREFIX, [7]),
        draft_temperature_ppm=TEMPERATURE,
        support_policy=32,
    )
    return base._replace(**changes)


def make_step(num: int = 2, depth: int = 3, session: int = 9, **changes: Any) -> Step:
    step = Step(session, 0, 1, depth, tuple(make_request(slot) for slot in range(num)))
    return step._replace(**changes)


def random_tickets(rng: np.random.Generator, width: int) -> np.ndarray:
    """Positive tickets that sum to 2**24."""
    return rng.multinomial(TICKET_TOTAL - width, rng.dirichlet(np.ones(width))) + 1


def make_reply(step: Step, limits: Limits, seed: int = 0, *, ragged: bool = True) -> Reply:
    """A valid reply with random rows; greedy rows where the step asks for them."""
    rng = np.random.default_rng(seed)
    num, depth, width = len(step.requests), step.depth, min(r.support_policy for r in step.requests)
    ids = np.zeros((num, depth, width), dtype=np.int32)
    q = np.zeros((num, depth, width), dtype=np.float32)
    counts = np.zeros((num, depth), dtype=np.int32)
    tokens = np.zeros((num, depth), dtype=np.int32)
    for b in range(num):
        for d in range(depth):
            n = int(rng.integers(1, width + 1)) if ragged else width
            chosen = np.sort(rng.choice(limits.vocab_size, n, replace=False))
            ids[b, d, :n], q[b, d, :n] = chosen, tickets_to_q(random_tickets(rng, n))
            counts[b, d], tokens[b, d] = n, rng.choice(chosen)
    if limits.draft_mode is DraftMode.OFF:
        return greedy_reply(step, limits.whole_vocab, tokens)
    return build_reply(step, limits.whole_vocab, tokens=tokens, ids=ids, q=q, counts=counts)


def make_state(session: int, slot: int, generation: int, position: int, ids: list[int]) -> State:
    rng = np.random.default_rng(position)
    rows = rng.integers(0, 256, (len(ids), ROW_BYTES), dtype=np.uint8)
    return State(session, slot, generation, position, np.array(ids, dtype=np.int32), rows)


class MemoryDrafter:
    """Answers from memory, records what it was told, can be told to misbehave."""

    def __init__(self, hello: Hello) -> None:
        self.limits = limits_of(replace(hello, allow_dense=True))
        self.log: list[tuple[str, Any]] = []
        self.rows: dict[tuple[int, int], list[np.ndarray]] = {}
        self.seats: set[tuple[int, int]] = set()
        self.refuse: set[str] = set()
        self.gate: asyncio.Event | None = None
        self.reply: Any = None

    def _note(self, name: str, message: Any) -> None:
        self.log.append((name, message))
        if name in self.refuse:
            raise DrafterRefusal(f"no_{name}", "told to refuse")

    def on_open(self, message: Open) -> None:
        self._note("open", message)
        self.seats.add((message.session, message.slot))

    def on_state(self, message: State) -> None:
        self._note("state", message)
        self.rows.setdefault((message.session, message.slot), []).append(message.rows.copy())

    async def on_step(self, message: Step) -> Reply:
        self._note("step", message)
        if self.gate is not None:
            await self.gate.wait()
        if self.reply is not None:
            return self.reply(message)
        return make_reply(message, self.limits, seed=message.batch)

    def on_commit(self, message: Commit) -> None:
        self._note("commit", message)

    async def on_reset(self, message: Reset) -> None:
        self._note("reset", message)

    def on_cancel(self, message: Cancel) -> None:
        self._note("cancel", message)
        self.seats.discard((message.session, message.slot))

    async def on_disconnect(self, session: int) -> None:
        self.log.append(("disconnect", session))
        self.seats = {seat for seat in self.seats if seat[0] != session}


class LiveServer:
    """A server on its own loop in its own thread, with a way to run things there."""

    def __init__(self, address: str, handler: Any, hello: Hello, **options: Any) -> None:
        self.handler = handler
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.server: WireServer = self.run(serve_wire(address, handler, hello, **options))

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def until(self, condition: Any, timeout_s: float = 10.0) -> None:
        """Polls ``condition`` on the server's loop, bounded."""

        async def poll() -> None:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await asyncio.sleep(0.002)

        self.run(poll())

    def stop(self) -> None:
        self.run(self.server.close())
        # Half-done TLS handshakes are asyncio's, not yet ours: let their sockets go before the loop does.
        listener = self.server._server
        self.until(lambda: listener._active_count == 0)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@contextmanager
def live_server(handler: Any = None, hello: Hello | None = None, **options: Any) -> Iterator[LiveServer]:
    offer = hello or make_hello()
    server = LiveServer(options.pop("address", "127.0.0.1:0"), handler or MemoryDrafter(offer), offer, **options)
    try:
        yield server
    finally:
        server.stop()
