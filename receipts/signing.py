"""Ed25519 signatures in DSSE envelopes, and who may sign.

One algorithm, fixed by the format; nothing is negotiated. The payload of an envelope is the receipt file's own bytes,
and those are compared, so what was verified is what is read. A key id is a hint for finding a key, never a reason to
trust one. Keys count once, however many envelopes carry their signatures.

Validity follows the log's order: a signer's entry names the sequence numbers it may sign, because a receipt's own time
is only what its writer said.

Source: DSSE protocol v1.0 (pre-authentication encoding, verification rules).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from pydantic import Field, ValidationError

from receipts.build import schema_error
from receipts.canonical import canonical_bytes
from receipts.errors import Code, ReceiptError
from receipts.fields import Block, Count, LogId, Name, Text, _relaxed
from receipts.reader import MAX_BYTES, read_document

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
MAX_ENVELOPE_BYTES: Final = 2 * MAX_BYTES
MAX_SIGNATURES: Final = 16
Role = Literal["operator", "auditor", "ci"]


def pre_authentication(payload: bytes, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """The bytes that are signed: ``DSSEv1 len type len payload``, lengths in ASCII decimal."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def key_id(key: Ed25519PublicKey) -> str:
    """sha256 of the key's DER form: ``openssl pkey -pubin -in KEY -outform DER | sha256sum``."""
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


@dataclass(frozen=True)
class Ed25519Signer:
    """Signs receipts with one private key."""

    private_key: Ed25519PrivateKey

    @property
    def keyid(self) -> str:
        """64 hex digits naming the public key."""
        return key_id(self.private_key.public_key())

    def sign(self, content: bytes) -> bytes:
        """The envelope for a payload of exactly ``content``."""
        signature = self.private_key.sign(pre_authentication(content))
        return canonical_bytes(
            {
                "payload": base64.b64encode(content).decode(),
                "payloadType": PAYLOAD_TYPE,
                "signatures": [{"keyid": self.keyid, "sig": base64.b64encode(signature).decode()}],
            }
        )


