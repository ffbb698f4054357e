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


COPY_BLOCK = 2048
GIB = 1 << 30
VERIFIED_ROWS = 24


@triton.jit
def read_kernel(source_ptr, out_ptr, length, BLOCK: tl.constexpr):  # noqa: N803 - the field's capitals for constexprs
    """Reads a block of int32 and keeps its maximum: the cheapest honest use of every byte."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source_ptr + at, mask=at < length, other=0)
    tl.store(out_ptr + tl.program_id(0), tl.max(values, axis=0))


@triton.jit
def copy_kernel(source_ptr, target_ptr, BLOCK: tl.constexpr):  # noqa: N803 - see above
    """Copies a block of int32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + at, tl.load(source_ptr + at))


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
    """A copy of 1 GiB by a plain kernel: inside a graph, the library's copy is a slower copy-engine node."""
    source = torch.randint(-(1 << 31), 1 << 31, (1 << 28,), device="cuda", dtype=torch.int32)
    target = torch.empty_like(source)
    programs = source.numel() // COPY_BLOCK

    def call(_: int) -> None:
        copy_kernel[(programs,)](source, target, BLOCK=COPY_BLOCK, num_warps=4)

    return time_graph(_repeat(call), 20, replays=10)


def measure(report: Report) -> None:
    """Adds the ceilings to the report."""
    report.add("copy 1 GiB", _time_copy())
    report.add_plain("copy bandwidth", 2 * GIB / report.value("copy 1 GiB") / 1e6, "TB/s")
    counter = torch.zeros(1, device="cuda")
    report.add("smallest kernel", time_graph(_repeat(lambda _: counter.add_(1), 40), 40))
    w2 = [torch.randn(VOCAB, RANK, device="cuda").to(torch.bfloat16) for _ in range(4)]
    report.add("W2 read", time_graph(_repeat(_read(w2)), 20))
    hidden = torch.randn(RANK, 1, device="cuda").to(torch.bfloat16)
    report.add("W2 product, library", time_graph(_repeat(lambda index: w2[index % 4] @ hidden), 20))
    rows = torch.randn(VERIFIED_ROWS, VOCAB, device="cuda")
    report.add("24 target rows read", time_graph(_repeat(_read([rows], 4096)), 20))


def add_rates(report: Report) -> None:
    """Adds what the kernels read per second over what a plain kernel reads or copies: each kernel against its ceiling.

    Cached head: logits and bias rows, against the copy. Uncached head: W2, against its plain read. Verifier: target
    rows, once, against their plain read, which comes from L2 as well.
    """
    row, w2 = VOCAB * 2, VOCAB * RANK * 2
    ceilings = {
        "W2 read": w2 / report.value("W2 read") / 1e6,
        "24 target rows read": VERIFIED_ROWS * VOCAB * 4 / report.value("24 target rows read") / 1e6,
        "copy bandwidth": report.value("copy bandwidth"),
    }
    measured = {line.name: line.value for line in report.lines if line.unit == "us"}
    for batch in (1, 2, 3, 4):
        kernels = {
            f"cached head, B={batch}, cold": (2 * batch * row, "copy bandwidth"),
            f"uncached head, B={batch}": (w2, "W2 read"),
            f"verifier, {batch} x 6": (batch * 6 * VOCAB * 4, "24 target rows read"),
        }
        for name, (num_bytes, ceiling) in kernels.items():
            if name in measured:
                rate = num_bytes / measured[name] / 1e6
                report.add_plain(f"{name}: of {ceiling}", rate / ceilings[ceiling], "ratio")
