"""The emulated pair as a program, and its checks against outputs that are wrong on purpose.

Turns red when: a check accepts a wrong token, count, support or flag; a sticky rank answers another launch; the
physical pair can be claimed from a CPU; an observation is overwritten.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from remote_dspark.contract import Q_FLOOR_FIRST, SUPPORT_K
from remote_dspark.oracle.philox import proposal_draw
from remote_dspark.oracle.sample_row import row_from_weights
from remote_dspark.oracle.support import top_k_support
from remote_dspark.oracle.weights import fixed_weights
from remote_dspark.qualify.pair_checks import BlockOutputs, compare_block, same_outputs
from remote_dspark.qualify.pair_inputs import BlockInputs, bias_table, corrected, random_block
from remote_dspark.qualify.pair_memory import PairShape


def run_pair(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "remote_dspark.qualify.pair", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.models
@pytest.mark.services
def test_the_program_observes_a_good_pair(tmp_path: Path) -> None:
    done = run_pair("--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "observation.json").read_text())
    failed = [check for check in document["checks"] if check["ok"] is not True]
    assert failed == []
    assert len(document["checks"]) > 50
    assert (document["kind"], document["compute"], document["device"]) == ("pair", "cpu", {})
    assert (document["hold_id"], document["hold_epoch"]) == (None, None)
    [sample] = document["samples"]
    data = (tmp_path / sample["name"]).read_bytes()
    assert hashlib.sha256(data).hexdigest() == sample["sha256"]
    assert len(data.splitlines()) == sample["num_samples"] == document["values"]["num_launches"]


@pytest.mark.models
@pytest.mark.services
@pytest.mark.parametrize("ranks", [3, 4])
def test_the_union_of_more_ranks_is_the_vocabularys_best(tmp_path: Path, ranks: int) -> None:
    # red when a shard is counted twice or left out, one peer's flags or acknowledgement are not looked at
    done = run_pair("--output", str(tmp_path), "--ranks", str(ranks))
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "observation.json").read_text())
    assert [check for check in document["checks"] if check["ok"] is not True] == []
    assert document["values"]["settings.num_ranks"] == ranks
    [codes] = [check["found"] for check in document["checks"] if check["name"] == "teardown.exit_codes"]
    assert codes == str([3] * ranks)


def test_shards_cover_the_vocabulary_once() -> None:
    for ranks in (2, 3, 4, 7):
        shape = PairShape(1, 1, 515, ranks)
        ends = [shape.shard(rank) for rank in range(ranks)]
        assert [column for start, end in ends for column in range(start, end)] == list(range(515))
    for vocab_size, ranks in ((515, 1), (515, 9), (95, 3)):
        with pytest.raises(ValueError, match="ranks of at least 32 columns"):
            PairShape(1, 1, vocab_size, ranks)


def test_the_kernels_exchange_between_two(tmp_path: Path) -> None:
    for options in (("--ranks", "3"), ("--devices", "0,1,2")):
        refused = run_pair("--output", str(tmp_path), "--physical", *options)
        assert refused.returncode == 2
        assert "the kernels exchange between" in refused.stderr
    assert "expected 2..8 ranks" in run_pair("--output", str(tmp_path), "--ranks", "9").stderr


def test_what_it_refuses(tmp_path: Path) -> None:
    physical = run_pair("--output", str(tmp_path), "--physical")
    assert physical.returncode == 2
    assert "expected CUDA devices [0, 1]" in physical.stderr
    assert not (tmp_path / "observation.json").exists()
    outside = run_pair("--output", str(tmp_path), "--require-hold")
    assert outside.returncode == 2
    assert "DSPARK_HOLD_ID" in outside.stderr
    (tmp_path / "observation.json").write_text("{}")
    assert "written once" in run_pair("--output", str(tmp_path)).stderr
    assert (tmp_path / "observation.json").read_text() == "{}"


B, P, V = 2, 3, 80


def oracle_outputs(inputs: BlockInputs, bias: np.ndarray) -> BlockOutputs:
    """Outputs of a perfect rank."""
    ids = np.full((B, P, SUPPORT_K), -1, dtype=np.int32)
    tickets, weights = (np.zeros((B, P, SUPPORT_K), dtype=np.int64) for _ in range(2))
    token, error = (np.zeros((B, P), dtype=np.int64) for _ in range(2))
    for b in range(B):
        previous = int(inputs.previous[b])
        for p in range(P):
            row = corrected(inputs.base[b, p], bias[previous])
            support, first = top_k_support(row, SUPPORT_K)
            all_weights = fixed_weights(row[support], float(inputs.tau[b]))
            draw = proposal_draw(
                (int(inputs.keys[b, 0]), int(inputs.keys[b, 1])), int(inputs.rounds[b]), int(inputs.positions[b]) + p
            )
            sampled = row_from_weights(support, all_weights, first, Q_FLOOR_FIRST, draw)
            places = np.searchsorted(support, sampled.ids)
            ids[b, p, places], tickets[b, p, places] = sampled.ids, sampled.tickets
            weights[b, p, : support.size] = all_weights
            token[b, p] = previous = sampled.token
    return BlockOutputs(ids, tickets, weights, token, error)


@pytest.fixture
def block() -> tuple[BlockInputs, np.ndarray, BlockOutputs]:
    rng = np.random.default_rng(3)
    inputs, bias = random_block(rng, B, P, V), bias_table(rng, V)
    return inputs, bias, oracle_outputs(inputs, bias)


def test_perfect_outputs_have_no_differences(block: tuple[BlockInputs, np.ndarray, BlockOutputs]) -> None:
    inputs, bias, outputs = block
    assert compare_block(inputs, bias, outputs, Q_FLOOR_FIRST) == []
    assert same_outputs(outputs, outputs) == []


@pytest.mark.parametrize("what", ["token", "tickets", "ids", "weights", "error", "stale"])
def test_every_wrong_output_is_a_difference(block: tuple[BlockInputs, np.ndarray, BlockOutputs], what: str) -> None:
    inputs, bias, good = block
    bad = BlockOutputs(*(getattr(good, n).copy() for n in ("ids", "tickets", "weights", "token", "error")))
    if what == "token":
        bad.token[1, 2] = int(bad.ids[1, 2][bad.ids[1, 2] >= 0][0]) + (bad.token[1, 2] == bad.ids[1, 2].max()) + 1
        bad.token[1, 2] %= V
        assert bad.token[1, 2] != good.token[1, 2]
    elif what == "tickets":
        donor, receiver = np.argsort(bad.tickets[0, 1])[-2:]
        bad.tickets[0, 1, donor] -= 1
        bad.tickets[0, 1, receiver] += 1
    elif what == "ids":
        shown = np.flatnonzero(bad.ids[0, 0] >= 0)
        bad.ids[0, 0, shown[-1]] = (bad.ids[0, 0, shown[-1]] + 1) % V
    elif what == "weights":
        bad.weights[1, 0, int(bad.weights[1, 0].argmax())] -= 1 << 20
    elif what == "error":
        bad.error[0, 2] = 1
    else:
        bad = replace(bad, token=np.full_like(bad.token, -1), ids=np.full_like(bad.ids, -1))
    assert compare_block(inputs, bias, bad, Q_FLOOR_FIRST) != []
    assert same_outputs(good, bad) != []


def test_a_refused_row_must_carry_nothing(block: tuple[BlockInputs, np.ndarray, BlockOutputs]) -> None:
    inputs, bias, outputs = block
    inputs.base[0, 1, 5] = 0x7FC0
    found = compare_block(inputs, bias, outputs, Q_FLOOR_FIRST)
    assert [text[:20] for text in found] == ["request 0 position 1", "request 0 position 2"]
