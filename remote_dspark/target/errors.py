"""Errors of the target server.

TargetError
├── ConfigError   the configuration file: names the field, the value and what was expected
├── ModelError    the checkpoint, or tokens it cannot take
├── RequestError  a client's request: becomes HTTP 400 with a code
└── DrafterError  the drafter is unreachable or incompatible at start: the server does not become READY
"""

from __future__ import annotations


class TargetError(Exception):
    """Any refusal of the target server."""


class ConfigError(TargetError):
    """The configuration is not usable."""


class ModelError(TargetError):
    """The checkpoint cannot be loaded, or tokens are outside of what it accepts."""


class DrafterError(TargetError):
    """The drafter cannot be reached, or it is not the one that the configuration asks for."""


class RequestError(TargetError):
    """A request that the server refuses.

    Attributes:
        code: Stable name of the refusal, e.g. ``unknown-field``.
        field: The field of the request, or None for the request as a whole.
    """

    def __init__(self, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.field = field
