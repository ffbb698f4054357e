"""Failure on real sockets: timeouts, damage, vanished and hostile peers, certificates, back-pressure.

Red when a failed round can be consumed, a slot leaks, a wait has no end, or a stranger is let in.
"""

from __future__ import annotations

import asyncio
import datetime
import gc
import io
import itertools
import socket
import threading
import time
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from wire_kit import MemoryDrafter, live_server, make_hello, make_reply, make_state

from remote_dspark.wire import connection
from remote_dspark.wire.aio import AsyncDrafterClient
from remote_dspark.wire.capture import CaptureWriter, read_capture, replay_capture
from remote_dspark.wire.client import DrafterClient
from remote_dspark.wire.codec import decode, encode
from remote_dspark.wire.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from remote_dspark.wire.kinds import Role
from remote_dspark.wire.messages import Cancel, Commit, Error, Open, Ping, Reset, Step, StepRequest
from remote_dspark.wire.prefix import prefix_digest
from remote_dspark.wire.server import ServerDeadlines, serve_wire
from remote_dspark.wire.tls import TlsConfig, fingerprint

PROMPT = [3, 1, 4, 1]


def make_step(client, slots=(0,), generation=1, round_=0, batch_slot=0, prompt=PROMPT):
    prefix = prefix_digest(prompt)
    requests = tuple(
        StepRequest(slot, generation, round_, len(prompt) - 1, prompt[-1], prefix, 700_000, 32) for slot in slots
    )
    return Step(client.session, batch_slot, client.next_batch(), 3, requests)


def open_slot(client, slot=0, generation=1):
    client.open(Open(client.session, slot, generation, 5, 700_000, 32, 3))
    client.state(make_state(client.session, slot, generation, 0, PROMPT[:-1]))


@contextmanager
def connected(**options):
    client_options = options.pop("client", {})
    with (
        live_server(**options) as live,
        DrafterClient.connect(live.server.address, make_hello(), timeout_s=5, **client_options) as client,
    ):
        yield live, client


def code_of(call, *args, **options):
    with pytest.raises(ProtocolError) as caught:
        call(*args, **options)
    return caught.value.code


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


# -- threads, asyncio, traces -----------------------------------------------------------------------------------------


def test_two_threads_with_one_batch_slot_each():
    rounds = 60
    failures = []
    with connected() as (live, client):

        def work(index):
            try:
                prompt = list(PROMPT)
                open_slot(client, index)
                for round_ in range(rounds):
                    step = make_step(client, (index,), 1, round_, index, prompt)
                    reply = client.step(step)
                    expected = make_reply(step, live.handler.limits, seed=step.batch)
                    assert np.array_equal(reply.q, expected.q)
                    client.commit([Commit(client.session, index, 1, round_, 0, 9, False, len(prompt))])
                    client.state(make_state(client.session, index, 1, len(prompt) - 1, prompt[-1:]))
                    prompt.append(9)
            except Exception as error:  # noqa: BLE001 - reported by the main thread
                failures.append(error)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not failures
        assert [name for name, _ in live.handler.log].count("step") == 2 * rounds


def test_a_long_prefill_lets_other_requests_through():
    with connected() as (live, client):
        open_slot(client, 1)
        client.open(Open(client.session, 0, 1, 5, 700_000, 32, 3))
        ids = [5] * 1600
        thread = threading.Thread(target=client.state, args=(make_state(client.session, 0, 1, 0, ids),))
        thread.start()
        live.until(lambda: len(live.handler.log) > 10)
        client.step(make_step(client, (1,)))
        thread.join(20)
        client.ping()
        names = [name for name, _ in live.handler.log]
        assert "state" in names[names.index("step") :]
        rows = np.concatenate(live.handler.rows[client.session, 0])
        assert np.array_equal(rows, make_state(client.session, 0, 1, 0, ids).rows)
        assert client.counters["credit_exceeded"] == 0


