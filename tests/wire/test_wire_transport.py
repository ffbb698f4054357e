"""Failure on real sockets: timeouts, damage, vanished and hostile peers, certificates, back-pressure.

Red when a failed round can be consumed, a slot leaks, a wait has no end, or a stranger is let in.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import suppress

import pytest
from wire_dial import PROMPT, code_of, connected, make_step, open_slot
from wire_kit import live_server, make_hello, make_reply, make_state

from remote_dspark.wire import connection
from remote_dspark.wire.client import DrafterClient
from remote_dspark.wire.codec import decode, encode
from remote_dspark.wire.errors import ProtocolError, RemoteProtocolError
from remote_dspark.wire.messages import Cancel, Error, Open, Ping, Reset, Step
from remote_dspark.wire.server import ServerDeadlines

# -- rounds that fail -------------------------------------------------------------------------------------------------


def test_a_late_reply_is_never_consumed():
    with connected() as (live, client):
        open_slot(client)
        live.handler.gate = asyncio.Event()
        step = make_step(client)
        assert code_of(client.step, step, timeout_s=0.1) == "step_timeout"
        assert code_of(client.step, make_step(client, batch_slot=1)) == "generation_invalid"
        live.loop.call_soon_threadsafe(live.handler.gate.set)
        client.reset(Reset(client.session, 0, 1, 2, 3))
        assert client.counters["stale_reply"] == 1
        reply = client.step(make_step(client, generation=2))
        assert reply.requests[0].generation == 2


def test_a_workers_refusals_have_its_reason():
    with connected() as (live, client):
        open_slot(client)
        live.handler.refuse = {"step", "open", "reset"}
        with pytest.raises(ProtocolError) as caught:
            client.step(make_step(client))
        assert (caught.value.code, caught.value.reason) == ("drafter_refused", "no_step")
        with pytest.raises(ProtocolError) as caught:
            client.open(Open(client.session, 1, 1, 5, 700_000, 32, 3))
        assert caught.value.reason == "no_open"
        with pytest.raises(ProtocolError) as caught:
            client.reset(Reset(client.session, 0, 1, 2, 3))
        assert caught.value.reason == "no_reset"
        live.handler.refuse = set()
        client.reset(Reset(client.session, 0, 2, 3, 0))
        client.state(make_state(client.session, 0, 3, 0, PROMPT[:-1]))
        client.step(make_step(client, generation=3))
        assert live.server.counters["no_step"] == 1


@pytest.mark.parametrize("fault", ["bad_q", "not_a_reply", "exception", "other_round"])
def test_a_worker_cannot_send_a_wrong_reply(fault):
    def answer(step):
        reply = make_reply(step, live.handler.limits)
        if fault == "bad_q":
            reply.q[0] = 0.123
        elif fault == "other_round":
            return make_reply(Step(step.session, 0, step.batch + 1, 3, step.requests), live.handler.limits)
        elif fault == "exception":
            raise RuntimeError("device lost")
        return None if fault == "not_a_reply" else reply

    reasons = {
        "bad_q": "non_dyadic_q",
        "not_a_reply": "wrong_reply_shape",
        "exception": "handler_fault",
        "other_round": "stale_reply",
    }
    with connected() as (live, client):
        open_slot(client)
        live.handler.reply = answer
        with pytest.raises(ProtocolError) as caught:
            client.step(make_step(client))
        # A wrong q is seen by both ends, and each refuses on its own.
        assert (caught.value.code if fault == "bad_q" else caught.value.reason) == reasons[fault]
        live.handler.reply = None
        client.reset(Reset(client.session, 0, 1, 2, 3))
        assert live.server.counters[reasons[fault]] == 1
        client.step(make_step(client, generation=2))


class Flipper:
    """A proxy that flips one bit of the worker's bytes, at ``offset`` after ``armed`` is set."""

    def __init__(self, address, offset):
        host, port = address.rsplit(":", 1)
        self.offset, self.armed = offset, threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.up = socket.create_connection((host, int(port)))
        self.threads = [threading.Thread(target=self.run, daemon=True)]
        self.threads[0].start()

    def run(self):
        self.down, _ = self.listener.accept()
        self.threads.append(threading.Thread(target=self.pump, args=(self.down, self.up, False), daemon=True))
        self.threads[1].start()
        self.pump(self.up, self.down, True)

    def pump(self, source, sink, damage):
        while True:
            try:
                data = bytearray(source.recv(1 << 16))
            except OSError:
                data = bytearray()
            if damage and data and self.armed.is_set():
                data[self.offset] ^= 1
                self.armed.clear()
            try:
                sink.sendall(data)
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
            except OSError:
                return

    def stop(self):
        for sock in (self.listener, self.up, self.down):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self.threads:
            thread.join(5)


@pytest.mark.parametrize(
    ("offset", "code"), [(0, "bad_magic"), (8, "bad_header"), (20, "bad_digest"), (200, "bad_digest")]
)
def test_damage_on_the_way_costs_the_connection_and_the_proposal(offset, code):
    with live_server() as live:
        flipper = Flipper(live.server.address, offset)
        with DrafterClient.connect(flipper.address, make_hello(), timeout_s=5) as client:
            open_slot(client)
            client.ping()
            flipper.armed.set()
            assert code_of(client.step, make_step(client)) == code
            assert client.counters[code] == 1
            with pytest.raises(ProtocolError):
                client.ping()
        flipper.stop()
        live.until(lambda: live.handler.log[-1][0] == "disconnect")


# -- clients that vanish, stall, or talk nonsense ---------------------------------------------------------------------


def raw_socket(live):
    host, port = live.server.address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=10)


def read_all(sock):
    data = b""
    while chunk := sock.recv(1 << 16):
        data += chunk
    return data


