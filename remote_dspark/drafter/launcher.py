"""Runs a fixed sequence of launches again and again: a captured graph on a CUDA device, the plain calls elsewhere.

The same code decides both, so that what is tested without a device is what is captured on one. A sequence is primed
(run once, so that everything is compiled and every buffer exists) before it is captured.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor


class Launcher:
    """One device and its stream.

    Args:
        device: ``cpu`` or a CUDA device; the calling thread's current device becomes it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        if self.is_cuda:
            torch.cuda.set_device(device)
        # torch's own capture stream belongs to the first device that captured
        self._stream: torch.cuda.Stream | None = None
        if self.is_cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """What runs ``body``'s launches once more; ``body`` must use fixed tensors only."""
        if not self.is_cuda:
            return body
        body()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            body()
        return _Replay(graph, body)

    def pinned(self, size_bytes: int) -> Tensor:
        """Zeroed uint8 host memory that the device can copy from and to by itself."""
        return torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=self.is_cuda)

    def mark(self, *, captured: bool = False) -> Mark:
        """A point that later launches come behind; a captured one has a time, and is not to be waited for."""
        return Mark(self.is_cuda, captured=captured)


class _Replay:
    """A captured graph and the sequence it came from: a graph knows addresses, the sequence holds the tensors."""

    def __init__(self, graph: torch.cuda.CUDAGraph, body: Callable[[], None]) -> None:
        self._graph = graph
        self._body = body

    def __call__(self) -> None:
        self._graph.replay()


class Mark:
    """A reusable point on the stream, with a time."""

    def __init__(self, is_cuda: bool, *, captured: bool = False) -> None:
        event: torch.cuda.Event | None = None
        if is_cuda:
            event = torch.cuda.Event(enable_timing=True, external=captured)  # type: ignore[no-untyped-call]
        self._event = event
        self._host_ns = 0

    def record(self) -> None:
        """Set the point behind everything launched so far."""
        if self._event is None:
            self._host_ns = time.perf_counter_ns()
        else:
            self._event.record()

    def wait(self) -> None:
        """Block until everything before the point is done."""
        if self._event is not None:
            self._event.synchronize()

    def since_ns(self, earlier: Mark) -> int:
        """Time between two recorded points that have been reached."""
        if self._event is None or earlier._event is None:
            return self._host_ns - earlier._host_ns
        return int(earlier._event.elapsed_time(self._event) * 1e6)
