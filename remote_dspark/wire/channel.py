"""A blocking byte channel for threads: one reader and one writer at a time, plain or TLS.

Rules: no protocol here. The socket never blocks; waiting is always a poll with a deadline. TLS runs over memory
buffers under one lock, because a TLS object must not be read and written by two threads at once, while the socket may.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time

from remote_dspark.wire.address import Address, tune
from remote_dspark.wire.kinds import Role
from remote_dspark.wire.tls import TlsConfig, make_context, require_pinned

READ_BYTES = 1 << 18


class Channel:
    """A connected socket; see `connect`."""

    def __init__(self, sock: socket.socket, spin_s: float = 0.0) -> None:
        self._sock = sock
        self._spin_s = spin_s
        sock.setblocking(False)
        # One poller and one buffer for the one reader: a round costs two system calls and no allocation to receive.
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._received = memoryview(bytearray(READ_BYTES))
        self._tls: ssl.SSLObject | None = None
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls_lock = threading.Lock()
        self._write_lock = threading.Lock()

    @classmethod
    def connect(cls, address: Address, tls: TlsConfig | None, deadline: float, *, spin_s: float = 0.0) -> Channel:
        """Connects before ``deadline`` (``time.monotonic`` seconds), with the TLS handshake if configured.

        ``spin_s`` is how long a reader looks for bytes before it sleeps.
        """
        remaining = _remaining(deadline)
        if address.path:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(remaining)
                sock.connect(address.path)
            except OSError:
                sock.close()
                raise
        else:
            sock = socket.create_connection((address.host, address.port), timeout=remaining)
        tune(sock)
        channel = cls(sock, spin_s)
        try:
            if tls is not None:
                channel._handshake(tls, deadline)
        except BaseException:
            channel.close()
            raise
        return channel

    def _handshake(self, config: TlsConfig, deadline: float) -> None:
        context = make_context(config, Role.CLIENT)
        tls = context.wrap_bio(self._incoming, self._outgoing, server_side=False)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush(deadline)
                self._fill(deadline)
        self._flush(deadline)
        require_pinned(tls.getpeercert(binary_form=True), config)
        self._tls = tls

    def send(self, data: bytes | bytearray | memoryview, deadline: float) -> None:
        """Writes all of ``data`` or raises ``TimeoutError``/``OSError``, after which the channel is broken."""
        with self._write_lock:
            if self._tls is None:
                self._send_all(data, deadline)
                return
            with self._tls_lock:
                self._tls.write(data)
                sealed = self._outgoing.read()
            self._send_all(sealed, deadline)

    def receive(self, deadline: float) -> bytes | memoryview:
        """Some bytes, valid until the next call; empty at the end of the stream.

        Raises:
            TimeoutError: at the deadline, losing nothing.
        """
        if self._tls is None:
            return self._read_socket(deadline)
        while True:
            with self._tls_lock:
                try:
                    return self._tls.read(READ_BYTES)
                except ssl.SSLWantReadError:
                    pass
                except ssl.SSLZeroReturnError:
                    return b""
            if not self._fill(deadline):
                return b""

    def close(self) -> None:
        """Closes both directions; wakes a blocked reader. Idempotent."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _flush(self, deadline: float) -> None:
        data = self._outgoing.read()
        if data:
            self._send_all(data, deadline)

    def _fill(self, deadline: float) -> bool:
        data = self._read_socket(deadline)
        with self._tls_lock:
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()
        if not data and self._tls is None:
            raise ConnectionError("the peer closed the connection during the TLS handshake; is our certificate pinned?")
        return bool(data)

    def _read_socket(self, deadline: float) -> memoryview:
        """Bytes of the one receive buffer, once there are any."""
        if self._spin_s:
            until = min(time.monotonic() + self._spin_s, deadline)
            while time.monotonic() < until:
                with contextlib.suppress(BlockingIOError):
                    return self._received[: self._sock.recv_into(self._received)]
        while True:
            if self._sock.fileno() < 0:
                # The poller would look at whoever has the number now.
                raise ConnectionError("this channel was closed")
            if not self._readable.poll(_remaining(deadline) * 1000):
                raise TimeoutError("no bytes from the peer before the deadline")
            try:
                return self._received[: self._sock.recv_into(self._received)]
            except BlockingIOError:
                # Readiness may be withdrawn, for example after a bad checksum.
                continue

    def _send_all(self, data: bytes | bytearray | memoryview, deadline: float) -> None:
        view = memoryview(data)
        while view:
            remaining = _remaining(deadline)
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                self._wait_writable(remaining)

    def _wait_writable(self, remaining_s: float) -> None:
        poller = select.poll()
        poller.register(self._sock, select.POLLOUT)
        if not poller.poll(remaining_s * 1000):
            raise TimeoutError("the peer did not take the bytes before the deadline")


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("the deadline has passed")
    return remaining
