"""Sparse-q verification of R requests in three launches: row maxima, weight sums, then one program per request.

A fixed-point weight needs the row's maximum, so the rows are read twice; the second read comes from L2. Nobody waits
for anybody inside a launch. The third launch may start early (programmatic dependent launch) and has read everything
but the sums by the time these are complete. The residual needs no further pass: its mass is S minus what the at most
k support entries lose, and only the one tile that holds the drawn token is looked at again. No dense q exists.

Rules: only integers are added, so tiles, shards and order do not matter. Not covered: how target rows are processed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from remote_dspark.contract import SUPPORT_K
from remote_dspark.kernels.rows import VerifiedRounds
from remote_dspark.kernels.sampled_head import Tiling
from remote_dspark.kernels.verifier_kernels import (
    target_max_kernel,
    target_sum_kernel,
    target_weights_kernel,
    verify_kernel,
)


@dataclass(frozen=True)
class VerifierSettings:
    """What is fixed when a verifier is built.

    Attributes:
        tiling: Tiles of a target row; ``num_shards`` logical vocabulary shards.
        depth: Most draft tokens of a request.
        k: Support entries of a draft row.
        overlap: Programmatic dependent launch of the second and third kernel.
    """

    tiling: Tiling
    depth: int
    k: int = SUPPORT_K
    overlap: bool = False

    def __post_init__(self) -> None:
        """Refuses tiles whose partial sums would not fit 32 bits."""
        if self.tiling.tile > 4096:
            raise ValueError(f"a tile of the verifier may have 4096 columns, found {self.tiling.tile}")


class VerifierBuffers:
    """Outputs and scratch of one verifier with fixed addresses; graphs that may overlap need one each."""

    def __init__(
        self, settings: VerifierSettings, num_requests: int, num_rows: int, device: torch.device | str
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        width = settings.depth + 1
        self.num_accepted = zeros(num_requests)
        self.tokens = zeros(num_requests, width)
        self.zero_residual = zeros(num_requests)
        self.error = zeros(num_requests)
        self.totals = zeros(num_requests, width, dtype=torch.int64)
        self.stamp = zeros(num_requests, 3, dtype=torch.int64)
        self.top = torch.full((num_rows,), -(1 << 31), dtype=torch.int32, device=device)
        self.sums = zeros(num_rows, settings.tiling.num_tiles, dtype=torch.int64)
        self.loss = zeros(num_requests, settings.tiling.tile, dtype=torch.int64)

    def poison(self) -> None:
        """Fills outputs and the scratch that carries nothing between calls with a pattern that no launch writes."""
        for tensor in (self.num_accepted, self.tokens, self.zero_residual, self.error, self.totals, self.stamp):
            tensor.fill_(-0x5A5A5A5B)
        self.sums.fill_(-0x5A5A5A5B)

    def outputs(self) -> VerifiedRounds:
        """The outputs as one record; views, overwritten by the next call."""
        return VerifiedRounds(self.num_accepted, self.tokens, self.zero_residual, self.error, self.totals, self.stamp)


def launch_verify(
    settings: VerifierSettings,
    buffers: VerifierBuffers,
    target: torch.Tensor,
    control: torch.Tensor,
    proposed: torch.Tensor,
    ids: torch.Tensor,
    q: torch.Tensor,
    count: torch.Tensor,
) -> None:
    """Verifies all requests of a batch on the current stream.

    Args:
        settings: Fixed choices.
        buffers: Outputs and scratch.
        target: float32 [n, >= V], processed target rows.
        control: int32 [R, 16] with NUM_DRAFT and FIRST_ROW.
        proposed: int32 [R, D].
        ids: int32 [R, D, k].
        q: float32 [R, D, k].
        count: int32 [R, D].

    Raises:
        ValueError: Dtypes or shapes.
    """
    tiling, depth = settings.tiling, settings.depth
    num_requests = control.shape[0]
    if target.dtype != torch.float32 or target.shape[1] < tiling.vocab_size or target.stride(1) != 1:
        raise ValueError(f"expected float32 [n, >= {tiling.vocab_size}], found {target.dtype} {tuple(target.shape)}")
    if ids.shape != (num_requests, depth, settings.k) or q.shape != ids.shape or count.shape != (num_requests, depth):
        raise ValueError(f"expected draft rows [{num_requests}, {depth}, {settings.k}], found {tuple(ids.shape)}")
    shape = (tiling.vocab_size, tiling.shard_size, tiling.tiles_per_shard)
    early = {"launch_pdl": True} if settings.overlap else {}
    grid = (tiling.num_tiles, buffers.top.shape[0])
    fixed = {"TILE": tiling.tile, "OVERLAP": settings.overlap, "num_warps": tiling.num_warps}
    target_max_kernel[grid](target, target.stride(0), buffers.top, *shape, **fixed)
    target_sum_kernel[grid](
        target, target.stride(0), buffers.top, buffers.sums, *shape, tiling.num_tiles, **fixed, **early
    )
    verify_kernel[(num_requests,)](
        target,
        target.stride(0),
        buffers.top,
        buffers.sums,
        buffers.loss,
        control,
        proposed,
        ids,
        q,
        count,
        buffers.num_accepted,
        buffers.tokens,
        buffers.zero_residual,
        buffers.error,
        buffers.totals,
        buffers.stamp,
        *shape,
        tiling.num_tiles,
        D=depth,
        D2=triton.next_power_of_2(depth + 1),
        T2=triton.next_power_of_2(tiling.num_tiles),
        K=settings.k,
        **fixed,
        **early,
    )


def emitted_weights(settings: VerifierSettings, target: torch.Tensor) -> torch.Tensor:
    """The weights that `verify_kernel` sums, int64 [n, V]: the input of the oracle in checks."""
    tiling = settings.tiling
    top = torch.full((target.shape[0],), -(1 << 31), dtype=torch.int32, device=target.device)
    weights = torch.zeros((target.shape[0], tiling.vocab_size), dtype=torch.int64, device=target.device)
    shape = (tiling.vocab_size, tiling.shard_size, tiling.tiles_per_shard)
    grid = (tiling.num_tiles, target.shape[0])
    target_max_kernel[grid](target, target.stride(0), top, *shape, TILE=tiling.tile, OVERLAP=False)
    target_weights_kernel[grid](target, target.stride(0), top, weights, *shape, TILE=tiling.tile)
    return weights
