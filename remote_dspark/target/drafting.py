"""The engine's side of the wire: seats opened, states sent, proposals asked for, outcomes committed.

Rules: a proposal comes back validated and complete, or not at all; whatever fails is counted under the wire's own
code, invalidates the generations concerned on both ends, and costs target-only rounds, never a wrong token. A broken
connection ends drafting for the seats it carried; seats admitted later try a new one. Nothing is retried within a
round, so no draw is ever made twice under one key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from remote_dspark.contract import Metric
from remote_dspark.oracle.verify import DraftRow, FinalKind
from remote_dspark.target.config import TargetConfig
from remote_dspark.target.errors import DrafterError
from remote_dspark.target.identity import is_sampled
from remote_dspark.target.metrics import Counters
from remote_dspark.target.recording import SessionRecording
from remote_dspark.target.seat import Played, Proposal, Seat
from remote_dspark.wire.client import DrafterClient
from remote_dspark.wire.errors import ProtocolError, Scope
from remote_dspark.wire.kinds import RowKind
from remote_dspark.wire.messages import Cancel, Commit, Hello, Open, Reply, Reset, State, Step, StepRequest
from remote_dspark.wire.reply import reply_row

CONNECT_PAUSE_S: Final = 0.1
RECONNECT_EVERY_S: Final = 5.0
HEARTBEAT_S: Final = 20.0
"""Well below the worker's idle deadline, which would end the session of a server without requests."""


