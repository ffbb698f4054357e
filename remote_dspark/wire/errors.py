"""Every refusal of the wire, each its own class with a stable ``code`` that is also its counter.

::

    ProtocolError
    ├── LocalProtocolError      our caller asked for something the protocol does not allow; nothing was sent
    └── RemoteProtocolError     the peer sent something that is refused; one subclass per reason

A check is written once and raises the subclass of RemoteProtocolError; when it fails on something we were about to
send, it is re-raised as LocalProtocolError with the same code. `Scope` says what is lost with it.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar


class Scope(Enum):
    """What a refusal takes with it."""

    CONNECTION = "connection"
    """Framing or identity is broken: nothing after this can be trusted."""
    PROPOSAL = "proposal"
    """The whole proposal is discarded and its generations are invalid until RESET; the connection goes on."""
    FRAME = "frame"
    """A late or repeated frame is dropped and counted; nothing else changes."""


class ProtocolError(Exception):
    """Base of both kinds. ``code`` names the reason; ``scope`` what is lost."""

    code: str = "protocol"
    scope: Scope = Scope.CONNECTION


class LocalProtocolError(ProtocolError):
    """We were asked to send something that is not allowed now. Nothing was sent and no state changed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code

    @classmethod
    def of(cls, error: RemoteProtocolError) -> LocalProtocolError:
        """The same refusal, found on our own message."""
        return cls(error.code, str(error))


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol, or its data is refused.

    Attributes:
        batch_slot: The in-flight batch concerned, where it is known.
        slot: The slot concerned, where it is known.
        refused: The refused message, where it could be decoded.
    """

    code: str = "remote"
    all_codes: ClassVar[dict[str, type[RemoteProtocolError]]] = {}

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.batch_slot: int | None = None
        self.slot: int | None = None
        self.refused: object = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.code in RemoteProtocolError.all_codes:
            raise TypeError(f"two refusals share the code {cls.code!r}")
        RemoteProtocolError.all_codes[cls.code] = cls


class BadMagicError(RemoteProtocolError):
    """The first bytes are not those of a v2 frame."""

    code = "bad_magic"
    scope = Scope.CONNECTION


class WrongVersionError(RemoteProtocolError):
    """A version other than 2."""

    code = "wrong_version"
    scope = Scope.CONNECTION


class BadHeaderError(RemoteProtocolError):
    """The header's own check value does not match, or a reserved byte is not zero."""

    code = "bad_header"
    scope = Scope.CONNECTION


class UnknownFrameError(RemoteProtocolError):
    """No such frame type."""

    code = "unknown_frame"
    scope = Scope.CONNECTION


class FrameTooLargeError(RemoteProtocolError):
    """Longer than this frame may be under the negotiated limits; refused before allocation."""

    code = "frame_too_large"
    scope = Scope.CONNECTION


class BadSizeError(RemoteProtocolError):
    """Payload length differs from what its own fields require."""

    code = "bad_size"
    scope = Scope.CONNECTION


class BadDigestError(RemoteProtocolError):
    """xxh3-128 of the payload does not match."""

    code = "bad_digest"
    scope = Scope.CONNECTION


class TruncatedFrameError(RemoteProtocolError):
    """The stream ended inside a frame."""

    code = "truncated_frame"
    scope = Scope.CONNECTION


class TrailingBytesError(RemoteProtocolError):
    """Bytes after the end of a frame where exactly one was expected."""

    code = "trailing_bytes"
    scope = Scope.CONNECTION


class BadFieldError(RemoteProtocolError):
    """A field outside its range or not canonical."""

    code = "bad_field"
    scope = Scope.CONNECTION


class PeerNotPinnedError(RemoteProtocolError):
    """The peer's certificate is not on the allow-list."""

    code = "peer_not_pinned"
    scope = Scope.CONNECTION


class PlainTransportError(RemoteProtocolError):
    """Plain sockets are for loopback and Unix sockets only."""

    code = "plain_transport"
    scope = Scope.CONNECTION


class BadHelloError(RemoteProtocolError):
    """HELLO is not acceptable."""

    code = "bad_hello"
    scope = Scope.CONNECTION


class TooManyConnectionsError(RemoteProtocolError):
    """The worker serves its maximum of clients."""

    code = "too_many_connections"
    scope = Scope.CONNECTION


class BufferTooSmallError(RemoteProtocolError):
    """The agreed reply buffer cannot hold the largest reply that the other limits allow."""

    code = "buffer_too_small"
    scope = Scope.CONNECTION


class HelloRequiredError(RemoteProtocolError):
    """A frame, v1 frames included, came before HELLO; no client is upgraded without it."""

    code = "hello_required"
    scope = Scope.CONNECTION


class UnexpectedFrameError(RemoteProtocolError):
    """This sender may not send this frame in this state."""

    code = "unexpected_frame"
    scope = Scope.CONNECTION


class WrongSessionError(RemoteProtocolError):
    """A session id other than ours."""

    code = "wrong_session"
    scope = Scope.CONNECTION


class WrongDialectError(RemoteProtocolError):
    """A v1 reply in a v2 session, or a v2 reply in an OFF session."""

    code = "wrong_dialect"
    scope = Scope.CONNECTION


class DrainingError(RemoteProtocolError):
    """OPEN after DRAIN."""

    code = "draining"
    scope = Scope.CONNECTION


class CreditExceededError(RemoteProtocolError):
    """More STATE chunks than credits."""

    code = "credit_exceeded"
    scope = Scope.CONNECTION


class PeerFaultError(RemoteProtocolError):
    """The peer sent a fatal ERROR."""

    code = "peer_error"
    scope = Scope.CONNECTION


class IdentityMismatchError(RemoteProtocolError):
    """An identity of HELLO differs between the ends.

    Attributes:
        field: Name of the HELLO field.
        expected: What this end has.
        found: What the peer has.
    """

    code = "identity_mismatch"
    scope = Scope.CONNECTION

    def __init__(self, field: str, expected: str, found: str) -> None:
        super().__init__(f"HELLO field {field}: expected {expected}, found {found}; start both ends from one plan")
        self.field = field
        self.expected = expected
        self.found = found
