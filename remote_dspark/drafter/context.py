"""Context keys and values of one seat: append committed positions, crop, view. Block rows never enter it.

Buffers are allocated once per seat for the model's position limit and reused by every later occupant; what lies beyond
``length`` is never read, so a crop or a new occupant costs nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from remote_dspark.drafter.errors import CapacityError, StateGapError
from remote_dspark.drafter.model import DSparkDrafter


class ContextCache:
    """Keys and values [1, kv_heads, max_positions, head_dim] per draft layer; ``length`` positions are valid."""

    def __init__(self, model: DSparkDrafter, max_positions: int) -> None:
        config, weight = model.config, model.fc.weight
        shape = (1, config.num_kv_heads, max_positions, config.head_dim)
        self._model = model
        self._pairs = [
            (
                torch.zeros(shape, dtype=weight.dtype, device=weight.device),
                torch.zeros(shape, dtype=weight.dtype, device=weight.device),
            )
            for _ in range(config.num_layers)
        ]
        self.max_positions = max_positions
        self.length = 0

    def append(self, position: int, states: Tensor) -> None:
        """Fuse and store rows of consecutive positions.

        Args:
            position: Absolute position of the first row; must be ``length``.
            states: Unfused target states [n, m*d]; not kept.

        Raises:
            StateGapError: Rows that do not continue the context, or of another width.
            CapacityError: More positions than the model was trained for.
        """
        end = position + len(states)
        if position != self.length:
            raise StateGapError(f"expected target states from position {self.length}, found {position}; reset the slot")
        if states.ndim != 2 or states.shape[1] != self._model.config.fused_width:
            expected = self._model.config.fused_width
            raise StateGapError(f"expected state rows of width {expected}, found {tuple(states.shape)}")
        if end > self.max_positions:
            raise CapacityError(f"expected at most {self.max_positions} positions, found {end}; end the request")
        positions = torch.arange(position, end, device=self._pairs[0][0].device).unsqueeze(0)
        rows = states.to(self._pairs[0][0].device).unsqueeze(0)
        for (key, value), (new_key, new_value) in zip(
            self._pairs, self._model.context_kv(rows, positions), strict=True
        ):
            key[:, :, position:end] = new_key
            value[:, :, position:end] = new_value
        self.length = end

    def crop(self, length: int) -> None:
        """Keep the first ``length`` positions.

        Raises:
            StateGapError: More than there are.
        """
        if not 0 <= length <= self.length:
            raise StateGapError(f"expected to keep 0..{self.length} positions, found {length}; send the states again")
        self.length = length

    def view(self) -> list[tuple[Tensor, Tensor]]:
        """Views of the valid positions, per draft layer; [1, kv_heads, length, head_dim] each."""
        return [(key[:, :, : self.length], value[:, :, : self.length]) for key, value in self._pairs]
