"""Who may connect: addresses, pinned mutual TLS, Unix sockets.

Red when a stranger is let in or a plain socket leaves this machine.
"""

from __future__ import annotations

import asyncio
import datetime
import gc

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from wire_dial import code_of, connected, open_slot
from wire_kit import MemoryDrafter, live_server, make_hello, make_state

from remote_dspark.wire.aio import AsyncDrafterClient
from remote_dspark.wire.client import DrafterClient
from remote_dspark.wire.errors import ProtocolError, RemoteProtocolError
from remote_dspark.wire.kinds import Role
from remote_dspark.wire.server import serve_wire
from remote_dspark.wire.tls import TlsConfig, fingerprint

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
