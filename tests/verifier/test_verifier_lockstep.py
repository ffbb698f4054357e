"""Verifier and oracle in lockstep, bit for bit: outcomes, draws and refusals.

Turns red when: an acceptance compares with <= instead of <, a residual is not floored, a draw comes from another domain
or position, ties at T = 0 go to the highest id, or a malformed q row is accepted.
"""

from __future__ import annotations

import numpy as np
import pytest

from remote_dspark.contract import TICKET_TOTAL, WEIGHT_ONE
from remote_dspark.oracle.philox import derive_key
from remote_dspark.oracle.tickets import allocate
from remote_dspark.oracle.verify import DraftRow, FinalKind, one_hot_row, verify_round
from remote_dspark.oracle.weights import fixed_weights, greedy_weights
from remote_dspark.verifier.errors import ProposalError, RowError
from remote_dspark.verifier.greedy import verify_argmax, verify_one_hot
from remote_dspark.verifier.naive import verify_proposal
from remote_dspark.verifier.noise import RoundNoise
from remote_dspark.verifier.processed import process, target_weights

SEMANTICS = "dyadic24-floor-first-v1"
KEY = derive_key(1234, 7)


def random_row(rng: np.random.Generator, vocab_size: int, k: int) -> DraftRow:
    ids = np.sort(rng.choice(vocab_size, size=k, replace=False)).astype(np.int64)
    weights = rng.integers(0, WEIGHT_ONE + 1, size=k, dtype=np.int64)
    weights[int(rng.integers(k))] = WEIGHT_ONE
    tickets = allocate(weights, SEMANTICS, int(weights.argmax()))
    kept = tickets > 0
    return DraftRow(ids[kept], tickets[kept])


def random_target(rng: np.random.Generator, rows: list[DraftRow], depth: int, vocab_size: int) -> np.ndarray:
    """Peaked rows, flat rows, rows equal to q, rows with p = 0 on the support."""
    logits = rng.normal(scale=rng.choice([0.1, 1.0, 6.0]), size=(depth + 1, vocab_size)).astype(np.float32)
    target = target_weights(logits)
    for index, row in enumerate(rows):
        kind = rng.integers(5)
        if kind <= 2:
            target[index] = 0
            target[index, row.ids] = row.tickets << 13
            # Next to equal: some ratios fall just below 1.
            target[index, row.ids[:1]] //= 2
        elif kind == 3:
            target[index, row.ids] = 0
    target[:, -1] = np.maximum(target[:, -1], 1)
    return target


@pytest.mark.parametrize("seed", range(6))
def test_sampled_rounds_equal_the_oracle(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kinds: set[tuple[FinalKind, int]] = set()
    for trial in range(150):
        depth, vocab_size = int(rng.choice([1, 4, 5])), int(rng.choice([40, 97]))
        rows = [random_row(rng, vocab_size, int(rng.choice([1, 3, 32]))) for _ in range(depth)]
        target = random_target(rng, rows, depth, vocab_size)
        proposed = [int(rng.choice(row.ids, p=row.tickets / TICKET_TOTAL)) for row in rows]
        expected = verify_round(list(target), rows, proposed, KEY, trial, 11)
        found = verify_proposal(target, rows, proposed, RoundNoise(KEY, trial, 11))
        assert found == expected
        kinds.add((found.final_kind, found.num_accepted))
    # The comparison means nothing unless rejections at several places and full acceptances both occurred.
    assert len(kinds) >= 6


@pytest.mark.parametrize("seed", range(3))
def test_greedy_drafts_equal_the_oracle_with_one_hot_q(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    for trial in range(100):
        depth, vocab_size = 5, 23
        logits = rng.normal(scale=2.0, size=(depth + 1, vocab_size)).astype(np.float32)
        target = target_weights(logits)
        proposed = [
            int(row.argmax()) if rng.random() < 0.8 else int(rng.integers(vocab_size)) for row in logits[:depth]
        ]
        rows = [one_hot_row(token) for token in proposed]
        expected = verify_round(list(target), rows, proposed, KEY, trial, 3)
        assert verify_one_hot(target, proposed, RoundNoise(KEY, trial, 3)) == expected


def test_temperature_zero_equals_the_oracle_with_all_mass_on_the_argmax() -> None:
    rng = np.random.default_rng(9)
    for trial in range(200):
        # Few distinct values: ties are the rule, and the lowest id wins them.
        logits = rng.integers(-2, 3, size=(6, 12)).astype(np.float32)
        proposed = [int(row.argmax()) if rng.random() < 0.8 else int(rng.integers(12)) for row in logits[:5]]
        rows = [one_hot_row(token) for token in proposed]
        target = [greedy_weights(row) for row in logits]
        expected = verify_round(target, rows, proposed, KEY, trial, 1)
        found = verify_argmax(logits, proposed)
        assert (found.num_accepted, found.tokens, found.final_kind) == (
            expected.num_accepted,
            expected.tokens,
            expected.final_kind,
        )
        assert found.acceptance_draws == ()


def test_target_only_round_is_a_bonus_draw_from_p() -> None:
    target = target_weights(np.random.default_rng(0).normal(size=(1, 50)).astype(np.float32))
    expected = verify_round(list(target), [], [], KEY, 4, 17)
    assert verify_one_hot(target, (), RoundNoise(KEY, 4, 17)) == expected
    assert expected.final_kind is FinalKind.BONUS


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.05, 2.0])
def test_weights_are_those_of_the_processed_row(temperature: float) -> None:
    logits = np.random.default_rng(5).normal(scale=9.0, size=(4, 300)).astype(np.float32)
    processed = process(logits, temperature)
    assert processed.dtype == np.float32
    for row, found in zip(processed, target_weights(processed), strict=True):
        assert np.array_equal(found, fixed_weights(row, 1.0))
        assert int(found.max()) == WEIGHT_ONE


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("column", [0, 13, 28])
def test_every_column_of_a_target_row_is_looked_at(bad: float, column: int) -> None:
    logits = np.zeros((2, 29), dtype=np.float32)
    logits[1, column] = bad
    for refuse in (lambda: process(logits, 1.0), lambda: target_weights(logits), lambda: verify_argmax(logits, [0])):
        with pytest.raises(RowError, match="row 1"):
            refuse()


