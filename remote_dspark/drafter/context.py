"""Context keys and values of one seat: append committed positions, crop, view. Block rows never enter it.

Buffers are allocated once per seat for the model's position limit and reused by every later occupant; what lies beyond
``length`` is never read, so a crop or a new occupant costs nothing.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remote_dspark.drafter.errors import CapacityError, StateGapError
from remote_dspark.drafter.model import DSparkDrafter


class ContextWriter(Protocol):
    """What stores rows for a seat on a device."""

    def write(self, seat: int, position: int, rows: NDArray[np.uint8]) -> None:
        """Store the context of rows of consecutive positions; rows are not kept."""


class SeatContext:
    """The committed positions of one seat, whose rows a writer stores elsewhere.

    Args:
        writer: Stores rows.
        seat: The seat's number.
        fused_width: Elements of a state row.
        max_positions: Limit.
    """

    def __init__(self, writer: ContextWriter, seat: int, fused_width: int, max_positions: int) -> None:
        self._writer = writer
        self._seat = seat
        self._row_bytes = 2 * fused_width
        self.max_positions = max_positions
        self.length = 0

    def append(self, position: int, rows: NDArray[np.uint8]) -> None:
        """Store BF16 rows uint8 [n, 2*m*d] of consecutive positions; errors as of `require_append`."""
        require_append(self.length, self.max_positions, position, rows.shape, self._row_bytes)
        self._writer.write(self._seat, position, rows)
        self.length = position + len(rows)

    def crop(self, length: int) -> None:
        """Keep the first ``length`` positions.

        Raises:
            StateGapError: More than there are.
        """
        if not 0 <= length <= self.length:
            raise StateGapError(f"expected to keep 0..{self.length} positions, found {length}; send the states again")
        self.length = length


class ContextCache(SeatContext):
    """Keys and values [1, kv_heads, max_positions, head_dim] per draft layer, in torch."""

    def __init__(self, model: DSparkDrafter, max_positions: int) -> None:
        config, weight = model.config, model.fc.weight
        super().__init__(self, 0, config.fused_width, max_positions)
        shape = (1, config.num_kv_heads, max_positions, config.head_dim)
        self._model = model
        self._pairs = [
            (
                torch.zeros(shape, dtype=weight.dtype, device=weight.device),
                torch.zeros(shape, dtype=weight.dtype, device=weight.device),
            )
            for _ in range(config.num_layers)
        ]

    def write(self, seat: int, position: int, rows: NDArray[np.uint8]) -> None:
        """Fuse and store rows."""
        end, device = position + len(rows), self._pairs[0][0].device
        positions = torch.arange(position, end, device=device).unsqueeze(0)
        states = states_from_bytes(rows).to(device).unsqueeze(0)
        for (key, value), (new_key, new_value) in zip(
            self._pairs, self._model.context_kv(states, positions), strict=True
        ):
            key[:, :, position:end] = new_key
            value[:, :, position:end] = new_value

    def view(self) -> list[tuple[Tensor, Tensor]]:
        """Views of the valid positions, per draft layer; [1, kv_heads, length, head_dim] each."""
        return [(key[:, :, : self.length], value[:, :, : self.length]) for key, value in self._pairs]


def require_append(length: int, max_positions: int, position: int, shape: tuple[int, ...], row_bytes: int) -> None:
    """Check that rows continue a context.

    Raises:
        StateGapError: Rows that do not continue the context, or of another width.
        CapacityError: More positions than the model was trained for.
    """
    if position != length:
        raise StateGapError(f"expected target states from position {length}, found {position}; reset the slot")
    if len(shape) != 2 or shape[1] != row_bytes:
        raise StateGapError(f"expected state rows of {row_bytes} bytes, found {shape}")
    if position + shape[0] > max_positions:
        raise CapacityError(f"expected at most {max_positions} positions, found {position + shape[0]}; end the request")


def states_from_bytes(rows: NDArray[np.uint8]) -> Tensor:
    """BF16 [n, width] tensor of uint8 [n, 2*width] little-endian rows; a copy."""
    patterns = np.array(rows, dtype=np.uint8, order="C", copy=True).view("<i2")
    return torch.from_numpy(patterns.astype(np.int16, copy=False)).view(torch.bfloat16)
