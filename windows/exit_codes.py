"""What the exit code of ``coordinator`` says about the hardware, and which code wins when several apply.

Rules: one enum, no other number ever leaves the program; the order is DECISIONS 16: what a person must look at comes
first, what touched nothing comes last.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Final


class ExitCode(IntEnum):
    """Every exit code, with the state the hardware is in."""

    DONE = 0
    USAGE = 2
    ADMISSION_REFUSED = 10
    HELD_BY_OTHER = 11
    HOST_UNREACHABLE = 20
    HOST_KEY_MISMATCH = 21
    HOST_TIMED_OUT = 22
    GATE_FAILED = 30
    WORSE = 31
    INCONCLUSIVE = 32
    INVALID = 33
    OWNERSHIP_LOST = 40
    NOT_RESTORED = 50
    LINK_LOST = 51
    RECEIPTS_INVALID = 60
    INTERRUPTED = 130

    @property
    def meaning(self) -> str:
        """One sentence for a person."""
        return _MEANING[self]


_MEANING: Final[dict[ExitCode, str]] = {
    ExitCode.DONE: "done",
    ExitCode.USAGE: "the command line or a file is wrong; nothing was touched",
    ExitCode.ADMISSION_REFUSED: "admission refused; nothing was touched",
    ExitCode.HELD_BY_OTHER: "the hardware is held by someone else; nothing was touched",
    ExitCode.HOST_UNREACHABLE: "a host cannot be reached; nothing was stopped",
    ExitCode.HOST_KEY_MISMATCH: "a host shows another key than the pinned one; nothing was sent to it",
    ExitCode.HOST_TIMED_OUT: "a host did not answer in time; nothing was stopped",
    ExitCode.GATE_FAILED: "a gate failed; production is restored and checked",
    ExitCode.WORSE: "the comparison says WORSE; production is restored and checked",
    ExitCode.INCONCLUSIVE: "the comparison says INCONCLUSIVE; production is restored and checked",
    ExitCode.INVALID: "the comparison is INVALID; production is restored and checked",
    ExitCode.OWNERSHIP_LOST: "the hold is no longer ours; we stopped touching the hosts",
    ExitCode.NOT_RESTORED: "production is NOT proven restored; a person must look now",
    ExitCode.LINK_LOST: "the link was lost inside a hold; the hosts restore by themselves at the printed time",
    ExitCode.RECEIPTS_INVALID: "receipts do not verify",
    ExitCode.INTERRUPTED: "interrupted; production is restored and checked",
}

PRECEDENCE: Final[tuple[ExitCode, ...]] = (
    ExitCode.NOT_RESTORED,
    ExitCode.LINK_LOST,
    ExitCode.OWNERSHIP_LOST,
    ExitCode.INTERRUPTED,
    ExitCode.INVALID,
    ExitCode.GATE_FAILED,
    ExitCode.WORSE,
    ExitCode.INCONCLUSIVE,
    ExitCode.RECEIPTS_INVALID,
    # DECISIONS 16 says 20-22 without an order; a wrong key is the one that may be an attack.
    ExitCode.HOST_KEY_MISMATCH,
    ExitCode.HOST_UNREACHABLE,
    ExitCode.HOST_TIMED_OUT,
    ExitCode.HELD_BY_OTHER,
    ExitCode.ADMISSION_REFUSED,
    ExitCode.USAGE,
    ExitCode.DONE,
)
"""The first one that applies wins."""


def combine(codes: Iterable[int]) -> ExitCode:
    """The code of a command of which several parts ended.

    Raises:
        ValueError: No code at all (nothing ran, so nothing is known), or a number that is none of ours.
    """
    present = {ExitCode(code) for code in codes}
    for code in PRECEDENCE:
        if code in present:
            return code
    raise ValueError("combine: found no code, expected at least one; a command that ran nothing is no success")