def test_a_vanished_client_frees_its_slots_once_even_during_a_step():
    with live_server() as live:
        client = DrafterClient.connect(live.server.address, make_hello())
        open_slot(client)
        live.handler.gate = asyncio.Event()
        thread = threading.Thread(target=lambda: code_or_none(client, make_step(client)))
        thread.start()
        live.until(lambda: live.handler.log[-1][0] == "step")
        client.close()
        thread.join(5)
        assert live.handler.seats
        live.loop.call_soon_threadsafe(live.handler.gate.set)
        live.until(lambda: not live.handler.seats and live.server.num_connections == 0)
        assert [name for name, _ in live.handler.log].count("disconnect") == 1


def code_or_none(client, step):
    try:
        client.step(step)
    except (ProtocolError, OSError):
        return


def test_sessions_are_isolated():
    with live_server() as live, DrafterClient.connect(live.server.address, make_hello()) as one:
        with DrafterClient.connect(live.server.address, make_hello()) as two:
            open_slot(one)
            open_slot(two)
            assert one.session != two.session
            forged = Cancel(one.session, 0, 1)
            assert code_of(two.cancel, forged) == "wrong_session"
        live.until(lambda: live.server.num_connections == 1)
        assert live.handler.seats == {(one.session, 0)}
        one.step(make_step(one))


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", bytes(64), b"DSV1" + bytes(60), b"DSW2" + bytes(60)],
)
def test_strangers_get_a_named_refusal(data):
    with live_server() as live, raw_socket(live) as sock:
        sock.sendall(data)
        answer = decode(read_all(sock), None)
        assert isinstance(answer, Error)
        assert answer.is_fatal
        assert live.server.counters[answer.code] == 1
        assert live.handler.log == []


def test_wrong_identity_tells_the_client_what_differs():
    with live_server() as live, pytest.raises(RemoteProtocolError, match="draft_sha256"):
        DrafterClient.connect(live.server.address, make_hello(draft_sha256=b"z" * 32))


@pytest.mark.parametrize("sent", [b"", b"DSW2", bytes(encode(make_hello(), None))[:-1]])
def test_silence_has_an_end(sent):
    deadlines = ServerDeadlines(hello_s=0.2, frame_s=0.2)
    with live_server(deadlines=deadlines) as live, raw_socket(live) as sock:
        sock.sendall(sent)
        started = time.monotonic()
        with pytest.raises(ConnectionResetError):
            raise_on_end(sock)
        assert time.monotonic() - started < 5
        live.until(lambda: live.server.num_connections == 0)


def raise_on_end(sock):
    if not sock.recv(1):
        raise ConnectionResetError


def test_an_idle_client_is_let_go_unless_its_heart_beats():
    deadlines = ServerDeadlines(idle_s=0.4)
    with (
        live_server(deadlines=deadlines) as live,
        DrafterClient.connect(live.server.address, make_hello(), heartbeat_s=0.1) as alive,
        DrafterClient.connect(live.server.address, make_hello()) as silent,
    ):
        live.until(lambda: live.server.num_connections == 1)
        alive.ping()
        with pytest.raises(OSError, match=r"closed|reset|peer"):
            silent.ping()


def test_half_a_frame_then_gone():
    with live_server() as live:
        with raw_socket(live) as sock:
            sock.sendall(bytes(encode(make_hello(), None))[:50])
        live.until(lambda: live.server.counters["truncated_frame"] == 1 and live.server.num_connections == 0)


def test_too_many_clients():
    with (
        live_server(max_connections=1) as live,
        DrafterClient.connect(live.server.address, make_hello()),
        pytest.raises(RemoteProtocolError, match="at most 1 clients"),
    ):
        DrafterClient.connect(live.server.address, make_hello())


def test_a_client_that_does_not_read_stops_being_served(monkeypatch):
    """Its frames stay in its own socket buffers: the worker neither buffers without end nor waits for ever."""
    # Small buffers on the worker's side. A small one on the client's would make its kernel drop our acknowledgements,
    # so that it could not send either, and another deadline would end the connection.
    monkeypatch.setattr(connection, "WRITE_HIGH_WATER", 1 << 16)
    deadlines = ServerDeadlines(write_s=0.3)
    with live_server(deadlines=deadlines) as live:
        live.server._server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        _flood_without_reading(live)


def _flood_without_reading(live):
    with raw_socket(live) as sock:
        sock.sendall(encode(make_hello(), None))
        session = decode(sock.recv(1 << 16), None).session
        ping = bytes(encode(Ping(session, 1), live.handler.limits)) * 1000
        sock.settimeout(15)
        with pytest.raises(OSError, match=r"reset|Broken"):
            send_for_ever(sock, ping)
        live.until(lambda: live.server.num_connections == 0)
        assert live.server.counters["deadline"] == 1
        assert live.server.counters["bytes_in"] < 8 << 20


def send_for_ever(sock, data):
    for _ in range(2000):
        sock.sendall(data)


def test_a_busy_worker_pauses_reading():
    with connected() as (live, client):
        open_slot(client)
        live.handler.gate = asyncio.Event()
        thread = threading.Thread(target=lambda: client.step(make_step(client)))
        thread.start()
        live.until(lambda: live.handler.log[-1][0] == "step")
        (connection,) = live.server._connections
        sent = bytes(encode(Ping(client.session, 7), client.limits))
        for _ in range(200):
            client._channel.send(sent, time.monotonic() + 5)
        live.until(lambda: connection._is_paused)
        assert len(connection._queue) < 10_000
        live.loop.call_soon_threadsafe(live.handler.gate.set)
        thread.join(10)
        client.ping()
        assert not connection._is_paused
