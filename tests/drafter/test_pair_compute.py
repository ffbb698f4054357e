"""A drafting pair: what its host does with two ranks, and the kernels of both, interpreted in two processes.

The interpreter proves indexing, protocol and errors, not memory ordering or speed; the two-GPU lane states the same on
devices.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from remote_dspark.contract import Q_FLOOR_FIRST
from remote_dspark.drafter.checkpoint import load_drafter
from remote_dspark.drafter.errors import DeviceFaultError
from remote_dspark.drafter.heads import greedy_rows
from remote_dspark.drafter.pair import PairCompute, RankStep
from remote_dspark.drafter.pair_emulated import EmulatedModel, EmulatedRank, EmulatedShape, emulated_pair
from remote_dspark.drafter.shapes import synthetic_config
from remote_dspark.drafter.staging import Block
from remote_dspark.drafter.timings import StepTimings
from remote_dspark.oracle.philox import derive_key

pytestmark = [
    pytest.mark.models,
    pytest.mark.interp,
    # Triton's interpreter turns a loop bound into an integer in a way that numpy has deprecated
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]

NO_TIME = StepTimings(*([1] * 11))
BLOCK = Block(seat=0, anchor=3, position=2, tau=0.7, key=(1, 2), round=4, generation=5, epoch=6)


class ScriptedRank:
    """A rank that says what it is told to, and writes down what it is asked."""

    markov: Any = None

    def __init__(self, number: int, log: list[str], step: RankStep | Exception) -> None:
        self.number, self.log, self.step = number, log, step

    def write(self, seat: int, position: int, rows: np.ndarray) -> None:
        self.log.append(f"write {self.number}")

    def start(self, blocks: object, depth: int) -> None:
        self.log.append(f"start {self.number}")

    def draft(self) -> None:
        self.log.append(f"draft {self.number}")

    def finish(self, *, with_rows: bool) -> RankStep:
        self.log.append(f"finish {self.number}")
        if isinstance(self.step, Exception):
            raise self.step
        return self.step if with_rows else replace(self.step, rows=None)

    def base_logits(self, blocks: object, depth: int) -> torch.Tensor:
        return torch.full((1, depth, 2), float(self.number))

    def quiesce(self) -> None:
        self.log.append(f"quiesce {self.number}")

    def close(self) -> None:
        self.log.append(f"close {self.number}")


def good_step(outputs: bytes = b"same") -> RankStep:
    return RankStep("", outputs, greedy_rows(np.array([[7, 8]], dtype=np.int32), 32), NO_TIME)


def scripted(*steps: RankStep | Exception) -> tuple[PairCompute, list[str]]:
    log: list[str] = []
    ranks = [ScriptedRank(number, log, step) for number, step in enumerate(steps)]
    return PairCompute(ranks, fused_width=4, max_positions=9), log


def test_all_ranks_are_launched_before_any_is_waited_for() -> None:
    # red when a rank waits in its heads for one that was not launched, or states reach one rank only
    pair, log = scripted(good_step(), good_step())
    pair.context(0).append(0, np.zeros((1, 8), dtype=np.uint8))
    assert pair.draft([BLOCK], 2).tokens.tolist() == [[7, 8]]
    assert log == ["write 0", "write 1", "start 0", "start 1", "draft 0", "draft 1", "finish 0", "finish 1"]
    assert pair.base_logits([BLOCK], 1).tolist() == [[[0, 0, 1, 1]]]
    assert pair.timings is not None
    assert (pair.timings.submit_ns, pair.timings.heads_ns) == (2, 1)


@pytest.mark.parametrize(
    ("second", "found"),
    [
        (replace(good_step(), errors="PEER_TIMEOUT", outputs=b""), "rank 0: none, rank 1: PEER_TIMEOUT"),
        (good_step(b"other"), "output of rank 0 on rank 1"),
        (DeviceFaultError("stamps of another step"), "stamps"),
        (RuntimeError("the device is lost"), "lost"),
    ],
)
def test_a_fault_of_one_rank_discards_the_reply_and_ends_both(second: RankStep | Exception, found: str) -> None:
    # red when a reply leaves, memory goes while the other rank runs, or a closed pair drafts again
    pair, log = scripted(good_step(), second)
    with pytest.raises((DeviceFaultError, RuntimeError), match=found):
        pair.draft([BLOCK], 2)
    assert log[-4:] == ["quiesce 0", "quiesce 1", "close 0", "close 1"]
    for call in (lambda: pair.draft([BLOCK], 2), lambda: pair.write(0, 0, np.zeros((1, 8), dtype=np.uint8))):
        with pytest.raises(DeviceFaultError, match="fresh worker"):
            call()
    pair.close()
    assert log[-1] == "close 1"


def shape_of(num_seats: int, max_depth: int) -> EmulatedShape:
    return EmulatedShape(num_seats, 32, Q_FLOOR_FIRST, 2 * 1024 * 4, 16, max_depth)


@contextmanager
def running(source: EmulatedModel, width: int, num_seats: int, max_depth: int) -> Iterator[PairCompute]:
    pair = emulated_pair(source, width, shape_of(num_seats, max_depth))
    try:
        yield pair
    finally:
        pair.close()


def block(seat: int, tau: float, number: int, context: int) -> Block:
    return Block(seat, 11 + 7 * seat, context, tau, derive_key(seat, 3), number, 3, 100 + number)


def test_two_ranks_propose_what_one_does(state_rows: Any, tiny_drafter: Path) -> None:
    # red when a rank's columns are shifted, a candidate of the other shard is lost, or bias rows to other columns
    from remote_dspark.drafter.device import DeviceCompute

    model = load_drafter(tiny_drafter, torch.device("cpu"), torch.bfloat16)
    width, context, depth = model.config.fused_width, 3, 2
    rows = state_rows(1, 0, context, width)
    solo = DeviceCompute(
        model, 2, support=32, semantics=Q_FLOOR_FIRST, cache_bytes=2 * 2048 * 4, max_positions=16, max_depth=depth
    )
    with running(EmulatedModel(path=str(tiny_drafter)), width, 2, depth) as pair:
        for compute in (solo, pair):
            for seat in (0, 1):
                compute.context(seat).append(0, rows)
        for number, taus in enumerate(((0.7, 0.0), (0.0,))):
            blocks = [block(seat, tau, number, context) for seat, tau in enumerate(taus)]
            expected, found = solo.draft(blocks, depth), pair.draft(blocks, depth)
            for name in ("tokens", "ids", "q", "counts"):
                assert np.array_equal(getattr(expected, name), getattr(found, name)), (number, name)
            assert bool(expected.counts.any()) is (number == 0)
            # entries on both sides of the cut, or nothing was exchanged
            if number == 0:
                assert {int(each) // 1024 for each in expected.ids[0].ravel()} == {0, 1}


def test_errors_of_the_kernels_end_the_pair_and_a_fresh_one_works(state_rows: Any, monkeypatch: Any) -> None:
    # red when a mismatch or bad states give a reply, an error is forgotten, or what is left disturbs the next pair
    source, width = EmulatedModel(synthetic="tiny"), synthetic_config("tiny").fused_width
    good, start = state_rows(2, 0, 2, width), EmulatedRank.start
    bad = np.full_like(good, 0xFF)

    def other_key(rank: EmulatedRank, blocks: Any, depth: int) -> None:
        key = (9, 9) if rank is ranks[1] else blocks[0].key
        start(rank, [each._replace(key=key, tau=5.0) for each in blocks], depth)

    for rows, fault, names in ((good, other_key, "PEER_MISMATCH"), (bad, start, "BAD_LOGITS"), (good, start, "")):
        with running(source, width, 1, 1) as pair:
            ranks = list(pair.ranks)
            monkeypatch.setattr(EmulatedRank, "start", fault)
            pair.context(0).append(0, rows)
            if not names:
                assert pair.draft([block(0, 0.7, 1, 2)], 1).tokens.shape == (1, 1)
                continue
            with pytest.raises(DeviceFaultError, match=f"rank 0: .*{names}.*rank 1: .*{names}"):
                pair.draft([block(0, 0.7, 1, 2)], 1)
            with pytest.raises(DeviceFaultError, match="fresh worker"):
                pair.draft([block(0, 0.7, 2, 2)], 1)
            for rank in ranks:
                with pytest.raises(ProcessLookupError):
                    os.kill(rank.pid, 0)
