"""Wire messages in, engine calls out. Every engine call runs on one thread, so the engine needs no lock.

Fail closed: a refusal of the engine becomes an ERROR frame and costs that request or batch; anything unforeseen
poisons the worker, because nothing is known about its state any more, and every later call is refused.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from remote_dspark.contract import DraftMode
from remote_dspark.drafter.engine import DraftEngine, DraftRequest
from remote_dspark.drafter.errors import EngineError
from remote_dspark.drafter.heads import DraftedRows
from remote_dspark.serve.config import WorkerConfig
from remote_dspark.serve.health import Health
from remote_dspark.serve.log import log_event
from remote_dspark.serve.timings import StepLog
from remote_dspark.wire.handler import DrafterRefusal
from remote_dspark.wire.messages import PPM, Cancel, Commit, Open, Reply, Reset, Shard, State, Step
from remote_dspark.wire.reply import build_reply, greedy_reply

T = TypeVar("T")


@dataclass
class Occupancy:
    """Which engine seat a (session, slot) holds, and for which generation."""

    seat: int
    generation: int


class WorkerHandler:
    """The `DrafterHandler` of this worker: slots of sessions are mapped to seats of the engine.

    Args:
        engine: Drafts.
        config: Mode, support and depth that requests are held to.
        health: Told of every STEP.
        thread: A pool of exactly one thread.
        timings: Told of every step that was answered.
    """

    def __init__(
        self,
        engine: DraftEngine,
        config: WorkerConfig,
        health: Health,
        thread: ThreadPoolExecutor,
        timings: StepLog,
    ) -> None:
        self._engine = engine
        self._config = config
        self._health = health
        self._thread = thread
        self._timings = timings
        self._held: dict[tuple[int, int], Occupancy] = {}
        self._shard = Shard(0, 1, 0, engine.model.config.vocab_size)
        self.refusals: Counter[str] = Counter()

    @property
    def num_held(self) -> int:
        """Seats in use over all sessions."""
        return len(self._held)

    async def on_open(self, message: Open) -> None:
        """Take a seat."""
        self._require_policy(message.draft_temperature_ppm, message.support_policy)

        def take() -> None:
            previous = self._held.pop((message.session, message.slot), None)
            if previous is not None:
                # the wire has checked that the new generation is newer: the old occupant is gone
                self._engine.close(previous.seat, previous.generation)
            seat = self._engine.open(message.seed, message.generation)
            self._held[message.session, message.slot] = Occupancy(seat, message.generation)

        await self._call(take)

    async def on_state(self, message: State) -> None:
        """Append target states."""

        def append() -> None:
            held = self._occupancy(message.session, message.slot)
            self._engine.append_states(held.seat, message.generation, message.position, message.rows)

        await self._call(append)

    async def on_step(self, message: Step) -> Reply:
        """Draft."""
        for request in message.requests:
            self._require_policy(request.draft_temperature_ppm, request.support_policy)

        def draft() -> Reply:
            start_ns = time.perf_counter_ns()
            requests = [
                DraftRequest(
                    seat=self._occupancy(message.session, request.slot).seat,
                    generation=request.generation,
                    round=request.round,
                    anchor_position=request.anchor_position,
                    anchor_token=request.anchor_token,
                    draft_temperature=request.draft_temperature_ppm / PPM,
                )
                for request in message.requests
            ]
            rows = self._engine.step(requests, message.depth)
            drafted_ns = time.perf_counter_ns()
            reply = self._reply(message, rows)
            end_ns = time.perf_counter_ns()
            self._timings.add(self._engine.timings, end_ns - drafted_ns, end_ns - start_ns)
            return reply

        num_rounds = 0
        self._health.step_started()
        try:
            reply = await self._call(draft)
            num_rounds = len(message.requests)
            return reply
        finally:
            self._health.step_ended(num_rounds)

    async def on_commit(self, message: Commit) -> None:
        """Count what was accepted; the states that follow move the context."""

        def count() -> None:
            held = self._occupancy(message.session, message.slot)
            self._engine.commit(held.seat, message.generation, message.num_accepted)

        await self._call(count)

    async def on_reset(self, message: Reset) -> None:
        """Start another generation in the seat."""

        def reset() -> None:
            held = self._occupancy(message.session, message.slot)
            self._engine.reset(held.seat, message.generation, message.new_generation, message.keep_position)
            held.generation = message.new_generation

        await self._call(reset)

    async def on_cancel(self, message: Cancel) -> None:
        """Free the seat."""

        def free() -> None:
            held = self._occupancy(message.session, message.slot)
            self._engine.close(held.seat, message.generation)
            del self._held[message.session, message.slot]

        await self._call(free)

    async def on_disconnect(self, session: int) -> None:
        """Free every seat of a client that is gone."""

        def free_all() -> int:
            slots = [key for key in self._held if key[0] == session]
            for key in slots:
                held = self._held.pop(key)
                self._engine.close(held.seat, held.generation)
            return len(slots)

        try:
            num_freed = await self._call(free_all)
        except DrafterRefusal as cause:
            # nobody is left to be told
            log_event("client_gone", session=f"{session:016x}", detail=str(cause))
        else:
            log_event("client_gone", session=f"{session:016x}", seats_freed=num_freed)

    async def _call(self, work: Callable[[], T]) -> T:
        """Run on the engine's thread; refusals keep their code, anything else poisons."""
        state = self._health.to_document()
        if state["state"] == "poisoned":
            raise self._refusal("poisoned", str(state["detail"]))
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except DrafterRefusal as cause:
            self.refusals[cause.code] += 1
            raise
        except EngineError as cause:
            raise self._refusal(cause.code, str(cause)) from cause
        except Exception as cause:
            detail = f"{type(cause).__name__}: {cause}"
            self._health.poison(detail)
            log_event("poisoned", detail=detail)
            raise self._refusal("poisoned", detail) from cause

    def _refusal(self, code: str, detail: str) -> DrafterRefusal:
        self.refusals[code] += 1
        return DrafterRefusal(code, detail.encode("ascii", "replace").decode()[:240])

    def _occupancy(self, session: int, slot: int) -> Occupancy:
        held = self._held.get((session, slot))
        if held is None:
            raise DrafterRefusal("slot_not_open", f"slot {slot}: expected an open request, found none")
        return held

    def _require_policy(self, temperature_ppm: int, support: int) -> None:
        """The sampled path runs only where the configuration says so, whatever a client asks for."""
        if temperature_ppm and self._config.mode is DraftMode.OFF:
            raise self._refusal("sampling_is_off", f"expected draft temperature 0, found {temperature_ppm} ppm")
        if temperature_ppm and support != self._config.support:
            raise self._refusal("support_policy", f"expected support {self._config.support}, found {support}")

    def _reply(self, step: Step, rows: DraftedRows) -> Reply:
        if self._config.mode is DraftMode.OFF:
            return greedy_reply(step, self._shard, rows.tokens)
        return build_reply(step, self._shard, tokens=rows.tokens, ids=rows.ids, q=rows.q, counts=rows.counts)
