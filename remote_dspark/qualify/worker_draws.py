"""Requests of a probe, and whether their tokens are the oracle's draws from the q that came with them."""

from __future__ import annotations

from typing import Final

import numpy as np

from remote_dspark.contract import DRAFT_TEMPERATURE
from remote_dspark.oracle.philox import derive_key, proposal_draw
from remote_dspark.oracle.tickets import draw_token
from remote_dspark.qualify.worker_client import ProbeSeat
from remote_dspark.wire.kinds import RowKind
from remote_dspark.wire.messages import PPM, Reply
from remote_dspark.wire.reply import reply_row

TEMPERATURE_PPM: Final = int(float(DRAFT_TEMPERATURE) * PPM)


def probe_seat(seed: int, slot: int, generation: int, kind: str, *, number: int) -> ProbeSeat:
    """A request whose tokens, states and draws follow from ``seed`` and ``number``.

    Args:
        seed: Of the whole probe.
        slot: Seat number.
        generation: Occupant.
        kind: ``sampled``, ``greedy``, or ``mixed``: every second number is greedy.
        number: Of the request.
    """
    is_greedy = kind == "greedy" or (kind == "mixed" and number % 2 == 1)
    rng = np.random.default_rng([seed, number])
    return ProbeSeat(slot, generation, seed + number, 0 if is_greedy else TEMPERATURE_PPM, rng)


def count_wrong_draws(reply: Reply, seats: list[ProbeSeat]) -> int:
    """Rows of the wrong kind, or whose token is not the oracle's draw from the row's own tickets."""
    wrong = 0
    for request, seat in enumerate(seats):
        key = derive_key(seat.seed, seat.generation)
        expected_kind = RowKind.SPARSE if seat.temperature_ppm else RowKind.GREEDY
        for position in range(reply.depth):
            row = reply_row(reply, request, position)
            if row.kind is not expected_kind:
                wrong += 1
            elif row.kind is RowKind.SPARSE:
                draw = proposal_draw(key, seat.round, seat.position + 1 + position)
                wrong += draw_token(row.ids.astype(np.int64), row.tickets, draw) != row.token
    return wrong
