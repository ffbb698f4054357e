"""One request while it is served: its tokens, its cache, its round numbers, and one round of verification.

Rules: a round either commits exactly what the verifier decided, or nothing; the cache always ends right before the
anchor; a proposal that cannot be verified is discarded as a whole and the same forward's first row, which is
conditioned on committed tokens only, gives a target-only token. This file does not know the wire or HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from remote_dspark.oracle.philox import derive_key
from remote_dspark.oracle.verify import DraftRow, RoundOutcome
from remote_dspark.target.requests import CompletionRequest
from remote_dspark.target.text import TextStream
from remote_dspark.verifier.errors import ProposalError
from remote_dspark.verifier.greedy import verify_argmax, verify_one_hot
from remote_dspark.verifier.naive import verify_proposal
from remote_dspark.verifier.noise import RoundNoise
from remote_dspark.verifier.processed import process, target_weights
from remote_dspark.wire.prefix import EMPTY_PREFIX, extend_prefix

if TYPE_CHECKING:
    # torch stays out of the process until the engine's thread loads the model.
    from remote_dspark.target.model import Rows, TargetModel
    from remote_dspark.target.model import Sequence as ModelSequence


class Finish(StrEnum):
    """Why a completion ended; the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class Proposal:
    """A validated draft chain.

    Attributes:
        tokens: Draft token ids.
        rows: q of each, or None for greedy drafts.
    """

    tokens: tuple[int, ...]
    rows: tuple[DraftRow, ...] | None


@dataclass(frozen=True)
class Emitted:
    """What a client gets from one round: tokens, the text that is complete, and why it ended, if it did."""

    token_ids: tuple[int, ...]
    text: str
    finish: Finish | None


@dataclass(frozen=True)
class Failure:
    """A request that ended in an error of ours: a stable code and a message."""

    code: str
    message: str


@dataclass(frozen=True)
class Played:
    """One round of one seat.

    Attributes:
        outcome: What was committed.
        states: bf16 bit patterns as uint16 ``[num_accepted + 1, m*d]`` of the newly cached positions.
        first_position: Absolute position of the first of them.
        token_ids: The tokens at those positions.
        was_discarded: Whether a proposal was refused and the round became target-only.
    """

    outcome: RoundOutcome
    states: npt.NDArray[np.uint16]
    first_position: int
    token_ids: tuple[int, ...]
    was_discarded: bool


@dataclass
class Seat:
    """A request and everything that changes while it is served.

    Attributes:
        request: What was asked.
        committed: Prompt and committed tokens; the last one is the anchor.
        num_prompt: Length of the prompt.
        sink: Receives `Emitted` and `Failure`, in order, on the engine's thread.
        text: Detokenizer of the completion.
        slot: Seat number on the wire.
        generation: Occupant number; with the seed it gives the RNG key.
        round: Next round number of this generation.
        num_states: Positions whose hidden states the drafter holds.
        is_drafted: Whether the drafter holds this seat; otherwise every round is target-only.
        is_finished: Nothing more is served; the engine frees the seat after this round.
        is_cancelled: Set by the client's side; the engine frees the seat before the next round.
    """

    request: CompletionRequest
    committed: list[int]
    num_prompt: int
    sink: Callable[[Emitted | Failure], None]
    text: TextStream
    slot: int = -1
    generation: int = 0
    round: int = 0
    num_states: int = 0
    is_drafted: bool = False
    is_cancelled: bool = False
    is_finished: bool = False
    num_emitted: int = 0
    num_rounds: int = 0
    num_accepted: int = 0
    num_target_only: int = 0
    admitted_ns: int = field(default_factory=time.monotonic_ns)
    _cache: ModelSequence | None = None
    _digest: bytes = EMPTY_PREFIX
    _num_digested: int = 0

    @property
    def anchor_position(self) -> int:
        """Absolute position of the last committed token."""
        return len(self.committed) - 1

    def prefix_digest(self) -> bytes:
        """Chained digest over all committed ids; work is proportional to what is new."""
        self._digest = extend_prefix(self._digest, self.committed[self._num_digested :])
        self._num_digested = len(self.committed)
        return self._digest

    def prefill(self, model: TargetModel) -> Rows | None:
        """Cache everything before the anchor; None for a prompt of one token."""
        self._cache = model.new_sequence()
        return self._cache.extend(self.committed[:-1], with_logits=False) if len(self.committed) > 1 else None

    def play(self, proposal: Proposal | None) -> Played:
        """One round: forward, verify, commit.

        Raises:
            RowError: The target's own row is no distribution; the seat must be ended.
        """
        assert self._cache is not None, "prefill comes first"
        first = self.anchor_position
        drafts = proposal.tokens if proposal else ()
        rows = self._cache.extend((self.committed[-1], *drafts))
        was_discarded = False
        try:
            outcome = self._verify(rows.logits, proposal)
        except ProposalError:
            was_discarded = True
            outcome = self._verify(rows.logits[:1], None)
        num_cached = outcome.num_accepted + 1
        self._cache.crop(first + num_cached)
        token_ids = (self.committed[-1], *outcome.tokens[:-1])
        self.committed.extend(outcome.tokens)
        self.num_rounds += 1
        self.num_accepted += outcome.num_accepted
        return Played(outcome, rows.states[:num_cached], first, token_ids, was_discarded)

    def emit(self, tokens: Sequence[int], eos: frozenset[int]) -> Emitted:
        """Turn committed tokens into what the client gets, up to the end of the completion."""
        taken: list[int] = []
        finish: Finish | None = None
        for token in tokens:
            taken.append(token)
            stopped = self.text.push(token)
            self.num_emitted += 1
            if stopped or (token in eos and not self.request.ignore_eos):
                finish = Finish.STOP
            elif self.num_emitted == self.request.max_tokens:
                finish = Finish.LENGTH
            if finish:
                break
        return Emitted(tuple(taken), self.text.take(final=finish is not None), finish)

    def _verify(self, logits: npt.NDArray[np.float32], proposal: Proposal | None) -> RoundOutcome:
        tokens = proposal.tokens if proposal else ()
        if self.request.temperature == 0:
            return verify_argmax(logits, tokens)
        weights = target_weights(process(logits, self.request.temperature))
        key = derive_key(self.request.seed, self.generation)
        noise = RoundNoise(key, self.round, self.anchor_position + 1)
        if proposal is None or proposal.rows is None:
            return verify_one_hot(weights, tokens, noise)
        return verify_proposal(weights, proposal.rows, tokens, noise)
