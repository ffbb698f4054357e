"""What this device can do at all: copy, plain reads, the library's product, an almost empty kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from benchmarks.gpu_inputs import RANK, VOCAB
from benchmarks.gpu_timing import Timing, time_graph

if TYPE_CHECKING:
    from benchmarks.gpu import Report


@triton.jit
def read_kernel(source_ptr, out_ptr, length, BLOCK: tl.constexpr):  # noqa: N803 - the field's capitals for constexprs
    """Reads a block of int32 and keeps its maximum: the cheapest honest use of every byte."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source_ptr + at, mask=at < length, other=0)
    tl.store(out_ptr + tl.program_id(0), tl.max(values, axis=0))


def _repeat(call, calls: int = 20):
    def body() -> None:
        for index in range(calls):
            call(index)

    return body


def _read(tensors: list[torch.Tensor], block: int = 8192):
    words = [tensor.view(torch.int32).reshape(-1) for tensor in tensors]
    programs = triton.cdiv(words[0].numel(), block)
    out = torch.zeros(programs, device="cuda", dtype=torch.int32)

    def call(index: int) -> None:
        source = words[index % len(words)]
        read_kernel[(programs,)](source, out, source.numel(), BLOCK=block, num_warps=8)

    return call


def _time_copy() -> Timing:
    """A device-to-device copy of 1 GiB; counts bytes read plus bytes written."""
    source = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return time_graph(_repeat(lambda _: target.copy_(source)), 20, replays=10)


def measure(report: Report) -> None:
    """Adds the ceilings to the report."""
    report.add("copy 1 GiB", _time_copy())
    report.add_plain("copy bandwidth", 2 * (1 << 30) / report.value("copy 1 GiB") / 1e6, "TB/s")
    counter = torch.zeros(1, device="cuda")
    report.add("smallest kernel", time_graph(_repeat(lambda _: counter.add_(1), 40), 40))
    w2 = [torch.randn(VOCAB, RANK, device="cuda").to(torch.bfloat16) for _ in range(4)]
    report.add("W2 read", time_graph(_repeat(_read(w2)), 20))
    hidden = torch.randn(RANK, 1, device="cuda").to(torch.bfloat16)
    report.add("W2 product, library", time_graph(_repeat(lambda index: w2[index % 4] @ hidden), 20))
    rows = torch.randn(24, VOCAB, device="cuda")
    report.add("24 target rows read", time_graph(_repeat(_read([rows], 4096)), 20))
