"""Refusals that cost a proposal, not the connection: slots, generations, rounds, replies, completions, late frames.

Each is a `RemoteProtocolError` with its own ``code`` (``errors`` draws the tree). Those of `Scope.PROPOSAL` discard
the whole proposal and invalidate its generations; those of `Scope.FRAME` drop one late frame.
"""

from __future__ import annotations

from remote_dspark.wire.errors import RemoteProtocolError, Scope


class SlotOutOfRangeError(RemoteProtocolError):
    """Slot not below max_slots."""

    code = "slot_out_of_range"
    scope = Scope.PROPOSAL


class SlotInUseError(RemoteProtocolError):
    """OPEN of a taken slot."""

    code = "slot_in_use"
    scope = Scope.PROPOSAL


class SlotNotOpenError(RemoteProtocolError):
    """The slot is free."""

    code = "slot_not_open"
    scope = Scope.PROPOSAL


class StaleGenerationError(RemoteProtocolError):
    """A generation that has ended, or one not newer than the last."""

    code = "stale_generation"
    scope = Scope.PROPOSAL


class GenerationInvalidError(RemoteProtocolError):
    """The generation was invalidated; only RESET and CANCEL are allowed."""

    code = "generation_invalid"
    scope = Scope.PROPOSAL


class ExhaustedCounterError(RemoteProtocolError):
    """A generation, round or batch number has reached its end; it never wraps."""

    code = "exhausted_counter"
    scope = Scope.PROPOSAL


class StaleRoundError(RemoteProtocolError):
    """A round that has ended."""

    code = "stale_round"
    scope = Scope.PROPOSAL


class DuplicateRoundError(RemoteProtocolError):
    """A round that is already in flight or answered."""

    code = "duplicate_round"
    scope = Scope.PROPOSAL


class RoundGapError(RemoteProtocolError):
    """A round other than the next one."""

    code = "round_gap"
    scope = Scope.PROPOSAL


class UncommittedRoundError(RemoteProtocolError):
    """STEP or STATE while a proposal awaits its COMMIT."""

    code = "uncommitted_round"
    scope = Scope.PROPOSAL


class RoundInFlightError(RemoteProtocolError):
    """Not while the slot's STEP is in flight."""

    code = "round_in_flight"
    scope = Scope.PROPOSAL


class CommitWithoutProposalError(RemoteProtocolError):
    """COMMIT without a completed proposal."""

    code = "commit_without_proposal"
    scope = Scope.PROPOSAL


class BatchSlotBusyError(RemoteProtocolError):
    """The batch slot's buffer still has consumers."""

    code = "batch_slot_busy"
    scope = Scope.PROPOSAL


class StaleBatchError(RemoteProtocolError):
    """Batch number not greater than the last."""

    code = "stale_batch"
    scope = Scope.PROPOSAL


class DuplicateSlotError(RemoteProtocolError):
    """One slot twice in a STEP."""

    code = "duplicate_slot"
    scope = Scope.PROPOSAL


class StateGapError(RemoteProtocolError):
    """STATE rows or anchor do not continue the committed prefix."""

    code = "state_gap"
    scope = Scope.PROPOSAL


class WrongPrefixError(RemoteProtocolError):
    """The prefix digest differs from the one of the delivered tokens."""

    code = "wrong_prefix"
    scope = Scope.PROPOSAL


class WrongContextError(RemoteProtocolError):
    """Another target processor, grammar or stop context version."""

    code = "wrong_context"
    scope = Scope.PROPOSAL


class WrongPolicyError(RemoteProtocolError):
    """Temperature, support or depth policy differs from OPEN's, or exceeds the limits."""

    code = "wrong_policy"
    scope = Scope.PROPOSAL


class WrongCommitError(RemoteProtocolError):
    """num_accepted, position or bonus flag do not fit the round."""

    code = "wrong_commit"
    scope = Scope.PROPOSAL


class ResetPositionError(RemoteProtocolError):
    """RESET keeps neither everything nor nothing."""

    code = "reset_position"
    scope = Scope.CONNECTION


class StepTimeoutError(RemoteProtocolError):
    """No complete reply before the deadline."""

    code = "step_timeout"
    scope = Scope.PROPOSAL


