"""A blocking client for threads: one connection, one session, any number of calling threads.

Rules: no background reader. Whichever thread waits first reads the socket for all of them, so a lone STEP is woken by
its own bytes. Frames are written in the order in which the session accepted them.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from remote_dspark.wire.address import parse_address, require_protected
from remote_dspark.wire.channel import Channel
from remote_dspark.wire.kinds import FrameType
from remote_dspark.wire.limits import Limits
from remote_dspark.wire.mailbox import Mailbox, Tap
from remote_dspark.wire.messages import Cancel, Commit, Drain, Hello, Message, Open, Ping, Reply, Reset, State, Step
from remote_dspark.wire.table import ConnectionState
from remote_dspark.wire.tls import TlsConfig

T = TypeVar("T")


class DrafterClient:
    """The verifier's end.

    Every method either returns after the worker answered, or raises a ``ProtocolError`` (or ``OSError`` when the
    connection is gone). After a failed ``step`` the generations of its requests are invalid: ``reset`` or ``cancel``.

    Attributes:
        limits: What HELLO agreed on.
        session: Session id to put in messages.
        counters: Every rejection by its code, and frames and bytes both ways.
    """

    def __init__(self, channel: Channel, mailbox: Mailbox, timeout_s: float) -> None:
        self._channel = channel
        self._mailbox = mailbox
        self._timeout_s = timeout_s
        self._send_order = threading.Lock()
        self._changed = threading.Condition()
        self._is_reading = False
        self._batch = 0
        self._heart: threading.Event | None = None

    @classmethod
    def connect(
        cls,
        address: str,
        hello: Hello,
        tls: TlsConfig | None = None,
        timeout_s: float = 10.0,
        *,
        tap: Tap | None = None,
        heartbeat_s: float | None = None,
        spin_s: float = 0.0,
    ) -> DrafterClient:
        """Connects and settles HELLO.

        Args:
            address: ``host:port``, ``[v6]:port`` or ``unix:/path``.
            hello: What this end offers; ``role`` CLIENT, ``session`` 0.
            tls: Needed for anything but loopback and Unix sockets.
            timeout_s: Deadline of every call that has none of its own.
            tap: Sees every frame, see ``capture``.
            heartbeat_s: Sends PING at this interval from a thread of its own, for clients that may be idle for
                longer than the worker's idle deadline.
            spin_s: Seconds for which a waiting thread looks for bytes before it sleeps: a shorter round for a busy
                core, see ``spin``.

        Raises:
            PlainTransportError: a plain socket to another machine was asked for.
            IdentityMismatchError, BadHelloError, PeerFaultError: HELLO failed, the peer's words included.
        """
        where = parse_address(address)
        require_protected(where, has_tls=tls is not None)
        channel = Channel.connect(where, tls, time.monotonic() + timeout_s, spin_s=spin_s)
        client = cls(channel, Mailbox(hello, tap), timeout_s)
        try:
            client._write(hello)
            client._wait(lambda: client._mailbox.session.state is ConnectionState.READY, client._deadline(None))
        except BaseException:
            client.close()
            raise
        if heartbeat_s is not None:
            client._start_heart(heartbeat_s)
        return client

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

    def open(self, message: Open) -> None:
        """Takes a slot.

        Raises:
            DrafterRefusedError: the worker has no room, or refuses this request; the slot is free again.
        """
        self._acknowledged(message, (FrameType.OPEN, message.slot, message.generation))

    def state(self, message: State) -> None:
        """Sends rows, split into chunks; blocks while there is no credit. Returns when the last chunk is sent.

        Another thread's STEP goes between two chunks.
        """
        deadline = self._deadline(None)
        for chunk in self._mailbox.chunks(message):
            while not self._sent_on_credit(chunk, deadline):
                pass

    def step(self, message: Step, timeout_s: float | None = None) -> Reply:
        """One proposal per request: validated and complete, or an error and nothing.

        Safe from two threads at once with different batch slots. On the deadline the generations are invalidated
        before this returns, and the batch slot stays unusable until the worker has answered or reset.

        Raises:
            ProtocolError: the whole proposal is discarded; ``code`` says why.
        """
        deadline = self._deadline(timeout_s)
        self._write(message, deadline)
        try:
            return self._wait(lambda: self._mailbox.round_of(message), deadline)
        except TimeoutError:
            with self._changed:
                error = self._mailbox.expire(message)
            raise error from None

    def commit(self, commits: Sequence[Commit]) -> None:
        """Sends the outcome of verified rounds; does not wait."""
        deadline = self._deadline(None)
        with self._send_order:
            with self._changed:
                self._mailbox.require_alive()
                data = self._mailbox.encode_commits(commits)
            self._channel.send(data, deadline)

    def reset(self, message: Reset) -> None:
        """Starts a new generation in a slot."""
        self._acknowledged(message, (FrameType.RESET, message.slot, message.new_generation))

    def cancel(self, message: Cancel) -> None:
        """Frees a slot."""
        self._acknowledged(message, (FrameType.CANCEL, message.slot, message.generation))

    def ping(self, timeout_s: float | None = None) -> int:
        """Round-trip time in nanoseconds."""
        token, started = secrets.randbits(64), time.monotonic_ns()
        deadline = self._deadline(timeout_s)
        self._write(Ping(self.session, token), deadline)
        self._wait(lambda: self._mailbox.pong_of(token), deadline)
        return time.monotonic_ns() - started

    def drain(self, reason: str = "") -> None:
        """Announces that this client opens nothing any more."""
        self._write(Drain(self.session, reason))

    def next_batch(self) -> int:
        """A fresh batch number for a STEP. Those of one batch slot must be sent in the order of their numbers."""
        with self._changed:
            self._batch += 1
            return self._batch

    def close(self) -> None:
        """Ends the connection; the worker frees every slot of the session. Idempotent."""
        if self._heart is not None:
            self._heart.set()
        self._channel.close()
        with self._changed:
            self._mailbox.failure = self._mailbox.failure or ConnectionError("this client was closed")
            self._changed.notify_all()

    def __enter__(self) -> DrafterClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- one writer, one reader -----------------------------------------------------------------------------------

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)

    def _acknowledged(self, message: Open | Reset | Cancel, key: tuple[FrameType, int, int]) -> None:
        deadline = self._deadline(None)
        self._write(message, deadline)
        self._wait(lambda: self._mailbox.ack_of(key), deadline)

    def _sent_on_credit(self, chunk: State, deadline: float) -> bool:
        """Waits for a credit without holding the send order; False when another thread took it meanwhile."""
        self._wait(lambda: self._mailbox.session.credits > 0, deadline)
        with self._send_order:
            if self._mailbox.session.credits == 0:
                return False
            self._write_ordered(chunk, deadline)
            return True

    def _write(self, message: Message, deadline: float | None = None) -> None:
        with self._send_order:
            self._write_ordered(message, self._deadline(None) if deadline is None else deadline)

    def _write_ordered(self, message: Message, deadline: float) -> None:
        """Holds the send order: what the session accepted first is written first."""
        with self._changed:
            self._mailbox.require_alive()
            frame = self._mailbox.encode(message)
        try:
            self._channel.send(frame, deadline)
        except OSError as error:
            # Part of a frame may be out: nothing can follow it.
            with self._changed:
                self._mailbox.failure = self._mailbox.failure or error
            raise

    def _wait(self, ready: Callable[[], T | None], deadline: float) -> T:
        """Until ``ready`` gives something; reads the socket itself unless another thread is doing so."""
        with self._changed:
            while True:
                result = ready()
                if result is not None and result is not False:
                    return result
                self._mailbox.require_alive()
                if self._is_reading:
                    if not self._changed.wait(max(deadline - time.monotonic(), 0)):
                        raise TimeoutError("no answer from the drafter before the deadline")
                    continue
                self._read_once(deadline)

    def _read_once(self, deadline: float) -> None:
        """One read with the lock released; a deadline that passes here belongs to the caller alone."""
        self._is_reading = True
        self._changed.release()
        data: bytes | memoryview | None = None
        failure: Exception | None = None
        try:
            data = self._channel.receive(deadline)
        except TimeoutError:
            failure = TimeoutError("no answer from the drafter before the deadline")
        except (OSError, ValueError) as error:
            data, failure = None, error
        finally:
            self._changed.acquire()
            self._is_reading = False
            self._changed.notify_all()
        if data is not None:
            self._mailbox.feed(data)
        elif failure is not None:
            if not isinstance(failure, TimeoutError):
                self._mailbox.failure = self._mailbox.failure or failure
            raise failure

    # -- heartbeat ------------------------------------------------------------------------------------------------

    def _start_heart(self, interval_s: float) -> None:
        self._heart = threading.Event()
        threading.Thread(target=self._beat, args=(interval_s, self._heart), daemon=True, name="wire-heart").start()

    def _beat(self, interval_s: float, stop: threading.Event) -> None:
        while not stop.wait(interval_s):
            try:
                self.ping()
            except Exception:  # noqa: BLE001 - whoever calls next sees the failure; a thread has nobody to tell
                return
