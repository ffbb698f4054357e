"""The receipt store: one folder, append-only, one writer at a time. The only file that takes the store's lock.

Layout::

    HEAD                     {"count","head","log"}: the chain head, replaced atomically
    SHA256SUMS               one line per receipt, envelope and sample; ``sha256sum -c`` accepts it
    receipts/NNNNNNNN-kind-digest12.json              0444, canonical bytes, never changed
    receipts/NNNNNNNN-kind-digest12.keyid12.dsse.json 0444, one signature envelope per signer
    samples/<sha256>         0444, raw files by content
    logs/<log>/              another log that was merged: a whole store of its own, never written again
    pending/                 what is being written; empty unless a writer died

Everything of one receipt is written and synced in ``pending/`` first; that all of it is there, whole, is the commit
point (names carry digests, so a torn file shows). After it, the same idempotent steps publish it, whether this writer
does them or the next one after a crash; before it, nothing has happened. Reading opens regular files only, follows no
link and leaves the folder alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NewType, Protocol

from filelock import FileLock, Timeout

from coordinator.store_files import copy_sample, link_new, read_file, sync, write_new
from coordinator.store_snapshot import (
    ENVELOPE_NAME,
    OWN_NAMES,
    RECEIPT_NAME,
    Snapshot,
    envelopes_of,
    listed_entries,
    receipt_stem,
    take_snapshot,
)
from receipts.chain import Head, link_draft, parse_head
from receipts.errors import Code, ReceiptError
from receipts.findings import Entry
from receipts.model import Predicate
from receipts.raw import MAX_SAMPLE_BYTES, check_sample
from receipts.reader import Receipt, read_document, read_receipt
from receipts.signing import MAX_ENVELOPE_BYTES

ReceiptId = NewType("ReceiptId", str)
"""The sha256 of the stored bytes, 64 hex digits."""

LOCK_TIMEOUT_S: Final = 30.0
_SNAPSHOT_TRIES: Final = 50


class Signer(Protocol):
    """Turns the receipt's bytes into a DSSE envelope's bytes (``receipts.signing.Ed25519Signer``)."""

    @property
    def keyid(self) -> str:
        """64 hex digits naming the public key."""

    def sign(self, content: bytes) -> bytes:
        """Return the envelope file's content for a payload of exactly ``content``."""