def test_the_asyncio_client():
    async def scenario(live):
        client = await AsyncDrafterClient.connect(live.server.address, make_hello(), timeout_s=5)
        session = client.session
        for slot in (0, 1):
            await client.open(Open(session, slot, 1, 5, 700_000, 32, 3))
            await client.state(make_state(session, slot, 1, 0, PROMPT[:-1]))
        steps = [make_step(client, (slot,), batch_slot=slot) for slot in (0, 1)]
        replies = await asyncio.gather(*(client.step(step) for step in steps))
        for step, reply in zip(steps, replies, strict=True):
            assert np.array_equal(reply.ids, make_reply(step, live.handler.limits, seed=step.batch).ids)
        await client.commit([Commit(session, slot, 1, 0, 0, 9, False, 4) for slot in (0, 1)])
        await client.state(make_state(session, 0, 1, 3, [1] * 40))
        await client.reset(Reset(session, 1, 1, 2, 3))
        live.handler.gate = asyncio.Event()
        step = make_step(client, (1,), generation=2)
        with pytest.raises(ProtocolError) as caught:
            await client.step(step, timeout_s=0.1)
        assert caught.value.code == "step_timeout"
        live.loop.call_soon_threadsafe(live.handler.gate.set)
        await client.cancel(Cancel(session, 1, 2))
        assert await client.ping() > 0
        await client.drain("done")
        client.close()
        with pytest.raises(ConnectionError):
            await client.ping()
        with pytest.raises(RemoteProtocolError):
            await AsyncDrafterClient.connect(live.server.address, make_hello(vocab_size=299))

    with live_server() as live:
        asyncio.run(scenario(live))
        live.until(lambda: live.server.num_connections == 0)


def test_cancelling_a_task_invalidates_its_round():
    async def scenario(live):
        client = await AsyncDrafterClient.connect(live.server.address, make_hello(), timeout_s=5)
        await client.open(Open(client.session, 0, 1, 5, 700_000, 32, 3))
        await client.state(make_state(client.session, 0, 1, 0, PROMPT[:-1]))
        task = asyncio.create_task(client.step(make_step(client)))
        while live.handler.log[-1][0] != "step":
            await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        live.loop.call_soon_threadsafe(live.handler.gate.set)
        with pytest.raises(LocalProtocolError) as caught:
            await client.step(make_step(client, batch_slot=1))
        assert caught.value.code == "generation_invalid"
        client.close()

    with live_server() as live:
        live.handler.gate = asyncio.Event()
        asyncio.run(scenario(live))


def test_a_draining_worker_takes_no_new_requests():
    with connected() as (live, client):
        open_slot(client)
        live.run(live.server.drain("maintenance"))
        client.ping()
        assert client.is_draining
        assert code_of(client.open, Open(client.session, 1, 1, 5, 700_000, 32, 3)) == "draining"
        client.step(make_step(client))
        with pytest.raises(OSError, match="refused"):
            DrafterClient.connect(live.server.address, make_hello())


def test_traces_hold_every_frame_and_replay():
    stream, ticks = io.BytesIO(), itertools.count(1000, 7)
    writer = CaptureWriter(stream, lambda: next(ticks))
    with connected(client={"tap": writer}) as (_, client):
        open_slot(client)
        reply = client.step(make_step(client))
    writer.close()
    data = stream.getvalue()
    records = read_capture(data)
    assert [r.elapsed_ns for r in records] == [7 * i for i in range(len(records))]
    replayed = [message for _, message in replay_capture(records)]
    names = [type(message).__name__ for message in replayed]
    assert names == ["Hello", "Hello", "Open", "Complete", "State", "Step", *names[6:]]
    assert sorted(names[6:]) == ["Complete", "Complete", "Reply"]
    (again,) = (message for message in replayed if type(message).__name__ == "Reply")
    assert np.array_equal(again.q, reply.q)
    for size in range(0, len(data), 7):
        with pytest.raises(RemoteProtocolError):
            read_capture(data[:size])
    for at in range(0, len(data), 5):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        with pytest.raises(RemoteProtocolError):
            read_capture(bytes(damaged))