class DraftLink:
    """One connection to the drafter worker, owned by the engine's thread.

    Args:
        config: Server configuration.
        hello: What we offer.
        counters: Rejections are counted here.
    """

    def __init__(self, config: TargetConfig, hello: Hello, counters: Counters) -> None:
        self._config = config
        self._hello = hello
        self._counters = counters
        self._client: DrafterClient | None = None
        self._generation = 0
        self._next_attempt_s = 0.0
        self._seats: dict[int, Seat] = {}
        self._recording = SessionRecording(config.capture) if config.capture else None

    @property
    def is_connected(self) -> bool:
        """Whether a session is up."""
        return self._client is not None

    def connect(self, timeout_s: float, should_stop: Callable[[], bool]) -> bool:
        """Connect, retrying until the deadline only while nobody listens: at start-up the worker may be later than we.

        Args:
            timeout_s: Bound of all attempts.
            should_stop: Ends the attempts early.

        Returns:
            Whether there is a session; False only when stopped.

        Raises:
            DrafterError: Nobody listened in time, or the worker is not the one that the configuration asks for.
        """
        address = self._config.drafter_address
        deadline = time.monotonic() + timeout_s
        while not should_stop():
            try:
                self._client = self._dial()
                return True
            except ProtocolError as cause:
                raise DrafterError(f"drafter {address}: {cause}") from cause
            except OSError as cause:
                if time.monotonic() >= deadline:
                    raise DrafterError(
                        f"drafter {address}: expected a worker within {timeout_s} s, found {cause}; "
                        "start the worker or correct drafter.address"
                    ) from cause
            time.sleep(CONNECT_PAUSE_S)
        return False

    def open(self, seat: Seat) -> None:
        """Give a seat to the worker. On failure the seat is served target-only."""
        if self._client is None:
            self._reconnect()
        self._new_generation(seat)
        seat.num_states = 0
        client = self._client
        if client is None:
            return
        message = Open(
            session=client.session,
            slot=seat.slot,
            generation=seat.generation,
            seed=seat.request.seed,
            draft_temperature_ppm=self._temperature_ppm(seat),
            support_policy=self._config.support,
            depth_policy=self._config.depth,
        )
        self._seats[seat.slot] = seat
        seat.is_drafted = self._attempt(lambda: client.open(message), [seat])

    def send_states(self, seat: Seat, position: int, token_ids: Sequence[int], states: npt.NDArray[np.uint16]) -> None:
        """Send hidden states of newly committed positions; bf16 little-endian rows."""
        client = self._client
        if client is None or not seat.is_drafted:
            return
        rows = np.ascontiguousarray(states.astype("<u2", copy=False)).view(np.uint8)
        ids = np.asarray(token_ids, dtype=np.int32)
        message = State(client.session, seat.slot, seat.generation, position, ids, rows)
        if self._attempt(lambda: client.state(message), []):
            seat.num_states = position + len(token_ids)
        elif seat.is_drafted:
            # How much of the rows arrived is not known, so no later anchor could be trusted.
            self.close_seat(seat)

    def propose(self, seats: Sequence[Seat]) -> dict[int, Proposal]:
        """One STEP for all ``seats``; proposals by slot, or nothing for all of them."""
        client = self._client
        drafted = [seat for seat in seats if seat.is_drafted]
        if client is None or not drafted:
            return {}
        batch = client.next_batch()
        requests = tuple(self._step_request(seat) for seat in drafted)
        step = Step(client.session, batch % 2, batch, self._config.depth, requests)
        replies: list[Reply] = []
        self._attempt(lambda: replies.append(client.step(step, timeout_s=self._config.step_timeout_s)), drafted)
        return {seat.slot: _proposal(reply, index) for reply in replies for index, seat in enumerate(drafted)}

    def commit(self, played: Sequence[tuple[Seat, Played]]) -> None:
        """Tell the worker what became of each proposal, then send the states of the new positions."""
        client = self._client
        if client is None:
            return
        commits = [_commit(client.session, seat, round_) for seat, round_ in played]
        seats = [seat for seat, _ in played]
        if commits:
            self._attempt(lambda: client.commit(commits), seats)
        for seat, round_ in played:
            seat.round += 1
            if not seat.is_finished:
                self.send_states(seat, round_.first_position, round_.token_ids, round_.states)

    def discard(self, seat: Seat) -> None:
        """Invalidate a seat's generation on both ends and start the next one; committed states are kept."""
        client = self._client
        if client is None or not seat.is_drafted:
            return
        old = seat.generation
        self._new_generation(seat)
        message = Reset(client.session, seat.slot, old, seat.generation, seat.num_states)
        try:
            client.reset(message)
        except (ProtocolError, OSError) as cause:
            self._lose(cause, [seat])

    def close_seat(self, seat: Seat) -> None:
        """Free a seat on the worker."""
        client = self._client
        self._seats.pop(seat.slot, None)
        if client is None or not seat.is_drafted:
            return
        seat.is_drafted = False
        self._attempt(lambda: client.cancel(Cancel(client.session, seat.slot, seat.generation)), [])

    def close(self) -> None:
        """End the session; the worker frees all seats."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._recording is not None:
            self._recording.close()
            self._recording = None

    def _attempt(self, call: Callable[[], None], seats: Sequence[Seat]) -> bool:
        """Run one wire call. False on failure, after the failure is counted and its consequences are drawn."""
        try:
            call()
        except ProtocolError as cause:
            if cause.scope is Scope.CONNECTION:
                self._lose(cause, seats)
            else:
                self._count(cause.code)
                for seat in seats:
                    self.discard(seat)
            return False
        except OSError as cause:
            self._lose(cause, seats)
            return False
        return True

    def _lose(self, cause: ProtocolError | OSError, seats: Sequence[Seat]) -> None:
        """The connection cannot be trusted any more: every seat on it is served target-only from here."""
        self._count(cause.code if isinstance(cause, ProtocolError) else "connection_lost")
        for seat in {seat.slot: seat for seat in (*self._seats.values(), *seats)}.values():
            seat.is_drafted = False
            # What was in flight under the old key stays in the past: no draw of it is used again.
            self._new_generation(seat)
        self._seats.clear()
        self.close()
        self._next_attempt_s = time.monotonic() + RECONNECT_EVERY_S

    def _reconnect(self) -> None:
        if time.monotonic() < self._next_attempt_s:
            return
        self._next_attempt_s = time.monotonic() + RECONNECT_EVERY_S
        try:
            self._client = self._dial()
        except (ProtocolError, OSError) as cause:
            self._count(cause.code if isinstance(cause, ProtocolError) else "connection_lost")

    def _dial(self) -> DrafterClient:
        # This bound stays the session's: a stalled worker must not hold up every request for longer than one STEP may.
        return DrafterClient.connect(
            self._config.drafter_address,
            self._hello,
            self._config.tls,
            timeout_s=self._config.step_timeout_s,
            tap=self._recording.tap() if self._recording else None,
            heartbeat_s=HEARTBEAT_S,
            spin_s=self._config.spin_us / 1e6,
        )

    def _new_generation(self, seat: Seat) -> None:
        self._generation += 1
        seat.generation, seat.round = self._generation, 0

    def _count(self, code: str) -> None:
        self._counters.add(Metric.REPLIES_REJECTED, label=code)

    def _temperature_ppm(self, seat: Seat) -> int:
        is_greedy = seat.request.temperature == 0 or not is_sampled(self._config)
        return 0 if is_greedy else self._config.draft_temperature_ppm

    def _step_request(self, seat: Seat) -> StepRequest:
        return StepRequest(
            slot=seat.slot,
            generation=seat.generation,
            round=seat.round,
            anchor_position=seat.anchor_position,
            anchor_token=seat.committed[-1],
            prefix_digest=seat.prefix_digest(),
            draft_temperature_ppm=self._temperature_ppm(seat),
            support_policy=self._config.support,
        )


def _proposal(reply: Reply, index: int) -> Proposal:
    rows = [reply_row(reply, index, position) for position in range(reply.depth)]
    tokens = tuple(row.token for row in rows)
    if rows[0].kind is RowKind.GREEDY:
        return Proposal(tokens, None)
    return Proposal(tokens, tuple(DraftRow(row.ids.astype(np.int64), row.tickets) for row in rows))


def _commit(session: int, seat: Seat, played: Played) -> Commit:
    outcome = played.outcome
    return Commit(
        session=session,
        slot=seat.slot,
        generation=seat.generation,
        round=seat.round,
        num_accepted=outcome.num_accepted,
        next_token=outcome.tokens[-1],
        is_bonus=outcome.final_kind is FinalKind.BONUS,
        committed_position=seat.anchor_position,
    )
