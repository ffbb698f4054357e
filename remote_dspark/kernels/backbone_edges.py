"""The end of a step: results go to the host by a launch of the chain itself, not by a copy behind it.

A copy engine starts after everything before it has ended, and takes longer to start than these bytes take. A program of
the chain starts while the selector before it ends, and stores to registered host memory, which is complete once the
launch is. The same programs read the device's clock, because an event between two launches keeps them apart.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NUM_CLOCKS = 3
"""Step begun, base logits complete, heads complete: ns of the device's own clock."""


@triton.jit(do_not_specialize=["num_words"])
def store_outputs_kernel(
    source_ptr,
    target_ptr,
    clock_ptr,
    host_clock_ptr,
    num_words,
    SIZE: tl.constexpr,
    CLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """int64 words of results from the device to the host; grid (1,)."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    at = tl.arange(0, SIZE)
    if CLOCK:
        tl.store(host_clock_ptr + 2, tl.extra.cuda.globaltimer())
    words = tl.load(source_ptr + at, mask=at < num_words, other=0)
    tl.store(target_ptr + at, words, mask=at < num_words)
    if CLOCK:
        tl.store(host_clock_ptr, tl.load(clock_ptr))
        tl.store(host_clock_ptr + 1, tl.load(clock_ptr + 1))


def store_outputs(
    source: torch.Tensor,
    target: torch.Tensor,
    clock: torch.Tensor,
    host_clock: torch.Tensor,
    *,
    overlap: bool = False,
) -> None:
    """Launches the way of the results to the host on the current stream.

    Args:
        source: uint8 [n], n a multiple of 8, on the device.
        target: uint8 [n], registered host memory (or any memory where there is no device), written.
        clock: int64 [`NUM_CLOCKS`] on the device, of which the first two were written by earlier launches.
        host_clock: int64 [`NUM_CLOCKS`], registered host memory, written on CUDA.
        overlap: Programmatic dependent launch.
    """
    num_words = source.shape[0] // 8
    overlap = overlap and source.is_cuda
    store_outputs_kernel[(1,)](
        source.view(torch.int64),
        target.view(torch.int64),
        clock,
        host_clock,
        num_words,
        SIZE=triton.next_power_of_2(num_words),
        CLOCK=source.is_cuda,
        OVERLAP=overlap,
        num_warps=8,
        **({"launch_pdl": True} if overlap else {}),
    )
