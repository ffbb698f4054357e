"""A host over SSH: the only file that imports paramiko.

Rules: the host key is pinned by type and value, no agent, no password, no prompt, no configuration file; every wait has
a deadline of ours; both streams are drained; a dead link is found by TCP_USER_TIMEOUT and by a channel probe, because
the library's keepalive notices nothing; a missing exit status is LINK_LOST or SIGNALLED-unknown, never "failed".
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import shlex
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import paramiko

from coordinator.clock import Clock, SystemClock
from coordinator.errors import CoordinatorError, HostKeyMismatch, HostTimedOut, HostUnreachable
from coordinator.host import CommandResult, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

_TCP_USER_TIMEOUT_MS = 5000
_POLL_S = 0.01
_PROBE_EVERY_S = 5.0
_CHUNK = 32768


@dataclass(frozen=True)
class SshTarget:
    """Where and as whom to log in, and which key the host must show.

    Attributes:
        key_type: Type of the pinned host key, e.g. ``ssh-ed25519``.
        key_base64: Its base64 body as in ``known_hosts``.
        identity_file: Private key on this machine; nothing else is tried.
    """

    name: str
    address: str
    port: int
    user: str
    key_type: str
    key_base64: str
    identity_file: Path


class SshHost:
    """One connection to one host for one window.

    Thread-safe: commands of several threads run on channels of their own.
    """

    def __init__(self, target: SshTarget, *, connect_timeout_s: float = 10.0, clock: Clock | None = None) -> None:
        self._target = target
        self._clock = clock or SystemClock()
        self._connect_timeout_s = connect_timeout_s
        self._lock = threading.Lock()
        self._transport: paramiko.Transport | None = None

    @property
    def name(self) -> str:
        """The site file's name of the host."""
        return self._target.name

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float, cap_bytes: int = 4 << 20
    ) -> CommandResult:
        """Run one bounded command. The login shell sees one quoted line and nothing from a configuration file."""
        start = self._clock.monotonic_ns()
        deadline = start + int(timeout_s * 1e9)
        channel = self._open_channel(timeout_s)
        if channel is None:
            return CommandResult(Outcome.LINK_LOST, None, b"", b"no channel", False, self._clock.monotonic_ns() - start)
        with contextlib.closing(channel):
            outcome, code, out, err, cut = self._exchange(channel, argv, stdin, deadline, cap_bytes)
        return CommandResult(outcome, code, out, err, cut, self._clock.monotonic_ns() - start)

    def put(self, data: bytes, path: str, *, mode: int = 0o644) -> str:
        """Upload to a temporary name, check the digest there, rename."""
        digest = hashlib.sha256(data).hexdigest()
        folder, temporary = str(Path(path).parent), f"{path}.{digest[:12]}.part"
        script = (
            'set -e; umask 077; mkdir -p "$1"; cat > "$2"; '
            'test "$(sha256sum < "$2" | cut -c1-64)" = "$4" || { rm -f "$2"; echo damaged >&2; exit 9; }; '
            'chmod "$5" "$2"; sync -d "$2" 2>/dev/null || sync; mv -f "$2" "$3"'
        )
        argv = ["/bin/sh", "-c", script, "put", folder, temporary, path, digest, f"{mode:o}"]
        result = self.run(argv, stdin=data, timeout_s=30 + len(data) / 1e6)
        if result.outcome is not Outcome.EXITED or result.code != 0:
            raise HostUnreachable(
                f"cannot write {path}",
                where=self.name,
                expected="a whole file of " + digest,
                found=f"{result.outcome.value} {result.code}: {result.stderr[-200:].decode('utf-8', 'replace')}",
            )
        return digest

    def fetch(self, path: str, destination: Path, *, sha256: str, size_bytes: int) -> None:
        """Copy a file here, bounded by its announced size; the destination is complete or absent."""
        result = self.run(["/bin/cat", "--", path], timeout_s=30 + size_bytes / 1e6, cap_bytes=size_bytes + 1)
        found = hashlib.sha256(result.stdout).hexdigest()
        if result.outcome is not Outcome.EXITED or found != sha256 or len(result.stdout) != size_bytes:
            raise CoordinatorError(
                "a fetched file is not the one that was announced",
                where=f"{self.name}:{path}",
                expected=f"{sha256} ({size_bytes} bytes)",
                found=f"{found} ({len(result.stdout)} bytes, {result.outcome.value})",
            )
        destination.parent.mkdir(parents=True, exist_ok=True)
        temporary = destination.with_name(f".{destination.name}.part")
        temporary.write_bytes(result.stdout)
        temporary.replace(destination)

    def read(self, path: str, *, max_bytes: int) -> bytes:
        """Read a small file."""
        result = self.run(
            ["/usr/bin/head", "-c", str(max_bytes + 1), "--", path], timeout_s=30, cap_bytes=max_bytes + 1
        )
        if result.outcome is not Outcome.EXITED or result.code != 0:
            raise HostUnreachable(
                f"cannot read {path}", where=self.name, found=result.stderr[-200:].decode("utf-8", "replace")
            )
        if len(result.stdout) > max_bytes:
            raise CoordinatorError(
                "a file is larger than allowed", where=f"{self.name}:{path}", expected=f"at most {max_bytes} bytes"
            )
        return result.stdout

    def fingerprint(self) -> str:
        """``SHA256:`` of the pinned key, in the form OpenSSH prints."""
        digest = hashlib.sha256(base64.b64decode(self._target.key_base64)).digest()
        return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")

    def close(self) -> None:
        """Close the connection; remote work under the guard goes on."""
        with self._lock:
            if self._transport is not None:
                self._transport.close()
                self._transport = None

    def _open_channel(self, timeout_s: float) -> paramiko.Channel | None:
        # Twice: a connection that died quietly since the last command is replaced once, then the caller decides.
        for fresh in (False, True):
            transport = self._connected(force=fresh)
            try:
                return transport.open_session(timeout=min(timeout_s, self._connect_timeout_s))
            except (paramiko.SSHException, OSError, EOFError):
                continue
        return None

    def _connected(self, *, force: bool) -> paramiko.Transport:
        with self._lock:
            if self._transport is not None and self._transport.is_active() and not force:
                return self._transport
            if self._transport is not None:
                self._transport.close()
            self._transport = self._connect()
            return self._transport

    def _connect(self) -> paramiko.Transport:
        target = self._target
        where = f"{target.name} ([{target.address}]:{target.port})"
        try:
            sock = socket.create_connection((target.address, target.port), timeout=self._connect_timeout_s)
        except TimeoutError as error:
            raise HostTimedOut("the host did not answer", where=where) from error
        except OSError as error:
            raise HostUnreachable(f"cannot connect: {error}", where=where) from error
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TCP_USER_TIMEOUT_MS)
        transport = paramiko.Transport(sock)
        transport.banner_timeout = transport.auth_timeout = transport.channel_timeout = self._connect_timeout_s
        try:
            # Only the pinned type is offered, so a host cannot answer with another key and be "unknown".
            transport.get_security_options().key_types = (target.key_type,)
            transport.start_client(timeout=self._connect_timeout_s)
            self._require_pinned_key(transport, where)
            key = paramiko.PKey.from_path(target.identity_file)
            transport.auth_publickey(target.user, key)
        except CoordinatorError:
            transport.close()
            raise
        except (paramiko.SSHException, OSError, EOFError, ValueError) as error:
            transport.close()
            if "key" in str(error).lower() and "host" in str(error).lower():
                raise HostKeyMismatch(
                    f"no host key of the pinned type {target.key_type}: {error}", where=where
                ) from error
            raise HostUnreachable(f"SSH refused: {type(error).__name__}: {error}", where=where) from error
        return transport

    def _require_pinned_key(self, transport: paramiko.Transport, where: str) -> None:
        shown = transport.get_remote_server_key()
        if shown.get_name() != self._target.key_type or shown.get_base64() != self._target.key_base64:
            raise HostKeyMismatch(
                "the host shows another key than the site file pins",
                where=where,
                expected=f"{self._target.key_type} {self.fingerprint()}",
                found=f"{shown.get_name()} {shown.fingerprint}",
                next_step="find out why before you change the pin",
            )

    def _exchange(
        self, channel: paramiko.Channel, argv: Sequence[str], stdin: bytes, deadline: int, cap: int
    ) -> tuple[Outcome, int | None, bytes, bytes, bool]:
        out, err = bytearray(), bytearray()
        cut = False
        try:
            channel.settimeout(max((deadline - self._clock.monotonic_ns()) / 1e9, 0.1))
            channel.exec_command(shlex.join(argv))
            pending = memoryview(stdin)
            next_probe = self._clock.monotonic_ns() + int(_PROBE_EVERY_S * 1e9)
            while True:
                progress = False
                if pending and channel.send_ready():
                    sent = channel.send(pending[:_CHUNK])
                    pending = pending[sent:]
                    progress = True
                    if not pending:
                        channel.shutdown_write()
                elif not pending and not stdin and not channel.eof_sent:
                    channel.shutdown_write()
                for buffer, chunk in self._chunks(channel, out, err):
                    room = cap - len(buffer)
                    buffer.extend(chunk[:room])
                    cut |= len(chunk) > room
                    progress = True
                now = self._clock.monotonic_ns()
                if progress:
                    next_probe = now + int(_PROBE_EVERY_S * 1e9)
                    continue
                if channel.exit_status_ready() and not channel.recv_ready() and not channel.recv_stderr_ready():
                    return (*self._classify(channel), bytes(out), bytes(err), cut)
                if channel.closed or not self._alive(channel):
                    return Outcome.LINK_LOST, None, bytes(out), bytes(err), cut
                if now >= deadline:
                    return Outcome.TIMED_OUT, None, bytes(out), bytes(err), cut
                if now >= next_probe:
                    if not self._probe():
                        return Outcome.LINK_LOST, None, bytes(out), bytes(err), cut
                    next_probe = now + int(_PROBE_EVERY_S * 1e9)
                self._clock.sleep(_POLL_S)
        except (paramiko.SSHException, OSError, EOFError):
            return Outcome.LINK_LOST, None, bytes(out), bytes(err), cut

    @staticmethod
    def _chunks(channel: paramiko.Channel, out: bytearray, err: bytearray) -> Iterator[tuple[bytearray, bytes]]:
        if channel.recv_ready():
            yield out, channel.recv(_CHUNK)
        if channel.recv_stderr_ready():
            yield err, channel.recv_stderr(_CHUNK)

    @staticmethod
    def _alive(channel: paramiko.Channel) -> bool:
        transport = channel.get_transport()
        return transport is not None and transport.is_active()

    def _classify(self, channel: paramiko.Channel) -> tuple[Outcome, int | None]:
        # -1 is three things at once: killed by a signal, no status sent, connection lost. Only the last is told apart.
        status = channel.recv_exit_status()
        if status >= 0:
            return Outcome.EXITED, status
        return (Outcome.SIGNALLED if self._probe() else Outcome.LINK_LOST), None

    def _probe(self) -> bool:
        """True when the server still opens channels: a stopped sshd keeps its TCP connection and answers nothing."""
        transport = self._transport
        if transport is None or not transport.is_active():
            return False
        try:
            transport.open_session(timeout=3).close()
        except (paramiko.SSHException, OSError, EOFError):
            return False
        return True
