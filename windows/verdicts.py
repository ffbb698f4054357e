"""One gate's finding, and how findings become a verdict.

Rules: three values; an empty set is UNKNOWN; one FAIL beats everything, one UNKNOWN beats every PASS. The words are
those of receipts, so a finding becomes a row of a receipt without translation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from receipts.fields import Outcome


@dataclass(frozen=True)
class Finding:
    """What one gate expected and found.

    Attributes:
        gate: Name of the gate.
        subject: What was looked at: an arm label, or two of them.
        ok: None means it could not be evaluated: UNKNOWN, never a pass.
    """

    gate: str
    subject: str
    expected: str
    found: str
    ok: bool | None

    @property
    def outcome(self) -> Outcome:
        """The finding's verdict."""
        if self.ok is None:
            return Outcome.UNKNOWN
        return Outcome.PASS if self.ok else Outcome.FAIL

    @property
    def reason(self) -> str:
        """One line for a person: what, expected, found."""
        return f"{self.subject}: {self.gate} {self.outcome.value}: expected {self.expected}, found {self.found}"

    def to_row(self) -> dict[str, Any]:
        """A row of a receipt's table."""
        return {
            "field": f"{self.subject}.{self.gate}",
            "expected": self.expected,
            "found": self.found,
            "ok": self.ok,
            "source": None,
        }


def verdict(findings: Iterable[Finding]) -> Outcome:
    """FAIL if anything failed, else UNKNOWN if anything is unknown or nothing was evaluated, else PASS."""
    outcomes = {finding.outcome for finding in findings}
    if Outcome.FAIL in outcomes:
        return Outcome.FAIL
    if Outcome.UNKNOWN in outcomes or not outcomes:
        return Outcome.UNKNOWN
    return Outcome.PASS
