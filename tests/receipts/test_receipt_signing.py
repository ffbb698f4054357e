"""Signatures: who signed, what, where in the log; and that public tools accept our envelopes and statements."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from google.protobuf import json_format
from in_toto_attestation.v1.statement import Statement as TheirStatement
from receipt_kit import LOG, allowed, draft, every_kind, signer, signers_toml
from securesystemslib.dsse import Envelope
from securesystemslib.signer import SSlibKey

from receipts.canonical import canonical_bytes
from receipts.errors import Code, ReceiptError
from receipts.fields import Kind
from receipts.signing import (
    PAYLOAD_TYPE,
    AllowedSigners,
    Ed25519Signer,
    Signature,
    key_id,
    load_signer,
    parse_allowed_signers,
    pre_authentication,
    verify_envelope,
)

CONTENT = draft(Kind.HOLD)


def verify(envelope: bytes, signers: AllowedSigners | None = None, sequence: int = 0) -> tuple[Signature, ...]:
    return verify_envelope(envelope, CONTENT, signers or allowed(), log=LOG, sequence=sequence)


def refused(envelope: bytes, signers: AllowedSigners | None = None, sequence: int = 0) -> Code:
    with pytest.raises(ReceiptError) as caught:
        verify(envelope, signers, sequence)
    return caught.value.code


def changed(envelope: bytes, **fields: object) -> bytes:
    return canonical_bytes(json.loads(envelope) | fields)


def public_pem(key: Ed25519Signer) -> str:
    return key.private_key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def test_the_pre_authentication_encoding_of_the_protocol() -> None:
    """The vector of the DSSE protocol page."""
    assert pre_authentication(b"hello world", "http://example.com/HelloWorld") == (
        b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )


def test_a_signature_of_an_allowed_key() -> None:
    (found,) = verify(signer().sign(CONTENT))
    assert (found.signer, found.role, found.keyid) == ("operator", "operator", signer().keyid)


def test_an_unknown_key_is_nobody() -> None:
    """Red when a key id is trusted because it is in the envelope."""
    assert verify(signer("stranger").sign(CONTENT)) == ()


def test_a_stranger_under_an_allowed_key_id() -> None:
    """Red when the hint decides: the signature must verify with the key that the id names here."""
    document = json.loads(signer("stranger").sign(CONTENT))
    document["signatures"][0]["keyid"] = signer().keyid
    assert refused(canonical_bytes(document)) is Code.BAD_SIGNATURE


def test_a_signature_over_the_content_without_its_type() -> None:
    """Red when the payload type is not part of what is signed (DSSE: it must be)."""
    raw = signer().private_key.sign(CONTENT)
    document = json.loads(signer().sign(CONTENT))
    document["signatures"][0]["sig"] = base64.b64encode(raw).decode()
    assert refused(canonical_bytes(document)) is Code.BAD_SIGNATURE


def test_a_good_envelope_about_another_receipt() -> None:
    """Red when the payload is verified and something else is read (the missing-binding class of attacks)."""
    assert refused(signer().sign(draft(Kind.ARM))) is Code.BAD_ENVELOPE


@pytest.mark.parametrize(
    "envelope",
    [
        b"", b"{}", b"[]", changed(signer().sign(CONTENT), payloadType="application/json"),
        changed(signer().sign(CONTENT), signatures=[]), changed(signer().sign(CONTENT), signatures=[{}]),
        changed(signer().sign(CONTENT), signatures=[{"keyid": "a", "sig": "%%"}]),
        changed(signer().sign(CONTENT), signatures=[{"keyid": 1, "sig": ""}]),
        changed(signer().sign(CONTENT), signatures=[{"keyid": "a", "sig": ""}] * 17),
        changed(signer().sign(CONTENT), extra=1), changed(signer().sign(CONTENT), payload=7),
    ],
)  # fmt: skip
def test_a_malformed_envelope(envelope: bytes) -> None:
    with pytest.raises(ReceiptError):
        verify(envelope)


def test_one_key_counts_once() -> None:
    """Red when repeating a signature adds a signer."""
    document = json.loads(signer().sign(CONTENT))
    assert len(verify(changed(signer().sign(CONTENT), signatures=document["signatures"] * 3))) == 1


def test_two_signers_in_one_envelope() -> None:
    both = [json.loads(signer(name).sign(CONTENT))["signatures"][0] for name in ("operator", "auditor")]
    found = verify(changed(signer().sign(CONTENT), signatures=both), allowed("operator", "auditor"))
    assert {signature.role for signature in found} == {"operator", "auditor"}


def test_validity_follows_the_order_of_the_log() -> None:
    """Red when a withdrawn key can sign later places, whatever time a receipt claims."""
    extra = f'[[signer.valid]]\nlog = "{LOG}"\nfirst_sequence = 2\nlast_sequence = 4\n'
    signers = parse_allowed_signers(signers_toml(extra=extra))
    envelope = signer().sign(CONTENT)
    for sequence in (2, 4):
        assert len(verify(envelope, signers, sequence)) == 1
    for sequence in (0, 1, 5):
        assert refused(envelope, signers, sequence) is Code.UNKNOWN_SIGNER
    with pytest.raises(ReceiptError):
        verify_envelope(envelope, CONTENT, signers, log="f" * 32, sequence=3)


@pytest.mark.parametrize(
    "text",
    [
        "", "version = 2\n", "version = 1\nsigner = 3\n", "version = 1\nextra = 1\n",
        '[[signer]]\nname = "x"\nrole = "operator"\npublic_key = "no"\n',
        'version = 1\n[[signer]]\nname = "x"\nrole = "operator"\npublic_key = "no"\n',
        'version = 1\n[[signer]]\nname = "x"\nrole = "root"\npublic_key = """\n' + public_pem(signer()) + '"""\n',
        'version = 1\n[[signer]]\nname = "x"\npublic_key = """\n' + public_pem(signer()) + '"""\n',
        signers_toml("operator").decode().replace('"operator"\nrole', '"second"\nrole')
        + signers_toml("operator").decode().replace("version = 1\n", ""),
    ],
)  # fmt: skip
def test_a_signers_file_that_is_refused(text: str) -> None:
    """Red when one key under two names could count as two people, or a file is read loosely."""
    with pytest.raises(ReceiptError) as caught:
        parse_allowed_signers(text.encode())
    assert caught.value.code is Code.BAD_KEY_FILE


def test_other_algorithms_are_refused() -> None:
    """Red when the algorithm is negotiated: only Ed25519 can be loaded, as signer or as allowed key."""
    other = generate_private_key(SECP256R1())
    pem = other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with pytest.raises(ReceiptError):
        load_signer(pem)
    public = other.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    entry = f'version = 1\n[[signer]]\nname = "x"\nrole = "ci"\npublic_key = """\n{public}"""\n'
    with pytest.raises(ReceiptError):
        parse_allowed_signers(entry.encode())


# -- the public peers -------------------------------------------------------------------------------------------------


def test_securesystemslib_accepts_our_envelope_and_refuses_a_changed_one() -> None:
    """The peer verifies the same bytes with its own code."""
    key = SSlibKey(signer().keyid, "ed25519", "ed25519", {"public": _raw_public()})
    envelope = Envelope.from_dict(json.loads(signer().sign(CONTENT)))
    assert envelope.payload == CONTENT
    assert envelope.payload_type == PAYLOAD_TYPE
    assert set(envelope.verify([key], 1)) == {signer().keyid}
    envelope.payload = CONTENT + b" "
    from securesystemslib.exceptions import VerificationError

    with pytest.raises(VerificationError):
        envelope.verify([key], 1)


def _raw_public() -> str:
    return signer().private_key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()


@pytest.mark.parametrize("kind", list(Kind))
def test_the_in_toto_attestation_model_accepts_every_statement(kind: Kind) -> None:
    """Red when a receipt is not an in-toto Statement v1."""
    content = next(r.content for r in every_kind().receipts if r.predicate.kind == kind.value)
    document = json.loads(content)
    theirs = TheirStatement(subjects=[], predicate_type="", predicate={})
    json_format.ParseDict(document, theirs.pb)
    theirs.validate()
    assert theirs.pb.predicate_type == document["predicateType"]
    assert theirs.pb.subject[0].digest["sha256"] == document["subject"][0]["digest"]["sha256"]


def test_openssl_verifies_what_we_signed(tmp_path: Path) -> None:
    """What docs/receipts.md tells a third person to run."""
    document = json.loads(signer().sign(CONTENT))
    payload = base64.b64decode(document["payload"])
    (tmp_path / "message").write_bytes(
        b"DSSEv1 %d %b %d " % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload)) + payload
    )
    (tmp_path / "signature").write_bytes(base64.b64decode(document["signatures"][0]["sig"]))
    (tmp_path / "key.pem").write_text(public_pem(signer()))
    command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", "key.pem", "-rawin", "-in", "message",
               "-sigfile", "signature"]  # fmt: skip
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 0
    (tmp_path / "message").write_bytes(b"DSSEv1 ")
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode != 0


def test_the_key_id_is_the_digest_of_the_der_key(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text(public_pem(signer()))
    command = ["openssl", "pkey", "-pubin", "-in", "key.pem", "-outform", "DER"]
    der = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True).stdout
    assert hashlib.sha256(der).hexdigest() == signer().keyid == key_id(signer().private_key.public_key())
