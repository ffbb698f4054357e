"""Names of the store's files, and what a store held at one moment: pure, from lists and bytes that were read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from receipts.chain import Head
from receipts.sums import parse_sums

RECEIPT_NAME: Final = re.compile(r"([0-9]{8,})-([a-z-]+)-([0-9a-f]{12})\.json")
ENVELOPE_NAME: Final = re.compile(r"([0-9]{8,}-[a-z-]+-[0-9a-f]{12})\.([0-9a-f]{12})\.dsse\.json")

STAGED_NAME: Final = re.compile(rf"{RECEIPT_NAME.pattern}|{ENVELOPE_NAME.pattern}|sample-[0-9a-f]{{64}}")
"""What a writer may have in ``pending/``."""
OWN_NAMES: Final = frozenset({"HEAD", "HEAD.new", "SHA256SUMS", ".lock", "receipts", "samples", "pending", "logs"})
"""What may lie in the store's folder; ``HEAD.new`` is a head that was not renamed before its writer died."""


def receipt_stem(sequence: int, kind: str, digest: str) -> str:
    """File name of a receipt without its suffix."""
    return f"{sequence:08d}-{kind}-{digest[:12]}"


def sequence_of(name: str) -> int:
    """The sequence number in a receipt's file name; -1 for any other name."""
    match = RECEIPT_NAME.fullmatch(name)
    return int(match[1]) if match else -1


def sort_names(names: Iterable[str]) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Names of ``receipts/``: what is no envelope, sorted; and the envelopes by the stem of their receipt."""
    receipts: list[str] = []
    envelopes: dict[str, tuple[str, ...]] = {}
    for name in sorted(names):
        match = ENVELOPE_NAME.fullmatch(name)
        if match:
            envelopes[match[1]] = (*envelopes.get(match[1], ()), name)
        else:
            receipts.append(name)
    return receipts, envelopes


def envelopes_of(stem: str, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that are envelopes of one receipt, sorted. A pattern for each stem would be compiled anew."""
    return sorted(name for name in names if (match := ENVELOPE_NAME.fullmatch(name)) and match[1] == stem)


@dataclass(frozen=True)
class Snapshot:
    """What a store held at one moment.

    Attributes:
        head: The chain head.
        sums: SHA256SUMS as path -> digest, without lines of what is in flight.
        receipts: File names in ``receipts/`` that are no envelopes, sorted; whatever else lies there too.
        envelopes: Stem of a receipt -> names of its envelopes.
        in_flight: Names of receipts that a writer is publishing, or was when it died; the next writer finishes them.
        others: Paths of raw files, and of whatever lies in the store and has no name of ours.
    """

    head: Head
    sums: Mapping[str, str]
    receipts: Sequence[str]
    envelopes: Mapping[str, tuple[str, ...]]
    in_flight: tuple[str, ...]
    others: tuple[str, ...] = ()


def listed_entries(snapshot: Snapshot, first: int = 0) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Names of receipt files in order, each with those of its envelopes; then envelopes that have no receipt.

    Args:
        snapshot: What the store held.
        first: Leave out receipts whose name has a lower sequence number.
    """
    envelopes = dict(snapshot.envelopes)
    for name in snapshot.receipts:
        names = envelopes.pop(name.removesuffix(".json"), ())
        if sequence_of(name) >= first or not RECEIPT_NAME.fullmatch(name):
            yield name, names
    for _, names in sorted(envelopes.items()):
        yield names[0], ()


def take_snapshot(
    head: Head, sums: bytes, names: Iterable[str], pending: Iterable[str], others: Iterable[str] = ()
) -> Snapshot:
    """The log as HEAD counts it: what has a twin in ``pending/`` and is not counted yet has not happened.

    Raises:
        receipts.errors.ReceiptError: SHA256SUMS is not a list of digests.
    """
    receipts, envelopes = sort_names(names)
    staged = set(pending)
    # A raw file that is being published has its twin in ``pending/`` as well.
    beside = tuple(path for path in others if f"sample-{path.removeprefix('samples/')}" not in staged)
    if not staged:
        return Snapshot(head, parse_sums(sums), receipts, envelopes, (), beside)
    beside += tuple(f"pending/{name}" for name in staged if not STAGED_NAME.fullmatch(name))
    hidden = {name for name in staged if not _is_published(name, head, staged)}
    return Snapshot(
        head,
        parse_sums(_counted_lines(sums, head, hidden)),
        [name for name in receipts if name not in hidden],
        {stem: kept for stem, all_ in envelopes.items() if (kept := tuple(n for n in all_ if n not in hidden))},
        tuple(name for name in receipts if name in hidden),
        beside,
    )


def _is_published(name: str, head: Head, staged: set[str]) -> bool:
    """Whether a staged file belongs to a receipt that HEAD counts: only its twin in ``pending/`` is left over."""
    match = ENVELOPE_NAME.fullmatch(name)
    # An envelope that is staged without its receipt is a countersignature, which ends with its own removal.
    receipt = f"{match[1]}.json" if match else name
    return receipt in staged and sequence_of(receipt) < head.count


def _counted_lines(sums: bytes, head: Head, hidden: set[str]) -> bytes:
    # Lines are appended in the order of the log: what a writer has in flight stands behind HEAD's own line, and its
    # last line may be torn. Envelopes that were added later stand there too.
    end = sums.find(b"\n", sums.rfind(f"{head.head}  receipts/".encode())) + 1 if head.head else 0
    later = [line for line in sums[end:].split(b"\n")[:-1] if line.endswith(b".dsse.json")]
    kept = [line for line in later if line.rpartition(b"/")[2].decode("ascii", "replace") not in hidden]
    return sums[:end] + b"".join(line + b"\n" for line in kept)
