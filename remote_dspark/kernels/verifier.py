"""Sparse-q verification of R requests: one launch on CUDA, a launch for each stage elsewhere, bit for bit the same.

A fixed-point weight needs its row's maximum, the acceptance its row's sum, the outcome all rows of the request. In one
launch every program keeps its tile in registers and waits for these three, so target rows are read once. The launch is
cooperative: either all programs are resident together, or the driver refuses it before any has started; a wait that
still finds nothing ends and refuses the request. The residual needs no further pass: its mass is S minus what the at
most k support entries lose, and the program whose tile holds the drawn token finds it. No dense q exists.

Rules: only integers are added. Not covered: how target rows are processed; two requests that own one row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from remote_dspark.contract import SUPPORT_K
from remote_dspark.kernels.rows import VerifiedRounds
from remote_dspark.kernels.sampled_head import Tiling
from remote_dspark.kernels.verifier_kernels import verify_kernel
from remote_dspark.kernels.verifier_weights import target_weights_kernel

MAX_TILE = 8192
"""Columns whose weights, each at most 2**38, still sum to less than the 2**52 of a word's payload."""

PARTS = 8
"""Parts of a tile whose sums are kept for the search of the drawn token."""

RUN = 128
"""Consecutive columns that one warp loads at a time, 4 a thread."""

PROGRAMS_PER_SM = 3
"""24 rows of 16 tiles are 384 programs on 132 multiprocessors; registers are limited so that three fit."""

LOOKS = 1 << 20
"""Looks at a word before a program gives up, about half a second; a sound launch needs a few."""

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class VerifierSettings:
    """What is fixed when a verifier is built.

    Attributes:
        tiling: Tiles of a target row; ``num_shards`` logical vocabulary shards.
        depth: Most draft tokens of a request.
        k: Support entries of a draft row.
        one_launch: On CUDA, wait inside one cooperative launch instead of launching every stage.
        overlap: Programmatic dependent launch of the one launch: set up, no more, before its predecessor ends.
    """

    tiling: Tiling
    depth: int
    k: int = SUPPORT_K
    one_launch: bool = True
    overlap: bool = True

    def __post_init__(self) -> None:
        """Refuses tiles whose sums would not fit a word or that have no parts."""
        if not PARTS <= self.tiling.tile <= MAX_TILE:
            raise ValueError(f"a tile of the verifier has {PARTS} to {MAX_TILE} columns, found {self.tiling.tile}")


