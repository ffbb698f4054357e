"""Fixed memory between host and device for one batch size: one copy in, one copy out, laid out here and nowhere else.

In: control blocks, anchors, seats and context lengths. Out: stamps, tokens, errors, counts, then ids and q, so that a
greedy chain copies only the front. The host side is registered (pinned) once. It belongs to one step at a time: filled
before the copy in, read after the copy out was waited for, and what leaves this module is a copy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from struct import Struct
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remote_dspark.drafter.errors import DeviceFaultError, RowError
from remote_dspark.drafter.heads import DraftedRows, drafted_rows, greedy_rows
from remote_dspark.drafter.launcher import Launcher
from remote_dspark.kernels.backbone_edges import NUM_CLOCKS, store_outputs
from remote_dspark.kernels.rows import CONTROL_WORDS

ROW_GROUP = 4
"""Rows are padded to this many, so that every position of every field starts at a multiple of 16 bytes: kernels are
compiled for aligned addresses, and another alignment would be another compilation."""


_CONTROL: Final = Struct("<4IifI4I")
"""Key, round, position, temperature, greedy, generation, epoch: the first words of `kernels.rows.Control`."""

_STAMP: Final = Struct("<3Q")
_WORD: Final = 0xFFFFFFFF


class Block(NamedTuple):
    """What one request's draft depends on. A tuple, because a step makes one per request while its client waits.

    Attributes:
        seat: Whose context.
        anchor: Last committed token.
        position: Its absolute position, which is the context's length.
        tau: Draft temperature; 0 asks for a greedy row.
        key: u32 words of the RNG key.
        round: In [0, 2^32).
        generation: u64; for the stamp.
        epoch: Number of this step; for the stamp.
    """

    seat: int
    anchor: int
    position: int
    tau: float
    key: tuple[int, int]
    round: int
    generation: int
    epoch: int

    def pack_control(self, buffer: memoryview, offset: int) -> None:
        """Write the words of a control block (`kernels.rows.Control`) that a draft reads."""
        _CONTROL.pack_into(
            buffer,
            offset,
            *self.key,
            self.round,
            0,
            self.position + 1,
            self.tau,
            self.tau == 0,
            self.generation & _WORD,
            self.generation >> 32,
            self.epoch & _WORD,
            self.epoch >> 32,
        )

    def stamp(self) -> bytes:
        """What every row of this request's answer must carry."""
        return _STAMP.pack(self.generation, self.round, self.epoch)


