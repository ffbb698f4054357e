"""A drafting pair on two CUDA devices of one host, driven by one process and one thread.

The devices are judged, peer access is enabled and used once each way, and both ranks are built, primed and captured
before either exchanges anything.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Sequence

import torch

from remote_dspark.drafter.errors import UnsupportedShapeError
from remote_dspark.drafter.model import DSparkDrafter
from remote_dspark.drafter.pair import PairCompute
from remote_dspark.drafter.pair_rank import RankCompute, RankShape
from remote_dspark.kernels.pair_devices import (
    PairRefusedError,
    dedicated_inbox,
    enable_peer_access,
    read_facts,
    require_pair,
)
from remote_dspark.kernels.pair_rank import NONCE_LIMIT, RankCountError, require_two


def physical_pair(model: DSparkDrafter, devices: Sequence[int], shape: RankShape) -> PairCompute:
    """A compute over two devices.

    Args:
        model: Loaded, BF16, on the first device; becomes the first rank's and loses the other rank's columns.
        devices: CUDA device of each rank.
        shape: Agreed.

    Raises:
        UnsupportedShapeError: Devices that are no pair, or a model that a rank does not compute.
    """
    try:
        require_two(len(devices))
        require_pair(read_facts(devices), shape.bound)
        enable_peer_access(devices)
    except (PairRefusedError, RankCountError) as cause:
        raise UnsupportedShapeError(f"pair: {cause}") from cause
    models = [model, *(_copy_to(model, device) for device in devices[1:])]
    inboxes = [dedicated_inbox(shape.inbox_words, device) for device in devices]
    nonce = 1 + secrets.randbelow(NONCE_LIMIT - 1)
    ranks = [
        RankCompute(part, rank, shape, inboxes[rank][0], inboxes[1 - rank][0].data_ptr(), nonce, inboxes[rank][1])
        for rank, part in enumerate(models)
    ]
    for rank in ranks:
        rank.quiesce()
    for rank in ranks:
        rank.restart()
    config = model.config
    return PairCompute(ranks, fused_width=config.fused_width, max_positions=shape.max_positions)


def _copy_to(model: DSparkDrafter, device: int) -> DSparkDrafter:
    """The same weights on another device, bit for bit."""
    with torch.no_grad():
        return copy.deepcopy(model).to(f"cuda:{device}")
