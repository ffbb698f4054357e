"""Wire messages in, engine calls out. Every engine call runs on one thread, so the engine needs no lock.

That thread is the engine's own, or the event loop's: a device's step lasts about a millisecond, and two hand-overs
between sleeping threads cost a quarter of it, while other connections have nothing to wait for but the same device.
Fail closed: a refusal of the engine becomes an ERROR frame and costs that request or batch; anything unforeseen
poisons the worker, because nothing is known about its state any more, and every later call is refused.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
        health: Told of every engine call.
        thread: A pool of exactly one thread; None runs the engine on the event loop's, and the methods are plain.
        timings: Told of every step that was answered.
    """

    def __init__(
        self,
        engine: DraftEngine,
        config: WorkerConfig,
        health: Health,
        thread: ThreadPoolExecutor | None,
        timings: StepLog,
    ) -> None:
        self._engine = engine
        self._config = config
        self._health = health
        self._thread = thread
        self._timings = timings
        self._held: dict[tuple[int, int], Occupancy] = {}
        self._shard = Shard(0, 1, 0, engine.model.config.vocab_size)
        self._unnoted: tuple[int, int] | None = None
        self.refusals: Counter[str] = Counter()

    @property
    def num_held(self) -> int:
        """Seats in use over all sessions."""
        return len(self._held)

    def on_open(self, message: Open) -> Awaitable[None] | None:
        """Take a seat."""
        self._require_policy(message.draft_temperature_ppm, message.support_policy)

        def take() -> None:
            previous = self._held.pop((message.session, message.slot), None)
            if previous is not None:
                # the wire has checked that the new generation is newer: the old occupant is gone
                self._engine.close(previous.seat, previous.generation)
            seat = self._engine.open(message.seed, message.generation)
            self._held[message.session, message.slot] = Occupancy(seat, message.generation)

        return self._call(take)

    def on_state(self, message: State) -> Awaitable[None] | None:
        """Append target states."""

        def append() -> None:
            held = self._occupancy(message.session, message.slot)
            self._engine.append_states(held.seat, message.generation, message.position, message.rows)

        return self._call(append)

    def on_step(self, message: Step) -> Awaitable[Reply] | Reply:
        """Draft."""
        for request in message.requests:
            self._require_policy(request.draft_temperature_ppm, request.support_policy)

        def draft() -> Reply:
            self._note_step()
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
            self._health.count_rounds(len(message.requests))
            self._unnoted = end_ns - drafted_ns, end_ns - start_ns
            if self._thread is None:
                # behind the reply, which is written in this turn of the loop
                asyncio.get_running_loop().call_soon(self._note_step)
            else:
                self._note_step()
            return reply

        return self._call(draft)

    def _note_step(self) -> None:
        """Log the last step, once: its account is the engine's until the next step."""
        if self._unnoted is not None:
            (encode_ns, thread_ns), self._unnoted = self._unnoted, None
            self._timings.add(self._engine.timings, encode_ns, thread_ns)

    def on_commit(self, message: Commit) -> Awaitable[None] | None:
        """Count what was accepted; the states that follow move the context."""

        def count() -> None:
            held = self._occupancy(message.session, message.slot)
            self._engine.commit(held.seat, message.generation, message.num_accepted)

        return self._call(count)

    def on_reset(self, message: Reset) -> Awaitable[None] | None:
        """Start another generation in the seat."""

        def reset() -> None:
            held = self._occupancy(message.session, message.slot)
            self._engine.reset(held.seat, message.generation, message.new_generation, message.keep_position)
            held.generation = message.new_generation

        return self._call(reset)

    def on_cancel(self, message: Cancel) -> Awaitable[None] | None:
        """Free the seat."""

        def free() -> None:
            held = self._occupancy(message.session, message.slot)
            self._engine.close(held.seat, message.generation)
            del self._held[message.session, message.slot]

        return self._call(free)

    async def on_disconnect(self, session: int) -> None:
        """Free every seat of a client that is gone."""

        def free_all() -> int:
            slots = [key for key in self._held if key[0] == session]
            for key in slots:
                held = self._held.pop(key)
                self._engine.close(held.seat, held.generation)
            return len(slots)

        try:
            freed = self._call(free_all)
            num_freed = freed if isinstance(freed, int) else await freed
        except DrafterRefusal as cause:
            # nobody is left to be told
            log_event("client_gone", session=f"{session:016x}", detail=str(cause))
        else:
            log_event("client_gone", session=f"{session:016x}", seats_freed=num_freed)

    def _call(self, work: Callable[[], T]) -> Awaitable[T] | T:
        """Run on the engine's thread, or here where it has none."""
        if self._thread is None:
            with self._refusals():
                return self._watched(work)
        return self._call_on_thread(work, self._thread)

    async def _call_on_thread(self, work: Callable[[], T], thread: ThreadPoolExecutor) -> T:
        with self._refusals():
            return await asyncio.get_running_loop().run_in_executor(thread, self._watched, work)

    def _watched(self, work: Callable[[], T]) -> T:
        self._health.call_started()
        try:
            return work()
        finally:
            self._health.call_ended()

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Refusals keep their code, anything else poisons; a poisoned worker calls nothing."""
        poison = self._health.poison_detail
        if poison is not None:
            raise self._refusal("poisoned", poison)
        try:
            yield
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
        if self._config.mode is DraftMode.OFF or not any(request.draft_temperature_ppm for request in step.requests):
            return greedy_reply(step, self._shard, rows.tokens)
        return build_reply(step, self._shard, tokens=rows.tokens, ids=rows.ids, q=rows.q, counts=rows.counts)
