"""The worker's end: an asyncio server in front of a `DrafterHandler`.

Rules: sessions are isolated (own state machine, own buffers, own session id) and share only the handler; a connection
beyond the maximum is refused by name. What one connection does is in ``connection``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

from remote_dspark.wire.address import Address, parse_address, require_protected, tune
from remote_dspark.wire.connection import Connection
from remote_dspark.wire.control import require_hello
from remote_dspark.wire.counters import new_counters
from remote_dspark.wire.deadlines import ServerDeadlines
from remote_dspark.wire.errors import TooManyConnectionsError
from remote_dspark.wire.handler import DrafterHandler
from remote_dspark.wire.kinds import Role
from remote_dspark.wire.mailbox import Tap
from remote_dspark.wire.messages import Hello
from remote_dspark.wire.session import Session
from remote_dspark.wire.tls import TlsConfig, make_context, require_pinned

__all__ = ["ServerDeadlines", "WireServer", "serve_wire"]

CLOSE_S = 10.0


class WireServer:
    """A running server; made by `serve_wire`.

    Attributes:
        address: Where it listens, ``host:port`` with the real port, or ``unix:/path``.
        counters: Sums over all connections, by code.
        num_connections: Open connections.
    """

    def __init__(
        self,
        handler: DrafterHandler,
        hello: Hello,
        tls: TlsConfig | None,
        deadlines: ServerDeadlines,
        *,
        max_connections: int,
        tap: Tap | None,
    ) -> None:
        self.address = ""
        self.counters = new_counters()
        self._handler = handler
        self._hello = hello
        self._tls = tls
        self._deadlines = deadlines
        self._max_connections = max_connections
        self._tap = tap
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self._path: Path | None = None

    @property
    def num_connections(self) -> int:
        """Open connections."""
        return len(self._connections)

    async def start(self, address: Address) -> None:
        """Listens."""
        loop = asyncio.get_running_loop()
        options: dict[str, Any] = {}
        if self._tls is not None:
            options = {
                "ssl": make_context(self._tls, Role.SERVER),
                "ssl_handshake_timeout": self._deadlines.hello_s,
                "ssl_shutdown_timeout": 1.0,
            }
        if address.path:
            # Mode 0600 from the first moment: a chmod afterwards would leave a gap.
            before = os.umask(0o177)
            try:
                self._server = await loop.create_unix_server(self._accept, address.path, **options)
            finally:
                os.umask(before)
            self._path = Path(address.path)
            self.address = str(address)
        else:
            self._server = await loop.create_server(self._accept, address.host, address.port, **options)
            port = self._server.sockets[0].getsockname()[1]
            self.address = str(Address(host=address.host, port=port))

    async def drain(self, reason: str = "") -> None:
        """Tells every client DRAIN and accepts no new OPEN or connection."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.announce_drain(reason)

    async def close(self) -> None:
        """Ends every connection, calling ``on_disconnect`` for each. Idempotent."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.close()
        async with asyncio.timeout(CLOSE_S):
            while self._connections:
                await asyncio.wait(
                    [asyncio.ensure_future(connection.finished()) for connection in tuple(self._connections)]
                )
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()

    def _accept(self) -> Connection:
        session = Session(Role.SERVER, replace(self._hello, session=secrets.randbits(63) + 1), self.counters)
        return Connection(
            self._handler,
            session,
            self._deadlines,
            admit=self._admit,
            on_end=self._connections.discard,
            tap=self._tap,
        )

    def _admit(self, connection: Connection, transport: asyncio.Transport) -> None:
        self._connections.add(connection)
        if len(self._connections) > self._max_connections:
            raise TooManyConnectionsError(f"at most {self._max_connections} clients are served at a time")
        if self._tls is not None:
            tls: ssl.SSLObject = transport.get_extra_info("ssl_object")
            require_pinned(tls.getpeercert(binary_form=True), self._tls)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            tune(sock)


async def serve_wire(
    address: str,
    handler: DrafterHandler,
    hello: Hello,
    *,
    tls: TlsConfig | None = None,
    deadlines: ServerDeadlines | None = None,
    max_connections: int = 8,
    tap: Tap | None = None,
) -> WireServer:
    """Listens on ``host:port`` (port 0 picks one), ``[v6]:port`` or ``unix:/path`` (mode 0600).

    Args:
        address: Where.
        handler: The drafter.
        hello: What this worker offers; role and session are set per connection.
        tls: Needed for anything but loopback and Unix sockets.
        deadlines: Defaults of `ServerDeadlines`.
        max_connections: Further clients are refused by name.
        tap: Sees every frame of every connection.

    Raises:
        PlainTransportError: no ``tls`` and the address is neither loopback nor a Unix socket.
        BadHelloError: the offer itself is not acceptable.
    """
    where = parse_address(address)
    require_protected(where, has_tls=tls is not None)
    offer = replace(hello, role=Role.SERVER, session=1)
    require_hello(offer)
    server = WireServer(handler, offer, tls, deadlines or ServerDeadlines(), max_connections=max_connections, tap=tap)
    await server.start(where)
    return server
