"""Files of the store: read once and follow nothing, create and never replace, sync what must last.

The rules of every open here: no symbolic link as the last component, regular files only, one descriptor for check and
use. Directories are the store's own.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Final

from receipts.errors import Code, ReceiptError
from receipts.reader import MAX_BYTES

_CHUNK: Final = 1 << 20


def read_file(path: Path | str, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a regular file once, through one descriptor, following no link."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ReceiptError(Code.NOT_A_FILE, f"cannot open a regular file: {error.strerror}", str(path)) from error
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise ReceiptError(Code.NOT_A_FILE, "expected a regular file", str(path))
        if facts.st_size > max_bytes:
            raise ReceiptError(Code.TOO_LARGE, f"expected at most {max_bytes} bytes, found {facts.st_size}", str(path))
        return _read_all(descriptor, facts.st_size)
    except OSError as error:
        raise ReceiptError(Code.NOT_A_FILE, f"cannot read: {error.strerror}", str(path)) from error
    finally:
        os.close(descriptor)


def _read_all(descriptor: int, size: int) -> bytes:
    # One call is enough for almost every file; a file that grows meanwhile is read no further than its size was.
    content = os.read(descriptor, size)
    while len(content) < size and (more := os.read(descriptor, size - len(content))):
        content += more
    return content


def write_new(path: Path, content: bytes, mode: int = 0o444, replace: bool = False) -> None:
    """Write a file that must not exist yet (or may, with ``replace``). Not durable until synced."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_TRUNC if replace else os.O_EXCL)
    with os.fdopen(os.open(path, flags, mode), "wb") as file:
        file.write(content)


def link_new(source: Path, target: Path) -> None:
    """Give a file a second name that must be free, or be this very file already."""
    # link, not rename: it refuses to replace what is there. The same inode there means a dead writer got this far.
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        if not source.samefile(target):
            raise ReceiptError(Code.CHAIN_DUPLICATE, "expected no file of this name", str(target)) from None


def sync(*paths: Path) -> None:
    """Return when all of ``paths`` are durable, one after the other; the first failure is raised.

    On a file system with a journal the first of them commits what all have pending, so the others cost little; asking
    from several threads at once was 10 to 20 % slower for the six paths of one receipt (docs/receipts.md, figures).
    """
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def copy_sample(source: Path, target: Path, sha256: str, size_bytes: int) -> None:
    """Copy while hashing: what is stored is what was hashed."""
    digest = hashlib.sha256()
    read_flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    write_flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with (
        os.fdopen(os.open(source, read_flags), "rb") as reader,
        os.fdopen(os.open(target, write_flags, 0o444), "wb") as writer,
    ):
        while chunk := reader.read(_CHUNK):
            digest.update(chunk)
            writer.write(chunk)
        size = writer.tell()
    if digest.hexdigest() != sha256 or size != size_bytes:
        target.unlink()
        raise ReceiptError(
            Code.DIGEST_MISMATCH,
            f"expected {size_bytes} bytes of sha256 {sha256}, found {size} of {digest.hexdigest()}",
            source.name,
        )
