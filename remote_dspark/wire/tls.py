"""Who may connect: pinned mutual TLS 1.3.

Rules: no certificate authority and no host names. The peers' certificates are the trust anchors, and after the
handshake the peer's own certificate must also be on the fingerprint list, so that nothing a pinned certificate could
sign gets in. Both ends check the other.
"""

from __future__ import annotations

import hashlib
import ssl
from dataclasses import dataclass

from remote_dspark.wire.errors import PeerNotPinnedError
from remote_dspark.wire.kinds import Role

ALPN = "dspark-wire-2"


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """Pinned mutual TLS.

    Attributes:
        cert_path: Our certificate, PEM.
        key_path: Its key, PEM.
        peers_path: PEM bundle of the certificates that may be at the other end.
        peer_fingerprints: Lower-case hex SHA-256 of their DER forms; a certificate outside this set is refused.
    """

    cert_path: str
    key_path: str
    peers_path: str
    peer_fingerprints: frozenset[str]


def make_context(config: TlsConfig, role: Role) -> ssl.SSLContext:
    """A context that demands the peer's certificate, for ``role``'s end."""
    purpose = ssl.PROTOCOL_TLS_SERVER if role is Role.SERVER else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(purpose)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    # A pinned certificate is trusted by itself, whoever issued it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_cert_chain(config.cert_path, config.key_path)
    context.load_verify_locations(cafile=config.peers_path)
    context.set_alpn_protocols([ALPN])
    if role is Role.SERVER:
        # A resumed session would not show the certificate again.
        context.num_tickets = 0
    return context


def fingerprint(der: bytes) -> str:
    """Lower-case hex SHA-256 of a DER certificate."""
    return hashlib.sha256(der).hexdigest()


def require_pinned(der: bytes | None, config: TlsConfig) -> None:
    """The peer's certificate is on the list.

    Raises:
        PeerNotPinnedError: names the fingerprint found.
    """
    found = fingerprint(der) if der else "no certificate"
    if found not in config.peer_fingerprints:
        raise PeerNotPinnedError(
            f"the peer's certificate {found} is not among the {len(config.peer_fingerprints)} pinned; add it to both "
            "the bundle and the fingerprint list if this peer is meant"
        )
