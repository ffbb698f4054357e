"""Signing keys on disk: make one, list who is allowed, countersign. The only file that writes a private key.

A key file is PKCS 8 PEM, mode 0600, created and never replaced. Whoever trusts a key puts its printed entry into an
allowed-signers file; nothing is trusted because it exists.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from coordinator.clock import SystemClock
from coordinator.errors import UsageError
from coordinator.render import Reporter, print_json, write_line
from coordinator.store import Store
from coordinator.store_files import read_file, sync, write_new
from receipts.errors import ReceiptError
from receipts.reader import read_receipt
from receipts.signing import AllowedSigners, Ed25519Signer, Role, load_signer, parse_allowed_signers
from windows.exit_codes import ExitCode


def new_key(name: str, role: str, out: Path, *, json: bool) -> int:
    """Create a key and print its allowed-signers entry.

    Raises:
        UsageError: The file exists, or name or role cannot be an entry.
    """
    private = Ed25519PrivateKey.generate()
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    if role not in get_args(Role):
        raise UsageError("no such role", expected=", ".join(get_args(Role)), found=role[:80])
    entry = signer_entry(name, role, public)
    try:
        # The entry is read back before anything is written: a key that nobody could list would be useless.
        parse_allowed_signers(b"version = 1\n\n" + entry.encode())
    except ReceiptError as error:
        raise UsageError(f"this name cannot be an allowed signer: {error}") from error
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_new(out, pem, mode=0o600)
    except FileExistsError as error:
        raise UsageError("a key is never replaced", where=str(out), found="a file of this name") from error
    sync(out, out.parent)
    keyid = Ed25519Signer(private).keyid
    if json:
        print_json({"name": name, "role": role, "keyid": keyid, "public_key": public, "private_key_file": str(out)})
    else:
        reporter = Reporter(SystemClock().utc)
        reporter.step(f"private key in {out} (0600)")
        reporter.step("add this to the allowed-signers file, whose first line is `version = 1`:")
        for line in entry.splitlines():
            write_line(sys.stdout, line)
    return int(ExitCode.DONE)


def signer_entry(name: str, role: str, public_pem: str) -> str:
    """One ``[[signer]]`` table of an allowed-signers file."""
    quoted = name.replace("\\", "\\\\").replace('"', '\\"')
    return f'[[signer]]\nname = "{quoted}"\nrole = "{role}"\npublic_key = """\n{public_pem}"""\n'


def list_keys(path: Path, *, json: bool) -> int:
    """Print the signers of a file."""
    signers = _read(path)
    if json:
        document = [
            {"name": s.entry.name, "role": s.entry.role, "keyid": s.keyid, "valid": s.entry.model_dump()["valid"]}
            for s in signers
        ]
        print_json({"sha256": signers.sha256, "signers": document})
        return int(ExitCode.DONE)
    rows = [
        (s.entry.name, s.entry.role, s.keyid, v.log, f"{v.first_sequence} to {v.last_sequence or 'open'}")
        for s in signers
        for v in s.entry.valid
    ]
    title = f"allowed signers of {path}  {signers.sha256}"
    Reporter(SystemClock().utc).table(title, ("name", "role", "key id", "log", "sequence"), rows)
    return int(ExitCode.DONE)


def signer_from(key: Path | None) -> Ed25519Signer | None:
    """The signer of a command's ``--key``; None without one.

    Raises:
        UsageError: It is not a readable Ed25519 private key.
    """
    if key is None:
        return None
    try:
        return load_signer(read_file(key))
    except ReceiptError as error:
        raise UsageError(
            f"cannot sign with this key: {error}",
            where=str(key),
            next_step="`coordinator keys new` makes one; without --key receipts are unsigned and can be countersigned",
        ) from error


def countersign_receipt(store: Path, receipt_id: str, key: Path, *, json: bool) -> int:
    """Put one more signature beside a stored receipt."""
    try:
        signer = load_signer(read_file(key))
        keeper = Store(store)
        whole_id = read_receipt(keeper.find(receipt_id)[1]).id
        name = keeper.countersign(whole_id, signer)
    except ReceiptError as error:
        raise UsageError(f"not signed: {error}", where=str(store)) from error
    if json:
        print_json({"receipt": whole_id, "keyid": signer.keyid, "envelope": name})
    else:
        Reporter(SystemClock().utc).table(f"signed {whole_id}", ("key id", "envelope"), [(signer.keyid, name)])
    return int(ExitCode.DONE)


def _read(path: Path) -> AllowedSigners:
    try:
        return parse_allowed_signers(read_file(path))
    except ReceiptError as error:
        raise UsageError(f"not an allowed-signers file: {error}", where=str(path)) from error
