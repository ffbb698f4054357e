"""From base logits to tokens, position by position: the original greedy selector, and the sampled head beside it.

`TPDrafter`'s branch (seeds): the caller decides *before* the selector which of the two runs, and neither calls the
other. A batch of only T = 0 requests uses `select_greedy` whatever the mode; a mixed batch uses `sample_block`, whose
T = 0 rows are argmax without a draw. Solo only: partial-rank, margin and traced heads do not exist here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remote_dspark.drafter.errors import RowError
from remote_dspark.drafter.markov import MarkovRows
from remote_dspark.kernels.naive import sampled_head


@dataclass(frozen=True, eq=False)
class DraftedRows:
    """Proposals of one step.

    Attributes:
        tokens: int32 [B, D], drafted global ids.
        ids: int32 [B, D, K], ascending in the first ``counts`` entries, 0 after them.
        q: float32 [B, D, K], tickets * 2**-24, all positive in the first ``counts`` entries.
        counts: int32 [B, D], entries with at least one ticket; 0 in greedy rows.
    """

    tokens: NDArray[np.int32]
    ids: NDArray[np.int32]
    q: NDArray[np.float32]
    counts: NDArray[np.int32]

    def front(self, depth: int) -> DraftedRows:
        """The first positions: views, since no position sees a later one."""
        return DraftedRows(self.tokens[:, :depth], self.ids[:, :depth], self.q[:, :depth], self.counts[:, :depth])


@dataclass(frozen=True, eq=False)
class SampleInputs:
    """What the draws of a step depend on, one entry per request; never the batch row.

    Attributes:
        tau: float32 [B], draft temperatures; ignored where greedy.
        keys: int64 [B, 2], u32 words of each request's key.
        rounds: int64 [B].
        first_positions: int64 [B], absolute position of the first drafted token.
        greedy: bool [B].
        support: Entries kept per row.
        semantics: Ticket allocation.
    """

    tau: Tensor
    keys: Tensor
    rounds: Tensor
    first_positions: Tensor
    greedy: Tensor
    support: int
    semantics: str


def select_greedy(base: Tensor, anchors: list[int], markov: MarkovRows) -> NDArray[np.int32]:
    """The original selector: the highest corrected logit, ties to the lowest id.

    Args:
        base: BF16 [B, D, V] base logits.
        anchors: Last committed token of each request.
        markov: Bias rows.

    Returns:
        int32 [B, D].

    Raises:
        RowError: A NaN or +inf, or nothing but -inf, in any row.
    """
    previous, chosen = list(anchors), []
    for position in range(base.shape[1]):
        logits = base[:, position] + markov.rows(previous)
        best = logits.amax(dim=-1, keepdim=True)
        if not bool(torch.isfinite(best).all()) or bool(logits.isnan().any()):
            raise RowError(f"expected finite draft logits at block position {position}; discard the whole reply")
        # the first column that holds the maximum; argmax leaves the order of ties open
        previous = (logits == best).to(torch.uint8).argmax(dim=-1).tolist()
        chosen.append(previous)
    return np.array(chosen, dtype=np.int32).T.copy()


def sample_block(base: Tensor, anchors: list[int], markov: MarkovRows, inputs: SampleInputs) -> DraftedRows:
    """Walk the block with the sampled head; each row is conditioned on the tokens drawn before it.

    Args:
        base: BF16 [B, D, V] base logits.
        anchors: Last committed token of each request.
        markov: Bias rows.
        inputs: Temperatures, keys and counters.

    Raises:
        RowError: Any row of any position carries an error flag: the whole reply is discarded.
    """
    previous, rows = list(anchors), []
    error = torch.zeros(len(anchors), dtype=torch.int32)
    for position in range(base.shape[1]):
        row = sampled_head(
            base[:, position],
            markov.rows(previous),
            tau=inputs.tau,
            keys=inputs.keys,
            rounds=inputs.rounds,
            positions=inputs.first_positions + position,
            greedy=inputs.greedy,
            k=inputs.support,
            semantics=inputs.semantics,
            error=error,
        )
        # a refused row continues with an in-range 0 and keeps its flag
        previous, error = row.token.tolist(), row.error
        rows.append(row)
    if bool(error.any()):
        raise RowError(f"row error flags by request: {error.tolist()}; the whole reply is discarded")
    return drafted_rows(
        torch.stack([row.token for row in rows], dim=1).numpy().astype(np.int32),
        torch.stack([row.ids for row in rows], dim=1).numpy(),
        torch.stack([row.q for row in rows], dim=1).numpy(),
    )


def drafted_rows(tokens: NDArray[np.int32], ids: NDArray[np.int32], q: NDArray[np.float32]) -> DraftedRows:
    """Drop entries without a ticket, keeping the order of ids.

    Args:
        tokens: int32 [B, D], kept.
        ids: int32 [B, D, K], copied.
        q: float32 [B, D, K], copied; 0 in entries without a ticket.
    """
    has_ticket = q > 0
    if np.count_nonzero(has_ticket) == has_ticket.size:
        counts = np.full(tokens.shape, ids.shape[-1], dtype=np.int32)
        return DraftedRows(tokens, ids.astype(np.int32, order="C"), q.astype(np.float32, order="C"), counts)
    counts = has_ticket.sum(axis=-1, dtype=np.int32)
    front = np.arange(ids.shape[-1]) < counts[..., None]
    kept_ids, kept_q = np.zeros(ids.shape, dtype=np.int32), np.zeros(q.shape, dtype=np.float32)
    # both masks hold the same number of entries in every row, and are read in the same order
    kept_ids[front], kept_q[front] = ids[has_ticket], q[has_ticket]
    return DraftedRows(tokens, kept_ids, kept_q, counts)


def greedy_rows(tokens: NDArray[np.int32], support: int) -> DraftedRows:
    """Proposals without entries: ``tokens`` int32 [B, D]."""
    shape = (*tokens.shape, support)
    return DraftedRows(
        tokens,
        np.zeros(shape, dtype=np.int32),
        np.zeros(shape, dtype=np.float32),
        np.zeros(tokens.shape, dtype=np.int32),
    )
