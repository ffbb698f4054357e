"""Seats, generations and rounds of one worker: from committed target states to proposals.

The rules of this file:

* A seat has one occupant at a time, named by its generation; generations only grow, so a late call can be told.
* A draw is keyed by (seed, generation) and counted by (round, absolute position): the same STEP can be computed in
  any batch and any seat with the same result, and no key is used for two prefixes (a reset takes a new generation).
* The context holds target states of committed positions only; a rejection therefore leaves nothing to undo.
* ``step`` either returns every row of every request or raises; it changes no context.
* Numbers come from a `BlockCompute`: the torch reference, or a device. This file does not know which.

Not covered: sockets, queues, several devices. One thread calls at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from remote_dspark.contract import Q_FLOOR_FIRST, SUPPORT_K
from remote_dspark.drafter.compute import BlockCompute, CachedRows, TorchCompute
from remote_dspark.drafter.context import SeatContext
from remote_dspark.drafter.errors import CapacityError, EngineError, StaleError, StateGapError
from remote_dspark.drafter.heads import DraftedRows
from remote_dspark.drafter.model import DSparkDrafter
from remote_dspark.drafter.staging import Block
from remote_dspark.drafter.timings import StepTimings
from remote_dspark.oracle.philox import derive_key

MAX_ROUND: Final = (1 << 32) - 1
"""The counter holds 32 bits of the round; the next one needs a new generation (contract, RNG key)."""


class DraftRequest(NamedTuple):
    """One request of a step.

    Attributes:
        seat: Engine seat.
        generation: Occupant the caller means.
        round: Must exceed the seat's previous round in this generation.
        anchor_position: Absolute position of the anchor; the context must hold exactly the positions before it.
        anchor_token: Last committed token.
        draft_temperature: tau; 0 asks for greedy rows.
    """

    seat: int
    generation: int
    round: int
    anchor_position: int
    anchor_token: int
    draft_temperature: float


@dataclass
class Seat:
    """One seat's state; ``generation`` None means free."""

    context: SeatContext
    generation: int | None = None
    seed: int = 0
    key: tuple[int, int] = (0, 0)
    last_round: int = -1


@dataclass
class EngineCounters:
    """Monotonic counters of the engine; ``rounds`` counts (request, step) pairs."""

    steps: int = 0
    rounds: int = 0
    sampled_rounds: int = 0
    greedy_rounds: int = 0
    row_errors: int = 0
    state_rows: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    opened: int = 0
    closed: int = 0


