"""``coordinator receipts merge``: takes another store in, chain untouched, and links it by a receipt (DECISIONS 20).

The other log becomes ``logs/<log>/``, byte for byte: its own HEAD, SHA256SUMS, receipts and raw files. The receipt that
links it names its head and the digest of its list, so that nothing can be added to it or taken away afterwards. The
copy is made beside, then renamed, then linked; what dies in between is found by ``verify`` and merged again.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from coordinator.clock import SystemClock
from coordinator.errors import UsageError
from coordinator.evidence import EvidenceWriter
from coordinator.gate_admission import plain_writer
from coordinator.keys import signer_from
from coordinator.render import Reporter, print_json
from coordinator.store import ReceiptId, Store
from coordinator.store_files import read_file, sync, write_new
from coordinator.store_merged import MAX_SUMS_BYTES, MERGE_COMMAND, merge_link, merged_store, with_merged
from coordinator.store_verify import StoreVerdict, read_signers, unreadable
from coordinator.store_walk import Trust, walk
from receipts import bodies
from receipts.chain import Head
from receipts.errors import Code, ReceiptError
from receipts.fields import Evidence, Kind, Subject
from receipts.findings import Outline
from receipts.raw import MAX_SAMPLE_BYTES
from receipts.reader import read_receipt
from windows.exit_codes import ExitCode


def merge_command(store: Path, other: Path, *, signers: Path | None, key: Path | None, json: bool) -> int:
    """Merge and print; exits 60, with nothing changed, when either store does not verify."""
    clock = SystemClock()
    writer = plain_writer(store, clock, signer_from(key))
    try:
        trust = Trust(now_utc=clock.utc(), signers=read_signers(signers))
        for path in (store, other) if (store / "HEAD").exists() else (other,):
            verdict = StoreVerdict(walk(Store(path), trust))
            if not verdict.is_whole:
                reporter = Reporter(clock.utc)
                reporter.error([f"{path} does not verify, so nothing is merged"])
                if json:
                    print_json(verdict.to_document())
                else:
                    reporter.table(f"receipts of {path}", ("what", "found"), verdict.rows())
                return int(ExitCode.RECEIPTS_INVALID)
        head, receipt = merge(writer, Store(other))
    except ReceiptError as error:
        if error.code is Code.NOT_WRITTEN:
            raise
        return unreadable(error, store, json=json)
    if json:
        print_json({"log": head.log, "count": head.count, "head": head.head, "receipt": receipt})
    else:
        rows = [("log", head.log), ("receipts", str(head.count)), ("head", str(head.head)), ("linked by", receipt)]
        Reporter(clock.utc).table(f"merged {other} into {store}", ("what", "value"), rows)
    return int(ExitCode.DONE)


def merge(writer: EvidenceWriter, other: Store) -> tuple[Head, ReceiptId]:
    """Copy a verified store below the writer's and append the receipt that links it.

    Raises:
        UsageError: It is this very log, is linked already, or its writer is not done.
        receipts.errors.ReceiptError: A file cannot be read or written.
    """
    store, started = writer.store, writer.now()
    snapshot = other.snapshot()
    head = snapshot.head
    if head.log in known_logs(store):
        raise UsageError("this log is in the store already", found=head.log, where=str(store.path))
    if snapshot.in_flight or any(other.names("pending")):
        raise UsageError("a writer is at work in that store, or died there", where=str(other.path),
                         next_step="append to it once more, or wait; then merge again")  # fmt: skip
    classes: list[Evidence] = []
    walk(other, Trust(), note=lambda outline, _: classes.append(_class(outline)))
    target = merged_store(store, head.log)
    try:
        _copy_beside(other, target)
    except OSError as error:
        raise ReceiptError(Code.NOT_WRITTEN, f"cannot copy: {error.strerror}", str(target.path)) from error
    sums = hashlib.sha256(read_file(target.path / "SHA256SUMS", MAX_SUMS_BYTES)).hexdigest()
    labels = {"log": head.log, "count": str(head.count), "head": str(head.head), "sums-sha256": sums}
    receipt = writer.write(
        Kind.ATTEMPT,
        bodies.AttemptBody(
            command=MERGE_COMMAND, stage="merge", exit_code=0, error_code="none", labels=labels,
            message=f"log {head.log} of {head.count} receipts, which verified, is kept in logs/",
        ),
        started=started,
        scope="that a whole log was taken in, unchanged, and where it ended",
        not_claimed=("anything that its receipts say", "that it went on after this head"),
        evidence=min(classes, key=lambda evidence: evidence.strength, default=Evidence.EMULATED),
        subjects=[Subject(name="merged-log", sha256=str(head.head))],
    )  # fmt: skip
    return head, receipt


def known_logs(store: Store) -> set[str]:
    """The store's own log and every one that a receipt of it links; none for a store that is not there yet."""
    if not (store.path / "HEAD").exists():
        return set()
    found = (read_receipt(entry.content).predicate.body for entry in store.entries())
    return {store.head().log, *(link.head.log for body in found if (link := merge_link(body)) is not None)}


def _class(outline: Outline) -> Evidence:
    return outline.facts.evidence if outline.facts else Evidence.EMULATED


def _copy_beside(source: Store, target: Store) -> None:
    """A durable copy under its final name; one that a dead merge left is replaced, nothing links it."""
    part = target.path.with_name(f"{target.path.name}.part")
    for left in (part, target.path):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
    for store in with_merged(source):
        _copy_store(store.path, part / store.path.relative_to(source.path))
    part.rename(target.path)
    sync(target.path.parent, target.path.parent.parent)


def _copy_store(source: Path, target: Path) -> None:
    # Every file is in the list, because the store was verified; what is copied is what the list names.
    sums = read_file(source / "SHA256SUMS", MAX_SUMS_BYTES)
    names = [line.partition("  ")[2] for line in sums.decode("ascii").splitlines()]
    for folder in ("receipts", "samples"):
        (target / folder).mkdir(parents=True, exist_ok=True)
    write_new(target / "SHA256SUMS", sums)
    write_new(target / "HEAD", read_file(source / "HEAD"))
    for name in names:
        write_new(target / name, read_file(source / name, MAX_SAMPLE_BYTES))
    files = [target / name for name in ("SHA256SUMS", "HEAD", *names)]
    sync(*files, target / "receipts", target / "samples", target)
