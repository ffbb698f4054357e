"""Checks of a drafting pair on two GPUs, below the wire: against the solo compute, and with faults; a small shape.

Each pair is built for one check, because an error is for life. CUDA only. What a worker does on the pair at full size
is observed by `whole_worker`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from remote_dspark.contract import Q_FLOOR_FIRST, SUPPORT_K, Check
from remote_dspark.drafter.device import DeviceCompute
from remote_dspark.drafter.errors import DeviceFaultError
from remote_dspark.drafter.model import DSparkDrafter
from remote_dspark.drafter.pair import PairCompute
from remote_dspark.drafter.pair_devices import physical_pair
from remote_dspark.drafter.pair_rank import RankCompute, RankShape
from remote_dspark.drafter.staging import Block
from remote_dspark.drafter.synthetic import synthetic_drafter
from remote_dspark.kernels.pair_rank import DEFAULT_TIMEOUT_NS
from remote_dspark.oracle.philox import derive_key

CONTEXT = 9
SHAPE = RankShape(
    num_seats=2,
    support=SUPPORT_K,
    semantics=Q_FLOOR_FIRST,
    cache_bytes=1 << 12,
    max_positions=64,
    max_depth=5,
    bound=DEFAULT_TIMEOUT_NS,
)


def worker_checks(devices: Sequence[int], synthetic: str = "tiny", rounds: int = 50) -> list[Check]:
    """Identity with the solo compute, then a mismatch, a rank that never drafts and bad states; and a fresh pair.

    Args:
        devices: CUDA device of each rank.
        synthetic: Shape of the weights.
        rounds: Steps compared, of two requests each.
    """
    return [
        _same_as_solo(devices, synthetic, rounds),
        _fault(devices, synthetic, "mismatch", ("PEER_MISMATCH", "PEER_MISMATCH"), _other_key),
        _fault(devices, synthetic, "lone", ("PEER_TIMEOUT", "PEER_FAULT"), _never_draft),
        _fault(devices, synthetic, "bad-states", ("BAD_LOGITS", "BAD_LOGITS"), None),
    ]


def _model(device: int, synthetic: str) -> DSparkDrafter:
    torch.cuda.set_device(device)
    return synthetic_drafter(synthetic, f"cuda:{device}")


def _states(model: DSparkDrafter, seed: int) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(CONTEXT, model.config.fused_width, generator=generator).to(torch.bfloat16)
    return values.view(torch.uint8).numpy()


def _blocks(number: int, taus: Sequence[float]) -> list[Block]:
    return [
        Block(seat, (number * 13 + seat) % 200, CONTEXT, tau, derive_key(seat, 3), number, 3, 1 + number)
        for seat, tau in enumerate(taus)
    ]


def _same_as_solo(devices: Sequence[int], synthetic: str, rounds: int) -> Check:
    solo = DeviceCompute(
        _model(devices[0], synthetic),
        SHAPE.num_seats,
        support=SHAPE.support,
        semantics=SHAPE.semantics,
        cache_bytes=SHAPE.cache_bytes,
        max_positions=SHAPE.max_positions,
        max_depth=SHAPE.max_depth,
    )
    model = _model(devices[0], synthetic)
    pair = physical_pair(model, devices, SHAPE)
    compared = 0
    try:
        for seat in range(SHAPE.num_seats):
            for compute in (solo, pair):
                compute.context(seat).append(0, _states(model, seat))
        for number in range(rounds):
            blocks = _blocks(number, ((0.7, 0.7), (0.7, 0.0), (0.0, 0.0), (0.7,))[number % 4])
            one, other = solo.draft(blocks, 5), pair.draft(blocks, 5)
            different = [
                name
                for name in ("tokens", "ids", "q", "counts")
                if not np.array_equal(getattr(one, name), getattr(other, name))
            ]
            if different:
                return Check("worker.same", "no mismatch", f"step {number}: other {', '.join(different)}", False)
            compared += one.tokens.size
    finally:
        pair.close()
    return Check("worker.same", "no mismatch", f"no mismatch in {compared} positions", compared > 0)


def _fault(
    devices: Sequence[int],
    synthetic: str,
    name: str,
    errors: tuple[str, str],
    plant: Callable[[list[RankCompute]], None] | None,
) -> Check:
    """A fault of one kind gives no reply and both ranks' errors, and the same object drafts no more."""
    model = _model(devices[0], synthetic)
    pair = physical_pair(model, devices, SHAPE)
    states = _states(model, 0)
    pair.context(0).append(0, np.full_like(states, 0xFF) if plant is None else states)
    if plant is not None:
        plant([rank for rank in pair.ranks if isinstance(rank, RankCompute)])
    expected = f"no reply; rank 0: {errors[0]}, rank 1: {errors[1]}; then closed"
    found = _message(pair)
    again = _message(pair)
    ok = all(f"rank {rank}: " in found and error in found for rank, error in enumerate(errors))
    return Check(f"worker.{name}", expected, f"{found[:120]}; {again[:70]}", ok and "closed" in again)


def _message(pair: PairCompute) -> str:
    try:
        rows = pair.draft(_blocks(1, (0.7,)), 5)
    except DeviceFaultError as cause:
        return str(cause)
    return f"a reply: {rows.tokens.tolist()}"


def _other_key(ranks: list[RankCompute]) -> None:
    start = ranks[1].start

    def other(blocks: Sequence[Block], depth: int) -> None:
        # hot enough that another key gives another token
        start([block._replace(key=(9, 9)) for block in blocks], depth)

    ranks[1].start = other  # type: ignore[method-assign]


def _never_draft(ranks: list[RankCompute]) -> None:
    sequence_draft, finish = ranks[1].draft, ranks[1].finish

    def nothing() -> None:
        """The heads are launched only once the peer has given up."""

    def late(*, with_rows: bool):  # type: ignore[no-untyped-def]
        sequence_draft()
        return finish(with_rows=with_rows)

    ranks[1].draft, ranks[1].finish = nothing, late  # type: ignore[method-assign]
