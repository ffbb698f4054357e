"""Markov bias rows for serving, with a cache of whole rows for frequent previous tokens.

A cached row is the uncached computation's own output (DECISIONS 7), so a hit can never change a token: the cache may
be any size, including none. Rows are kept in the order of use and the longest unused one goes first.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from remote_dspark.drafter.errors import RowError
from remote_dspark.drafter.model import DSparkDrafter
from remote_dspark.kernels.naive import markov_bias


class MarkovRows:
    """Bias rows BF16 [B, V] by previous token.

    Args:
        model: Its Markov tables must be BF16.
        cache_bytes: Bound of the cached rows; 0 keeps none.

    Attributes:
        hits: Rows served from the cache.
        misses: Rows computed.
    """

    def __init__(self, model: DSparkDrafter, cache_bytes: int) -> None:
        self._w1 = model.markov_head.markov_w1.weight.detach()
        self._w2 = model.markov_head.markov_w2.weight.detach()
        self._capacity = cache_bytes // (2 * self._w2.shape[0])
        self._rows: OrderedDict[int, Tensor] = OrderedDict()
        self.hits = 0
        self.misses = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the rows held now."""
        return len(self._rows) * 2 * self._w2.shape[0]

    def rows(self, previous_ids: list[int]) -> Tensor:
        """Bias rows BF16 [B, V], a fresh tensor.

        Raises:
            RowError: An id outside the vocabulary.
        """
        return torch.stack([self._row(token) for token in previous_ids])

    def _row(self, token: int) -> Tensor:
        if not 0 <= token < self._w1.shape[0]:
            raise RowError(f"expected a previous token in [0, {self._w1.shape[0]}), found {token}; discard the reply")
        row = self._rows.get(token)
        if row is not None:
            self.hits += 1
            self._rows.move_to_end(token)
            return row
        self.misses += 1
        row = markov_bias(self._w1[token : token + 1], self._w2)[0]
        if self._capacity:
            self._rows[token] = row
            if len(self._rows) > self._capacity:
                self._rows.popitem(last=False)
        return row
