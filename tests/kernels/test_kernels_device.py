"""The Triton kernels against oracle and references: on a CUDA device, or small under the CPU interpreter.

Every output is poisoned before the launch, padded columns are NaN, V is a multiple of nothing.
"""

from __future__ import annotations

import pytest
import torch

from remote_dspark.contract import Q_SEMANTICS
from remote_dspark.oracle import philox as oracle_philox
from remote_dspark.oracle.verify import accepts

pytestmark = [pytest.mark.models, pytest.mark.interp]


@pytest.fixture
def checks(device):
    from remote_dspark.kernels import checks as module

    return module


@pytest.mark.parametrize("semantics", Q_SEMANTICS)
def test_head_plain_and_ties(checks, device, semantics):
    found = checks.check_head(
        device, 331, tile=128, num_rows=2, seeds=range(1), kinds=("plain", "ties"), semantics=semantics
    )
    assert found.ok, found


@pytest.mark.parametrize("kind", ["flat", "masked", "greedy", "bad", "wide"])
def test_head_kinds(checks, device, kind):
    found = checks.check_head(device, 203, tile=64, num_rows=3, seeds=range(1), kinds=(kind,))
    assert found.ok, found


def test_vocabulary_smaller_than_the_support(checks, device):
    found = checks.check_head(device, 21, tile=64, num_rows=2, seeds=range(1), kinds=("plain",))
    assert found.ok, found


def test_development_support(checks, device):
    found = checks.check_head(device, 203, tile=64, num_rows=1, seeds=range(1), kinds=("plain",), k=16)
    assert found.ok, found


def test_uncached_rows_equal_the_reference(checks, device):
    found = checks.check_markov(device, 150, tile=64, rank=64, seeds=range(1), part=32)
    assert found.ok, found


def test_verifier(checks, device):
    found = checks.check_verifier(device, 203, tile=128, num_requests=2, depth=2, seeds=range(1, 2))
    assert found.ok, found


def verified(checks, device, monkeypatch=None, skipped=None, first_row=None):
    """One poisoned verification in stages of one request of two draft tokens; optionally without a stage."""
    from dataclasses import replace

    from remote_dspark.kernels import verifier
    from remote_dspark.kernels.rows import Control
    from remote_dspark.kernels.sampled_head import Tiling

    case = checks.make_verify_case(1, 1, 2, 90)
    if first_row is not None:
        case.control[0, Control.FIRST_ROW] = first_row
    settings = replace(verifier.VerifierSettings(Tiling(90, 64), 2), one_launch=False)
    if monkeypatch is not None:
        honest = verifier.stages
        monkeypatch.setattr(
            verifier,
            "stages",
            lambda *arguments: {stage: grid for stage, grid in honest(*arguments).items() if stage != skipped},
        )
    buffers = verifier.VerifierBuffers(settings, 1, 3, device)
    buffers.poison()
    verifier.launch_verify(settings, buffers, *case.arguments(device))
    return buffers.outputs()


@pytest.mark.parametrize("skipped", [1, 2, 3])
def test_a_word_that_never_comes_refuses_the_request(checks, device, monkeypatch, skipped):
    """A wait ends: nothing of an earlier call or of the poison passes for a word of this one."""
    from remote_dspark.kernels.rows import RowError

    found = verified(checks, device, monkeypatch, skipped)
    assert int(found.error[0]) & int(RowError.MISSING)
    assert found.tokens.tolist() == [[0, 0, 0]]
    assert found.num_accepted.tolist() == [0]


@pytest.mark.parametrize("first_row", [1, -1])
def test_a_request_without_its_rows_is_refused(checks, device, first_row):
    from remote_dspark.kernels.rows import RowError

    found = verified(checks, device, first_row=first_row)
    assert int(found.error[0]) == int(RowError.MISSING)
    assert found.tokens.tolist() == [[0, 0, 0]]
    assert found.totals.tolist() == [[0, 0, 0]]


def test_chain_is_sticky_and_looks_up_its_own_cache(checks, device):
    """A chain of three with a cache: position 1 reads the row of position 0's token, and an error stays."""
    from remote_dspark.kernels import naive
    from remote_dspark.kernels.rows import RowError, pack_control, stamp_of
    from remote_dspark.kernels.sampled_head import HeadBuffers, HeadSettings, Tiling, launch_position

    size, depth = 90, 3
    case = checks.make_case(2, 2, size, padding=0)
    generator = torch.Generator().manual_seed(11)
    logits = (torch.randn(depth, 2, size, generator=generator) * 2).to(torch.bfloat16)
    logits[1, 1, 77] = torch.nan
    cache = torch.randn(5, size, generator=generator).to(torch.bfloat16)
    slots = torch.arange(size, dtype=torch.int32) % 5
    fields = {**case.fields, "positions": torch.tensor([50, 60])}
    control = pack_control(**fields, generations=torch.tensor([3, 4]), epochs=torch.tensor([8, 9]))
    buffers = HeadBuffers(HeadSettings(Tiling(size, 64)), depth, 2, device)
    buffers.poison()
    previous = torch.tensor([4, 89], dtype=torch.int32)
    on_device = previous.to(device)
    error = torch.zeros(2, dtype=torch.int32)
    for step in range(depth):
        launch_position(
            HeadSettings(Tiling(size, 64)),
            buffers,
            step,
            logits[step].to(device),
            cache.to(device),
            control.to(device),
            previous=on_device,
            slots=slots.to(device),
        )
        on_device = buffers.token[step]
        positions = fields["positions"] + step
        bias = cache[slots[previous.long()].long()]
        wanted = naive.sampled_head(logits[step], bias, **{**fields, "positions": positions}, error=error)
        found = buffers.rows(step)
        assert found.token.tolist() == wanted.token.tolist()
        assert found.ids.tolist() == wanted.ids.tolist()
        assert found.error.tolist() == wanted.error.tolist()
        assert torch.equal(found.stamp, stamp_of(control))
        previous, error = wanted.token, wanted.error
    assert error.tolist() == [0, int(RowError.NAN)]


