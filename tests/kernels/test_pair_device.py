"""The pair on two GPUs, small: the same checks as `qualify.pair --physical`, in seconds.

Turns red when: the exchange loses, repeats or misorders anything, a lone rank hangs, or an error stays on one rank.
"""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.pair

VOCAB = 10_007
DEVICES = (0, 1)


@pytest.fixture(scope="module", autouse=True)
def two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.fail("the pair lane needs two CUDA devices; leave it out elsewhere with -m 'not pair'")


def test_everything_small():
    from remote_dspark.qualify.pair_physical import device_checks

    failed = [check for check in device_checks(DEVICES, VOCAB, 50_000_000, share=200) if not check.ok]
    assert failed == []


def test_no_pair_of_one_device():
    from remote_dspark.kernels.pair_chain import PhysicalPair
    from remote_dspark.kernels.pair_devices import PairRefusedError
    from remote_dspark.kernels.pair_rank import PairSettings

    with pytest.raises(PairRefusedError, match="two distinct GPUs"):
        PhysicalPair(PairSettings(VOCAB), 1, 1, (0, 0))


def test_a_pair_of_three_is_refused_by_name():
    from remote_dspark.kernels.pair_chain import PhysicalPair
    from remote_dspark.kernels.pair_rank import PairSettings, RankCountError

    with pytest.raises(RankCountError, match="expected 2 ranks"):
        PhysicalPair(PairSettings(VOCAB), 1, 1, (0, 1, 0))


def test_workers_on_the_pair():
    from remote_dspark.qualify.pair_worker_checks import worker_checks

    checks = worker_checks(DEVICES)
    assert [check for check in checks if not check.ok] == []
    assert len(checks) == 4
