"""The asyncio client: the same session and the same answers as ``client``, awaited instead of blocked on.

Rules: everything runs on one loop; any number of tasks may call at once. Cancelling a task that awaits ``step`` is a
deadline like any other: its generations are invalid at once.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from remote_dspark.wire.address import connect_socket, parse_address, require_protected, tune
from remote_dspark.wire.errors import RemoteProtocolError
from remote_dspark.wire.kinds import FrameType, Role
from remote_dspark.wire.limits import Limits
from remote_dspark.wire.mailbox import Mailbox, Tap
from remote_dspark.wire.messages import Cancel, Commit, Drain, Hello, Message, Open, Ping, Reply, Reset, State, Step
from remote_dspark.wire.table import ConnectionState
from remote_dspark.wire.tls import TlsConfig, make_context, require_pinned

T = TypeVar("T")


class AsyncDrafterClient(asyncio.Protocol):
    """The verifier's end for asyncio; see ``client.DrafterClient`` for what each method promises.

    Attributes:
        limits: What HELLO agreed on.
        session: Session id to put in messages.
        counters: Every rejection by its code, and frames and bytes both ways.
    """

    def __init__(self, mailbox: Mailbox, tls: TlsConfig | None, timeout_s: float) -> None:
        self._mailbox = mailbox
        self._tls = tls
        self._timeout_s = timeout_s
        self._batch = 0
        self._transport: asyncio.Transport | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._changed = asyncio.Event()
        self._lost = asyncio.Event()

    @classmethod
    async def connect(
        cls,
        address: str,
        hello: Hello,
        tls: TlsConfig | None = None,
        timeout_s: float = 10.0,
        *,
        tap: Tap | None = None,
    ) -> AsyncDrafterClient:
        """Connects and settles HELLO; arguments and errors as in ``DrafterClient.connect``."""
        where = parse_address(address)
        require_protected(where, has_tls=tls is not None)
        client = cls(Mailbox(hello, tap), tls, timeout_s)
        options: dict[str, Any] = {}
        if tls is not None:
            options = {
                "ssl": make_context(tls, Role.CLIENT),
                "server_hostname": "",
                "ssl_handshake_timeout": timeout_s,
                "ssl_shutdown_timeout": 1.0,
            }
        sock: socket.socket | None = None
        try:
            async with asyncio.timeout(timeout_s):
                sock = await connect_socket(where)
                await asyncio.get_running_loop().create_connection(lambda: client, sock=sock, **options)
                await client._send(hello)
                await client._wait(lambda: client._mailbox.session.state is ConnectionState.READY)
        except BaseException:
            await client.aclose()
            if sock is not None:
                # A handshake that was refused never became a connection of ours: the library would leave its socket
                # to a later turn of the loop, which may not come. Its transport goes in the turn that we wait for.
                await asyncio.sleep(0)
                sock.close()
            raise
        return client

    # -- asyncio.Protocol -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Checks the peer's certificate before a byte is sent."""
        self._transport = cast("asyncio.Transport", transport)
        tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if self._tls is not None and tls is not None:
            try:
                require_pinned(tls.getpeercert(binary_form=True), self._tls)
            except RemoteProtocolError as error:
                self._fail(error)
                self._transport.abort()
        sock = transport.get_extra_info("socket")
        if sock is not None:
            tune(sock)

    def data_received(self, data: bytes) -> None:
        """Sorts answers and wakes whoever waits."""
        self._mailbox.feed(data)
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Everybody who waits learns why."""
        if exc is not None:
            self._fail(exc)
        self._mailbox.feed(b"")
        self._can_write.set()
        self._lost.set()
        self._wake()

    def pause_writing(self) -> None:
        """The worker does not read."""
        self._can_write.clear()

    def resume_writing(self) -> None:
        """It does again."""
        self._can_write.set()

    # -- calls ----------------------------------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        """What HELLO agreed on."""
        return self._mailbox.session.limits

    @property
    def session(self) -> int:
        """Session id."""
        return self._mailbox.session.session

    @property
    def counters(self) -> dict[str, int]:
        """Live counters; copy to keep."""
        return self._mailbox.session.counters

    @property
    def is_draining(self) -> bool:
        """Whether the worker announced that it takes no new requests."""
        return self._mailbox.is_draining

    async def open(self, message: Open) -> None:
        """Takes a slot."""
        await self._acknowledged(message, (FrameType.OPEN, message.slot, message.generation))

    async def state(self, message: State) -> None:
        """Sends rows, split into chunks; waits while there is no credit."""
        async with asyncio.timeout(self._timeout_s):
            for chunk in self._mailbox.chunks(message):
                while True:
                    await self._wait(lambda: self._mailbox.session.credits > 0)
                    await self._can_write.wait()
                    if self._mailbox.session.credits > 0:
                        break
                self._write(self._mailbox.encode(chunk))

    async def step(self, message: Step, timeout_s: float | None = None) -> Reply:
        """One proposal per request: validated and complete, or an error and nothing."""
        await self._send(message)
        try:
            async with asyncio.timeout(self._timeout_s if timeout_s is None else timeout_s):
                return await self._wait(lambda: self._mailbox.round_of(message))
        except TimeoutError:
            raise self._mailbox.expire(message) from None
        except asyncio.CancelledError:
            self._mailbox.expire(message)
            raise

    async def commit(self, commits: Sequence[Commit]) -> None:
        """Sends the outcome of verified rounds; does not wait for the worker."""
        await self._can_write.wait()
        self._mailbox.require_alive()
        self._write(self._mailbox.encode_commits(commits))

    async def reset(self, message: Reset) -> None:
        """Starts a new generation in a slot."""
        await self._acknowledged(message, (FrameType.RESET, message.slot, message.new_generation))

    async def cancel(self, message: Cancel) -> None:
        """Frees a slot."""
        await self._acknowledged(message, (FrameType.CANCEL, message.slot, message.generation))

    async def ping(self, timeout_s: float | None = None) -> int:
        """Round-trip time in nanoseconds."""
        token, started = secrets.randbits(64), time.monotonic_ns()
        async with asyncio.timeout(self._timeout_s if timeout_s is None else timeout_s):
            await self._send(Ping(self.session, token))
            await self._wait(lambda: self._mailbox.pong_of(token))
        return time.monotonic_ns() - started

    async def drain(self, reason: str = "") -> None:
        """Announces that this client opens nothing any more."""
        await self._send(Drain(self.session, reason))

    def next_batch(self) -> int:
        """A fresh batch number for a STEP. Those of one batch slot must be sent in the order of their numbers."""
        self._batch += 1
        return self._batch

    def close(self) -> None:
        """Ends the connection; the worker frees every slot of the session. Idempotent.

        The socket goes when the loop has said goodbye; a loop that is about to end needs `aclose`.
        """
        self._fail(ConnectionError("this client was closed"))
        if self._transport is not None:
            self._transport.close()
        self._wake()

    async def aclose(self) -> None:
        """Closes, and waits until the socket is gone; what is unsent after the deadline is dropped."""
        self.close()
        if self._transport is None:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._lost.wait()
            # With TLS the socket below goes one turn of the loop later.
            await asyncio.sleep(0)
        except TimeoutError:
            self._transport.abort()

    # -- waiting --------------------------------------------------------------------------------------------------

    async def _acknowledged(self, message: Open | Reset | Cancel, key: tuple[FrameType, int, int]) -> None:
        async with asyncio.timeout(self._timeout_s):
            await self._send(message)
            await self._wait(lambda: self._mailbox.ack_of(key))

    async def _send(self, message: Message) -> None:
        """Encodes only when the bytes can go out in this same turn, so frames keep their order."""
        await self._can_write.wait()
        self._mailbox.require_alive()
        self._write(self._mailbox.encode(message))

    def _write(self, frame: bytearray) -> None:
        assert self._transport is not None
        self._transport.write(frame)

    async def _wait(self, ready: Callable[[], T | None]) -> T:
        while True:
            result = ready()
            if result is not None and result is not False:
                return result
            self._mailbox.require_alive()
            await self._changed.wait()

    def _wake(self) -> None:
        """Lets every waiter look once; those who find nothing wait on the next event."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _fail(self, error: Exception) -> None:
        self._mailbox.failure = self._mailbox.failure or error
