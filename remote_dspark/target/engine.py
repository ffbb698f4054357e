"""The continuous loop: admits requests, asks for proposals, plays rounds, commits. One thread owns all of it.

Rules: only the engine's thread touches the model, the seats and the drafter link; other threads hand over requests and
read state. A round that should have had a proposal and has none is a failed round, whatever the reason; it goes on
target-only. An unexpected exception poisons the engine: nothing is served after it. HTTP is not known here.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from remote_dspark.contract import Metric, ServerState
from remote_dspark.target.drafting import DraftLink
from remote_dspark.target.errors import ModelError, RequestError, TargetError
from remote_dspark.target.identity import Identity
from remote_dspark.target.metrics import Counters
from remote_dspark.target.requests import CompletionRequest
from remote_dspark.target.seat import Emitted, Failure, Played, Proposal, Seat
from remote_dspark.target.text import TextStream, Tokenizer
from remote_dspark.verifier.errors import RowError
from remote_dspark.verifier.processed import require_rows

if TYPE_CHECKING:
    from remote_dspark.target.model import TargetModel

WARM_PROMPT_TOKENS: Final = 8
WARM_TOKENS: Final = 8


class BusyError(TargetError):
    """The server is not READY, or its queue is full; the client may come back later."""


class Engine:
    """Serves completions.

    Args:
        identity: Configuration and digests.
        counters: Grown by every round.
        on_stopped: Called once, on the engine's thread, when it serves no more.

    Attributes:
        boot_error: Why it did not become READY, or None.
    """

    def __init__(self, identity: Identity, counters: Counters, on_stopped: Callable[[], None]) -> None:
        self._identity = identity
        self._config = identity.config
        self._counters = counters
        self._on_stopped = on_stopped
        self._link = DraftLink(self._config, identity.hello(), counters)
        self._wake = threading.Condition()
        self._queue: deque[Seat] = deque()
        self._active: list[Seat] = []
        self._state = ServerState.BOOTING
        self._drain_deadline_s: float | None = None
        self._progress_s = time.monotonic()
        self._model: TargetModel
        self._tokenizer: Tokenizer
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.boot_error: TargetError | None = None

    @property
    def state(self) -> ServerState:
        """What ``/health`` says; WEDGED is judged by progress while a request is in flight."""
        with self._wake:
            is_stuck = time.monotonic() - self._progress_s > self._config.wedge_after_s
            is_busy = bool(self._active or self._queue)
            return ServerState.WEDGED if self._state is ServerState.READY and is_busy and is_stuck else self._state

    @property
    def load(self) -> dict[str, int]:
        """Requests in flight and waiting, and the age of the last progress."""
        with self._wake:
            age_ns = int((time.monotonic() - self._progress_s) * 1e9)
            return {"active": len(self._active), "queued": len(self._queue), "progress_age_ns": age_ns}

    def start(self) -> None:
        """Begin to boot; READY comes later."""
        self._thread.start()

    def drain(self) -> None:
        """Refuse new requests, finish those in flight within the drain bound, then stop."""
        with self._wake:
            if self._drain_deadline_s is None:
                self._drain_deadline_s = time.monotonic() + self._config.drain_timeout_s
                if self._state in (ServerState.READY, ServerState.WARMING, ServerState.BOOTING):
                    self._state = ServerState.DRAINING
            self._wake.notify_all()

    def submit(self, request: CompletionRequest, sink: Callable[[Emitted | Failure], None]) -> Seat:
        """Queue one request.

        Raises:
            BusyError: Not READY or full.
            RequestError: Ids outside the vocabulary, or more tokens than the context holds.
        """
        self._require_ready()
        prompt = list(request.prompt_ids or self._tokenizer.encode(request.prompt or ""))
        self._require_fit(prompt, request.max_tokens)
        seat = Seat(request, prompt, len(prompt), sink, TextStream(self._tokenizer, request.stops))
        with self._wake:
            # Again under the lock: a request queued behind the end of a drain would wait for ever.
            self._require_ready()
            if len(self._queue) >= self._config.max_queue:
                raise BusyError(
                    f"queue holds {len(self._queue)} requests, expected fewer than {self._config.max_queue}"
                )
            if not self._active and not self._queue:
                self._progress_s = time.monotonic()
            self._counters.add(Metric.REQUESTS)
            self._queue.append(seat)
            self._wake.notify_all()
        return seat

    def _require_ready(self) -> None:
        state = self.state
        if state is not ServerState.READY:
            raise BusyError(f"server is {state}, expected {ServerState.READY}")

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        is_known = False
        try:
            if self._boot():
                self._serve()
            is_known = True
        except TargetError as cause:
            self.boot_error = cause
            self._set_state(ServerState.DRAINING)
            self._fail_all("server-stopped", str(cause))
            is_known = True
        finally:
            # Anything unforeseen ends up in threading.excepthook; wrong tokens must not follow it.
            if not is_known:
                self._set_state(ServerState.POISONED)
                self._fail_all("poisoned", "the engine failed; see the server's log")
        self._link.close()
        self._on_stopped()

    def _boot(self) -> bool:
        import torch

        from remote_dspark.target.model import TargetModel

        torch.set_num_threads(self._config.threads)
        self._tokenizer = Tokenizer(self._config.tokenizer)
        layers = self._identity.drafter.target_layer_ids
        self._model = TargetModel(self._config.model, layers, dtype=self._config.dtype, device=self._config.device)
        self._set_state(ServerState.WARMING)
        self._require_finite()
        if not self._link.connect(self._config.connect_timeout_s, lambda: self._drain_deadline_s is not None):
            return False
        self._warm()
        self._set_state(ServerState.READY)
        return self._drain_deadline_s is None

    def _require_finite(self) -> None:
        """A checkpoint of NaN must not wait for a drafter to be found out."""
        prompt = range(1, min(WARM_PROMPT_TOKENS, self._model.vocab_size))
        try:
            require_rows(self._model.new_sequence().extend(prompt).logits)
        except RowError as cause:
            raise ModelError(f"{self._config.model}: {cause}; copy the checkpoint again") from cause

    def _warm(self) -> None:
        """One short completion through the drafter: a worker that accepts and cannot draft must not look READY."""
        prompt = [token % self._model.vocab_size for token in range(1, WARM_PROMPT_TOKENS + 1)]
        request = CompletionRequest(None, tuple(prompt), WARM_TOKENS, 0.0, 0, True, False, (), True)
        failures: list[Failure] = []
        seat = Seat(
            request,
            prompt,
            len(prompt),
            lambda event: failures.append(event) if isinstance(event, Failure) else None,
            TextStream(self._tokenizer, ()),
        )
        self._admit(seat)
        while self._active and self._drain_deadline_s is None:
            self._round()
        if failures or seat.num_target_only:
            found = failures[0].message if failures else f"{seat.num_target_only} rounds without a proposal"
            raise TargetError(f"warm-up: expected a completion with proposals in every round, found {found}")

    def _serve(self) -> None:
        while True:
            with self._wake:
                while not (self._queue or self._active or self._drain_deadline_s is not None):
                    self._wake.wait()
                is_over = self._drain_deadline_s is not None and time.monotonic() > self._drain_deadline_s
                if is_over or (self._drain_deadline_s is not None and not self._queue and not self._active):
                    break
                admitted: list[Seat] = []
                while self._queue and len(self._active) + len(admitted) < self._config.max_requests:
                    admitted.append(self._queue.popleft())
            for seat in admitted:
                self._admit(seat)
            self._round()
        self._fail_all("draining", "the server stopped before this request was finished")

    def _admit(self, seat: Seat) -> None:
        taken = {other.slot for other in self._active}
        seat.slot = next(slot for slot in range(self._config.max_requests) if slot not in taken)
        with self._wake:
            self._active.append(seat)
        self._link.open(seat)
        rows = seat.prefill(self._model)
        if rows is not None:
            self._link.send_states(seat, 0, seat.committed[:-1], rows.states)
        self._progress()

    def _round(self) -> None:
        for seat in self._active:
            seat.is_finished = seat.is_finished or seat.is_cancelled
        playing = [seat for seat in self._active if not seat.is_finished]
        wanted = [seat for seat in playing if self._can_draft(seat)]
        proposals = self._link.propose(wanted)
        verified: list[tuple[Seat, Played]] = []
        for seat in playing:
            played = self._play(seat, proposals.get(seat.slot), is_wanted=seat in wanted)
            if played is None:
                continue
            if seat.slot in proposals and not played.was_discarded:
                verified.append((seat, played))
            else:
                if played.was_discarded:
                    self._link.discard(seat)
                self._link.send_states(seat, played.first_position, played.token_ids, played.states)
        self._link.commit(verified)
        self._retire()

    def _play(self, seat: Seat, proposal: Proposal | None, *, is_wanted: bool) -> Played | None:
        try:
            played = seat.play(proposal)
        except RowError as cause:
            self._finish(seat, Failure("target-row", str(cause)))
            return None
        used = proposal if proposal is not None and not played.was_discarded else None
        self._count(seat, played, used, is_failed=is_wanted and used is None)
        event = seat.emit(played.outcome.tokens, self._model.eos_token_ids)
        self._counters.add(Metric.EMITTED_TOKENS, len(event.token_ids))
        self._progress()
        if event.finish:
            self._finish(seat, event)
        else:
            seat.sink(event)
        return played

    def _count(self, seat: Seat, played: Played, used: Proposal | None, *, is_failed: bool) -> None:
        add, outcome = self._counters.add, played.outcome
        add(Metric.ROUNDS)
        add(Metric.ZERO_RESIDUAL, int(outcome.zero_residual))
        add(Metric.FAILED_ROUNDS, int(is_failed))
        if played.was_discarded:
            add(Metric.REPLIES_REJECTED, label="verifier_refused")
        if used is None:
            seat.num_target_only += 1
            add(Metric.TARGET_ONLY_ROUNDS)
            return
        add(Metric.GREEDY_ROUNDS if used.rows is None else Metric.SAMPLED_ROUNDS)
        add(Metric.DRAFT_TOKENS, len(used.tokens))
        add(Metric.ACCEPTED_TOKENS, outcome.num_accepted)
        for position in range(len(used.tokens)):
            add(Metric.PROPOSED_AT_POSITION, int(position <= outcome.num_accepted), str(position))
            add(Metric.ACCEPTED_AT_POSITION, int(position < outcome.num_accepted), str(position))

    def _can_draft(self, seat: Seat) -> bool:
        """Whether anchor and drafts fit both models; the last tokens of a full context are target-only by design."""
        drafter = self._identity.drafter
        end = seat.anchor_position + max(drafter.block_size, self._config.depth + 1)
        return end <= min(self._model.max_length, drafter.max_positions)

    def _require_fit(self, prompt: list[int], max_tokens: int) -> None:
        size, room = self._model.vocab_size, self._model.max_length
        bad = next((token for token in prompt if not 0 <= token < size), None)
        if bad is not None:
            raise RequestError("bad-prompt", f"expected token ids of 0..{size - 1}, found {bad}", "prompt")
        if len(prompt) + max_tokens > room:
            found = f"{len(prompt)} prompt tokens and max_tokens {max_tokens}"
            raise RequestError("context-length", f"expected at most {room} tokens in all, found {found}", "max_tokens")

    def _finish(self, seat: Seat, event: Emitted | Failure) -> None:
        seat.is_finished = True
        seat.sink(event)

    def _retire(self) -> None:
        for seat in [seat for seat in self._active if seat.is_finished]:
            self._link.close_seat(seat)
            with self._wake:
                self._active.remove(seat)

    def _fail_all(self, code: str, message: str) -> None:
        with self._wake:
            seats = [*self._active, *self._queue]
            self._active.clear()
            self._queue.clear()
        for seat in seats:
            seat.sink(Failure(code, message))

    def _progress(self) -> None:
        with self._wake:
            self._progress_s = time.monotonic()

    def _set_state(self, state: ServerState) -> None:
        with self._wake:
            if self._state is not ServerState.DRAINING or state is ServerState.POISONED:
                self._state = state
