"""Times of the sampled head: cached rows hot, cold and full of ties, uncached rows, and the torch chain as peer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from benchmarks.gpu_inputs import DEPTH, VOCAB, HeadInputs, make_head_inputs
from benchmarks.gpu_timing import Timing, time_graph
from remote_dspark.kernels.markov_head import launch_markov_position
from remote_dspark.kernels.sampled_head import HeadBuffers, HeadSettings, Tiling, launch_position

if TYPE_CHECKING:
    from benchmarks.gpu import Report

CACHED = Tiling(VOCAB, 2048, 1, 4)
UNCACHED = Tiling(VOCAB, 1024, 1, 8)
CACHED_GOAL_US = 9.0
UNCACHED_GOAL = 1.35
"""Times the measured read of W2."""


def cached_chain(inputs: HeadInputs, chains: int, num_sets: int, overlap: bool):
    """A body of ``chains`` depth-5 chains over rotating inputs."""
    settings = HeadSettings(CACHED, overlap=overlap)
    buffers = HeadBuffers(settings, DEPTH, inputs.control.shape[0], "cuda")

    def body() -> None:
        for chain in range(chains):
            logits, previous = inputs.logits[chain % num_sets], inputs.anchors[chain % num_sets]
            for step in range(DEPTH):
                launch_position(
                    settings, buffers, step, logits[step], inputs.cache, inputs.control,
                    previous=previous, slots=inputs.slots,
                )  # fmt: skip
                previous = buffers.token[step]

    return body, buffers


def uncached_chain(inputs: HeadInputs, chains: int, overlap: bool):
    """The same with every row computed from W1 and W2."""
    settings = HeadSettings(UNCACHED, overlap=overlap)
    buffers = HeadBuffers(settings, DEPTH, inputs.control.shape[0], "cuda")

    def body() -> None:
        for chain in range(chains):
            previous = inputs.anchors[chain]
            for step in range(DEPTH):
                launch_markov_position(
                    settings, buffers, step, inputs.logits[chain, step], inputs.control, previous, inputs.w1,
                    inputs.w2, inputs.no_slots, inputs.cache,
                )  # fmt: skip
                previous = buffers.token[step]

    return body, buffers


def time_chain(chain, calls: int, replays: int = 100) -> Timing:
    """Times a chain and refuses the figure if any of its rows was refused: those take another way."""
    body, buffers = chain
    timing = time_graph(body, calls, replays)
    if bool(buffers.error.any()) or bool((buffers.count != 32).any()):
        raise RuntimeError(f"expected sampled rows, found errors {buffers.error.tolist()}: this time means nothing")
    return timing


def torch_chain(inputs: HeadInputs, chains: int):
    """Add, top-k, softmax, cumulative sum, draw: the plain statement of the same job, without exact counts."""
    num_rows = inputs.control.shape[0]
    uniform = torch.rand(num_rows, 1, device="cuda")

    def body() -> None:
        for chain in range(chains):
            previous = inputs.anchors[chain]
            for step in range(DEPTH):
                bias = inputs.cache[inputs.slots[previous.long()].long()]
                values, ids = (inputs.logits[chain, step] + bias).float().topk(32, dim=1)
                cumulative = torch.softmax(values / 0.7, dim=1).cumsum(dim=1)
                index = (cumulative < uniform).sum(dim=1, keepdim=True).clamp(max=31)
                previous = ids.gather(1, index)[:, 0]

    return body


def measure_cached(report: Report, batches: tuple[int, ...]) -> None:
    """Cached rows per position, and without starting a position's programs while the one before still finishes."""
    for num_rows in batches:
        num_sets = 64 // num_rows
        inputs = make_head_inputs(num_rows, num_sets)
        if num_rows in (batches[0], batches[-1]):
            report.add(f"torch chain, B={num_rows}", time_graph(torch_chain(inputs, 4), 20, replays=30))
        peer = f"torch chain, B={batches[0] if num_rows < batches[-1] else num_rows}"
        ties = make_head_inputs(num_rows, 8, ties=True)
        for overlap in (True, False):
            name = f"cached head, B={num_rows}{'' if overlap else ', not set up early'}"
            cold = time_chain(cached_chain(inputs, num_sets, num_sets, overlap), num_sets * DEPTH, replays=30)
            report.add(f"{name}, cold", cold, CACHED_GOAL_US, peer)
            hot = time_chain(cached_chain(inputs, 8, 1, overlap), 40)
            report.add(f"{name}, hot", hot, CACHED_GOAL_US, peer)
            tied = time_chain(cached_chain(ties, 8, 8, overlap), 40)
            report.add(f"{name}, ties", tied, CACHED_GOAL_US, peer)
            report.add_plain(f"{name}, bytes/s", num_rows * VOCAB * 4 / cold.per_call_us / 1e6, "TB/s")
        del inputs, ties
        torch.cuda.empty_cache()


def measure_uncached(report: Report, batches: tuple[int, ...]) -> None:
    """Uncached rows per position."""
    goal = UNCACHED_GOAL * report.value("W2 read")
    for num_rows in batches:
        inputs = make_head_inputs(num_rows, 4)
        for overlap in (True, False):
            timing = time_chain(uncached_chain(inputs, 4, overlap), 20, replays=50)
            name = f"uncached head, B={num_rows}{'' if overlap else ', not set up early'}"
            report.add(name, timing, goal, "W2 read")
        del inputs
        torch.cuda.empty_cache()