class Store:
    """A store at ``path``; the folder is created with the first append."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        # A lock on a network file system may silently be none; never fall back to a weaker kind (facts 8).
        self._lock = FileLock(self.path / ".lock", timeout=LOCK_TIMEOUT_S, fallback_to_soft=False)

    # -- writing -------------------------------------------------------------------------------------------------

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
        files = dict(samples or {})
        receipt = read_receipt(draft)
        _require_samples(receipt.predicate, files)
        with _writing(self.path):
            return self._append(receipt, files, signer)

    def _append(self, draft: Receipt, files: Mapping[str, Path], signer: Signer | None) -> ReceiptId:
        self._create()
        with self._locked():
            self._recover()
            receipt = link_draft(draft, self.head().next_link())
            try:
                self._stage(receipt, files, signer)
            except BaseException:
                self._clear_pending()
                raise
            self._publish(receipt)
        return ReceiptId(receipt.id)

    def countersign(self, receipt_id: str, signer: Signer) -> str:
        """Add one more signer's envelope to a stored receipt; returns the envelope's file name.

        Raises:
            receipts.errors.ReceiptError: No such receipt, it does not verify, or this key signed it already.
        """
        self.head()
        with _writing(self.path), self._locked():
            # A copy that went through version control has lost its empty folders.
            (self.path / "pending").mkdir(exist_ok=True)
            self._recover()
            name, content = self.find(receipt_id)
            read_receipt(content, expected_id=receipt_id)
            envelope = signer.sign(content)
            final = f"{name.removesuffix('.json')}.{signer.keyid[:12]}.dsse.json"
            if (self.path / "receipts" / final).exists():
                raise ReceiptError(Code.BAD_NAME, "expected a new signer, found this key's envelope already", final)
            staged = self.path / "pending" / final
            write_new(staged, envelope)
            sync(staged, staged.parent)
            link_new(staged, self.path / "receipts" / final)
            self._add_sums([f"{hashlib.sha256(envelope).hexdigest()}  receipts/{final}"])
            sync(self.path / "receipts", self.path / "SHA256SUMS")
            staged.unlink()
        return final

    def _create(self) -> None:
        for folder in ("receipts", "samples", "pending"):
            (self.path / folder).mkdir(parents=True, exist_ok=True)
        if (self.path / "HEAD").exists():
            return
        with self._locked():
            if (self.path / "HEAD").exists():
                return
            if any((self.path / "receipts").iterdir()):
                raise ReceiptError(
                    Code.HEAD_MISMATCH,
                    "receipts without a HEAD: restore HEAD from a backup or start a new store",
                    "HEAD",
                )
            (self.path / "SHA256SUMS").touch(mode=0o644)
            empty = Head(log=secrets.token_hex(16), count=0, head=None)
            write_new(self.path / "HEAD.new", empty.encode(), mode=0o644, replace=True)
            sync(self.path / "HEAD.new")
            (self.path / "HEAD.new").rename(self.path / "HEAD")
            sync(self.path, self.path.parent)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except Timeout as error:
            raise ReceiptError(
                Code.NOT_A_FILE, f"another writer has held the store for {LOCK_TIMEOUT_S:.0f} s; see who runs", ".lock"
            ) from error

    def _stage(self, receipt: Receipt, files: Mapping[str, Path], signer: Signer | None) -> None:
        pending = self.path / "pending"
        written: list[Path] = []
        for sample in receipt.predicate.samples:
            staged = pending / f"sample-{sample.sha256}"
            # Two names may have the same content; it is stored once.
            if staged not in written:
                copy_sample(files[sample.name], staged, sample.sha256, sample.size_bytes)
                written.append(staged)
        stem = receipt_stem(receipt.predicate.chain.sequence, receipt.predicate.kind, receipt.id)
        if signer is not None:
            written.append(pending / f"{stem}.{signer.keyid[:12]}.dsse.json")
            write_new(written[-1], signer.sign(receipt.content))
        written.append(pending / f"{stem}.json")
        write_new(written[-1], receipt.content)
        sync(*written, pending)

    def _publish(self, receipt: Receipt) -> None:
        """Make a staged receipt visible. Every step may have been done already by a writer that died."""
        stem = receipt_stem(receipt.predicate.chain.sequence, receipt.predicate.kind, receipt.id)
        pending, folder = self.path / "pending", self.path / "receipts"
        lines, touched = [], [folder, self.path / "SHA256SUMS"]
        for digest in sorted({sample.sha256 for sample in receipt.predicate.samples}):
            staged, final = pending / f"sample-{digest}", self.path / "samples" / digest
            if staged.exists() and not final.exists():
                link_new(staged, final)
                lines.append(f"{digest}  samples/{digest}")
                touched.append(self.path / "samples")
        for envelope in (pending / name for name in envelopes_of(stem, self.names("pending"))):
            link_new(envelope, folder / envelope.name)
            lines.append(f"{hashlib.sha256(envelope.read_bytes()).hexdigest()}  receipts/{envelope.name}")
        link_new(pending / f"{stem}.json", folder / f"{stem}.json")
        lines.append(f"{receipt.id}  receipts/{stem}.json")
        self._add_sums(lines)
        head = self.head()
        if head.head != receipt.id:
            moved = head.follow(receipt.id, receipt.predicate.chain)
            write_new(self.path / "HEAD.new", moved.encode(), mode=0o644, replace=True)
            sync(self.path / "HEAD.new", *touched)
            (self.path / "HEAD.new").rename(self.path / "HEAD")
            sync(self.path)
        else:
            # A writer that died after the rename: what it did not sync may not be durable yet.
            sync(self.path, *touched)
        self._clear_pending()

    def _recover(self) -> None:
        """Finish what a dead writer had staged whole; drop what was torn, for nobody was told that it exists."""
        for left in sorted((self.path / "pending").iterdir()):
            if RECEIPT_NAME.fullmatch(left.name):
                receipt = self._whole(left)
                if receipt is not None:
                    self._restore_sum_lines(receipt)
                    self._publish(receipt)
            elif left.exists() and (self.path / "receipts" / left.name).exists():
                # A countersignature that was linked and perhaps not listed yet.
                digest = hashlib.sha256(left.read_bytes()).hexdigest()
                self._add_sums([f"{digest}  receipts/{left.name}"])
        self._clear_pending()

    def _whole(self, staged: Path) -> Receipt | None:
        """The staged receipt if it, its envelopes and its raw files are complete."""
        pending, stem = staged.parent, staged.name.removesuffix(".json")
        try:
            receipt = read_receipt(read_file(staged))
            link = receipt.predicate.chain
            if stem != receipt_stem(link.sequence, receipt.predicate.kind, receipt.id):
                return None
            head = self.head()
            if receipt.id != head.head:
                # Nothing but the very next receipt can have been staged; anything else was put there by somebody.
                head.follow(receipt.id, receipt.predicate.chain)
            for envelope in (pending / name for name in envelopes_of(stem, self.names("pending"))):
                read_document(read_file(envelope, MAX_ENVELOPE_BYTES), MAX_ENVELOPE_BYTES)
            for sample in receipt.predicate.samples:
                content = self.read_sample(sample.sha256, pending / f"sample-{sample.sha256}")
                if content is None or check_sample(sample, content):
                    return None
        except ReceiptError:
            return None
        return receipt

    def _restore_sum_lines(self, receipt: Receipt) -> None:
        # A sample linked before the crash may miss its line; ``_publish`` only names those it links itself.
        published = [s.sha256 for s in receipt.predicate.samples if (self.path / "samples" / s.sha256).exists()]
        self._add_sums([f"{digest}  samples/{digest}" for digest in published])

    def _clear_pending(self) -> None:
        # The receipt goes last: as long as it is there, the rest can still be published.
        for left in sorted((self.path / "pending").iterdir(), key=lambda p: RECEIPT_NAME.fullmatch(p.name) is not None):
            left.unlink()

    def _add_sums(self, lines: list[str]) -> None:
        """Append lines that are not there yet, repairing a torn last line first."""
        if not lines:
            return
        descriptor = os.open(self.path / "SHA256SUMS", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "r+b") as sums:
            size = sums.seek(0, os.SEEK_END)
            # Lines of one receipt are written together, so a repetition can only be near the end.
            start = sums.seek(max(0, size - 4096 - 2 * sum(len(line) + 1 for line in lines)))
            tail = sums.read()
            if tail and not tail.endswith(b"\n"):
                tail = tail[: tail.rfind(b"\n") + 1]
            known = set(tail.decode("utf-8", "replace").split("\n"))
            sums.truncate(start + len(tail))
            sums.seek(0, os.SEEK_END)
            sums.write("".join(f"{line}\n" for line in lines if line not in known).encode())

    # -- reading -------------------------------------------------------------------------------------------------

    def head(self) -> Head:
        """The chain head as the HEAD file says.

        Raises:
            receipts.errors.ReceiptError: There is no store here, or HEAD is not a head.
        """
        return parse_head(read_file(self.path / "HEAD"))

    def snapshot(self) -> Snapshot:
        """The store as it was at one moment, even while a writer is at work or after one died.

        A receipt is in the log once HEAD counts it. Until then its files may lie in ``receipts/`` already; they are
        known by their twin in ``pending/``, which goes only after HEAD has moved. So: HEAD first, then the lists, then
        HEAD again; the same HEAD means that the lists belong to it.

        Raises:
            receipts.errors.ReceiptError: There is no store here, or HEAD or SHA256SUMS cannot be read.
        """
        for _ in range(_SNAPSHOT_TRIES):
            head = self.head()
            sums = read_file(self.path / "SHA256SUMS", max_bytes=1 << 30)
            names, pending = self.names("receipts"), self.names("pending")
            others = [f"samples/{name}" for name in self.names("samples")]
            others += [name for name in self.names("") if name not in OWN_NAMES]
            if self.head() == head:
                return take_snapshot(head, sums, names, pending, others)
        raise ReceiptError(Code.HEAD_MISMATCH, "HEAD moves faster than the store can be listed: try again", "HEAD")

    def entries(self, snapshot: Snapshot | None = None, first: int = 0) -> Iterator[Entry]:
        """Every receipt file in order of its name, read once, with its envelopes. Names that fit nothing come too.

        Args:
            snapshot: Which files; taken now when left out.
            first: Leave out, unread, receipts whose name has a lower sequence number.
        """
        for name, envelope_names in listed_entries(snapshot or self.snapshot(), first):
            yield self.entry(name, envelope_names)

    def names(self, folder: str) -> list[str]:
        """What lies in one of the store's folders, in no order; a folder that is a link is refused."""
        try:
            if (self.path / folder).is_symlink() and folder:
                raise ReceiptError(Code.NOT_A_FILE, "expected a folder, found a link", f"{self.path}/{folder}")
            return [entry.name for entry in os.scandir(self.path / folder)]
        except FileNotFoundError:
            # A copy that went through version control or an archive may have lost folders that were empty.
            return []
        except OSError as error:
            raise ReceiptError(Code.NOT_A_FILE, f"cannot list: {error.strerror}", f"{self.path}/{folder}") from error

    def entry(self, name: str, envelope_names: tuple[str, ...]) -> Entry:
        """One file of a listing with its envelopes, read once; a refused one says why."""
        envelope = ENVELOPE_NAME.fullmatch(name)
        if envelope:
            return Entry(name=name, content=b"", refused=ReceiptError(Code.FOREIGN, f"no receipt {envelope[1]}", name))
        if not RECEIPT_NAME.fullmatch(name):
            refused = ReceiptError(Code.BAD_NAME, "expected NNNNNNNN-kind-digest12.json", name)
            return Entry(name=name, content=b"", refused=refused)
        folder = f"{self.path}/receipts"
        try:
            envelopes = tuple(read_file(f"{folder}/{envelope}", MAX_ENVELOPE_BYTES) for envelope in envelope_names)
            content = read_file(f"{folder}/{name}")
            return Entry(name=name, content=content, envelopes=envelopes, envelope_names=envelope_names)
        except ReceiptError as error:
            return Entry(name=name, content=b"", refused=error)

    def find(self, receipt_id: str) -> tuple[str, bytes]:
        """File name and bytes of one receipt by its id or by at least 6 digits of it.

        Raises:
            receipts.errors.ReceiptError: None or more than one fits.
        """
        wanted = receipt_id.lower()
        if not re.fullmatch(r"[0-9a-f]{6,64}", wanted):
            raise ReceiptError(Code.BAD_NAME, "expected 6 to 64 hex digits of a receipt id", receipt_id[:80])
        matches = []
        for name in self.names("receipts"):
            match = RECEIPT_NAME.fullmatch(name)
            if match and (match[3].startswith(wanted) or wanted.startswith(match[3])):
                content = read_file(self.path / "receipts" / name)
                if hashlib.sha256(content).hexdigest().startswith(wanted):
                    matches.append((name, content))
        if len(matches) != 1:
            raise ReceiptError(Code.MISSING_PARENT, f"expected one receipt, found {len(matches)}", receipt_id)
        return matches[0]

    def sample_path(self, sha256: str) -> Path:
        """Where a raw file with this digest is kept, whether or not it is there."""
        return self.path / "samples" / sha256

    def read_sample(self, sha256: str, staged: Path | None = None) -> bytes | None:
        """Content of a raw file, None when it is not in the store. The digest is the caller's to check."""
        path = staged if staged is not None and staged.exists() else self.sample_path(sha256)
        return read_file(path, max_bytes=MAX_SAMPLE_BYTES) if path.exists() else None


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turns what the file system refuses (full, read-only, not ours) into the one error."""
    try:
        yield
    except OSError as error:
        message = f"cannot write: {error.strerror}; the next writer finishes what was begun, or drops it"
        raise ReceiptError(Code.NOT_WRITTEN, message, str(path)) from error


def _require_samples(predicate: Predicate, files: Mapping[str, Path]) -> None:
    for sample in predicate.samples:
        if sample.size_bytes > MAX_SAMPLE_BYTES:
            message = f"expected at most {MAX_SAMPLE_BYTES} bytes, found {sample.size_bytes}"
            raise ReceiptError(Code.TOO_LARGE, message, sample.name)
    named = {sample.name for sample in predicate.samples}
    if named != files.keys():
        raise ReceiptError(
            Code.MISSING_SAMPLE, f"expected a file for each of {sorted(named)}, found {sorted(files)}", "samples"
        )
