"""The worker's end: an asyncio server in front of a `DrafterHandler`."""

from __future__ import annotations

from dataclasses import dataclass

from remote_dspark.wire.handler import DrafterHandler
from remote_dspark.wire.messages import Hello
from remote_dspark.wire.tls import TlsConfig


@dataclass(frozen=True, slots=True)
class ServerDeadlines:
    """Seconds after which a silent or slow client is let go (its slots are freed through ``on_disconnect``)."""

    hello_s: float = 10.0
    frame_s: float = 10.0
    idle_s: float = 120.0
    write_s: float = 10.0


class WireServer:
    """A running server.

    Attributes:
        address: Where it listens, ``host:port`` with the real port, or ``unix:/path``.
        counters: Sums over all connections, by code.
    """

    address: str
    counters: dict[str, int]

    async def drain(self, reason: str = "") -> None:
        """Tells every client DRAIN and accepts no new OPEN or connection."""
        raise NotImplementedError

    async def close(self) -> None:
        """Ends every connection, calling ``on_disconnect`` for each."""
        raise NotImplementedError


async def serve_wire(
    address: str,
    handler: DrafterHandler,
    hello: Hello,
    *,
    tls: TlsConfig | None = None,
    deadlines: ServerDeadlines | None = None,
    max_connections: int = 8,
) -> WireServer:
    """Listens on ``host:port`` (port 0 picks one) or ``unix:/path``; ``hello`` is what this worker offers.

    Raises:
        PlainTransportError: no ``tls`` and the address is neither loopback nor a Unix socket.
    """
    raise NotImplementedError
