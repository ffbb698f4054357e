"""Who may connect: pinned mutual TLS, and the rule that plain sockets stay on this machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """Pinned mutual TLS 1.3.

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