class DrafterRefusedError(RemoteProtocolError):
    """The worker refused a frame.

    Attributes:
        reason: The code the worker gave.
    """

    code = "drafter_refused"
    scope = Scope.PROPOSAL

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class WrongReplyIdentityError(RemoteProtocolError):
    """Slot, generation, round, position, context or order differ from the STEP's."""

    code = "wrong_reply_identity"
    scope = Scope.PROPOSAL


class WrongReplyShapeError(RemoteProtocolError):
    """Number of requests, depth or rows differ from the STEP's."""

    code = "wrong_reply_shape"
    scope = Scope.PROPOSAL


class WrongShardError(RemoteProtocolError):
    """Shard header differs from the negotiated ranges."""

    code = "wrong_shard"
    scope = Scope.PROPOSAL


class UnknownRowKindError(RemoteProtocolError):
    """Row kind outside SPARSE, DENSE, GREEDY."""

    code = "unknown_row_kind"
    scope = Scope.PROPOSAL


class WrongRowKindError(RemoteProtocolError):
    """GREEDY at T > 0, sampled at T = 0, or DENSE where not negotiated."""

    code = "wrong_row_kind"
    scope = Scope.PROPOSAL


class MissingQError(RemoteProtocolError):
    """A sampled row without entries."""

    code = "missing_q"
    scope = Scope.PROPOSAL


class SupportTooLargeError(RemoteProtocolError):
    """More entries than negotiated."""

    code = "support_too_large"
    scope = Scope.PROPOSAL


class DuplicateIdError(RemoteProtocolError):
    """An id twice in a row."""

    code = "duplicate_id"
    scope = Scope.PROPOSAL


class UnsortedSupportError(RemoteProtocolError):
    """Ids not ascending."""

    code = "unsorted_support"
    scope = Scope.PROPOSAL


class IdOutOfRangeError(RemoteProtocolError):
    """An id outside the vocabulary or the shard, padding included."""

    code = "id_out_of_range"
    scope = Scope.PROPOSAL


class TokenOutOfRangeError(RemoteProtocolError):
    """Sampled token outside the vocabulary."""

    code = "token_out_of_range"
    scope = Scope.PROPOSAL


class NonFiniteQError(RemoteProtocolError):
    """NaN or infinity."""

    code = "non_finite_q"
    scope = Scope.PROPOSAL


class NegativeQError(RemoteProtocolError):
    """A negative value, negative zero included."""

    code = "negative_q"
    scope = Scope.PROPOSAL


class NonDyadicQError(RemoteProtocolError):
    """Not a multiple of 2**-24."""

    code = "non_dyadic_q"
    scope = Scope.PROPOSAL


class ZeroEntryError(RemoteProtocolError):
    """A sparse entry of zero; zero counts are dropped by the sender."""

    code = "zero_entry"
    scope = Scope.PROPOSAL


class WrongMassError(RemoteProtocolError):
    """Tickets of the row do not sum to 2**24 (or to the shard's stated mass)."""

    code = "wrong_mass"
    scope = Scope.PROPOSAL


class ZeroQTokenError(RemoteProtocolError):
    """q of the proposed token is zero."""

    code = "zero_q_token"
    scope = Scope.PROPOSAL


class NonzeroTailError(RemoteProtocolError):
    """A dense column beyond the vocabulary is not +0.0."""

    code = "nonzero_tail"
    scope = Scope.PROPOSAL


class BadRowChecksumError(RemoteProtocolError):
    """Probability checksum of a row does not match."""

    code = "bad_row_checksum"
    scope = Scope.PROPOSAL


class WrongCompletionError(RemoteProtocolError):
    """COMPLETE does not match the reply: identity, size or digest."""

    code = "wrong_completion"
    scope = Scope.PROPOSAL


class FailedCompletionError(RemoteProtocolError):
    """COMPLETE says FAILED."""

    code = "failed_completion"
    scope = Scope.PROPOSAL


class StaleReplyError(RemoteProtocolError):
    """A reply or completion of an invalidated or unknown batch."""

    code = "stale_reply"
    scope = Scope.FRAME


class DuplicateReplyError(RemoteProtocolError):
    """A second reply to one STEP."""

    code = "duplicate_reply"
    scope = Scope.FRAME
