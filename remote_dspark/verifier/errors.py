"""Errors of verification.

VerifyError
├── RowError       a target row that is no distribution: sticky for its request, the whole reply is discarded
└── ProposalError  a proposal whose q the verifier cannot accept: the whole proposal is discarded
"""

from __future__ import annotations


class VerifyError(Exception):
    """Verification refused its input; nothing was committed."""


class RowError(VerifyError):
    """NaN, +inf, only -inf, or zero mass in a target row."""


class ProposalError(VerifyError):
    """Counts, support or tokens of a proposal are not what the contract allows."""
