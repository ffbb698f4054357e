"""The torch references against the exact oracle, and proof that the checks notice each planted mistake."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
import torch

from remote_dspark.contract import Q_FLOOR_FIRST, Q_SEMANTICS, Q_STANDARD, TICKET_TOTAL, Domain
from remote_dspark.kernels import naive, naive_verifier
from remote_dspark.kernels.dense import dense_rows
from remote_dspark.kernels.rows import RowError, SampledRows, pack_control, require_rows, stamp_of
from remote_dspark.oracle import philox as oracle_philox
from remote_dspark.oracle.sample_row import sample_row
from remote_dspark.oracle.verify import DraftRow, verify_round

pytestmark = pytest.mark.models


@pytest.fixture
def checks():
    from remote_dspark.kernels import checks as module

    return module


def sampled(checks, case, semantics=Q_FLOOR_FIRST, k=32, **changes) -> SampledRows:
    size = case.vocab_size
    fields = {**case.fields, **changes}
    return naive.sampled_head(case.logits[:, :size], case.bias[:, :size], k=k, semantics=semantics, **fields)


def problems(checks, case, rows, semantics=Q_FLOOR_FIRST) -> list[str]:
    found = [checks.row_mismatch(case, rows, row, semantics, 32) for row in range(case.logits.shape[0])]
    return [problem for problem in found if problem]


@pytest.mark.parametrize("semantics", Q_SEMANTICS)
@pytest.mark.parametrize("kind", ["plain", "ties", "flat", "masked", "wide", "greedy", "bad"])
@pytest.mark.parametrize("vocab_size", [5, 33, 700])
def test_reference_equals_oracle(checks, vocab_size, kind, semantics):
    case = checks.make_case(3, 4, vocab_size, kind)
    rows = require_rows(sampled(checks, case, semantics))
    assert problems(checks, case, rows, semantics) == []
    values = naive.corrected_logits(case.logits[:, :vocab_size], case.bias[:, :vocab_size]).numpy()
    for row in range(4):
        tau = 0.0 if case.fields["greedy"][row] else float(case.fields["tau"][row])
        key = tuple(case.fields["keys"][row].tolist())
        position = int(case.fields["positions"][row])
        wanted = sample_row(values[row], tau, 32, semantics, key, int(case.fields["rounds"][row]), position)
        assert (wanted.error is None) == (int(rows.error[row]) == 0)
        assert int(rows.token[row]) == max(wanted.token, 0)


def test_bf16_rounding_is_nearest_even():
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, (200_000,), generator=torch.Generator().manual_seed(5)).int()
    values = bits.view(torch.float32)
    wanted = values.to(torch.bfloat16).to(torch.float32)
    found = naive.round_to_bf16(values)
    usable = ~values.isnan()
    assert torch.equal(found[usable].view(torch.int32), wanted[usable].view(torch.int32))
    assert bool(found[~usable].isnan().all())


def test_philox_equals_oracle():
    keys = torch.tensor([[0, 0], [0xFFFFFFFF, 0x80000001], [123, 456]])
    rounds, positions = torch.tensor([0, 0xFFFFFFFF, 7]), torch.tensor([0xFFFFFFFF, 3, 9])
    words = naive.philox((rounds, positions, Domain.CORRECTION, 2), keys)
    for row in range(3):
        counter = (int(rounds[row]), int(positions[row]), int(Domain.CORRECTION), 2)
        wanted = oracle_philox.philox4x32(counter, tuple(keys[row].tolist()))
        assert tuple(int(word[row]) for word in words) == wanted


def test_markov_bias_is_close_to_float64_and_independent_of_the_batch():
    generator = torch.Generator().manual_seed(2)
    w1, w2 = (torch.randn(90, 64, generator=generator).to(torch.bfloat16) for _ in range(2))
    whole = naive.markov_bias(w1[:4], w2)
    assert torch.equal(whole[2:3], naive.markov_bias(w1[2:3], w2))
    assert torch.equal(whole[:, 40:], naive.markov_bias(w1[:4], w2[40:]))
    ideal = w1[:4].double() @ w2.double().T
    assert float(((whole.double() - ideal).abs() / ideal.abs().clamp(min=1.0)).max()) < 2**-8 + 2**-16


@pytest.mark.parametrize("semantics", Q_SEMANTICS)
def test_dense_producer_equals_top_k_of_everything(semantics, checks):
    case = checks.make_case(8, 3, 120, "ties")
    fields = {name: case.fields[name] for name in ("tau", "keys", "rounds", "positions")}
    values = naive.corrected_logits(case.logits[:, :120], case.bias[:, :120])
    dense = dense_rows(values, **fields)
    rows = sampled(checks, case, Q_STANDARD, k=120)
    assert torch.equal(dense.tickets.to(torch.int32), rows.tickets)
    assert dense.token.tolist() == rows.token.tolist() == dense_rows(values, **fields, num_shards=2).token.tolist()
    ideal = torch.logsumexp(values.double() / case.fields["tau"].double()[:, None], dim=1)
    assert float((dense.log_mass - ideal).abs().max()) < 1e-6


def test_control_block_round_trips_and_refuses():
    fields = {
        "tau": torch.tensor([0.7]),
        "keys": torch.tensor([[0xFFFFFFFF, 1]]),
        "rounds": torch.tensor([(1 << 32) - 1]),
        "positions": torch.tensor([5]),
        "greedy": torch.tensor([False]),
    }
    control = pack_control(**fields, generations=torch.tensor([(1 << 40) + 3]), epochs=torch.tensor([1 << 33]))
    assert stamp_of(control).tolist() == [[(1 << 40) + 3, (1 << 32) - 1, 1 << 33]]
    with pytest.raises(ValueError, match="reset the generation"):
        pack_control(**{**fields, "rounds": torch.tensor([1 << 32])})


# -- each planted mistake is noticed ---------------------------------------------------------------------------------


def test_mutant_wrong_temperature(checks):
    case = checks.make_case(1, 4, 300)
    assert problems(checks, case, sampled(checks, case, tau=case.fields["tau"] + 0.05))


def test_mutant_previous_rows_q(checks):
    case = checks.make_case(1, 4, 300)
    rows = sampled(checks, case)
    assert len(problems(checks, case, replace(rows, tickets=rows.tickets.roll(1, 0)))) == 4


def test_mutant_uniform_counts(checks):
    case = checks.make_case(1, 4, 300)
    rows = sampled(checks, case)
    assert len(problems(checks, case, replace(rows, tickets=torch.full_like(rows.tickets, TICKET_TOTAL // 32)))) == 4


@pytest.mark.parametrize("semantics", Q_SEMANTICS)
def test_mutant_remainder_to_another_candidate(checks, semantics):
    case = checks.make_case(1, 4, 300)
    rows = sampled(checks, case, semantics)
    tickets = rows.tickets.clone()
    for row in range(4):
        order = tickets[row].argsort()
        tickets[row, order[-1]] -= 1
        tickets[row, order[-2]] += 1
    assert len(problems(checks, case, replace(rows, tickets=tickets), semantics)) == 4


def test_mutant_tie_to_the_higher_id(checks):
    case = checks.make_case(1, 4, 300, "ties")
    size = case.vocab_size
    mirrored = naive.sampled_head(case.logits[:, :size].flip(1), case.bias[:, :size].flip(1), **case.fields)
    ids = (size - 1 - mirrored.ids).flip(1)
    assert problems(checks, case, replace(sampled(checks, case), ids=ids))


def test_mutant_nan_outside_the_support_is_ignored(checks):
    case = checks.make_case(1, 4, 300, "bad")
    blind = replace(case, bias=torch.where(case.bias.isnan(), -3.0, case.bias))
    assert problems(checks, case, sampled(checks, blind))


def test_mutant_key_reused_by_the_next_row(checks):
    case = checks.make_case(1, 8, 300)
    keys = case.fields["keys"][:1].expand(8, 2)
    same_round = {"keys": keys, "rounds": case.fields["rounds"], "positions": case.fields["positions"]}
    assert problems(checks, case, sampled(checks, case, **same_round))


def test_mutant_greedy_row_with_a_q(checks):
    case = checks.make_case(1, 4, 300, "greedy")
    assert problems(checks, case, sampled(checks, case, greedy=torch.zeros(4, dtype=torch.bool)))


# -- verifier ----------------------------------------------------------------------------------------------------------


def outcome_of_oracle(case, weights, request):
    first, drafts = int(case.control[request, 12]), int(case.control[request, 11])
    draft_rows = []
    for index in range(drafts):
        count = int(case.count[request, index])
        tickets = (case.q[request, index, :count].double() * TICKET_TOTAL).long().numpy()
        ids = case.ids[request, index, :count].numpy().astype(np.int64)
        if count == 0:
            ids, tickets = case.proposed[request, index : index + 1].numpy().astype(np.int64), np.array([TICKET_TOTAL])
        draft_rows.append(DraftRow(ids[tickets > 0], tickets[tickets > 0]))
    key = tuple(int(word) & 0xFFFFFFFF for word in case.control[request, :2].tolist())
    rows = [weights[first + index].numpy() for index in range(drafts + 1)]
    proposed = case.proposed[request, :drafts].tolist()
    return verify_round(rows, draft_rows, proposed, key, int(case.control[request, 2]), int(case.control[request, 4]))


def differences(checks, seeds=range(12), noise=1.0) -> int:
    """Requests in which the reference verifier and the oracle disagree."""
    wrong = 0
    for seed in seeds:
        case = checks.make_verify_case(seed, 3, 3, 60, noise=noise)
        weights, error = naive_verifier.target_weights(case.target[:, :60])
        found = naive_verifier.verify_weights(weights, error, *case.arguments("cpu")[1:], num_shards=1 + seed % 2)
        for request in range(3):
            wanted = outcome_of_oracle(case, weights, request)
            tokens = found.tokens[request, : wanted.num_accepted + 1].tolist()
            same = int(found.num_accepted[request]) == wanted.num_accepted and tokens == list(wanted.tokens)
            wrong += int(not same)
    return wrong


def test_reference_verifier_equals_oracle(checks):
    assert differences(checks) == 0


def test_mutant_residual_on_the_support_only(checks, monkeypatch):
    honest = naive_verifier.residual

    def support_only(weights, ids, tickets):
        left = honest(weights, ids, tickets)
        kept = torch.zeros_like(left)
        kept[ids] = left[ids]
        return kept

    monkeypatch.setattr(naive_verifier, "residual", support_only)
    assert differences(checks) > 0


def test_mutant_shared_noise(checks, monkeypatch):
    honest = naive_verifier._draw
    monkeypatch.setattr(
        naive_verifier,
        "_draw",
        lambda control, request, index, domain: honest(control, request, index, Domain.PROPOSAL),
    )
    assert differences(checks) > 0


def test_mutant_bonus_from_the_last_draft_row(checks, monkeypatch):
    honest = naive_verifier.draw_weighted

    def sharper(weights, draw64, num_shards=1):
        # p replaced by a truncated row, as q is
        kept = torch.where(weights >= weights.sort().values[-4], weights, 0)
        return honest(kept, draw64, num_shards)

    monkeypatch.setattr(naive_verifier, "draw_weighted", sharper)
    assert differences(checks) > 0


def test_refused_inputs_commit_nothing(checks):
    for spoil, flag in (("nan", RowError.NAN), ("q", RowError.PROPOSAL)):
        case = checks.make_verify_case(0, 2, 3, 60)
        if spoil == "nan":
            case.target[2, 9] = torch.nan
        else:
            case.q[0, 1, 0] += 2.0**-24
        found = naive_verifier.verify_rows(case.target[:, :60], *case.arguments("cpu")[1:])
        assert int(found.error[0]) == int(flag)
        assert int(found.error[1]) == 0
        assert int(found.num_accepted[0]) == 0
        assert found.tokens[0].tolist() == [0, 0, 0, 0]


# -- frequencies -------------------------------------------------------------------------------------------------------


def test_proposal_frequencies():
    """30,000 draws of one row, 12 cells: chi-square below the 1 - 1e-6 quantile of 11 degrees (47.3).

    Power: a shift of 2 % of the mass between two cells of 10 % gives a noncentrality of 120, so it is missed less than
    once in a million runs.
    """
    draws = 30_000
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(1, 12, generator=generator).to(torch.bfloat16)
    key = oracle_philox.derive_key(99, 1)
    rows = naive.sampled_head(
        logits.expand(draws, 12),
        torch.zeros(draws, 12, dtype=torch.bfloat16),
        tau=torch.full((draws,), 1.0),
        keys=torch.tensor([key]).expand(draws, 2),
        rounds=torch.arange(draws),
        positions=torch.full((draws,), 17),
        greedy=torch.zeros(draws, dtype=torch.bool),
    )
    expected = rows.tickets[0, :12].double() / TICKET_TOTAL * draws
    observed = torch.bincount(rows.token.long(), minlength=12).double()
    assert float(((observed - expected) ** 2 / expected).sum()) < 47.3


def acceptance(one_hot: bool) -> tuple[float, float, float]:
    """Observed acceptance of 1,500 single-token rounds, sum of min(p, q), and its standard error."""
    rounds, size = 1500, 24
    generator = torch.Generator().manual_seed(6)
    base = torch.randn(1, size, generator=generator) * 1.5
    target = base + 0.8 * torch.randn(1, size, generator=generator)
    keys = torch.tensor([oracle_philox.derive_key(5, 2)])
    rows = naive.sampled_head(
        base.to(torch.bfloat16).expand(rounds, size),
        torch.zeros(rounds, size, dtype=torch.bfloat16),
        tau=torch.full((rounds,), 0.7),
        keys=keys.expand(rounds, 2),
        rounds=torch.arange(rounds),
        positions=torch.full((rounds,), 3),
        greedy=torch.zeros(rounds, dtype=torch.bool),
    )
    weights, error = naive_verifier.target_weights(target.expand(2, size))
    accepted = 0
    for index in range(rounds):
        control = pack_control(
            tau=torch.tensor([0.7]),
            keys=keys,
            rounds=torch.tensor([index]),
            positions=torch.tensor([3]),
            greedy=torch.tensor([one_hot]),
            num_draft=torch.tensor([1]),
            first_row=torch.tensor([0]),
        )
        count = torch.zeros((1, 1), dtype=torch.int32) if one_hot else rows.count[index].reshape(1, 1)
        arguments = (rows.token[index].reshape(1, 1), rows.ids[index][None, None], rows.q[index][None, None], count)
        accepted += int(naive_verifier.verify_weights(weights, error, control, *arguments).num_accepted[0])
    p = weights[0].double() / float(weights[0].sum())
    q = torch.zeros(size, dtype=torch.float64).index_add(0, rows.ids[0, :size].long(), rows.q[0, :size].double())
    ideal = float(torch.minimum(p, q).sum())
    return accepted / rounds, ideal, sqrt(ideal * (1 - ideal) / rounds)


def test_acceptance_identity():
    """Acceptance equals the sum of min(p, q) within 4.9 standard errors (two-sided false alarm 1e-6)."""
    rate, ideal, error = acceptance(one_hot=False)
    assert abs(rate - ideal) < 4.9 * error


def test_mutant_lost_q_lowers_acceptance():
    """No output distribution shows a lost q; the acceptance does."""
    rate, ideal, error = acceptance(one_hot=True)
    assert rate < ideal - 4.9 * error
