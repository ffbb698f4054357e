"""Kernels that expose single device functions, so that checks can put boundary values into them."""

from __future__ import annotations

import triton
import triton.language as tl

from remote_dspark.kernels.draws import philox4x32
from remote_dspark.kernels.verifier_kernels import accept


@triton.jit
def philox_probe_kernel(words_ptr, out_ptr):
    """First two Philox words of counter (w0, w1, 3, 0) and key (w2, w3): int64 [2]."""
    word0, word1 = philox4x32(
        tl.load(words_ptr), tl.load(words_ptr + 1), 3, 0, tl.load(words_ptr + 2), tl.load(words_ptr + 3)
    )
    tl.store(out_ptr, word0.to(tl.int64))
    tl.store(out_ptr + 1, word1.to(tl.int64))


@triton.jit
def accept_probe_kernel(cases_ptr, out_ptr, N: tl.constexpr):
    """Acceptance of N cases (draw, tickets, total, weight), int64 [N, 4]: int32 [N]."""
    at = tl.arange(0, N) * 4
    draw = tl.load(cases_ptr + at)
    tickets = tl.load(cases_ptr + at + 1)
    result = accept(draw, tickets, tl.load(cases_ptr + at + 2), tl.load(cases_ptr + at + 3))
    tl.store(out_ptr + tl.arange(0, N), result.to(tl.int32))
