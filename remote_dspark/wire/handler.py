"""What a drafter worker implements to be served over the wire.

Rules: the server has already checked everything the wire can check (bounds, generations, rounds, prefix digest,
state positions), and calls one method at a time per connection, in the order of the frames. A method is plain or
``async``; a plain one runs on the event loop and must be short. Slots are numbered per session.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from remote_dspark.wire.messages import Cancel, Commit, Open, Reply, Reset, State, Step


class DrafterRefusal(Exception):
    """Raised by a handler method: becomes an ERROR frame; the slot or batch concerned is invalid until RESET.

    Attributes:
        code: ``[a-z0-9_]``, at most 48 characters; counted by both ends.
        detail: For people.
    """

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class DrafterHandler(Protocol):
    """Callbacks of ``serve_wire``; every message carries its session id."""

    def on_open(self, message: Open) -> Awaitable[None] | None:
        """Takes a seat; raise `DrafterRefusal` ("no_free_slot") if the worker is full."""

    def on_state(self, message: State) -> Awaitable[None] | None:
        """Appends rows; the credit returns to the client when this is done. The arrays are views: copy to keep."""

    def on_step(self, message: Step) -> Awaitable[Reply] | Reply:
        """Drafts; return ``reply.build_reply(...)``. A wrong reply is refused and never completes."""

    def on_commit(self, message: Commit) -> Awaitable[None] | None:
        """Accepts the outcome of the round; speculative entries beyond it are dropped."""

    def on_reset(self, message: Reset) -> Awaitable[None] | None:
        """Drops all speculation; keeps the first ``keep_position`` committed rows."""

    def on_cancel(self, message: Cancel) -> Awaitable[None] | None:
        """Frees the seat."""

    def on_disconnect(self, session: int) -> Awaitable[None] | None:
        """The client is gone, in whatever way: frees all its seats. Called exactly once per session."""
