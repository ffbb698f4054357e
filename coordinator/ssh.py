"""A host over SSH: the only file that imports paramiko.

Rules: the host key is pinned by type and value, no agent, no password, no prompt, no configuration file; every wait has
a deadline of ours; both streams are drained; a dead link is found by TCP_USER_TIMEOUT and by a channel probe, because
the library's keepalive notices nothing; a missing exit status is LINK_LOST or SIGNALLED-unknown, never "failed".
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import secrets
import shlex
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import paramiko

from coordinator.clock import Clock, SystemClock
from coordinator.errors import CoordinatorError, HostKeyMismatch, HostTimedOut, HostUnreachable
from coordinator.host import CommandResult, Outcome

_TCP_USER_TIMEOUT_MS = 5000
_ANSWER_S = 3.0
"""Within this a living server opens a channel or accepts a command; with the time between probes, a dead one is
noticed within 6 s."""
_PROBE_EVERY_NS = 2_500_000_000
_LATE_OUTPUT_NS = 500_000_000
_POLL_S = 0.01
_CHUNK = 32768
_FETCH_ATTEMPTS = 3
_RSA_SIGNATURES = ("rsa-sha2-512", "rsa-sha2-256")
"""What a pinned ssh-rsa key may sign with: the signature of its own name is SHA-1."""


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
        self._was_connected = False

    @property
    def name(self) -> str:
        """The site file's name of the host."""
        return self._target.name

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float, cap_bytes: int = 4 << 20
    ) -> CommandResult:
        """Run one bounded command. The login shell sees one quoted line and nothing from a configuration file.

        A command that timed out, or whose link was lost, may still run over there.

        Raises:
            HostKeyMismatch: The host shows another key; also when it does so in the middle of a window.
            HostUnreachable: No connection has been possible yet. Once there was one, its loss is an outcome.
        """
        start = self._clock.monotonic_ns()
        deadline = start + int(timeout_s * 1e9)
        channel, why = self._open_channel(timeout_s)
        if channel is None:
            lost = Outcome.LINK_LOST
            return CommandResult(lost, None, b"", why.encode(), False, self._clock.monotonic_ns() - start)
        exchange = _Exchange(channel, deadline_ns=deadline, cap=cap_bytes, clock=self._clock, probe=self._probe)
        try:
            outcome, code = exchange.run(argv, stdin)
        finally:
            # Closing says goodbye, which a link that has just died does not take; the outcome is known by then.
            with contextlib.suppress(paramiko.SSHException, OSError, EOFError):
                channel.close()
        elapsed = self._clock.monotonic_ns() - start
        return CommandResult(outcome, code, bytes(exchange.out), bytes(exchange.err), exchange.truncated, elapsed)

    def put(self, data: bytes, path: str, *, mode: int = 0o644) -> str:
        """Upload to a temporary name, check the digest there, rename."""
        digest = hashlib.sha256(data).hexdigest()
        # A name of its own: two coordinators may bring the same bytes at once.
        folder, temporary = str(Path(path).parent), f"{path}.{secrets.token_hex(6)}.part"
        script = (
            "set -e; umask 077; trap 'rm -f \"$2\"' EXIT; "
            'mkdir -p "$1"; cat > "$2"; '
            'test "$(sha256sum < "$2" | cut -c1-64)" = "$4" || { echo damaged >&2; exit 9; }; '
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
        """Copy a file here, bounded by its announced size; the destination is complete or absent.

        A link that is lost on the way costs another attempt, not a hold: reading twice does no harm.
        """
        argv = ["/bin/cat", "--", path]
        for attempt in range(_FETCH_ATTEMPTS):
            result = self.run(argv, timeout_s=30 + size_bytes / 1e6, cap_bytes=size_bytes + 1)
            if result.outcome is not Outcome.LINK_LOST:
                break
            self._clock.sleep(0.25 * 2**attempt)
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

    def _open_channel(self, timeout_s: float) -> tuple[paramiko.Channel | None, str]:
        """A channel, or None and why: a connection that died since the last command is replaced once."""
        why = ""
        for fresh in (False, True):
            try:
                transport = self._connected(force=fresh)
                return transport.open_session(timeout=min(timeout_s, _ANSWER_S)), ""
            except HostKeyMismatch:
                raise
            except HostUnreachable as error:
                # Nobody has ever answered: the caller has not reached this host. Later it is a link that got lost.
                if not self._was_connected:
                    raise
                why = "; ".join(error.lines())
                break
            except (paramiko.SSHException, OSError, EOFError) as error:
                why = f"{type(error).__name__}: {error}"
        return None, why

    def _connected(self, *, force: bool) -> paramiko.Transport:
        with self._lock:
            if self._transport is not None and self._transport.is_active() and not force:
                return self._transport
            if self._transport is not None:
                self._transport.close()
            self._transport = self._connect()
            self._was_connected = True
            return self._transport

    def _connect(self) -> paramiko.Transport:
        target = self._target
        where = f"{target.name} ([{target.address}]:{target.port})"
        try:
            # A host that answered before answers at once, or its link is lost: guards and peers are not kept waiting.
            patience_s = _ANSWER_S if self._was_connected else self._connect_timeout_s
            sock = socket.create_connection((target.address, target.port), timeout=patience_s)
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
            is_rsa = target.key_type == "ssh-rsa"
            transport.get_security_options().key_types = _RSA_SIGNATURES if is_rsa else (target.key_type,)
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

    def _probe(self) -> bool:
        """Whether the server still opens channels: a stopped sshd keeps its TCP connection and answers nothing."""
        transport = self._transport
        if transport is None or not transport.is_active():
            return False
        try:
            transport.open_session(timeout=_ANSWER_S).close()
        except (paramiko.SSHException, OSError, EOFError):
            # A connection that does not answer is given up for everybody who uses it; the next command connects anew.
            transport.close()
            return False
        return True


class _Exchange:
    """One command on one channel: feeds its input, drains both streams, keeps the deadline.

    Args:
        probe: Says whether the connection still answers.
    """

    def __init__(
        self, channel: paramiko.Channel, *, deadline_ns: int, cap: int, clock: Clock, probe: Callable[[], bool]
    ) -> None:
        self.out = bytearray()
        self.err = bytearray()
        self.truncated = False
        self._channel = channel
        self._deadline_ns = deadline_ns
        self._cap = cap
        self._clock = clock
        self._probe = probe

    def run(self, argv: Sequence[str], stdin: bytes) -> tuple[Outcome, int | None]:
        """How it ended; what was read stays in ``out`` and ``err``."""
        try:
            self._start(argv)
            return self._until_the_end(memoryview(stdin))
        except (paramiko.SSHException, OSError, EOFError):
            return Outcome.LINK_LOST, None

    def _start(self, argv: Sequence[str]) -> None:
        # paramiko waits for the answer without a bound: a watchdog ends that wait by ending the connection.
        transport = self._channel.get_transport()
        watchdog = threading.Timer(_ANSWER_S, transport.close)
        watchdog.daemon = True
        watchdog.start()
        try:
            self._channel.exec_command(shlex.join(argv))
        finally:
            watchdog.cancel()

    def _until_the_end(self, pending: memoryview) -> tuple[Outcome, int | None]:
        if not pending:
            self._channel.shutdown_write()
        next_probe_ns = self._clock.monotonic_ns() + _PROBE_EVERY_NS
        ended_ns = 0
        while True:
            # Asked before reading, so that what came together with the status is read.
            ended = self._channel.exit_status_ready()
            is_complete = self._channel.eof_received or self._channel.closed
            pending, fed = self._feed(pending)
            moved = self._drain() or fed
            now_ns = self._clock.monotonic_ns()
            if moved:
                next_probe_ns = now_ns + _PROBE_EVERY_NS
            elif ended:
                ended_ns = ended_ns or now_ns
                # The status may overtake the output; a grandchild that keeps the stream open is not waited for.
                if is_complete or now_ns - ended_ns > _LATE_OUTPUT_NS:
                    return self._classify()
            elif self._channel.closed or not self._is_active():
                return Outcome.LINK_LOST, None
            if now_ns >= self._deadline_ns:
                return Outcome.TIMED_OUT, None
            if now_ns >= next_probe_ns:
                if not self._probe():
                    return Outcome.LINK_LOST, None
                next_probe_ns = self._clock.monotonic_ns() + _PROBE_EVERY_NS
            if not moved:
                self._clock.sleep(_POLL_S)

    def _feed(self, pending: memoryview) -> tuple[memoryview, bool]:
        """Send some of the input; what is left of it, and whether any was sent."""
        if not pending or not self._channel.send_ready():
            return pending, False
        try:
            sent = self._channel.send(pending[:_CHUNK])
        except OSError:
            # A command that ends without reading its input is not a lost link: the loop tells the two apart.
            return memoryview(b""), False
        if sent == len(pending):
            self._channel.shutdown_write()
        return pending[sent:], True

    def _drain(self) -> bool:
        """Read what has arrived on either stream; whether anything had."""
        moved = False
        if self._channel.recv_ready():
            self._keep(self.out, self._channel.recv(_CHUNK))
            moved = True
        if self._channel.recv_stderr_ready():
            self._keep(self.err, self._channel.recv_stderr(_CHUNK))
            moved = True
        return moved

    def _keep(self, buffer: bytearray, chunk: bytes) -> None:
        room = self._cap - len(buffer)
        buffer.extend(chunk[:room])
        self.truncated |= len(chunk) > room

    def _is_active(self) -> bool:
        transport = self._channel.get_transport()
        return transport is not None and transport.is_active()

    def _classify(self) -> tuple[Outcome, int | None]:
        # -1 is three things at once: killed by a signal, no status sent, connection lost. Only the last is told apart.
        status = self._channel.recv_exit_status()
        if status >= 0:
            return Outcome.EXITED, status
        return (Outcome.SIGNALLED if self._probe() else Outcome.LINK_LOST), None
