"""The pair's kernels in two processes over shared memory, interpreted: indexing, protocol and errors, not ordering.

Turns red when: a rank's ids are local, a tie goes to the other shard, a flag or an acknowledgement is not exchanged or
not compared, an epoch or a nonce is not checked, an error is not sticky or not told, a stopped rank sends.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.interp

PROGRAM = Path(__file__).with_name("pair_process.py")
TIMEOUT_S = 600


@pytest.fixture(scope="module")
def process():
    sys.path.insert(0, str(PROGRAM.parent))
    try:
        import pair_process
    finally:
        sys.path.remove(str(PROGRAM.parent))
    return pair_process


@pytest.fixture(scope="module")
def results(process, tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    """What both ranks saved, by scenario."""
    folder = tmp_path_factory.mktemp("pair")
    from remote_dspark.kernels.pair_rank import inbox_words

    for scenario in process.SCENARIOS:
        for side in (0, 1):
            # more than any scenario needs; a file of zeros is an unused inbox
            (folder / f"{scenario.__name__}.{side}").write_bytes(bytes(8 * inbox_words(4)))
    root = PROGRAM.parents[2]
    ranks = [
        subprocess.Popen([sys.executable, str(PROGRAM), str(rank), str(folder)], cwd=root, stderr=subprocess.PIPE)
        for rank in (0, 1)
    ]
    try:
        ends = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], b"\n".join(error for _, error in ends).decode()
    names = sorted({path.name.split(".")[0] for path in folder.glob("*.pt")})
    found = {name: [folder / f"{name}.{rank}.pt" for rank in (0, 1)] for name in names}
    return {name: [torch.load(path) for path in paths if path.exists()] for name, paths in found.items()}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether both ranks have the same rows, bit for bit."""
    names = ("ids", "tickets", "q", "count", "token", "error", "stamp")
    return all(
        torch.equal(one[name], other[name])
        for one, other in zip(left["rows"], right["rows"], strict=True)
        for name in names
    )


def assert_chain(
    process, found: dict[str, Any], logits: torch.Tensor, anchors: list[int], fields: dict[str, Any]
) -> None:
    """Every position against the reference on the whole vocabulary."""
    from remote_dspark.kernels import naive

    previous = torch.tensor(anchors)
    for step, rows in enumerate(found["rows"]):
        bias = process.CACHE[process.SLOTS[previous.long()].long()]
        positions = fields["positions"] + step
        wanted = naive.sampled_head(logits[step], bias, **{**fields, "positions": positions}, k=process.K)
        for name in ("ids", "tickets", "count", "token", "error"):
            assert rows[name].tolist() == getattr(wanted, name).tolist(), (step, name)
        previous = wanted.token


@pytest.mark.parametrize("number", [0, 1])
def test_a_chain_equals_the_whole_vocabulary_and_the_peer(process, results, number):
    first, second = results[f"chain{number}"]
    assert same(first, second)
    assert [first["errors"], second["errors"]] == [0, 0]
    # two positions and the message that ends the chain, on both channels
    assert first["epochs"] == second["epochs"] == [3 * (number + 1)] * 2
    fields = process.fields_of(2, number)
    assert_chain(process, first, process.chain_logits(10 + number, 2, 2), [4, 74], fields)


def test_uncached_rows_of_one_launch(process, results):
    from remote_dspark.kernels import naive

    first, second = results["uncached"]
    assert same(first, second)
    assert first["epochs"] == second["epochs"] == [2, 2]
    previous = torch.tensor([70, 5])
    bias = naive.markov_bias(process.W1[previous], process.W2)
    bias[1] = process.CACHE[1]
    wanted = naive.sampled_head(process.chain_logits(80, 1, 2)[0], bias, **process.fields_of(2), k=process.K)
    for name in ("ids", "tickets", "count", "token", "error"):
        assert first["rows"][0][name].tolist() == getattr(wanted, name).tolist(), name


def test_bad_logits_of_one_shard_refuse_the_row_on_both_ranks(results):
    from remote_dspark.kernels.pair_rank import PairError
    from remote_dspark.kernels.rows import RowError

    first, second = results["bad"]
    assert same(first, second)
    assert [first["errors"], second["errors"]] == [int(PairError.BAD_LOGITS)] * 2
    # the protocol goes on: the other row and the rest of the chain were exchanged
    assert first["epochs"] == [3, 3]
    for rows in first["rows"]:
        assert rows["error"].tolist() == [int(RowError.NAN), 0]
        assert int(rows["token"][0]) == 0
        assert int(rows["tickets"][0].sum()) == 0


def test_other_tokens_are_a_mismatch_on_both_ranks(results):
    from remote_dspark.kernels.pair_rank import PairError

    found = results["mismatch"]
    assert found[0]["rows"][0]["token"].tolist() != found[1]["rows"][0]["token"].tolist()
    for rank in found:
        assert PairError.PEER_MISMATCH in PairError(rank["errors"])


def test_the_last_epoch_stops_both_ranks(results):
    from remote_dspark.kernels.pair_rank import PairError
    from remote_dspark.kernels.rows import RowError

    for rank in results["exhausted"]:
        assert PairError.EPOCH_EXHAUSTED in PairError(rank["errors"])
        assert rank["epochs"] == [1]
        assert rank["rows"][0]["error"].tolist() == [int(RowError.PEER)]


def test_another_incarnation_is_not_heard(results):
    from remote_dspark.kernels.pair_rank import PairError

    errors = [PairError(rank["errors"]) for rank in results["incarnation"]]
    assert all(error & (PairError.PEER_TIMEOUT | PairError.PEER_FAULT) for error in errors)
    assert any(PairError.PEER_TIMEOUT in error for error in errors)
    assert [rank["epochs"] for rank in results["incarnation"]] == [[0], [0]]


def test_a_lone_rank_stops_within_its_bound_and_tells_the_late_one(process, results):
    from remote_dspark.kernels.pair_rank import PairError
    from remote_dspark.kernels.rows import RowError

    first, late = results["lone"]
    assert first["errors"] == int(PairError.PEER_TIMEOUT)
    assert first["waited"] == process.HASTY
    # the first rank's message was there, so the late rank's position is complete; its end is not
    assert late["errors"] & int(PairError.PEER_FAULT)
    assert late["rows"][0]["error"].tolist() == [int(RowError.PEER)]
    [again] = results["lone-again"]
    assert again["errors"] == int(PairError.PEER_TIMEOUT)
    assert again["waited"] == 0
    assert again["rows"][0]["error"].tolist() == [int(RowError.PEER)]


def test_a_primed_rank_has_sent_nothing(process, results):
    stopped = results["stopped"]
    assert [rank["epochs"] for rank in stopped] == [[0], [0]]
    assert [rank["errors"] for rank in stopped] == [0, 0]
    first, second = results["primed"]
    assert same(first, second)
    assert [first["errors"], first["epochs"]] == [0, [2]]
    assert_chain(process, first, process.chain_logits(70, 1, 1), [4], process.fields_of(1))
