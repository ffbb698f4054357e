"""Prompts leave the server only to a pinned worker: both processes over mutual TLS.

Turns red when: the ``tls`` table is not passed on, or a server whose certificate the worker does not know is served.
"""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from target_services import START_S, ServerPair

from remote_dspark.contract import DraftMode
from remote_dspark.wire.tls import fingerprint

pytestmark = [pytest.mark.models, pytest.mark.services]

NOT_READY = 3


def make_identity(folder: Path, name: str) -> str:
    """A self-signed certificate ``name.pem`` with its key; returns the fingerprint to pin."""
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
    (folder / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / f"{name}.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return fingerprint(certificate.public_bytes(serialization.Encoding.DER))


def tls_table(own: str, peer: str, peer_fingerprint: str) -> str:
    """Names are relative to the configuration file, beside which the certificates lie."""
    return (
        f'[tls]\ncert = "{own}.pem"\nkey = "{own}.key"\npeers = "{peer}.pem"\n'
        f'peer_fingerprints = ["{peer_fingerprint}"]\n'
    )


def test_a_server_drafts_over_pinned_tls_and_a_stranger_does_not(tmp_path: Path) -> None:
    pins = {name: make_identity(tmp_path, name) for name in ("worker", "verifier", "stranger")}
    servers = ServerPair(DraftMode.ON.value, tmp_path)
    try:
        servers.start_worker(tls_table("worker", "verifier", pins["verifier"]))
        servers.start_target(tls_table("verifier", "worker", pins["worker"]))
        servers.await_state("ready")
        before = servers.metrics()
        servers.complete(prompt="import os\n", max_tokens=12, seed=1, ignore_eos=True)
        after = servers.metrics()
        assert after["dspark_sampled_rounds_total"] > before["dspark_sampled_rounds_total"]
        assert after["dspark_failed_rounds_total"] == 0
        servers.start_target(tls_table("stranger", "worker", pins["worker"]), drafter="connect_timeout_s = 1.0")
        assert servers.target is not None
        assert servers.target.process.wait(START_S) == NOT_READY
    finally:
        servers.stop()
