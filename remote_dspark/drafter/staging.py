"""Fixed memory between host and device for one batch size: one copy in, one copy out, laid out here and nowhere else.

In: control blocks, anchors, seats and context lengths. Out: stamps, tokens, errors, counts, then ids and q, so that a
greedy chain copies only the front. The host side is registered (pinned) once. It belongs to one step at a time: filled
before the copy in, read after the copy out was waited for, and what leaves this module is a copy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remote_dspark.drafter.errors import DeviceFaultError, RowError
from remote_dspark.drafter.heads import DraftedRows, drafted_rows, greedy_rows
from remote_dspark.drafter.launcher import Launcher
from remote_dspark.kernels.rows import CONTROL_WORDS, Control

ROW_GROUP = 4
"""Rows are padded to this many, so that every position of every field starts at a multiple of 16 bytes: kernels are
compiled for aligned addresses, and another alignment would be another compilation."""


def _signed(word: int) -> int:
    """The int32 with the bit pattern of a number's low 32 bits."""
    return ((word + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)


@dataclass(frozen=True)
class Block:
    """What one request's draft depends on.

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

    def control_words(self) -> list[int]:
        """The control block's words by bit pattern (`kernels.rows.Control`)."""
        words = [0] * CONTROL_WORDS
        words[Control.KEY0], words[Control.KEY1] = (_signed(word) for word in self.key)
        words[Control.ROUND_LOW] = _signed(self.round)
        words[Control.POSITION] = _signed(self.position + 1)
        words[Control.TAU_BITS] = int(np.float32(self.tau).view(np.int32))
        words[Control.GREEDY] = int(self.tau == 0)
        words[Control.GENERATION_LOW] = _signed(self.generation)
        words[Control.GENERATION_HIGH] = _signed(self.generation >> 32)
        words[Control.EPOCH_LOW], words[Control.EPOCH_HIGH] = _signed(self.epoch), _signed(self.epoch >> 32)
        return words


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
    """

    def __init__(self, launcher: Launcher, num_rows: int, depth: int, support: int) -> None:
        self.num_rows = num_rows
        self.depth = depth
        padded = -(-num_rows // ROW_GROUP) * ROW_GROUP
        inputs = {"control": (padded, CONTROL_WORDS), "anchors": (padded,), "seats": (padded,), "lengths": (padded,)}
        self._in = _Fields(launcher, {name: (torch.int32, shape) for name, shape in inputs.items()})
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

    def fill(self, blocks: Sequence[Block]) -> None:
        """Write the inputs of a step on the host."""
        host = self._in.host
        host["control"][: self.num_rows] = [block.control_words() for block in blocks]
        host["anchors"][: self.num_rows] = [block.anchor for block in blocks]
        host["seats"][: self.num_rows] = [block.seat for block in blocks]
        host["lengths"][: self.num_rows] = [block.position for block in blocks]

    def copy_in(self) -> None:
        """Launch the copy of the inputs."""
        self._in.device_bytes.copy_(self._in.host_bytes, non_blocking=True)

    def copy_out(self, *, sampled: bool) -> None:
        """Launch the copy of the outputs; greedy chains have no entries."""
        size = len(self._out.host_bytes) if sampled else self._front
        self._out.host_bytes[:size].copy_(self._out.device_bytes[:size], non_blocking=True)

    def outputs(self, *, sampled: bool) -> bytes:
        """What was copied out, as it lies in memory; a copy. Two ranks of one step must agree on every byte."""
        size = len(self._out.host_bytes) if sampled else self._front
        return self._out.host_bytes[:size].numpy().tobytes()

    def tokens(self) -> NDArray[np.int32]:
        """int32 [D, B] drafted tokens as copied out, unchecked; a view."""
        return self._out.host["token"][:, : self.num_rows]

    def collect(self, blocks: Sequence[Block], vocab_size: int, *, sampled: bool) -> DraftedRows:
        """The outputs of exactly this step, as copies. The copy out must have been waited for.

        Raises:
            DeviceFaultError: A stamp or token of another step, or none.
            RowError: A row has no distribution; the whole reply is discarded.
        """
        expected = np.array([[block.generation, block.round, block.epoch] for block in blocks], dtype=np.uint64).view(
            np.int64
        )
        stamps, tokens, errors = (self._out.host[name] for name in ("stamp", "token", "error"))
        stamps, tokens, errors = stamps[:, : self.num_rows], tokens[:, : self.num_rows], errors[: self.num_rows]
        if not (stamps == expected).all():
            raise DeviceFaultError(
                f"expected rows of (generation, round, epoch) {expected.tolist()}, found {stamps.tolist()}; restart"
            )
        if errors.any():
            raise RowError(f"row error flags by request: {errors.tolist()}; the whole reply is discarded")
        if ((tokens < 0) | (tokens >= vocab_size)).any():
            raise DeviceFaultError(f"expected tokens in [0, {vocab_size}), found {tokens.tolist()}; restart")
        tokens = np.ascontiguousarray(tokens.T)
        ids, q = (self._out.host[name][:, : self.num_rows].swapaxes(0, 1) for name in ("ids", "q"))
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
        size = sum(sizes.values())
        self.host_bytes = launcher.pinned(size)
        self.device_bytes = torch.zeros(size, dtype=torch.uint8, device=launcher.device)
        self.host: dict[str, NDArray[Any]] = {}
        self.device: dict[str, Tensor] = {}
        for name, (dtype, shape) in fields.items():
            part = slice(self._ends[name] - sizes[name], self._ends[name])
            self.host[name] = self.host_bytes[part].view(dtype).view(shape).numpy()
            self.device[name] = self.device_bytes[part].view(dtype).view(shape)

    def end_of(self, name: str) -> int:
        """Bytes up to the end of a field."""
        return self._ends[name]
