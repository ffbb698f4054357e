"""Markov bias rows of frequent previous tokens, kept on the device in a fixed number of bytes.

The host keeps the map and the order of use; the device has the rows and, per token, its row or -1, read by the heads.
A token gets a row at its second miss, never inside a step: rows are filled between steps, in stream order, by the
heads' own product, so a hit can never change a token. The longest unused row goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import torch
from torch import Tensor

from remote_dspark.kernels.markov_product import fill_bias_rows

FILLS_BETWEEN_STEPS = 2
"""Rows filled at one call: each costs a read of W2, which the next step would wait for."""


class DeviceMarkovRows:
    """Cached rows, and how often they served.

    Args:
        w1: bf16 [V, r].
        w2: bf16 [S, r]: V rows, or those of one rank's shard.
        cache_bytes: Bound of the cached rows; 0 keeps none.
        num_scratch: Rows behind the cached ones that no token owns, for bias rows of the step under way.

    Attributes:
        rows: bf16 [capacity + scratch, at least 1, S rounded up].
        slots: int32 [V], row of each token or -1.
        hits: Previous tokens of drafted positions that had a row.
        misses: Those that had none.
    """

    def __init__(self, w1: Tensor, w2: Tensor, cache_bytes: int, num_scratch: int = 0) -> None:
        vocab_size = w1.shape[0]
        width = -(-w2.shape[0] // 64) * 64
        self._w1, self._w2 = w1, w2
        self.capacity = min(cache_bytes // (2 * width), vocab_size)
        num_rows = max(self.capacity + num_scratch, 1)
        self.rows = torch.zeros((num_rows, width), dtype=torch.bfloat16, device=w2.device)
        self.slots = torch.full((vocab_size,), -1, dtype=torch.int32, device=w2.device)
        self._slot_of: OrderedDict[int, int] = OrderedDict()
        self._missed: set[int] = set()
        self._wanted: OrderedDict[int, None] = OrderedDict()
        self.hits = 0
        self.misses = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the rows held now."""
        return len(self._slot_of) * self.rows.shape[1] * 2

    def observe(self, previous: Iterable[int]) -> int:
        """Count the previous tokens of a finished step; returns how many had a row during it."""
        hits = 0
        for token in previous:
            if token in self._slot_of:
                hits += 1
                self._slot_of.move_to_end(token)
            else:
                self.misses += 1
                if self.capacity:
                    self._note_miss(token)
        self.hits += hits
        return hits

    def admit(self, limit: int = FILLS_BETWEEN_STEPS) -> None:
        """Launch the filling of at most ``limit`` wanted rows."""
        for _ in range(min(limit, len(self._wanted))):
            token, _ = self._wanted.popitem(last=False)
            self.fill(token)

    def fill(self, token: int) -> None:
        """Launch the filling of one token's row; it serves every later step."""
        if token in self._slot_of or not self.capacity:
            return
        slot = len(self._slot_of)
        if slot == self.capacity:
            oldest, slot = self._slot_of.popitem(last=False)
            self.slots[oldest : oldest + 1].fill_(-1)
        wanted = torch.full((1,), token, dtype=torch.int32, device=self.slots.device)
        fill_bias_rows(wanted, self._w1, self._w2, self.rows[slot : slot + 1])
        self.slots[token : token + 1].fill_(slot)
        self._slot_of[token] = slot

    def forget(self) -> None:
        """Launch the emptying of the cache; counters stay."""
        self.slots.fill_(-1)
        self._slot_of.clear()
        self._missed.clear()
        self._wanted.clear()

    def _note_miss(self, token: int) -> None:
        if token in self._missed:
            self._missed.discard(token)
            self._wanted[token] = None
        elif token not in self._wanted:
            self._missed.add(token)
