"""A seeded load on a worker's handler: four requests all the time, random ends and faults, every reply judged.

What a reply must be: each sampled token is the oracle's draw from the q beside it, under the key of the current
occupant, round and position; so a row of an earlier round, seat or occupant is found. What the counters must say is
kept here from the events alone and compared at the end.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from memory_compute import MemoryCompute

from remote_dspark.contract import DRAFT_TEMPERATURE, ServerState
from remote_dspark.drafter.compute import BlockCompute, TorchCompute
from remote_dspark.drafter.engine import DraftEngine
from remote_dspark.drafter.errors import RowError
from remote_dspark.drafter.heads import DraftedRows
from remote_dspark.drafter.staging import Block
from remote_dspark.drafter.synthetic import synthetic_drafter
from remote_dspark.oracle.philox import derive_key, proposal_draw
from remote_dspark.oracle.tickets import draw_token
from remote_dspark.serve.config import load_config
from remote_dspark.serve.handler import WorkerHandler
from remote_dspark.serve.health import Health
from remote_dspark.serve.timings import StepLog
from remote_dspark.wire.handler import DrafterRefusal
from remote_dspark.wire.kinds import RowKind
from remote_dspark.wire.messages import PPM, Cancel, Commit, Open, Reply, Reset, State, Step, StepRequest
from remote_dspark.wire.reply import reply_row

CONFIG = """
modes = ["sampled-top32-v2"]
[model]
synthetic = "tiny"
[listen]
address = "127.0.0.1:0"
[metrics]
address = "127.0.0.1:0"
"""
DEPTH = 5
TAU_PPM = int(float(DRAFT_TEMPERATURE) * PPM)
SESSIONS = (1, 2)
LAST_POSITION = 110


def lose_steps(compute: BlockCompute, every: int) -> None:
    """Lets a compute lose a step now and then, after all of its work."""
    draft, numbers = compute.draft, itertools.count(1)

    def flaky(blocks: Sequence[Block], depth: int) -> DraftedRows:
        rows = draft(blocks, depth)
        if every and next(numbers) % every == 0:
            raise RowError("planted: the step is lost")
        return rows

    compute.draft = flaky  # type: ignore[method-assign]


@dataclass
class Life:
    """One occupant as its verifier sees it."""

    session: int
    slot: int
    generation: int
    seed: int
    ppm: int
    round: int = 0
    position: int = 0
    anchor: int = 7


@dataclass
class Tally:
    """What the events alone say."""

    rounds: int = 0
    sampled: int = 0
    rows: int = 0
    accepted: int = 0
    state_rows: int = 0
    opened: int = 0
    lost: int = 0
    wrong_draws: int = 0
    refusals: Counter[str] = field(default_factory=Counter)


class WorkerLoad:
    """Events of a seed against one handler."""

    def __init__(self, handler: WorkerHandler, vocab_size: int, row_bytes: int, seed: int) -> None:
        self.tally = Tally()
        self.lives: list[Life] = []
        self._handler = handler
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)
        self._rows = np.random.default_rng(seed).integers(0, 60, (16, row_bytes), dtype=np.uint8)
        self._generation = 0
        self._batch = 0

    async def run(self, num_rounds: int) -> None:
        """Until that many (request, step) pairs were drafted; then every seat is freed."""
        events = ["step"] * 12 + ["fault"] * 3 + ["cancel", "reset", "vanish"]
        while self.tally.rounds < num_rounds:
            while len(self.lives) < 4:
                await self._open()
            await getattr(self, f"_{self._rng.choice(events)}")()
            for life in [life for life in self.lives if life.position > LAST_POSITION]:
                await self._end(life)
        for session in SESSIONS:
            await self._gone(session)

    async def _open(self) -> None:
        rng = self._rng
        self._generation += rng.randint(1, 3)
        session = rng.choice(SESSIONS)
        slot = next(s for s in range(4) if all((life.session, life.slot) != (session, s) for life in self.lives))
        life = Life(session, slot, self._generation, rng.getrandbits(53), rng.choice([0, TAU_PPM, TAU_PPM]))
        await self._handler.on_open(Open(session, slot, life.generation, life.seed, life.ppm, 32, DEPTH))
        self.tally.opened += 1
        self.lives.append(life)
        await self._append(life, rng.randint(0, 12))

    async def _append(self, life: Life, count: int) -> None:
        if count:
            rows = self._rows[[self._rng.randrange(16) for _ in range(count)]]
            ids = np.zeros(count, dtype=np.int32)
            await self._handler.on_state(State(life.session, life.slot, life.generation, life.position, ids, rows))
            life.position += count
            self.tally.state_rows += count

    def _request(self, life: Life, **changes: int) -> StepRequest:
        found = {"generation": life.generation, "round": life.round, "position": life.position} | changes
        return StepRequest(
            life.slot, found["generation"], found["round"], found["position"], life.anchor, bytes(32), life.ppm, 32
        )

    def _step_of(self, session: int, requests: list[StepRequest]) -> Step:
        self._batch += 1
        return Step(session, self._batch % 2, self._batch, DEPTH, tuple(requests))

    async def _step(self) -> None:
        session = self._rng.choice(self.lives).session
        mine = [life for life in self.lives if life.session == session]
        batch = self._rng.sample(mine, self._rng.randint(1, len(mine)))
        step = self._step_of(session, [self._request(life) for life in batch])
        try:
            reply = await self._handler.on_step(step)
        except DrafterRefusal as cause:
            if cause.code != "row":
                raise
            self.tally.refusals["row"] += 1
            self.tally.lost += 1
            for life in batch:
                # its draws are never made again
                life.round += 1
            return
        for index, life in enumerate(batch):
            await self._settle(reply, index, life)

    async def _settle(self, reply: Reply, index: int, life: Life) -> None:
        """Judge the rows, accept some of them, send the states of what was committed."""
        key = derive_key(life.seed, life.generation)
        for position in range(DEPTH):
            row = reply_row(reply, index, position)
            self.tally.rows += 1
            is_sampled = row.kind is RowKind.SPARSE and len(row.ids) > 0
            if is_sampled:
                draw = proposal_draw(key, life.round, life.position + 1 + position)
                self.tally.wrong_draws += draw_token(row.ids.astype(np.int64), row.tickets, draw) != row.token
            self.tally.wrong_draws += is_sampled is not bool(life.ppm)
        self.tally.rounds += 1
        self.tally.sampled += bool(life.ppm)
        accepted = self._rng.randint(0, DEPTH)
        self.tally.accepted += accepted
        token = self._rng.randrange(self._vocab_size)
        next_position = life.position + accepted + 1
        await self._handler.on_commit(
            Commit(life.session, life.slot, life.generation, life.round, accepted, token, False, next_position)
        )
        life.round, life.anchor = life.round + 1, token
        await self._append(life, accepted + 1)

    async def _fault(self) -> None:
        """Something a broken verifier might send: refused by its code, and nothing changes."""
        life = self._rng.choice(self.lives)
        taken = {one.slot for one in self.lives if one.session == life.session}
        free = next((slot for slot in range(4) if slot not in taken), 0)
        gap = State(life.session, life.slot, life.generation, life.position + 2, np.zeros(1, np.int32), self._rows[:1])
        kind = self._rng.choice(["generation", "position", "round", "gap", "slot", "support"])
        if (kind == "round" and life.round == 0) or (kind == "slot" and free in taken):
            kind = "gap"
        request = {
            "generation": self._request(life, generation=life.generation + 1),
            "position": self._request(life, position=life.position + 1),
            "round": self._request(life, round=life.round - 1),
        }.get(kind)
        expected = {"generation": "stale", "round": "stale", "slot": "slot_not_open", "support": "support_policy"}
        try:
            if request is not None:
                await self._handler.on_step(self._step_of(life.session, [request]))
            elif kind == "gap":
                await self._handler.on_state(gap)
            elif kind == "slot":
                await self._handler.on_cancel(Cancel(life.session, free, 1))
            else:
                await self._handler.on_open(Open(life.session, 3, self._generation + 9, 1, TAU_PPM, 16, DEPTH))
        except DrafterRefusal as cause:
            if cause.code != expected.get(kind, "state_gap"):
                raise
            self.tally.refusals[cause.code] += 1
        else:
            raise AssertionError(f"expected a refusal of {kind}, found none")

    async def _reset(self) -> None:
        life = self._rng.choice(self.lives)
        self._generation += 1
        keep = self._rng.randint(0, life.position)
        await self._handler.on_reset(Reset(life.session, life.slot, life.generation, self._generation, keep))
        life.generation, life.round, life.position = self._generation, 0, keep

    async def _cancel(self) -> None:
        await self._end(self._rng.choice(self.lives))

    async def _vanish(self) -> None:
        await self._gone(self._rng.choice(SESSIONS))

    async def _end(self, life: Life) -> None:
        await self._handler.on_cancel(Cancel(life.session, life.slot, life.generation))
        self.lives.remove(life)

    async def _gone(self, session: int) -> None:
        await self._handler.on_disconnect(session)
        self.lives = [life for life in self.lives if life.session != session]


@contextmanager
def load_worker(
    folder: Path, seed: int, lose_every: int, *, without_network: bool = False
) -> Iterator[tuple[WorkerHandler, DraftEngine, WorkerLoad]]:
    """A handler over the synthetic tiny shape in FP32, and a load on it; every ``lose_every``-th step is lost.

    The reference drafts, or, ``without_network``, what stands in for it at a fraction of the time.
    """
    path = folder / "worker.toml"
    path.write_text(CONFIG)
    config = load_config(path)
    model = synthetic_drafter("tiny", dtype=torch.float32)
    limit = model.config.max_positions
    compute: BlockCompute
    if without_network:
        compute = MemoryCompute(model.config, 32, limit)
    else:
        compute = TorchCompute(
            model, support=32, semantics=config.q_semantics, cache_bytes=1 << 14, max_positions=limit
        )
    lose_steps(compute, lose_every)
    engine = DraftEngine(model, config.max_requests, compute=compute)
    health = Health(time.monotonic_ns, 60.0)
    health.enter(ServerState.READY)
    with ThreadPoolExecutor(max_workers=1) as thread:
        handler = WorkerHandler(engine, config, health, thread, StepLog())
        yield handler, engine, WorkerLoad(handler, model.config.vocab_size, model.config.fused_width * 2, seed)


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
