"""Where a peer is: ``host:port``, ``[v6]:port`` or ``unix:/path``, and whether a plain socket may go there."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from dataclasses import dataclass
from typing import Any

from remote_dspark.wire.errors import PlainTransportError


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed address; ``path`` is set for Unix sockets, ``host`` and ``port`` otherwise."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parses ``text``.

    Raises:
        ValueError: states the three forms.
    """
    if text.startswith("unix:") and len(text) > len("unix:"):
        return Address(path=text[len("unix:") :])
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"expected host:port, [v6]:port or unix:/path, found {text!r}")
    return Address(host=host, port=int(port))


def is_local(address: Address) -> bool:
    """Unix sockets and literal loopback addresses; a name other than ``localhost`` is not trusted to stay local."""
    if address.path or address.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return False


def require_protected(address: Address, *, has_tls: bool) -> None:
    """Plain sockets only where nobody else can listen (DECISIONS 10).

    Raises:
        PlainTransportError: names the address and the way out.
    """
    if not has_tls and not is_local(address):
        raise PlainTransportError(
            f"{address} leaves this machine: prompts and proposals need mutual TLS; give a certificate, a key and the "
            "peer's pinned certificate, or use 127.0.0.1, ::1 or unix:/path"
        )


def tune(sock: socket.socket) -> None:
    """TCP_NODELAY, and keepalive with a bounded time to notice a vanished host. Unix sockets need nothing."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # 5 s idle, then 3 probes 2 s apart; unacknowledged data gives up after 10 s. Linux names; absent elsewhere.
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 10_000)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def connect_socket(address: Address) -> socket.socket:
    """A connected non-blocking socket, which the caller closes; every address of a name is tried in order.

    Raises:
        OSError: of the last address tried.
    """
    loop = asyncio.get_running_loop()
    found: list[tuple[int, Any]] = [(socket.AF_UNIX, address.path)]
    if not address.path:
        answers = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        found = [(family, where) for family, _, _, _, where in answers]
    failure: OSError = OSError(f"{address} has no address")
    for family, where in found:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, where)
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError):
                raise
            failure = error
        else:
            return sock
    raise failure