class BlockStaging:
    """Buffers of one (batch, depth).

    Args:
        launcher: Of the device.
        num_rows: Requests B.
        depth: Draft positions D.
        support: Entries k of a sampled row.

    Attributes:
        control: int32 [B, 16] on the device, as are the following.
        anchors: int32 [B].
        seats: int32 [B].
        lengths: int32 [B].
        stamp: int64 [D, B, 3].
        token: int32 [D, B].
        error: int32 [B].
        count: int32 [D, B].
        ids: int32 [D, B, k].
        q: float32 [D, B, k].
        clock: int64 [`NUM_CLOCKS`], when parts of the step were complete.
        words: int32 [n] at the host and on the device: all inputs.
        host_anchors: int32 [B], the anchors in registered host memory.
    """

    def __init__(self, launcher: Launcher, num_rows: int, depth: int, support: int) -> None:
        self.num_rows = num_rows
        self.depth = depth
        padded = -(-num_rows // ROW_GROUP) * ROW_GROUP
        inputs = {"control": (padded, CONTROL_WORDS), "anchors": (padded,), "seats": (padded,), "lengths": (padded,)}
        self._in = _Fields(launcher, {name: (torch.int32, shape) for name, shape in inputs.items()})
        self._words = memoryview(self._in.host_bytes.numpy().data)
        self.words = self._in.host_bytes.view(torch.int32), self._in.device_bytes.view(torch.int32)
        first = self._in.start_of("anchors") // 4
        self.host_anchors = self.words[0][first : first + num_rows]
        self._line = Struct(f"<{num_rows}i")
        self.control, self.anchors, self.seats, self.lengths = (self._in.device[name][:num_rows] for name in inputs)
        self._out = _Fields(
            launcher,
            {
                "stamp": (torch.int64, (depth, padded, 3)),
                "token": (torch.int32, (depth, padded)),
                "error": (torch.int32, (padded,)),
                "count": (torch.int32, (depth, padded)),
                "ids": (torch.int32, (depth, padded, support)),
                "q": (torch.float32, (depth, padded, support)),
            },
        )
        self.stamp, self.token, self.count, self.ids, self.q = (
            self._out.device[name][:, :num_rows] for name in ("stamp", "token", "count", "ids", "q")
        )
        self.error = self._out.device["error"][:num_rows]
        self._front = self._out.end_of("error")
        self.clock = torch.zeros(NUM_CLOCKS, dtype=torch.int64, device=launcher.device)
        self._host_clock = launcher.pinned(8 * NUM_CLOCKS).view(torch.int64)
        self._expected = b""

    def fill(self, blocks: Sequence[Block]) -> None:
        """Write the inputs of a step on the host."""
        words, line = self._words, self._line.pack_into
        # whoever forgets to expect is refused
        self._expected = b""
        for number, block in enumerate(blocks):
            block.pack_control(words, number * CONTROL_WORDS * 4)
        line(words, self._in.start_of("anchors"), *[block.anchor for block in blocks])
        line(words, self._in.start_of("seats"), *[block.seat for block in blocks])
        line(words, self._in.start_of("lengths"), *[block.position for block in blocks])

    def expect(self, blocks: Sequence[Block], *, sampled: bool) -> None:
        """Do what can be done while the device works: note the stamps that `collect` will look for.

        What lies in memory now is laid out once, for nothing but that the code is near when the results come.
        """
        self._expected = b"".join([block.stamp() for block in blocks]) * self.depth
        self._lay_out(sampled=sampled)

    def copy_in(self) -> None:
        """Launch the copy of the inputs."""
        self._in.device_bytes.copy_(self._in.host_bytes, non_blocking=True)

    def copy_out(self, *, sampled: bool) -> None:
        """Launch the copy of the outputs; greedy chains have no entries."""
        size = len(self._out.host_bytes) if sampled else self._front
        self._out.host_bytes[:size].copy_(self._out.device_bytes[:size], non_blocking=True)

    def store_out(self, *, sampled: bool, overlap: bool) -> None:
        """Launch the same as a part of the chain (`kernels.backbone_edges`)."""
        size = len(self._out.host_bytes) if sampled else self._front
        store_outputs(
            self._out.device_bytes[:size],
            self._out.host_bytes[:size],
            self.clock,
            self._host_clock,
            overlap=overlap,
        )

    def parts_ns(self) -> tuple[int, int]:
        """Backbone and heads of the finished step by the device's clock, in ns; zeros where there is none."""
        begun, logits, heads = self._host_clock.tolist()
        return logits - begun, heads - logits

    def outputs(self, *, sampled: bool) -> bytes:
        """What was copied out, as it lies in memory; a copy. Two ranks of one step must agree on every byte."""
        size = len(self._out.host_bytes) if sampled else self._front
        return self._out.host_bytes[:size].numpy().tobytes()

    def tokens(self) -> NDArray[np.int32]:
        """int32 [D, B] drafted tokens as copied out, unchecked; a view."""
        return self._out.host["token"][:, : self.num_rows]

    def collect(self, blocks: Sequence[Block], vocab_size: int, *, sampled: bool) -> DraftedRows:
        """The outputs of exactly the step that was expected, as copies. The copy out must have been waited for.

        Raises:
            DeviceFaultError: A stamp or token of another step, or none.
            RowError: A row has no distribution; the whole reply is discarded.
        """
        host, count = self._out.host, self.num_rows
        stamps = host["stamp"][:, :count]
        # few and small: comparing bytes and Python integers costs less than calls on arrays
        if stamps.tobytes() != self._expected:
            expected = [[block.generation, block.round, block.epoch] for block in blocks]
            found = stamps.view(np.uint64).tolist()
            raise DeviceFaultError(f"expected rows of (generation, round, epoch) {expected}, found {found}; restart")
        errors = host["error"][:count].tolist()
        if any(errors):
            raise RowError(f"row error flags by request: {errors}; the whole reply is discarded")
        rows = self._lay_out(sampled=sampled)
        flat = rows.tokens.ravel().tolist()
        if min(flat) < 0 or max(flat) >= vocab_size:
            raise DeviceFaultError(f"expected tokens in [0, {vocab_size}), found {rows.tokens.T.tolist()}; restart")
        return rows

    def _lay_out(self, *, sampled: bool) -> DraftedRows:
        host, count = self._out.host, self.num_rows
        tokens = np.ascontiguousarray(host["token"][:, :count].T)
        ids, q = host["ids"][:, :count].swapaxes(0, 1), host["q"][:, :count].swapaxes(0, 1)
        return drafted_rows(tokens, ids, q) if sampled else greedy_rows(tokens, ids.shape[-1])


class _Fields:
    """Named arrays in one registered host buffer and, at the same offsets, in one device buffer.

    Attributes:
        host_bytes: uint8 host buffer.
        device_bytes: uint8 device buffer.
        host: Views of the first by name.
        device: Views of the second by name.
    """

    def __init__(self, launcher: Launcher, fields: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        sizes = {name: dtype.itemsize * math.prod(shape) for name, (dtype, shape) in fields.items()}
        self._ends = dict(zip(sizes, itertools.accumulate(sizes.values()), strict=True))
        self._starts = {name: end - sizes[name] for name, end in self._ends.items()}
        size = sum(sizes.values())
        self.host_bytes = launcher.pinned(size)
        self.device_bytes = torch.zeros(size, dtype=torch.uint8, device=launcher.device)
        self.host: dict[str, NDArray[Any]] = {}
        self.device: dict[str, Tensor] = {}
        for name, (dtype, shape) in fields.items():
            part = slice(self._starts[name], self._ends[name])
            self.host[name] = self.host_bytes[part].view(dtype).view(shape).numpy()
            self.device[name] = self.device_bytes[part].view(dtype).view(shape)

    def start_of(self, name: str) -> int:
        """Bytes before a field."""
        return self._starts[name]

    def end_of(self, name: str) -> int:
        """Bytes up to the end of a field."""
        return self._ends[name]
