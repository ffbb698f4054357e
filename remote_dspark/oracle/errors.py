"""Everything the oracle refuses.

    OracleError(ValueError)
    ├── InvalidRowError          a row of logits, weights or tickets that defines no distribution; has a `RowFault`
    ├── InvalidProposalError     a round whose rows and tokens cannot belong together; has a `ProposalFault`
    └── CounterError             a random counter that must not be used
        ├── CounterRangeError    a field does not fit its 32 bits: exhaustion, never wrap-around
        ├── DrawReusedError      this key has already given this draw
        └── StaleDrawError       the round or the generation is older than one already used

A row fault is sticky for its row, and the host discards the whole reply (fail closed): no entry is repaired.
"""

from __future__ import annotations

from enum import StrEnum


class RowFault(StrEnum):
    """Why a row defines no distribution. Kernels report the same codes."""

    SHAPE = "shape"
    NAN = "nan"
    POSITIVE_INFINITY = "positive-infinity"
    NEGATIVE = "negative"
    TOO_LARGE = "too-large"
    ZERO_MASS = "zero-mass"
    REMAINDER = "remainder"
    FIRST_RANK = "first-rank"
    WRONG_TOTAL = "wrong-total"
    SUPPORT_ORDER = "support-order"
    ID_RANGE = "id-range"


class ProposalFault(StrEnum):
    """Why a round cannot be verified."""

    LENGTH = "length"
    PROPOSED_WITHOUT_MASS = "proposed-without-mass"
    PROPOSED_RANGE = "proposed-range"


class OracleError(ValueError):
    """Root of this package's errors."""


class InvalidRowError(OracleError):
    """A row of logits, weights or tickets that defines no distribution."""

    def __init__(self, fault: RowFault, message: str) -> None:
        super().__init__(f"{fault.value}: {message}")
        self.fault = fault


class InvalidProposalError(OracleError):
    """Proposed tokens, draft rows and target rows that cannot belong to one round."""

    def __init__(self, fault: ProposalFault, message: str) -> None:
        super().__init__(f"{fault.value}: {message}")
        self.fault = fault


class CounterError(OracleError):
    """A random counter that must not be used."""


class CounterRangeError(CounterError):
    """A counter field does not fit its width; reset the generation instead of wrapping around."""


class DrawReusedError(CounterError):
    """This key has already given this draw; resend the stored reply or reset the generation."""


class StaleDrawError(CounterError):
    """The round or the generation is older than one already used."""
