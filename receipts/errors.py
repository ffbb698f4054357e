"""The one error of this package, with a stable code.

Tree::

    ReceiptError            every refusal: of bytes, a chain, a signature, a policy or a value

A code never changes its meaning: CI scripts and JUnit reports match on it. Nothing else leaves ``receipts`` for any
input; the fuzz tests hold that line.
"""

from __future__ import annotations

from enum import StrEnum


class Code(StrEnum):
    """Why something was refused."""

    # the bytes
    TOO_LARGE = "too-large"
    TOO_DEEP = "too-deep"
    TOO_MANY = "too-many-items"
    NOT_UTF8 = "not-utf8"
    NOT_JSON = "not-json"
    DUPLICATE_KEY = "duplicate-key"
    NOT_AN_INTEGER = "not-an-integer"
    INTEGER_RANGE = "integer-range"
    LONE_SURROGATE = "lone-surrogate"
    BAD_KEY = "bad-key"
    NOT_CANONICAL = "not-canonical"
    # what they say
    NOT_A_STATEMENT = "not-a-statement"
    UNKNOWN_KIND = "unknown-kind"
    SCHEMA = "schema"
    # the file
    NOT_A_FILE = "not-a-regular-file"
    NOT_WRITTEN = "not-written"
    BAD_NAME = "bad-name"
    DIGEST_MISMATCH = "digest-mismatch"
    # the chain
    CHAIN_GAP = "chain-gap"
    CHAIN_BROKEN = "chain-broken"
    CHAIN_DUPLICATE = "chain-duplicate"
    FOREIGN = "foreign-receipt"
    ROLLBACK = "rollback"
    TORN = "torn-write"
    HEAD_MISMATCH = "head-mismatch"
    SUMS_MISMATCH = "sums-mismatch"
    MISSING_PARENT = "missing-parent"
    MISSING_SAMPLE = "missing-sample"
    CLOCK = "clock"
    # the signature
    BAD_ENVELOPE = "bad-envelope"
    BAD_SIGNATURE = "bad-signature"
    UNKNOWN_SIGNER = "unknown-signer"
    UNSIGNED = "unsigned"
    BAD_KEY_FILE = "bad-key-file"
    # the gate
    POLICY = "policy"
    OVERCLAIM = "evidence-overclaim"
    RECOMPUTE = "recompute-differs"


class ReceiptError(Exception):
    """Something was refused.

    Attributes:
        code: Stable reason.
        message: Expected, found, what to do.
        where: File name, field path or receipt id; empty when there is none.
    """

    def __init__(self, code: Code, message: str, where: str = "") -> None:
        self.code = code
        self.message = message
        self.where = where
        super().__init__(f"{code.value}: {message}" + (f" (at {where})" if where else ""))

    def __reduce__(self) -> tuple[type[ReceiptError], tuple[Code, str, str]]:
        """To another process it goes as its three parts; the text alone would not make one."""
        return type(self), (self.code, self.message, self.where)

    def at(self, where: str) -> ReceiptError:
        """The same refusal with its place named, unless one is known already."""
        return self if self.where else ReceiptError(self.code, self.message, where)
