"""The guard's one refusal.

``Refusal`` is everything a caller is told instead of a result: a code for programs, and for a person what was expected,
what was found and what to do next. Anything else that escapes is our own bug and answers ``INTERNAL``.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Refusal(Exception):
    """A named refusal; see the list of codes in ``docs/guard-protocol.md``.

    Attributes:
        code: Upper-case name for programs.
        message: One sentence for a person.
        expected: What the guard needed.
        found: What it saw.
        next_step: The next safe thing to do.
        details: Structured extra, or None.
    """

    def __init__(
        self,
        code: str,
        message: str,
        expected: str = "",
        found: str = "",
        next_step: str = "",
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.expected = expected
        self.found = found
        self.next_step = next_step
        self.details = details

    def to_document(self) -> dict[str, Any]:
        """The ``error`` object of a reply."""
        document: dict[str, Any] = {
            "code": self.code,
            "message": self.message,
            "expected": self.expected,
            "found": self.found,
            "next": self.next_step,
        }
        if self.details is not None:
            document["details"] = self.details
        return document
