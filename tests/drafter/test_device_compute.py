"""The device path on a small shape: captured where there is a device, else the same launches in the interpreter.

The interpreter proves indexing, layouts and what is computed, not memory ordering, speed or what a capture keeps;
`benchmarks/gpu_worker_checks.py` states the same on a device.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu_worker_checks import check_reference, check_rows
from benchmarks.gpu_worker_inputs import block_input, state_rows
from remote_dspark.contract import Q_FLOOR_FIRST
from remote_dspark.drafter.backbone import BackboneTiling
from remote_dspark.drafter.config import parse_config
from remote_dspark.drafter.device import DeviceCompute
from remote_dspark.drafter.device_markov import DeviceMarkovRows
from remote_dspark.drafter.engine import DraftEngine, DraftRequest
from remote_dspark.drafter.errors import DeviceFaultError, RowError, UnsupportedShapeError
from remote_dspark.drafter.launcher import Launcher
from remote_dspark.drafter.packed import pack_model, require_device_shape
from remote_dspark.drafter.shapes import SHAPES, synthetic_config
from remote_dspark.drafter.staging import BlockStaging
from remote_dspark.drafter.synthetic import synthetic_drafter
from remote_dspark.kernels.naive import markov_bias
from remote_dspark.kernels.rows import CONTROL_WORDS, pack_control

pytestmark = [
    pytest.mark.models,
    pytest.mark.interp,
    # Triton's interpreter turns a loop bound into an integer in a way that numpy has deprecated
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]

CONTEXT = 9
NUM_SEATS = 2


@pytest.fixture(scope="module")
def compute() -> DeviceCompute:
    """Two seats with the same context, sent in different pieces."""
    made = DeviceCompute(
        synthetic_drafter("tiny", "cuda" if torch.cuda.is_available() else "cpu"),
        NUM_SEATS,
        support=32,
        semantics=Q_FLOOR_FIRST,
        cache_bytes=2 * 256 * 3,
        max_positions=64,
        max_depth=5,
        tiling=BackboneTiling(),
    )
    rows = state_rows(made.backbone.model, 1, CONTEXT)
    made.context(0).append(0, rows)
    made.context(1).append(0, rows[:4])
    made.context(1).append(4, rows[4:])
    return made


def test_pieces_of_a_context_do_not_show_and_nothing_lies_beyond_it(compute: DeviceCompute) -> None:
    # red when positions restart per piece, padding rows are written, or a seat's rows go to another seat
    for stored in (compute.backbone.keys, compute.backbone.values):
        assert torch.equal(stored[:, 0], stored[:, 1])
        assert bool(stored[:, :, :, CONTEXT - 1].any())
        assert not stored[:, :, :, CONTEXT:].any()


def test_base_logits_are_as_close_to_fp32_as_the_torch_statement(compute: DeviceCompute) -> None:
    # red when a norm, a rotation, a residual or the block's own keys are missing or misplaced
    check = check_reference(compute, CONTEXT)
    assert check.ok, check.found


@pytest.mark.parametrize("tau", [0.7, 0.0])
def test_proposals_equal_the_reference_on_the_devices_own_logits(compute: DeviceCompute, tau: float) -> None:
    # red when a bias row of another request or position is used, entries without a ticket are kept, or ties move
    check = check_rows(compute, CONTEXT, tau)
    assert check.ok, check.found
    assert compute.timings is not None
    assert (compute.timings.num_sampled, compute.timings.depth) == (2 if tau else 0, 5)


def test_a_request_is_the_same_alone_and_last_in_a_batch(compute: DeviceCompute) -> None:
    # red when a row of a neighbour, the batch or the seat enters a result; the mixed batch must not change it either
    alone = compute.draft([block_input(0, CONTEXT, 0.7, 1, 0)], 4)
    other = block_input(1, CONTEXT, 0.0, 2, 0)
    both = compute.draft([other, block_input(0, CONTEXT, 0.7, 2, 1)], 4)
    for name in ("tokens", "ids", "q", "counts"):
        assert np.array_equal(getattr(alone, name)[0], getattr(both, name)[1]), name
    assert not both.counts[0].any()


def test_cached_rows_are_the_computed_ones_and_the_oldest_goes(compute: DeviceCompute) -> None:
    # red when a filled row differs from the product, a slot is kept by an evicted token, or the bound is ignored
    head = compute.backbone.model.markov_head
    markov = DeviceMarkovRows(head.markov_w1.weight, head.markov_w2.weight, 2 * 256 * 2)
    assert markov.observe([5, 6, 5]) == 0
    markov.admit()
    # 5 was missed twice, 6 once
    assert markov.observe([5, 6]) == 1
    markov.admit()
    markov.observe([5])
    markov.fill(7)
    slots = {token: int(markov.slots[token]) for token in (5, 6, 7)}
    assert slots[6] == -1
    assert sorted((slots[5], slots[7])) == [0, 1]
    for token in (5, 7):
        expected = markov_bias(head.markov_w1.weight[token : token + 1], head.markov_w2.weight)[0]
        assert torch.equal(markov.rows[slots[token], :211], expected)
    assert (markov.hits, markov.misses, markov.size_bytes) == (2, 4, 2 * 256 * 2)
    markov.forget()
    assert (int(markov.slots.max()), markov.size_bytes) == (-1, 0)


@pytest.mark.parametrize("tau", [0.7, 0.0])
def test_a_cached_row_in_any_place_changes_no_proposal(compute: DeviceCompute, tau: float) -> None:
    # red when a place of another request is used, a computed row overwrites a cached one, or scratch is a token's row
    blocks = [block_input(request, CONTEXT, tau, 3, request) for request in range(NUM_SEATS)]
    compute.markov.forget()
    expected = compute.draft(blocks, 5)
    drafted = expected.tokens[:, :-1].ravel().tolist()
    for tokens in ([blocks[1].anchor], [blocks[0].anchor, drafted[0]], [drafted[4]]):
        for token in tokens:
            compute.markov.fill(token)
        found = compute.draft(blocks, 5)
        for name in ("tokens", "ids", "q", "counts"):
            assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    assert compute.timings is not None
    assert compute.timings.num_cached > 0
    compute.markov.forget()


@pytest.fixture
def staging() -> BlockStaging:
    """Outputs of a finished step of two requests, written as a device would."""
    made = BlockStaging(Launcher(torch.device("cpu")), 2, 3, 4)
    made.fill([block_input(request, 8, 0.7, 1 << 40, request) for request in range(2)])
    made.copy_in()
    for request in range(2):
        made.stamp[:, request] = torch.tensor([3, 5, 1 << 40])
    made.q[..., 1:3] = 0.5
    made.ids[..., 1:3] = torch.tensor([4, 9], dtype=torch.int32)
    return made


def test_inputs_are_the_control_block_of_the_kernels(staging: BlockStaging) -> None:
    # red when a word, a sign or the position's offset differs from what the kernels read
    blocks = [block_input(request, 8, 0.7, 1 << 40, request) for request in range(2)]
    expected = pack_control(
        tau=torch.tensor([0.7, 0.7]),
        keys=torch.tensor([block.key for block in blocks]),
        rounds=torch.tensor([5, 5]),
        positions=torch.tensor([9, 9]),
        greedy=torch.tensor([False, False]),
        generations=torch.tensor([3, 3]),
        epochs=torch.tensor([1 << 40, 1 << 40]),
    )
    assert torch.equal(staging.control[:, :CONTROL_WORDS], expected)
    assert staging.anchors.tolist() == [block.anchor for block in blocks]
    assert (staging.seats.tolist(), staging.lengths.tolist()) == ([0, 1], [8, 8])


def test_only_rows_of_exactly_this_step_leave(staging: BlockStaging) -> None:
    # red when a stale stamp, a foreign token or an error flag is let through, or outputs are views
    blocks = [block_input(request, 8, 0.7, 1 << 40, request) for request in range(2)]

    def collect() -> object:
        staging.copy_out(sampled=True)
        return staging.collect(blocks, 100, sampled=True)

    with pytest.raises(DeviceFaultError):
        # filled, but nothing expected yet
        collect()
    staging.expect(blocks, sampled=True)
    rows = collect()
    assert rows.ids[1, 2].tolist() == [4, 9, 0, 0]  # type: ignore[attr-defined]
    staging.q.zero_()
    collect()
    assert rows.q[0, 0].tolist() == [0.5, 0.5, 0, 0]  # type: ignore[attr-defined]
    for field, place, bad, error in (
        ("stamp", (2, 1, 2), (1 << 40) - 1, DeviceFaultError),
        ("stamp", (0, 0, 1), 4, DeviceFaultError),
        ("token", (1, 1), 100, DeviceFaultError),
        ("token", (1, 1), -1, DeviceFaultError),
        ("error", (1,), 1, RowError),
    ):
        tensor = getattr(staging, field)
        kept = tensor[place].clone()
        tensor[place] = bad
        with pytest.raises(error):
            collect()
        tensor[place] = kept
    collect()


def test_models_that_the_device_path_does_not_compute_are_refused_by_name() -> None:
    # red when one of these is drafted for anyway
    config = synthetic_config("tiny")
    for field, value, dtype in (
        ("block_size", 9, torch.bfloat16),
        ("head_dim", 24, torch.bfloat16),
        ("markov_rank", 40, torch.bfloat16),
        ("dtype", 0, torch.float32),
    ):
        changed = config if field == "dtype" else replace(config, **{field: value})
        with pytest.raises(UnsupportedShapeError, match=field):
            require_device_shape(changed, dtype)
    with pytest.raises(UnsupportedShapeError, match="dtype"):
        pack_model(synthetic_drafter("tiny", dtype=torch.float32), 8)


def test_packing_changes_no_weight() -> None:
    # red when gate and up rows are mixed up or a projection is cut at the wrong row
    model = synthetic_drafter("tiny")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    packed = pack_model(model, 8)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(packed.layers[0].gate_up[7], before["layers.0.mlp.up_proj.weight"][3])
    assert packed.context_kv.shape == (2 * 2 * 32, 32)


def test_an_engine_over_the_device_path_drafts_and_counts(compute: DeviceCompute) -> None:
    # red when the engine's seats and the compute's are not the same, or a shallower depth is not a prefix
    engine = DraftEngine(compute.backbone.model, NUM_SEATS, compute=compute)
    seats = [engine.open(seed, 1) for seed in (4, 5)]
    rows = state_rows(compute.backbone.model, 1, CONTEXT)
    engine.append_states(seats[1], 1, 0, rows)
    deep = engine.step([DraftRequest(seats[1], 1, 0, CONTEXT, 3, 0.7)], 4)
    engine.close(seats[0], 1)
    fresh = engine.open(5, 1)
    engine.append_states(fresh, 1, 0, rows)
    front = engine.step([DraftRequest(fresh, 1, 0, CONTEXT, 3, 0.7)], 2)
    assert front.tokens.tolist() == deep.tokens[:, :2].tolist()
    assert front.q.tolist() == deep.q[:, :2].tolist()
    assert engine.markov.hits + engine.markov.misses > 0
    assert engine.counters.rounds == 2


def test_synthetic_shapes_are_parsed_like_checkpoints() -> None:
    # red when a shape drifts from the published one
    config = parse_config(SHAPES["qwen3-4b"])
    assert (config.vocab_size, config.hidden_size, config.num_layers, config.markov_rank) == (151_936, 2560, 5, 256)
    wide = parse_config(SHAPES["v129280"])
    assert (wide.vocab_size, wide.hidden_size, wide.num_layers, wide.markov_rank) == (129_280, 4096, 5, 256)
