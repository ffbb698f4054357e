"""Finds the receipts a plan asks for before any host is contacted, and says why each other one does not count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.errors import AdmissionRefused
from coordinator.store import ReceiptId, Store
from coordinator.store_verify import describe, verify_store
from receipts.errors import ReceiptError
from receipts.evidence import age_s
from receipts.fields import Kind, Outcome
from receipts.model import Predicate
from receipts.reader import read_receipt
from windows.plan import RequiredEvidence


@dataclass(frozen=True)
class Found:
    """A receipt that satisfies one requirement."""

    kind: Kind
    receipt: ReceiptId
    predicate: Predicate


def find_evidence(
    store: Store, required: Sequence[RequiredEvidence], *, source_sha256: str, now_utc: str
) -> dict[Kind, Found]:
    """The newest fitting receipt of every required kind.

    Args:
        store: Where to look; a store that does not exist yet has nothing.
        required: What the plan asks for.
        source_sha256: Tree digest of the coordinator that runs now, for ``same_sources``.
        now_utc: The time that ages are counted to.

    Raises:
        AdmissionRefused: A kind has no fitting receipt; every near miss is named with its reason.
    """
    found: dict[Kind, Found] = {}
    misses: dict[str, list[str]] = {entry.kind: [] for entry in required}
    for receipt_id, predicate in read_all(store):
        for entry in required:
            if predicate.kind != entry.kind:
                continue
            why = why_not(predicate, entry, source_sha256=source_sha256, now_utc=now_utc)
            if why:
                misses[entry.kind].append(f"{receipt_id[:12]}: {why}")
            else:
                kind = Kind(entry.kind)
                found[kind] = Found(kind, receipt_id, predicate)
    missing = [entry for entry in required if Kind(entry.kind) not in found]
    if missing:
        raise AdmissionRefused(
            "required evidence is missing; no host was contacted",
            where=str(store.path),
            expected="; ".join(f"{entry.kind} of class {' or '.join(entry.classes)}" for entry in missing),
            found="; ".join(f"{entry.kind}: {', '.join(misses[entry.kind]) or 'none'}" for entry in missing),
            next_step="for a budget run a plan of purpose first-hold; `coordinator receipts list` shows what there is",
        )
    return found


def why_not(predicate: Predicate, entry: RequiredEvidence, *, source_sha256: str, now_utc: str) -> str:
    """Why a receipt of the right kind does not count, or an empty text."""
    if predicate.verdict.outcome is not Outcome.PASS:
        return f"verdict {predicate.verdict.outcome.value}"
    if predicate.evidence.value not in entry.classes:
        return f"evidence {predicate.evidence.value}"
    if entry.same_sources and predicate.tool.source_sha256 != source_sha256:
        return f"made by other sources {predicate.tool.source_sha256[:12]}"
    age = age_s(predicate.ended_utc, now_utc)
    if entry.max_age_s is not None and not 0 <= age <= entry.max_age_s:
        return f"{age} s old, at most {entry.max_age_s}"
    return ""


def read_all(store: Store) -> list[tuple[ReceiptId, Predicate]]:
    """Every receipt of a store, oldest first.

    Raises:
        AdmissionRefused: One of them cannot be read: a damaged store admits nothing.
    """
    if not (store.path / "HEAD").exists():
        return []
    verified = verify_store(store.path)
    if not verified.is_whole:
        first = describe(verified.report.findings[0]) if verified.report.findings else "it is empty"
        raise AdmissionRefused(
            f"the receipt store does not verify: {first}",
            where=str(store.path),
            next_step="`coordinator receipts verify` names every fault; a damaged store admits nothing",
        )
    try:
        receipts = [read_receipt(entry.content) for entry in store.entries()]
    except ReceiptError as error:
        raise AdmissionRefused(
            f"a receipt cannot be read: {error}", where=str(store.path), next_step="`coordinator receipts verify`"
        ) from error
    return [(ReceiptId(receipt.id), receipt.predicate) for receipt in receipts]
