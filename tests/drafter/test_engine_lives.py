"""Random lives of seats: whatever happened before, a step equals one on a context computed afresh."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from remote_dspark.drafter.checkpoint import load_drafter
from remote_dspark.drafter.engine import DraftEngine, DraftRequest

pytestmark = pytest.mark.models

DEPTH = 5
NUM_SEATS = 3
MAX_POSITIONS = 96


class Life:
    """What the test knows of one occupant: the rows it sent, its generation and round."""

    def __init__(self, seat: int, seed: int, generation: int) -> None:
        self.seat, self.seed, self.generation, self.round = seat, seed, generation, 0
        self.rows: list[np.ndarray] = []

    def request(self, token: int, tau: float) -> DraftRequest:
        return DraftRequest(self.seat, self.generation, self.round, len(self.rows), token, tau)


@pytest.mark.parametrize("seed", range(4))
def test_random_lives_of_seats_equal_recomputation(checkpoint, seed):
    # red when any of: a crop off by one, rows of an earlier occupant, a key kept over a reset, a round used twice
    rng = random.Random(seed)
    # float64, so that chunking cannot move a BF16 rounding
    model = load_drafter(checkpoint(), dtype=torch.float64)
    engine, lives, generation, steps = DraftEngine(model, NUM_SEATS, markov_cache_bytes=2000), [], 0, 0
    noise = np.random.default_rng(seed)

    def new_rows(count: int) -> np.ndarray:
        values = torch.from_numpy(noise.standard_normal((count, 72))).to(torch.bfloat16)
        return values.view(torch.uint8).numpy()

    for _ in range(110):
        event = rng.choice(["open", "states", "states", "step", "step", "step", "reset", "close"])
        life = rng.choice(lives) if lives else None
        if event == "open" and len(lives) < NUM_SEATS:
            generation += rng.randint(1, 3)
            request_seed = rng.getrandbits(64)
            lives.append(Life(engine.open(request_seed, generation), request_seed, generation))
        elif life is None:
            continue
        elif event == "states" and len(life.rows) < MAX_POSITIONS - 8:
            rows = new_rows(rng.randint(1, 7))
            end = engine.append_states(life.seat, life.generation, len(life.rows), rows)
            life.rows.extend(rows)
            assert end == len(life.rows)
        elif event == "reset":
            generation += 1
            keep = rng.randint(0, len(life.rows))
            engine.reset(life.seat, life.generation, generation, keep)
            life.generation, life.round, life.rows = generation, 0, life.rows[:keep]
        elif event == "close":
            engine.close(life.seat, life.generation)
            lives.remove(life)
        elif event == "step":
            batch = rng.sample(lives, rng.randint(1, len(lives)))
            requests = [each.request(rng.randrange(101), rng.choice([0.0, 0.7, 1.0])) for each in batch]
            drafted = engine.step(requests, DEPTH)
            steps += 1
            for index, (each, asked) in enumerate(zip(batch, requests, strict=True)):
                fresh = DraftEngine(model, 1, markov_cache_bytes=0)
                fresh.open(each.seed, each.generation)
                if each.rows:
                    fresh.append_states(0, each.generation, 0, np.stack(each.rows))
                alone = DraftRequest(
                    0, asked.generation, asked.round, asked.anchor_position, asked.anchor_token, asked.draft_temperature
                )
                expected = fresh.step([alone], DEPTH)
                assert drafted.tokens[index].tolist() == expected.tokens[0].tolist()
                assert drafted.q[index].tolist() == expected.q[0].tolist()
                assert drafted.ids[index].tolist() == expected.ids[0].tolist()
                each.round += rng.randint(1, 2)
    assert steps > 20
    assert engine.num_free_seats == NUM_SEATS - len(lives)
    assert engine.counters.opened - engine.counters.closed == len(lives)