class VerifierBuffers:
    """Outputs and scratch of one verifier with fixed addresses; graphs that may overlap need one each."""

    def __init__(
        self, settings: VerifierSettings, num_requests: int, num_rows: int, device: torch.device | str
    ) -> None:
        def filled(value: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        width, num_tiles = settings.depth + 1, settings.tiling.num_tiles
        self.num_accepted = filled(0, num_requests)
        self.tokens = filled(0, num_requests, width)
        self.zero_residual = filled(0, num_requests)
        self.error = filled(0, num_requests)
        self.totals = filled(0, num_requests, width, dtype=torch.int64)
        self.stamp = filled(0, num_requests, 3, dtype=torch.int64)
        self.turn = filled(0, 1)
        # -1 is a word of no turn
        self.maxima = filled(-1, num_rows, num_tiles, dtype=torch.int64)
        self.sums = filled(-1, num_rows, num_tiles, dtype=torch.int64)
        self.verdicts = filled(-1, num_rows, dtype=torch.int64)

    def poison(self) -> None:
        """Fills outputs and words with a pattern that no launch writes; only the turn goes from call to call."""
        outputs = (self.num_accepted, self.tokens, self.zero_residual, self.error, self.totals, self.stamp)
        for tensor in (*outputs, self.maxima, self.sums, self.verdicts):
            tensor.fill_(-0x5A5A5A5B)

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
        buffers: Outputs and scratch for these numbers of requests and rows.
        target: float32 [n, >= V], processed target rows.
        control: int32 [R, 16] with NUM_DRAFT and FIRST_ROW; no row belongs to two requests.
        proposed: int32 [R, D].
        ids: int32 [R, D, k].
        q: float32 [R, D, k].
        count: int32 [R, D].

    Raises:
        ValueError: Dtypes or shapes.
        RuntimeError: From the driver, before anything ran: the programs cannot be resident together.
    """
    tiling, depth = settings.tiling, settings.depth
    num_requests, num_rows = control.shape[0], buffers.verdicts.shape[0]
    if target.dtype != torch.float32 or target.shape[1] < tiling.vocab_size or target.stride(1) != 1:
        raise ValueError(f"expected float32 [n, >= {tiling.vocab_size}], found {target.dtype} {tuple(target.shape)}")
    if ids.shape != (num_requests, depth, settings.k) or q.shape != ids.shape or count.shape != (num_requests, depth):
        raise ValueError(f"expected draft rows [{num_requests}, {depth}, {settings.k}], found {tuple(ids.shape)}")
    if target.shape[0] != num_rows or buffers.error.shape[0] != num_requests:
        expected = (buffers.error.shape[0], num_rows)
        raise ValueError(f"expected requests and rows {expected}, found {(num_requests, target.shape[0])}")
    in_one = settings.one_launch and target.is_cuda
    options = _cuda_options(settings, in_one) if target.is_cuda else {}
    for stage, grid in stages(settings, num_rows, in_one).items():
        verify_kernel[grid](
            target,
            target.stride(0),
            control,
            proposed,
            ids,
            q,
            count,
            buffers.turn,
            buffers.maxima,
            buffers.sums,
            buffers.verdicts,
            buffers.num_accepted,
            buffers.tokens,
            buffers.zero_residual,
            buffers.error,
            buffers.totals,
            buffers.stamp,
            tiling.vocab_size,
            tiling.shard_size,
            tiling.num_tiles,
            num_requests,
            num_rows,
            D=depth,
            D2=triton.next_power_of_2(depth + 1),
            R2=triton.next_power_of_2(num_requests),
            N2=triton.next_power_of_2(num_rows),
            T2=triton.next_power_of_2(tiling.num_tiles),
            K=settings.k,
            TILE=tiling.tile,
            PARTS=PARTS,
            RUN=min(RUN, tiling.tile // PARTS),
            LOOKS=LOOKS if in_one else 1,
            STAGE=stage,
            OVERLAP=in_one and settings.overlap,
            num_warps=tiling.num_warps,
            **options,
        )


def stages(settings: VerifierSettings, num_rows: int, in_one: bool) -> dict[int, Grid]:
    """The launches of one call: stage (0 for all of them) and grid (tiles of a shard, rows, shards)."""
    grid = (settings.tiling.tiles_per_shard, num_rows, settings.tiling.num_shards)
    if in_one:
        return {0: grid}
    # a row's first tile stores its verdict; the first program closes all requests
    return {1: grid, 2: grid, 3: (1, num_rows, 1), 4: grid, 5: (1, 1, 1)}


def _cuda_options(settings: VerifierSettings, in_one: bool) -> dict[str, int | bool]:
    """Launch options that the interpreter does not know."""
    threads = 32 * settings.tiling.num_warps
    options: dict[str, int | bool] = {"maxnreg": min(65536 // (PROGRAMS_PER_SM * threads) // 8 * 8, 248)}
    if in_one:
        options["launch_cooperative_grid"] = True
        if settings.overlap:
            options["launch_pdl"] = True
    return options


def emitted_weights(settings: VerifierSettings, target: torch.Tensor) -> torch.Tensor:
    """The weights that `verify_kernel` sums, int64 [n, V]: the input of the oracle in checks."""
    tiling = settings.tiling
    top = target[:, : tiling.vocab_size].amax(dim=1)
    # nobody uses the weights of a refused row
    top = torch.where(top.isfinite(), top, 0.0)
    weights = torch.zeros((target.shape[0], tiling.vocab_size), dtype=torch.int64, device=target.device)
    grid = (tiling.tiles_per_shard, target.shape[0], tiling.num_shards)
    shape = (tiling.vocab_size, tiling.shard_size)
    target_weights_kernel[grid](target, target.stride(0), top, weights, *shape, TILE=tiling.tile)
    return weights
