"""Which graph a batch takes and what is refused; on a CUDA device also replays with changed inputs."""

from __future__ import annotations

import pytest
import torch

from remote_dspark.contract import DraftMode

pytestmark = pytest.mark.models


def test_off_and_all_greedy_reuse_the_original_by_identity(device):
    from remote_dspark.kernels.graphs import route

    original, sampled = object(), object()
    assert route(DraftMode.OFF, [False, True], original, sampled) is original
    assert route(DraftMode.ON, [True, True], original, sampled) is original
    assert route(DraftMode.ON, [True, False], original, sampled) is sampled


def test_a_missing_graph_refuses(device):
    from remote_dspark.kernels.graphs import GraphKey, GraphSet, MissingGraphError

    graphs = GraphSet([], lambda key: pytest.fail(f"built {key}"))
    with pytest.raises(MissingGraphError, match=r"does not fall back") as refusal:
        graphs.require(2, 32, 5)
    assert str(GraphKey(2, 32, 5)) in str(refusal.value)


@pytest.mark.gpu
@pytest.mark.parametrize("check", ["check_graph_replays", "check_overlapping_graphs"])
def test_replays_with_changed_inputs_and_at_the_same_time(check):
    if not torch.cuda.is_available():
        pytest.fail("the gpu lane needs a CUDA device; leave it out elsewhere with -m 'not gpu'")
    from remote_dspark.kernels import graph_checks

    found = getattr(graph_checks, check)("cuda", 5003, tile=1024)
    assert found.ok, found
