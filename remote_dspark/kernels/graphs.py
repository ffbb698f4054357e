"""CUDA graphs of sampled chains, one per (rows, k, positions): fixed inputs, fixed outputs, no fallback.

A chain is primed (run once, so that every kernel is compiled and every buffer touched) before it is captured. Keys,
rounds, masks and anchors are graph inputs: a replay copies new values into the same tensors. Each graph owns its
scratch, so graphs that overlap never share any. A shape that was not captured is refused: an eager launch in the
middle of a graphed worker would be slow in a way nobody sees.

OFF and all-T=0 batches never come here: `route` hands the original object back, by identity.
Not covered: the backbone before the chain, and graphs of the physical pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from remote_dspark.contract import DraftMode
from remote_dspark.kernels.rows import CONTROL_WORDS
from remote_dspark.kernels.sampled_head import HeadBuffers, HeadSettings, launch_position

Original = TypeVar("Original")
Sampled = TypeVar("Sampled")


class MissingGraphError(LookupError):
    """A shape without a captured graph on a graphed worker."""


@dataclass(frozen=True, order=True)
class GraphKey:
    """What a graph is captured for.

    Attributes:
        num_rows: Requests B.
        k: Support entries.
        num_positions: Draft positions (n_out).
    """

    num_rows: int
    k: int
    num_positions: int


@dataclass(frozen=True)
class ChainInputs:
    """Inputs of one graph, at fixed addresses.

    Attributes:
        logits: bf16 [num_positions, B, V]; the backbone writes them.
        anchors: int32 [B], last committed tokens.
        control: int32 [B, 16].
    """

    logits: torch.Tensor
    anchors: torch.Tensor
    control: torch.Tensor


class ChainGraph:
    """One captured chain.

    Attributes:
        inputs: Written by the caller between replays, on the replay's stream.
        buffers: Outputs, overwritten by each replay.
    """

    def __init__(self, key: GraphKey, settings: HeadSettings, cache: torch.Tensor, slots: torch.Tensor) -> None:
        device = cache.device
        vocab_size = settings.tiling.vocab_size
        self.inputs = ChainInputs(
            torch.zeros((key.num_positions, key.num_rows, vocab_size), dtype=torch.bfloat16, device=device),
            torch.zeros(key.num_rows, dtype=torch.int32, device=device),
            torch.zeros((key.num_rows, CONTROL_WORDS), dtype=torch.int32, device=device),
        )
        self.buffers = HeadBuffers(settings, key.num_positions, key.num_rows, device)
        self._graph = torch.cuda.CUDAGraph()
        # a graph remembers addresses, not tensors: what it reads must live as long as it does
        self._held = (cache, slots)

        def body() -> None:
            previous = self.inputs.anchors
            for step in range(key.num_positions):
                launch_position(
                    settings,
                    self.buffers,
                    step,
                    self.inputs.logits[step],
                    cache,
                    self.inputs.control,
                    previous=previous,
                    slots=slots,
                )
                previous = self.buffers.token[step]

        # priming: nothing may compile during capture
        body()
        torch.cuda.synchronize(device)
        with torch.cuda.graph(self._graph):
            body()

    def replay(self, control: torch.Tensor, anchors: torch.Tensor, logits: torch.Tensor | None = None) -> HeadBuffers:
        """Replays with new inputs on the current stream and returns the outputs (same object every time)."""
        self.inputs.control.copy_(control, non_blocking=True)
        self.inputs.anchors.copy_(anchors, non_blocking=True)
        if logits is not None:
            self.inputs.logits.copy_(logits, non_blocking=True)
        self._graph.replay()
        return self.buffers


class GraphSet:
    """All captured chains of a worker.

    Args:
        keys: Shapes to capture.
        build: Makes the graph of one shape; `ChainGraph` partially applied.
    """

    def __init__(self, keys: Sequence[GraphKey], build: Callable[[GraphKey], ChainGraph]) -> None:
        self._graphs = {key: build(key) for key in sorted(set(keys))}

    def require(self, num_rows: int, k: int, num_positions: int) -> ChainGraph:
        """The graph of a shape.

        Raises:
            MissingGraphError: It was not captured; there is no eager fallback.
        """
        key = GraphKey(num_rows, k, num_positions)
        graph = self._graphs.get(key)
        if graph is None:
            raise MissingGraphError(
                f"expected a captured graph for {key}, found {sorted(self._graphs)}; capture it at start, "
                "a graphed worker does not fall back to eager launches"
            )
        return graph


def route(mode: DraftMode, greedy: Sequence[bool], original: Original, sampled: Sampled) -> Original | Sampled:
    """Which path a batch takes: the untouched original when OFF or when every row is at T = 0.

    Args:
        mode: The negotiated switch.
        greedy: Per request, whether it is at temperature 0.
        original: The original graph with its buffers, handed back by identity.
        sampled: The sampled one.
    """
    return original if mode is DraftMode.OFF or all(greedy) else sampled
