"""The receipt store: one folder, append-only, one writer at a time. The only file that takes the store's lock.

Layout::

    HEAD                     {"count","head","log"}: the chain head, replaced atomically
    SHA256SUMS               one line per receipt and per sample; ``sha256sum -c`` accepts it
    receipts/NNNNNNNN-kind-digest12.json        0444, canonical bytes, never changed
    receipts/NNNNNNNN-kind-digest12.dsse.json   0444, the signature envelope, if signed
    samples/<sha256>         0444, raw files by content
    pending/                 what was being written; empty unless a writer died

``append`` is the whole interface for makers of receipts; everything else reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NewType, Protocol

ReceiptId = NewType("ReceiptId", str)
"""The sha256 of the stored bytes, 64 hex digits."""


class Signer(Protocol):
    """Turns the receipt's bytes into a DSSE envelope's bytes (``receipts.signing.Ed25519Signer``)."""

    def sign(self, content: bytes) -> bytes:
        """Return the envelope file's content for a payload of exactly ``content``."""


class Store:
    """A store at ``path``; the folder is created with the first append."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def append(
        self, draft: bytes, samples: Mapping[str, Path] | None = None, signer: Signer | None = None
    ) -> ReceiptId:
        """Link a draft into the chain and store it, its samples and its signature durably.

        Args:
            draft: What ``receipts.build.build_receipt`` returned.
            samples: File for every name in the receipt's ``samples``, whose digest and size must match; all or refused.
            signer: Signs the final bytes; None stores no envelope.

        Returns:
            The id of the stored receipt (not of the draft).

        Raises:
            receipts.errors.ReceiptError: The draft, a sample or the store itself is not as it must be. Nothing is
                stored then.
        """
        raise NotImplementedError
