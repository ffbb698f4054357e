"""Ends that look before they sleep: the same answers, the same deadlines, and an end to the looking.

Red when a spinning end misses bytes, outlives a deadline, returns early, or never goes to sleep.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest

from remote_dspark.wire.address import Address
from remote_dspark.wire.channel import Channel
from remote_dspark.wire.spin import SpinningSelector, spinning_loop

SPIN_S = 0.05


@pytest.fixture
def ends():
    """A spinning channel and the socket at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        channel = Channel.connect(Address("127.0.0.1", port, ""), None, time.monotonic() + 5, spin_s=SPIN_S)
        peer, _ = listener.accept()
        yield channel, peer
        channel.close()
        peer.close()


@pytest.mark.parametrize("delay_s", [0.0, SPIN_S / 2, 3 * SPIN_S], ids=["there", "while-spinning", "while-asleep"])
def test_bytes_are_seen_whenever_they_come(ends, delay_s):
    channel, peer = ends
    timer = threading.Timer(delay_s, peer.sendall, (b"bytes",))
    timer.start()
    assert bytes(channel.receive(time.monotonic() + 5)) == b"bytes"
    timer.join()


def test_the_end_of_the_stream_is_seen_while_spinning(ends):
    channel, peer = ends
    peer.close()
    assert bytes(channel.receive(time.monotonic() + 5)) == b""


def test_a_deadline_inside_the_spin_holds_and_loses_nothing(ends):
    channel, peer = ends
    with pytest.raises(TimeoutError):
        channel.receive(time.monotonic() + SPIN_S / 5)
    peer.sendall(b"late")
    assert bytes(channel.receive(time.monotonic() + 5)) == b"late"


def test_closing_ends_a_spinning_reader(ends):
    channel, _ = ends
    timer = threading.Timer(SPIN_S / 2, channel.close)
    timer.start()
    with pytest.raises((OSError, ValueError)):
        read_to_the_end(channel)
    timer.join()


def read_to_the_end(channel):
    """A shut-down socket may read as ended first; the next look finds it closed."""
    while channel.receive(time.monotonic() + 5) == b"":
        time.sleep(SPIN_S / 10)


def test_a_selector_returns_at_its_timeout_and_not_before():
    with SpinningSelector(SPIN_S) as selector:
        for timeout in (0.0, SPIN_S / 5, 2 * SPIN_S):
            start = time.monotonic()
            assert selector.select(timeout) == []
            assert time.monotonic() - start >= timeout


def test_a_selector_sees_what_comes_while_it_spins_and_after():
    with SpinningSelector(SPIN_S) as selector:
        near, far = socket.socketpair()
        selector.register(near, 1)
        for delay_s in (SPIN_S / 2, 2 * SPIN_S):
            timer = threading.Timer(delay_s, far.sendall, (b"x",))
            timer.start()
            ((key, _),) = selector.select(None)
            assert key.fileobj is near
            assert near.recv(8) == b"x"
            timer.join()
        near.close()
        far.close()


def test_an_idle_loop_sleeps():
    """It looks for the length of one spin, not of the wait."""

    async def idle() -> float:
        used = time.process_time()
        await asyncio.sleep(20 * SPIN_S)
        return time.process_time() - used

    with asyncio.Runner(loop_factory=lambda: spinning_loop(SPIN_S)) as runner:
        assert runner.run(idle()) < 10 * SPIN_S


def test_no_spin_is_the_usual_loop():
    with asyncio.Runner(loop_factory=lambda: spinning_loop(0.0)) as runner:
        assert not isinstance(getattr(runner.get_loop(), "_selector", None), SpinningSelector)
