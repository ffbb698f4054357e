"""A blocking client for threads: one connection, one session, any number of calling threads."""

from __future__ import annotations

from collections.abc import Sequence

from remote_dspark.wire.limits import Limits
from remote_dspark.wire.messages import Cancel, Commit, Hello, Open, Reply, Reset, State, Step
from remote_dspark.wire.tls import TlsConfig


class DrafterClient:
    """The verifier's end.

    Every method either returns after the worker answered, or raises a ``ProtocolError`` (or ``OSError`` when the
    connection is gone). After a failed ``step`` the generations of its requests are invalid: ``reset`` or ``cancel``.

    Attributes:
        limits: What HELLO agreed on.
        session: Session id to put in messages.
        counters: Every rejection by its code, and frames and bytes both ways.
    """

    limits: Limits
    session: int
    counters: dict[str, int]

    @classmethod
    def connect(
        cls, address: str, hello: Hello, tls: TlsConfig | None = None, timeout_s: float = 10.0
    ) -> DrafterClient:
        """Connects and settles HELLO. ``address`` is ``host:port`` or ``unix:/path``."""
        raise NotImplementedError

    def open(self, message: Open) -> None:
        """Takes a slot."""
        raise NotImplementedError

    def state(self, message: State) -> None:
        """Sends rows, split into chunks; blocks while there is no credit. Returns when the last chunk is sent."""
        raise NotImplementedError

    def step(self, message: Step, timeout_s: float | None = None) -> Reply:
        """One proposal per request: validated and complete, or an error and nothing.

        Safe from two threads at once with different batch slots. On the deadline the generations are invalidated
        before this returns, and the batch slot stays unusable until the worker has answered or reset.
        """
        raise NotImplementedError

    def commit(self, commits: Sequence[Commit]) -> None:
        """Sends the outcome of verified rounds; does not wait."""
        raise NotImplementedError

    def reset(self, message: Reset) -> None:
        """Starts a new generation in a slot."""
        raise NotImplementedError

    def cancel(self, message: Cancel) -> None:
        """Frees a slot."""
        raise NotImplementedError

    def ping(self, timeout_s: float | None = None) -> int:
        """Round-trip time in nanoseconds."""
        raise NotImplementedError

    def drain(self, reason: str = "") -> None:
        """Announces that this client opens nothing any more."""
        raise NotImplementedError

    def next_batch(self) -> int:
        """A fresh batch number for a STEP."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the connection; the worker frees every slot of the session. Idempotent."""
        raise NotImplementedError