def load_signer(pem: bytes, passphrase: bytes | None = None) -> Ed25519Signer:
    """A signer from a PEM private key (PKCS 8).

    Raises:
        ReceiptError: BAD_KEY_FILE for another algorithm, a wrong passphrase or anything else.
    """
    try:
        key = load_pem_private_key(pem, passphrase)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ReceiptError(Code.BAD_KEY_FILE, f"not a readable private key: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ReceiptError(Code.BAD_KEY_FILE, f"expected an Ed25519 key, found {type(key).__name__}")
    return Ed25519Signer(key)


class Validity(Block):
    """Which receipts of which log a signer may sign. ``last_sequence`` None: until further notice."""

    log: LogId | Literal["any"] = "any"
    first_sequence: Count = 0
    last_sequence: Count | None = None

    def covers(self, log: str, sequence: int) -> bool:
        """Whether this entry allows the place."""
        in_log = self.log in {"any", log}
        return (
            in_log
            and self.first_sequence <= sequence
            and (self.last_sequence is None or sequence <= self.last_sequence)
        )


class SignerEntry(Block):
    """One allowed signer."""

    name: Name
    role: Role
    public_key: Text
    """PEM, as ``coordinator keys new`` prints it."""
    valid: Annotated[tuple[Validity, ...], _relaxed(256, 1)] = (Validity(),)


class _SignersFile(Block):
    version: Literal[1]
    signer: Annotated[tuple[SignerEntry, ...], Field(strict=False, max_length=256)] = ()


@dataclass(frozen=True)
class AllowedSigner:
    """A signer with its key loaded."""

    entry: SignerEntry
    key: Ed25519PublicKey
    keyid: str

    def __reduce__(self) -> tuple[Callable[[SignerEntry], AllowedSigner], tuple[SignerEntry]]:
        """To another process a signer goes as its entry: a loaded key cannot travel."""
        return _load_allowed, (self.entry,)


@dataclass(frozen=True)
class Signature:
    """A signature that was verified against an allowed signer at an allowed place."""

    keyid: str
    signer: str
    role: Role


class AllowedSigners:
    """The whole of who is trusted. There is no default: no file, no trust."""

    def __init__(self, signers: Iterable[AllowedSigner], sha256: str) -> None:
        self.sha256 = sha256
        """Digest of the file, so that a site can pin it."""
        self._by_keyid = {signer.keyid: signer for signer in signers}

    def __iter__(self) -> Iterator[AllowedSigner]:
        return iter(self._by_keyid.values())

    def get(self, keyid: str) -> AllowedSigner | None:
        """The signer whose key has this id."""
        return self._by_keyid.get(keyid)


def parse_allowed_signers(content: bytes) -> AllowedSigners:
    """Read an allowed-signers file (TOML).

    Raises:
        ReceiptError: BAD_KEY_FILE with the field; also when one key is listed twice.
    """
    try:
        parsed = _SignersFile.model_validate(tomllib.loads(content.decode("utf-8")))
    except ValidationError as error:
        raise ReceiptError(Code.BAD_KEY_FILE, str(schema_error(error))) from error
    except (ValueError, RecursionError) as error:
        raise ReceiptError(Code.BAD_KEY_FILE, f"not TOML: {error}") from error
    signers = [_load_allowed(entry) for entry in parsed.signer]
    # One key under two names would let one person count as two.
    if len({signer.keyid for signer in signers}) != len(signers):
        raise ReceiptError(Code.BAD_KEY_FILE, "one key is listed under two names")
    return AllowedSigners(signers, hashlib.sha256(content).hexdigest())


def _load_allowed(entry: SignerEntry) -> AllowedSigner:
    try:
        key = load_pem_public_key(entry.public_key.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ReceiptError(Code.BAD_KEY_FILE, f"{entry.name}: not a PEM public key: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ReceiptError(Code.BAD_KEY_FILE, f"{entry.name}: expected an Ed25519 key, found {type(key).__name__}")
    return AllowedSigner(entry, key, key_id(key))


def verify_envelope(
    envelope: bytes, content: bytes, signers: AllowedSigners, *, log: str, sequence: int
) -> tuple[Signature, ...]:
    """Verify one envelope over exactly ``content``.

    Returns:
        The valid signatures of allowed signers, one per key. Empty means: signed, but by nobody we know.

    Raises:
        ReceiptError: BAD_ENVELOPE when it is malformed or about something else; BAD_SIGNATURE when an allowed key's
            signature does not verify; UNKNOWN_SIGNER when an allowed key signed outside its validity.
    """
    signatures = _parse_envelope(envelope, content)
    message = pre_authentication(content)
    valid: dict[str, Signature] = {}
    for hint, signature in signatures:
        signer = signers.get(hint)
        if signer is None:
            continue
        try:
            signer.key.verify(signature, message)
        except InvalidSignature as error:
            raise ReceiptError(Code.BAD_SIGNATURE, f"the signature of {signer.entry.name} does not verify") from error
        if not any(entry.covers(log, sequence) for entry in signer.entry.valid):
            raise ReceiptError(
                Code.UNKNOWN_SIGNER, f"{signer.entry.name} may not sign sequence {sequence} of log {log[:12]}"
            )
        valid[signer.keyid] = Signature(signer.keyid, signer.entry.name, signer.entry.role)
    return tuple(valid.values())


def _parse_envelope(envelope: bytes, content: bytes) -> list[tuple[str, bytes]]:
    document = read_document(envelope, MAX_ENVELOPE_BYTES)
    if not isinstance(document, dict) or document.keys() != {"payload", "payloadType", "signatures"}:
        raise ReceiptError(Code.BAD_ENVELOPE, "expected {payload, payloadType, signatures}")
    if document["payloadType"] != PAYLOAD_TYPE:
        raise ReceiptError(
            Code.BAD_ENVELOPE, f"expected payloadType {PAYLOAD_TYPE}, found {document['payloadType']!r:.80}"
        )
    if _base64(document["payload"]) != content:
        raise ReceiptError(Code.BAD_ENVELOPE, "the payload is not the receipt beside it")
    listed = document["signatures"]
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_SIGNATURES:
        raise ReceiptError(Code.BAD_ENVELOPE, f"expected 1 to {MAX_SIGNATURES} signatures")
    signatures = []
    for item in listed:
        if not isinstance(item, dict) or item.keys() != {"keyid", "sig"} or not isinstance(item["keyid"], str):
            raise ReceiptError(Code.BAD_ENVELOPE, "expected {keyid, sig} for each signature")
        signatures.append((item["keyid"], _base64(item["sig"])))
    return signatures


def _base64(text: object) -> bytes:
    try:
        return base64.b64decode(text if isinstance(text, str) else "!", validate=True)
    except (binascii.Error, ValueError) as error:
        raise ReceiptError(Code.BAD_ENVELOPE, "expected standard base64") from error
