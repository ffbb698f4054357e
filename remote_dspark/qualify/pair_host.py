"""What a physical pair's receipt says about its machine: clocks, throttling, temperatures, link, compiled barriers."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Final

import torch

from remote_dspark.kernels.pair_barriers import barrier_faults
from remote_dspark.kernels.pair_head import pair_head_kernel
from remote_dspark.kernels.pair_markov import pair_markov_kernel
from remote_dspark.observe import ObserveError

STATE_FIELDS: Final = (
    "uuid",
    "clocks.sm",
    "clocks.mem",
    "clocks_throttle_reasons.active",
    "temperature.gpu",
    "power.draw",
    "compute_mode",
)


def device_state() -> list[dict[str, str]]:
    """State of every GPU of this machine as nvidia-smi shows it.

    Raises:
        ObserveError: It does not answer.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(STATE_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as cause:
        raise ObserveError(f"device state: expected an answer of nvidia-smi, found {cause}") from cause
    rows = [[value.strip() for value in line.split(",")] for line in answer.stdout.splitlines() if line.strip()]
    return [dict(zip(STATE_FIELDS, row, strict=True)) for row in rows]


COPY_BYTES: Final = 1 << 28


def peer_copies(one: int, other: int, repeats: int = 10) -> list[int]:
    """Durations in ns of copies of `COPY_BYTES` from one device to another."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{one}")
    target = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{other}")
    found = []
    with torch.cuda.device(one):
        for _ in range(repeats + 1):
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            found.append(int(start.elapsed_time(end) * 1e6))
    # the first one also maps memory
    return found[1:]


def compiled_faults(devices: Sequence[int]) -> list[str]:
    """`barrier_faults` of every pair kernel that was loaded on these devices; no kernel at all is a fault."""
    texts = [
        compiled.asm["ptx"]
        for kernel in (pair_head_kernel, pair_markov_kernel)
        for device in devices
        for compiled in kernel.device_caches[device][0].values()
    ]
    if not texts:
        return ["expected compiled pair kernels, found none; run them first"]
    return [fault for text in texts for fault in barrier_faults(text)]
