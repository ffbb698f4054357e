"""Errors of the control side. Each carries the exit code that says what state the hardware is in.

CoordinatorError
├── UsageError               2   the command line or a file it names is wrong
├── AdmissionRefused        10   refused before any host was changed
├── HardwareHeld            11   somebody else holds the hardware
├── HostUnreachable         20   nothing was changed there by this command
│   ├── HostKeyMismatch     21
│   └── HostTimedOut        22
├── GateFailed              30   a gate failed; production is restored and checked
├── OwnershipLost           40   our lease is gone; we stopped touching hosts
├── NotRestored             50   production is not proven restored; a person must look
├── LinkLost                51   link lost inside a hold; the host restores by itself
└── Interrupted            130   a person interrupted; production is restored
"""

from __future__ import annotations

from windows.exit_codes import ExitCode


class CoordinatorError(Exception):
    """Base of all refusals of the control side.

    Attributes:
        exit_code: The process exit code.
        expected: What would have been right; empty when the message says it.
        found: What was there.
        where: Host, file or field.
        next_step: What a person should do now.
    """

    exit_code: ExitCode = ExitCode.USAGE

    def __init__(
        self, message: str, *, expected: str = "", found: str = "", where: str = "", next_step: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.expected = expected
        self.found = found
        self.where = where
        self.next_step = next_step

    def lines(self) -> list[str]:
        """The message for a person, one fact a line."""
        rows = [self.message]
        for name, value in (
            ("where", self.where),
            ("expected", self.expected),
            ("found", self.found),
            ("next", self.next_step),
        ):
            if value:
                rows.append(f"  {name}: {value}")
        return rows


class UsageError(CoordinatorError):
    """The command line, or a file that it names, is wrong."""

    exit_code = ExitCode.USAGE


class AdmissionRefused(CoordinatorError):
    """A requirement is missing; no host was changed."""

    exit_code = ExitCode.ADMISSION_REFUSED


class HardwareHeld(CoordinatorError):
    """Another hold has the hardware."""

    exit_code = ExitCode.HELD_BY_OTHER


class HostUnreachable(CoordinatorError):
    """A host did not answer; this command changed nothing there."""

    exit_code = ExitCode.HOST_UNREACHABLE


class HostKeyMismatch(HostUnreachable):
    """The host presented another key than the site file pins."""

    exit_code = ExitCode.HOST_KEY_MISMATCH


class HostTimedOut(HostUnreachable):
    """The host did not answer in time."""

    exit_code = ExitCode.HOST_TIMED_OUT


class GateFailed(CoordinatorError):
    """A gate failed inside a hold; production is restored and checked."""

    exit_code = ExitCode.GATE_FAILED


class OwnershipLost(CoordinatorError):
    """The host no longer accepts our claim; nothing more was touched."""

    exit_code = ExitCode.OWNERSHIP_LOST


class NotRestored(CoordinatorError):
    """Production is not proven restored."""

    exit_code = ExitCode.NOT_RESTORED


class LinkLost(CoordinatorError):
    """The link broke inside a hold; the host restores by itself at its deadline."""

    exit_code = ExitCode.LINK_LOST


class Interrupted(CoordinatorError):
    """A person interrupted the command."""

    exit_code = ExitCode.INTERRUPTED