# -- who may connect --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["0.0.0.0:0", "192.0.2.1:9", "[::]:0", "drafter.example:9"])
def test_plain_sockets_stay_on_this_machine(address):
    with pytest.raises(RemoteProtocolError) as caught:
        asyncio.run(serve_wire(address, MemoryDrafter(make_hello()), make_hello()))
    assert caught.value.code == "plain_transport"
    assert code_of(DrafterClient.connect, address, make_hello()) == "plain_transport"
    with pytest.raises(RemoteProtocolError):
        asyncio.run(AsyncDrafterClient.connect(address, make_hello()))


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:x", "host:65536", "unix:"])
def test_addresses_that_are_none(address):
    with pytest.raises(ValueError, match="expected host:port"):
        DrafterClient.connect(address, make_hello())


def make_identity(folder, name):
    """A self-signed certificate; returns (cert path, key path, fingerprint, PEM)."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    (folder / f"{name}.pem").write_bytes(pem)
    (folder / f"{name}.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return fingerprint(certificate.public_bytes(serialization.Encoding.DER)), pem


@pytest.fixture
def identities(tmp_path):
    made = {name: make_identity(tmp_path, name) for name in ("worker", "verifier", "stranger")}

    def config(own, *peers, pinned=None):
        bundle = tmp_path / f"{own}-{'-'.join(peers)}.bundle"
        bundle.write_bytes(b"".join(made[peer][1] for peer in peers))
        pins = frozenset(made[peer][0] for peer in (peers if pinned is None else pinned))
        return TlsConfig(str(tmp_path / f"{own}.pem"), str(tmp_path / f"{own}.key"), str(bundle), pins)

    return config


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_pinned_mutual_tls(identities, kind):
    worker, verifier = identities("worker", "verifier"), identities("verifier", "worker")
    with live_server(tls=worker) as live:
        if kind == "threads":
            with DrafterClient.connect(live.server.address, make_hello(), verifier, 5) as client:
                open_slot(client)
                client.state(make_state(client.session, 0, 1, 3, [1] * 100))
                client.ping()
        else:

            async def scenario():
                client = await AsyncDrafterClient.connect(live.server.address, make_hello(), verifier, 5)
                assert await client.ping() > 0
                # `close` alone leaves the TLS goodbye, and the socket, to a loop that ends here.
                await client.aclose()

            asyncio.run(scenario())


def refused_connection(address, tls):
    with pytest.raises((OSError, ProtocolError)):
        DrafterClient.connect(address, make_hello(), tls, 10)
    asyncio.run(refused_by_asyncio(address, tls))


async def refused_by_asyncio(address, tls):
    with pytest.raises((OSError, ProtocolError)):
        await AsyncDrafterClient.connect(address, make_hello(), tls, 10)
    # The client closed what it opened: nothing is left for the loop.
    assert all(t._sock is None for t in asyncio.get_running_loop()._transports.values())


def test_strangers_are_kept_out_on_both_ends(identities):
    with live_server(tls=identities("worker", "verifier")) as live:
        refused_connection(live.server.address, identities("stranger", "worker"))
        refused_connection(live.server.address, identities("verifier", "stranger"))
        refused_connection(live.server.address, None)
        assert live.handler.log == []
    # In the bundle, but not on the list: trusted by the library, refused by the pin.
    both = identities("worker", "verifier", "stranger", pinned=("verifier",))
    with live_server(tls=both) as live:
        refused_connection(live.server.address, identities("stranger", "worker"))
        live.until(lambda: live.server.counters["peer_not_pinned"] == 2)
        assert live.handler.log == []
        lax = identities("verifier", "worker", pinned=("stranger",))
        assert code_of(DrafterClient.connect, live.server.address, make_hello(), lax, 10) == "peer_not_pinned"
    # A socket left open by anything above is reported here, not in the next test.
    gc.collect()


def test_unix_sockets_are_private_and_removed(tmp_path):
    path = tmp_path / "w.sock"
    with live_server(address=f"unix:{path}") as live:
        assert path.stat().st_mode & 0o777 == 0o600
        with DrafterClient.connect(live.server.address, make_hello()) as client:
            client.ping()
    assert not path.exists()


def test_roles_of_the_tap():
    seen = []
    with connected(client={"tap": lambda role, frame: seen.append(role)}):
        pass
    assert seen == [Role.CLIENT, Role.SERVER]
