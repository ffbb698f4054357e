"""A part of the worker's long proof: random lives, ends and faults; counters add up and nothing stays behind."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from worker_load import load_worker

pytestmark = pytest.mark.models


@pytest.mark.parametrize(("without_network", "rounds"), [(False, 60), (True, 600)])
def test_a_load_with_faults_leaves_exact_counters_and_free_seats(
    tmp_path: Path, without_network: bool, rounds: int
) -> None:
    # red when a row of another round or occupant is sent, a refusal changes a seat, or a vanished client keeps one
    with load_worker(tmp_path, seed=3, lose_every=17, without_network=without_network) as (handler, engine, load):
        asyncio.run(load.run(rounds))
        tally, counters = load.tally, engine.counters
        assert tally.wrong_draws == 0
        assert (counters.rounds, counters.sampled_rounds) == (tally.rounds, tally.sampled)
        assert counters.greedy_rounds == tally.rounds - tally.sampled
        assert counters.draft_tokens == tally.rows == 5 * tally.rounds
        assert counters.accepted_tokens == tally.accepted
        assert counters.state_rows == tally.state_rows
        assert counters.row_errors == tally.lost > 0
        assert counters.opened == counters.closed == tally.opened
        assert dict(handler.refusals) == dict(tally.refusals)
        assert (handler.num_held, engine.num_free_seats) == (0, 4)
        assert without_network or engine.markov.hits + engine.markov.misses >= 5 * tally.rounds


def test_a_row_of_an_earlier_round_is_found(tmp_path: Path) -> None:
    # the judge itself: a worker that sends the last step's rows again must not pass
    with load_worker(tmp_path, seed=5, lose_every=0) as (_, engine, load):
        fresh, kept = engine.compute.draft, {}

        def stale(blocks, depth):  # type: ignore[no-untyped-def]
            rows = fresh(blocks, depth)
            return kept.setdefault(len(blocks), rows)

        engine.compute.draft = stale
        asyncio.run(load.run(40))
        assert load.tally.wrong_draws > 0
