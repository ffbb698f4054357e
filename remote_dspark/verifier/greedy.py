"""Verification of greedy drafts: the OFF path, and every request at temperature 0.

A greedy draft carries no q; it is its own one-hot distribution. At T > 0 a token is accepted with probability p(x) and
a rejection samples from p without x, so the output is the target's. At T = 0 a token is accepted when it is the
target's argmax, without any draw. This path knows nothing of tickets: with the switch OFF nothing else runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from remote_dspark.oracle.verify import FinalKind, RoundOutcome
from remote_dspark.verifier.errors import ProposalError
from remote_dspark.verifier.naive import ACCEPTANCE_BITS, Weights, accept_all, draw_token, require_totals
from remote_dspark.verifier.noise import RoundNoise
from remote_dspark.verifier.processed import require_rows

NO_DRAW: Final = -1
"""`RoundOutcome.final_draw` where none was made."""


def verify_one_hot(target: Weights, proposed: Sequence[int], noise: RoundNoise) -> RoundOutcome:
    """Verify greedy drafts at T > 0.

    Args:
        target: int64 ``[depth + 1, V]``, weights of the processed rows; not modified.
        proposed: ``depth`` token ids.
        noise: Draws of this round.

    Returns:
        What to commit.

    Raises:
        RowError: A target row without mass.
        ProposalError: A token outside the vocabulary.
    """
    totals = require_totals(target, len(proposed))
    _require_tokens(proposed, target.shape[1])
    draws: list[int] = []
    for index, token in enumerate(proposed):
        draws.append(noise.acceptance(index))
        if draws[-1] * totals[index] >= int(target[index, token]) << ACCEPTANCE_BITS:
            draw = noise.correction(index)
            residual = target[index].copy()
            # A rejected token had p < 1, so other tokens have mass and the residual cannot be empty.
            residual[token] = 0
            final = draw_token(residual, draw)
            return RoundOutcome(index, (*proposed[:index], final), FinalKind.CORRECTION, False, tuple(draws), draw)
    return accept_all(target, proposed, draws, noise)


def verify_argmax(logits: npt.NDArray[np.float32], proposed: Sequence[int]) -> RoundOutcome:
    """Verify drafts at T = 0: equality with the target's argmax, ties to the lowest id.

    Args:
        logits: FP32 ``[depth + 1, V]``, raw target rows.
        proposed: ``depth`` token ids.

    Returns:
        What to commit; no draw is made.

    Raises:
        RowError: A bad row.
        ProposalError: A token outside the vocabulary, or a wrong number of rows.
    """
    require_rows(logits)
    depth = len(proposed)
    if logits.shape[0] != depth + 1:
        raise ProposalError(f"target: expected {depth + 1} rows for {depth} tokens, found {logits.shape[0]}")
    _require_tokens(proposed, logits.shape[1])
    best = [int(token) for token in logits.argmax(axis=1)]
    accepted = next((i for i, token in enumerate(proposed) if token != best[i]), depth)
    kind = FinalKind.BONUS if accepted == depth else FinalKind.CORRECTION
    return RoundOutcome(accepted, (*proposed[:accepted], best[accepted]), kind, False, (), NO_DRAW)


def _require_tokens(proposed: Sequence[int], vocab_size: int) -> None:
    for index, token in enumerate(proposed):
        if not 0 <= token < vocab_size:
            raise ProposalError(f"proposal: expected ids of 0..{vocab_size - 1}, found {token} at index {index}")