def test_bad_previous_token_and_bad_temperature_are_refused(checks, device):
    from remote_dspark.kernels.rows import RowError, pack_control
    from remote_dspark.kernels.sampled_head import HeadBuffers, HeadSettings, Tiling, launch_position

    case = checks.make_case(2, 4, 90, padding=0)
    fields = {**case.fields, "tau": torch.tensor([0.7, 0.7, 0.0, torch.nan])}
    buffers = HeadBuffers(HeadSettings(Tiling(90, 64)), 1, 4, device)
    buffers.poison()
    launch_position(
        HeadSettings(Tiling(90, 64)),
        buffers,
        0,
        case.logits.to(device),
        case.bias.to(device),
        pack_control(**fields).to(device),
        previous=torch.tensor([90, 5, 6, 7], dtype=torch.int32, device=device),
        slots=torch.tensor([-1 if token == 5 else 0 for token in range(90)], dtype=torch.int32, device=device),
    )
    rows = buffers.rows(0)
    missing, temperature = int(RowError.CONTINUATION), int(RowError.TEMPERATURE)
    assert rows.error.tolist() == [missing, missing, temperature, temperature]
    assert checks.check_bad_rows_are_sticky(rows).ok


def test_device_philox_and_acceptance_boundaries(device):
    """Every draw word, and the 128-bit comparison at equality: ``<=`` instead of ``<`` would show here."""
    from remote_dspark.kernels.probes import accept_probe_kernel, philox_probe_kernel

    for words in ([0, 0, 0, 0], [0xFFFFFFFF, 5, 0x80000000, 0xDEADBEEF]):
        out = torch.zeros(2, dtype=torch.int64, device=device)
        philox_probe_kernel[(1,)](torch.tensor(words).to(torch.int32).to(device), out)
        wanted = oracle_philox.philox4x32((words[0], words[1], 3, 0), (words[2], words[3]))
        assert out.tolist() == list(wanted[:2])
    # u * c * S == w * 2**56 exactly, and one to each side
    equal = [(1 << 31, 1 << 24, 1 << 40, 1 << 39), (1 << 20, 1 << 10, 1 << 54, 1 << 28), (0, 5, 1 << 50, 0)]
    cases = [(u, c, s, w + shift) for u, c, s, w in equal for shift in (-1, 0, 1) if w + shift >= 0]
    cases += [((1 << 32) - 1, 1 << 24, (1 << 55) - 1, 1 << 38)]
    padded = cases + [(0, 0, 1, 1)] * (16 - len(cases))
    out = torch.zeros(16, dtype=torch.int32, device=device)
    accept_probe_kernel[(1,)](torch.tensor(padded, dtype=torch.int64, device=device), out, N=16)
    assert [bool(value) for value in out[: len(cases)].tolist()] == [
        accepts(*case[:2], case[3], case[2]) for case in cases
    ]


def test_more_than_four_uncached_rows_in_one_launch_refuse(device):
    from remote_dspark.kernels.markov_head import launch_markov_position
    from remote_dspark.kernels.sampled_head import HeadBuffers, HeadSettings, Tiling

    settings = HeadSettings(Tiling(64, 64))
    rows = torch.zeros((5, 64), dtype=torch.bfloat16)
    weights = torch.zeros((64, 32), dtype=torch.bfloat16)
    control, words = torch.zeros((5, 16), dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    with pytest.raises(ValueError, match="in groups"):
        launch_markov_position(
            settings, HeadBuffers(settings, 1, 5, "cpu"), 0, rows, control, words[:5], weights, weights, words, rows
        )


def test_settings_refuse_what_no_kernel_was_built_for(device):
    from remote_dspark.kernels.sampled_head import HeadSettings, Tiling
    from remote_dspark.kernels.verifier import VerifierSettings

    with pytest.raises(ValueError, match="k must be"):
        HeadSettings(Tiling(100), k=31)
    with pytest.raises(ValueError, match="power of two"):
        HeadSettings(Tiling(100, tile=100))
    with pytest.raises(ValueError, match="expected one of"):
        HeadSettings(Tiling(100), semantics="dyadic24-v3")
    with pytest.raises(ValueError, match="8192"):
        VerifierSettings(Tiling(100, tile=16384), 5)