def test_a_row_of_minus_infinity_is_refused_and_a_masked_token_is_not() -> None:
    logits = np.zeros((1, 4), dtype=np.float32)
    logits[0, 2] = -np.inf
    assert int(target_weights(logits)[0, 2]) == 0
    with pytest.raises(RowError, match="only -inf"):
        process(np.full((1, 4), -np.inf, dtype=np.float32), 1.0)


GOOD_IDS = np.array([1, 4], dtype=np.int64)
GOOD_TICKETS = np.array([TICKET_TOTAL - 5, 5], dtype=np.int64)


@pytest.mark.parametrize(
    ("ids", "tickets", "token"),
    [
        (GOOD_IDS, GOOD_TICKETS, 2),
        (GOOD_IDS[::-1], GOOD_TICKETS, 1),
        (np.array([1, 1]), GOOD_TICKETS, 1),
        (np.array([1, 8]), GOOD_TICKETS, 1),
        (np.array([-1, 4]), GOOD_TICKETS, 4),
        (GOOD_IDS, np.array([TICKET_TOTAL, 0]), 1),
        (GOOD_IDS, np.array([TICKET_TOTAL + 5, -5]), 1),
        (GOOD_IDS, np.array([TICKET_TOTAL - 5, 4]), 1),
        (GOOD_IDS[:1], GOOD_TICKETS, 1),
        (GOOD_IDS[:0], GOOD_TICKETS[:0], 1),
    ],
)
def test_a_malformed_q_row_refuses_the_whole_proposal(ids: np.ndarray, tickets: np.ndarray, token: int) -> None:
    target = np.full((2, 8), WEIGHT_ONE, dtype=np.int64)
    row = DraftRow(ids.astype(np.int64), tickets.astype(np.int64))
    with pytest.raises(ProposalError):
        verify_proposal(target, [row], [token], RoundNoise(KEY, 0, 0))


def test_wrong_shapes_and_foreign_tokens_are_refused() -> None:
    noise = RoundNoise(KEY, 0, 0)
    target = np.full((2, 8), WEIGHT_ONE, dtype=np.int64)
    with pytest.raises(RowError, match=r"\[3, V\]"):
        verify_one_hot(target, [1, 2], noise)
    with pytest.raises(ProposalError, match=r"0\.\.7"):
        verify_one_hot(target, [8], noise)
    with pytest.raises(ProposalError, match="one row per token"):
        verify_proposal(target, [], [1], noise)
    with pytest.raises(RowError, match="mass"):
        verify_one_hot(np.zeros((1, 8), dtype=np.int64), (), noise)
    with pytest.raises(RowError, match="2\\^38"):
        verify_one_hot(np.full((1, 8), WEIGHT_ONE + 1, dtype=np.int64), (), noise)
