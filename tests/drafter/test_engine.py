"""Seats, generations, rounds: every step equals the oracle on the same logits, whatever happened before."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from remote_dspark.contract import Q_FLOOR_FIRST, Q_STANDARD
from remote_dspark.drafter import compute as compute_module
from remote_dspark.drafter.checkpoint import load_drafter
from remote_dspark.drafter.engine import DraftEngine, DraftRequest
from remote_dspark.drafter.errors import CapacityError, EngineError, RowError, StaleError, StateGapError
from remote_dspark.drafter.heads import select_greedy
from remote_dspark.drafter.markov import MarkovRows
from remote_dspark.kernels.naive import corrected_logits, markov_bias
from remote_dspark.oracle.philox import derive_key
from remote_dspark.oracle.sample_row import sample_row

pytestmark = pytest.mark.models

DEPTH = 5


@pytest.fixture
def model(checkpoint):
    return load_drafter(checkpoint())


def request(seat, round_number, position, token=9, tau=0.7, generation=1):
    return DraftRequest(seat, generation, round_number, position, token, tau)


def oracle_rows(engine, one, seed, semantics):
    """The walk of one request by the specification: ids, tickets and token of each position."""
    base = engine.base_logits([one], DEPTH)
    head = engine.model.markov_head
    key, previous, rows = derive_key(seed, one.generation), one.anchor_token, []
    for position in range(DEPTH):
        bias = markov_bias(head.markov_w1.weight[previous : previous + 1], head.markov_w2.weight)
        logits = corrected_logits(base[:, position], bias)[0].numpy()
        row = sample_row(
            logits, one.draft_temperature, 32, semantics, key, one.round, one.anchor_position + 1 + position
        )
        rows.append(row)
        previous = row.token
    return rows


def require_oracle(engine, drafted, index, one, seed, semantics=Q_FLOOR_FIRST):
    for position, row in enumerate(oracle_rows(engine, one, seed, semantics)):
        count = int(drafted.counts[index, position])
        assert int(drafted.tokens[index, position]) == row.token
        assert drafted.ids[index, position, :count].tolist() == row.ids.tolist()
        assert (drafted.q[index, position, :count].astype(np.float64) * 2**24).tolist() == row.tickets.tolist()
        assert not drafted.q[index, position, count:].any()


@pytest.mark.parametrize("semantics", [Q_FLOOR_FIRST, Q_STANDARD])
def test_steps_equal_the_oracle_bit_for_bit(model, state_rows, semantics):
    # red when: the counter starts at the anchor instead of the next position, the batch row enters the key,
    # the bias is added before rounding the base row, entries without a ticket are shipped, Markov uses the anchor
    engine = DraftEngine(model, 3, semantics=semantics)
    seats = [engine.open(seed, 1) for seed in (11, 12, 13)]
    for seat, length in zip(seats, (0, 4, 9), strict=True):
        engine.append_states(seat, 1, 0, state_rows(seat, 0, length))
    for round_number in range(3):
        batch = [
            request(seat, round_number, length, token=20 + seat, tau=tau)
            for seat, length, tau in zip(seats, (0, 4, 9), (0.7, 1.3, 0.2), strict=True)
        ]
        drafted = engine.step(batch, DEPTH)
        for index, one in enumerate(batch):
            require_oracle(engine, drafted, index, one, 11 + index, semantics)


def test_a_request_drafts_the_same_alone_and_in_any_batch(model, state_rows):
    # red when anything of a neighbour, the seat or the batch row enters a row
    results = []
    for order in ([5], [5, 6, 7], [7, 6, 5]):
        engine = DraftEngine(model, 3)
        seats = {seed: engine.open(seed, 1) for seed in order}
        for seed, seat in seats.items():
            engine.append_states(seat, 1, 0, state_rows(seed, 0, 6))
        drafted = engine.step([request(seats[seed], 0, 6, token=seed) for seed in order], DEPTH)
        row = order.index(5)
        results.append((drafted.tokens[row].tolist(), drafted.ids[row].tolist(), drafted.q[row].tolist()))
    assert results[0] == results[1] == results[2]


def test_history_of_a_seat_never_shows(model, state_rows):
    # red when a rejection leaves rows behind, a reset keeps a wrong end, or a new occupant sees the old context
    engine = DraftEngine(model, 1)
    seat = engine.open(1, 1)
    engine.append_states(seat, 1, 0, state_rows(1, 0, 20))
    engine.step([request(seat, 0, 20)], DEPTH)
    engine.close(seat, 1)
    seat = engine.open(77, 4)
    engine.append_states(seat, 4, 0, state_rows(2, 0, 5))
    engine.step([request(seat, 0, 5, generation=4)], DEPTH)
    engine.commit(seat, 4, 2)
    engine.append_states(seat, 4, 5, state_rows(2, 5, 3))
    engine.step([request(seat, 1, 8, generation=4)], DEPTH)
    engine.reset(seat, 4, 6, 7)
    engine.append_states(seat, 6, 7, state_rows(2, 7, 2))
    used = engine.step([request(seat, 0, 9, generation=6)], DEPTH)

    # the key of the new generation, by the specification
    require_oracle(engine, used, 0, request(seat, 0, 9, generation=6), 77)

    fresh = DraftEngine(model, 2)
    fresh.open(5, 1)
    other = fresh.open(77, 6)
    fresh.append_states(other, 6, 0, state_rows(2, 0, 9))
    expected = fresh.step([request(other, 0, 9, generation=6)], DEPTH)
    assert used.tokens.tolist() == expected.tokens.tolist()
    assert used.q.tolist() == expected.q.tolist()


def test_all_greedy_batches_never_enter_the_sampled_code(model, state_rows, monkeypatch):
    # red when T = 0 batches are routed through the sampled head
    def poisoned(*_):
        raise AssertionError("sampled code ran for a greedy batch")

    engine = DraftEngine(model, 2)
    seats = [engine.open(seed, 1) for seed in (1, 2)]
    for seat in seats:
        engine.append_states(seat, 1, 0, state_rows(seat, 0, 4))
    mixed = engine.step([request(seats[0], 0, 4, tau=0.0), request(seats[1], 0, 4)], DEPTH)
    monkeypatch.setattr(compute_module, "sample_block", poisoned)
    greedy = engine.step([request(seat, 1, 4, tau=0.0) for seat in seats], DEPTH)
    # a T = 0 row of a mixed batch is the same argmax, without entries
    assert mixed.tokens[0].tolist() == greedy.tokens[0].tolist()
    assert not greedy.counts.any()
    assert not mixed.counts[0].any()
    assert mixed.counts[1].all()
    with pytest.raises(AssertionError, match="sampled code"):
        engine.step([request(seats[0], 2, 4)], DEPTH)


def test_greedy_ties_go_to_the_lowest_id(model):
    # red when argmax picks any of several equal columns
    markov = MarkovRows(model, 0)
    base = torch.full((1, 1, 101), -100.0).to(torch.bfloat16)
    bias = markov.rows([9])[0].float()
    base[0, 0, [90, 40, 70]] = (1000 - bias[[90, 40, 70]]).to(torch.bfloat16)
    assert select_greedy(base, [9], markov).tolist() == [[40]]


@pytest.mark.parametrize("tau", [0.0, 0.7])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_discards_the_whole_reply_and_nothing_else(checkpoint, state_rows, tau, bad):
    # red when the error flag of one request or position is dropped, or the context moves
    def spoil(weights):
        weights["lm_head.weight"][55] = bad

    engine = DraftEngine(load_drafter(checkpoint(edit=spoil)), 2)
    seats = [engine.open(seed, 1) for seed in (1, 2)]
    for seat in seats:
        engine.append_states(seat, 1, 0, state_rows(seat, 0, 4))
    with pytest.raises(RowError):
        engine.step([request(seat, 0, 4, tau=tau) for seat in seats], DEPTH)
    assert engine.counters.row_errors == 1
    assert engine.counters.rounds == 0
    assert [engine.context_length(seat) for seat in seats] == [4, 4]
    with pytest.raises(StaleError):
        engine.step([request(seats[0], 0, 4, tau=tau)], DEPTH)


def test_refusals_leave_the_engine_as_it_was(model, state_rows):
    # red when any of these is accepted
    engine = DraftEngine(model, 1)
    seat = engine.open(1, 3)
    engine.append_states(seat, 3, 0, state_rows(1, 0, 4))
    with pytest.raises(CapacityError, match="free seat"):
        engine.open(2, 4)
    for bad, error in [
        (request(seat, 0, 4, generation=2), StaleError),
        (request(seat + 1, 0, 4, generation=3), StaleError),
        (request(seat, 1 << 32, 4, generation=3), StaleError),
        (request(seat, 0, 3, generation=3), StateGapError),
        (request(seat, 0, 5, generation=3), StateGapError),
        (request(seat, 0, 4, token=101, generation=3), EngineError),
        (request(seat, 0, 4, token=-1, generation=3), EngineError),
    ]:
        with pytest.raises(error):
            engine.step([bad], DEPTH)
    good = request(seat, 0, 4, generation=3)
    with pytest.raises(EngineError, match="different seats"):
        engine.step([good, good], DEPTH)
    with pytest.raises(EngineError, match="depth"):
        engine.step([good], 8)
    with pytest.raises(StaleError, match="above 3"):
        engine.reset(seat, 3, 3, 4)
    engine.step([good], DEPTH)
    with pytest.raises(StaleError, match=r"round in \[1"):
        engine.step([good], DEPTH)
    assert engine.counters.rounds == 1


def test_markov_cache_changes_nothing_but_the_hit_rate(model):
    # red when a cached row differs from the computed one, the bound is ignored, or the wrong row is evicted
    row_bytes = 2 * 101
    cached, plain = MarkovRows(model, 3 * row_bytes + 1), MarkovRows(model, 0)
    generator = np.random.default_rng(5)
    tokens = [int(token) for token in generator.integers(0, 6, 60)]
    for token in tokens:
        assert torch.equal(cached.rows([token]), plain.rows([token]))
        assert cached.size_bytes <= 3 * row_bytes
    assert cached.hits + cached.misses == len(tokens)
    assert cached.hits > 10
    assert (plain.hits, plain.size_bytes) == (0, 0)
    used = MarkovRows(model, 3 * row_bytes)
    for token in (0, 1, 2, 0, 3):
        used.rows([token])
    # 1 was the longest unused when 3 came; 0 was older but used since
    assert (used.hits, used.misses) == (1, 4)
    used.rows([0, 2, 3])
    assert (used.hits, used.misses) == (4, 4)
    with pytest.raises(RowError, match="previous token"):
        cached.rows([101])