class DraftEngine:
    """Drafts for up to ``num_seats`` requests at once.

    Args:
        model: A loaded drafter.
        num_seats: Seats allocated now.
        support: Entries of a sampled row; these four are for the torch reference.
        semantics: Ticket allocation.
        markov_cache_bytes: Bound of cached bias rows.
        max_positions: Context limit per seat; the model's own by default.
        compute: Drafts the blocks; the torch reference by default.
    """

    def __init__(
        self,
        model: DSparkDrafter,
        num_seats: int,
        *,
        support: int = SUPPORT_K,
        semantics: str = Q_FLOOR_FIRST,
        markov_cache_bytes: int = 16 << 20,
        max_positions: int | None = None,
        compute: BlockCompute | None = None,
    ) -> None:
        self.model = model
        self.counters = EngineCounters()
        self.compute: BlockCompute = compute or TorchCompute(
            model,
            support=support,
            semantics=semantics,
            cache_bytes=markov_cache_bytes,
            max_positions=min(max_positions or model.config.max_positions, model.config.max_positions),
        )
        self._seats = [Seat(self.compute.context(number)) for number in range(num_seats)]

    @property
    def markov(self) -> CachedRows:
        """Counters of the bias rows."""
        return self.compute.markov

    @property
    def timings(self) -> StepTimings | None:
        """Where the last step's time went."""
        return self.compute.timings

    @property
    def num_free_seats(self) -> int:
        """Seats without an occupant."""
        return sum(seat.generation is None for seat in self._seats)

    def open(self, seed: int, generation: int) -> int:
        """Take a free seat for a request.

        Args:
            seed: u64 of the RNG key.
            generation: u64, the occupant's number.

        Returns:
            The seat.

        Raises:
            CapacityError: None is free.
        """
        for number, seat in enumerate(self._seats):
            if seat.generation is None:
                seat.context.crop(0)
                self._occupy(seat, seed, generation)
                self.counters.opened += 1
                return number
        raise CapacityError(f"expected a free seat, found all {len(self._seats)} taken; cancel a request or wait")

    def append_states(self, seat: int, generation: int, position: int, rows: NDArray[np.uint8]) -> int:
        """Add target states of committed positions.

        Args:
            seat: Engine seat.
            generation: Occupant.
            position: Absolute position of the first row.
            rows: uint8 [n, m*d*2], BF16 little-endian, unfused; not kept.

        Returns:
            The next missing position.

        Raises:
            StaleError: Another occupant.
            StateGapError: Rows that do not continue the context.
            CapacityError: Past the position limit.
        """
        context = self._occupant(seat, generation).context
        context.append(position, rows)
        self.counters.state_rows += len(rows)
        return context.length

    def step(self, requests: Sequence[DraftRequest], depth: int) -> DraftedRows:
        """Draft ``depth`` tokens for every request, or raise and leave every context as it was.

        Rounds count as used even when this raises: their draws are never made again.

        Raises:
            EngineError: Empty batch, a seat twice, or a depth beyond the block.
            StaleError: Another occupant, or a round that is not newer.
            StateGapError: The context does not end just before the anchor.
            RowError: A row has no distribution; everything is discarded.
        """
        seats = self._require_step(requests, depth)
        for seat, request in zip(seats, requests, strict=True):
            seat.last_round = request.round
        self.counters.steps += 1
        try:
            rows = self.compute.draft(self._blocks(seats, requests), depth)
        except EngineError:
            self.counters.row_errors += 1
            raise
        num_greedy = sum(request.draft_temperature == 0 for request in requests)
        self.counters.rounds += len(requests)
        self.counters.greedy_rounds += num_greedy
        self.counters.sampled_rounds += len(requests) - num_greedy
        self.counters.draft_tokens += len(requests) * depth
        return rows

    def base_logits(self, requests: Sequence[DraftRequest], depth: int) -> Tensor:
        """BF16 [B, depth, V] base logits of requests that may be steps; changes nothing."""
        return self.compute.base_logits(self._blocks([self._seats[one.seat] for one in requests], requests), depth)

    def commit(self, seat: int, generation: int, num_accepted: int) -> None:
        """Count a verified round. The context advances by the states that follow, not by this."""
        self._occupant(seat, generation)
        self.counters.accepted_tokens += num_accepted

    def reset(self, seat: int, generation: int, new_generation: int, keep_position: int) -> None:
        """Start another generation in a seat, keeping the first ``keep_position`` context rows.

        Raises:
            StaleError: Another occupant, or a generation that is not newer.
            StateGapError: More rows to keep than there are.
        """
        occupant = self._occupant(seat, generation)
        if new_generation <= generation:
            raise StaleError(f"seat {seat}: expected a generation above {generation}, found {new_generation}")
        occupant.context.crop(keep_position)
        self._occupy(occupant, occupant.seed, new_generation)

    def close(self, seat: int, generation: int) -> None:
        """Free a seat.

        Raises:
            StaleError: Another occupant.
        """
        occupant = self._occupant(seat, generation)
        occupant.generation = None
        self.counters.closed += 1

    def shutdown(self) -> None:
        """End the compute; no call may follow."""
        self.compute.close()

    def context_length(self, seat: int) -> int:
        """Committed positions whose states a seat holds."""
        return self._seats[seat].context.length

    def _occupy(self, seat: Seat, seed: int, generation: int) -> None:
        seat.generation, seat.seed, seat.last_round = generation, seed, -1
        seat.key = derive_key(seed, generation)

    def _occupant(self, number: int, generation: int) -> Seat:
        if not 0 <= number < len(self._seats):
            raise StaleError(f"expected a seat in [0, {len(self._seats)}), found {number}")
        seat = self._seats[number]
        if seat.generation != generation:
            raise StaleError(f"seat {number}: expected generation {seat.generation}, found {generation}; open it again")
        return seat

    def _require_step(self, requests: Sequence[DraftRequest], depth: int) -> list[Seat]:
        if not requests or len({request.seat for request in requests}) != len(requests):
            raise EngineError(f"expected one or more requests in different seats, found {len(requests)} requests")
        if not 1 <= depth <= self.model.config.block_size:
            raise EngineError(f"expected a depth in 1..{self.model.config.block_size}, found {depth}")
        seats = []
        for request in requests:
            seat = self._occupant(request.seat, request.generation)
            if not seat.last_round < request.round <= MAX_ROUND:
                expected = f"a round in [{seat.last_round + 1}, {MAX_ROUND}]"
                raise StaleError(f"seat {request.seat}: expected {expected}, found {request.round}; reset the seat")
            if seat.context.length != request.anchor_position:
                raise StateGapError(
                    f"seat {request.seat}: expected states of all {request.anchor_position} positions before the "
                    f"anchor, found {seat.context.length}; send them or reset"
                )
            if not 0 <= request.anchor_token < self.model.config.vocab_size:
                limit = self.model.config.vocab_size
                raise EngineError(
                    f"seat {request.seat}: expected an anchor in [0, {limit}), found {request.anchor_token}"
                )
            seats.append(seat)
        return seats

    def _blocks(self, seats: Sequence[Seat], requests: Sequence[DraftRequest]) -> list[Block]:
        return [
            Block(
                seat=request.seat,
                anchor=request.anchor_token,
                position=request.anchor_position,
                tau=request.draft_temperature,
                key=seat.key,
                round=request.round,
                generation=request.generation,
                epoch=self.counters.steps,
            )
            for seat, request in zip(seats, requests, strict=True)
        ]
