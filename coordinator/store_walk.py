"""Walks a store from its first receipt to its head: files in, a report out. The judging is ``receipts.verify``.

A long log is examined in several processes: what one receipt says alone is most of the work and needs no order. The
outlines come back in order and are judged as a log in this process, so both ways find the same, word for word.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from coordinator.errors import CoordinatorError
from coordinator.store import Store
from coordinator.store_merged import MergedLogs, MergeLink, Note, loader, merge_link
from coordinator.store_recompute import RECOMPUTE
from coordinator.store_snapshot import Snapshot, listed_entries
from receipts.bodies import Witness
from receipts.chain import Head
from receipts.examine import examine
from receipts.findings import Entry, LogReport, Options, Outline, Verified
from receipts.signing import AllowedSigners
from receipts.verify import LogVerifier

_CHUNK: Final = 64
"""Entries a process takes at a time: some hundredths of a second of work; a bound on what outlines take in memory."""
_WORTH_PROCESSES: Final = 4000
"""Entries from which a second process, which needs half a second to start, pays."""
_MAX_JOBS: Final = 8
"""More processes than this only wait for the one that judges the order."""

Keep = Callable[[Entry, Verified | None], object]
"""What is done with every entry and its whole receipt; None for one that could not be read."""
Named = tuple[str, tuple[str, ...]]
"""A receipt's file name and those of its envelopes."""
Examined = tuple[Outline, MergeLink | None]


@dataclass(frozen=True)
class Trust:
    """What is known outside the store.

    Attributes:
        now_utc: The clock for receipts from the future; None does not ask it.
        signers: Who is trusted; None means integrity only.
        high_water: The furthest head that was accepted before.
        witnesses: Heads that somebody else kept.
    """

    now_utc: str | None = None
    signers: AllowedSigners | None = None
    high_water: Head | None = None
    witnesses: Sequence[Witness] = field(default_factory=tuple)


def walk(
    store: Store,
    trust: Trust,
    *,
    keep: Keep | None = None,
    note: Note = lambda _outline, _findings: None,
    since: Head | None = None,
    jobs: int | None = 1,
) -> LogReport:
    """Verify every entry of a store (after ``since``).

    Args:
        store: The store.
        trust: What is known outside it.
        keep: Takes every entry with its whole receipt; one process walks then.
        note: Takes every entry's outline and what was found about it, when ``keep`` is not given.
        since: Only what follows this head.
        jobs: Processes that examine; None means one per core, and one alone for a short log. More than one start anew
            from the main module, which must not do its work when it is imported.

    Raises:
        receipts.errors.ReceiptError: There is no store here, or HEAD or SHA256SUMS cannot be read at all.
        CoordinatorError: A process that examined ended by itself.
    """
    snapshot = store.snapshot()
    options = Options(
        now_utc=trust.now_utc,
        signers=trust.signers,
        sums=snapshot.sums,
        # After a head only new receipts are walked, so nobody knows which raw files the older ones account for.
        others=[path for path in snapshot.others if since is None or not path.startswith("samples/")],
        head=snapshot.head,
        high_water=trust.high_water,
        witnesses=tuple(trust.witnesses),
        load=loader(store),
        sample=store.read_sample,
        recompute=RECOMPUTE,
    )
    verifier, first = LogVerifier(options, since), since.count if since else 0
    nested = Trust(now_utc=trust.now_utc, signers=trust.signers)
    merged = MergedLogs(store, verifier, lambda log, remember: walk(log, nested, note=remember, jobs=jobs))
    if keep is not None:
        for entry in store.entries(snapshot, first):
            verified = verifier.add(entry)
            keep(entry, verified)
            if verified is not None and (link := merge_link(verified.receipt.predicate.body)):
                merged.follow(link)
    else:
        for outline, link in _outlines(store, options, snapshot, first, jobs):
            note(outline, verifier.place(outline))
            if link is not None:
                merged.follow(link)
    if since is None:
        merged.finish()
    return verifier.finish()


def _outlines(store: Store, options: Options, snapshot: Snapshot, first: int, jobs: int | None) -> Iterator[Examined]:
    listed = list(listed_entries(snapshot, first))
    if jobs is None:
        jobs = min(len(os.sched_getaffinity(0)), _MAX_JOBS) if len(listed) >= _WORTH_PROCESSES else 1
    jobs = min(jobs, -(-len(listed) // _CHUNK))
    if jobs <= 1:
        for name, envelope_names in listed:
            yield _examine(store, options, name, envelope_names)
        return
    # "spawn": a child of a process that has threads must not inherit their locks.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, context, _start_examining, (store.path, options.now_utc, options.signers))
    try:
        yield from _in_order(pool, listed, jobs)
    except BrokenProcessPool as error:
        raise CoordinatorError(
            "a process that examined receipts ended by itself", where=str(store.path), found=str(error),
            next_step="verify in one process (--jobs 1); if it was killed for memory, that needs the least",
        ) from error  # fmt: skip
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, listed: Sequence[Named], jobs: int) -> Iterator[Examined]:
    # One chunk ahead, no more: outlines that wait to be judged are memory.
    running = deque[Future[list[Examined]]]()
    for chunk in (listed[at : at + _CHUNK] for at in range(0, len(listed), _CHUNK)):
        running.append(pool.submit(_examine_chunk, chunk))
        if len(running) > jobs:
            yield from running.popleft().result()
    while running:
        yield from running.popleft().result()


def _examine(store: Store, options: Options, name: str, envelope_names: tuple[str, ...]) -> Examined:
    examined = examine(store.entry(name, envelope_names), options)
    link = None if examined.receipt is None else merge_link(examined.receipt.predicate.body)
    return examined.outline, link


# -- in a process of its own ---------------------------------------------------------------------------------------

_mine: dict[str, tuple[Store, Options]] = {}


def _start_examining(path: Path, now_utc: str | None, signers: AllowedSigners | None) -> None:
    threading.Thread(target=_end_with_the_parent, daemon=True, name="parent-watch").start()
    store = Store(path)
    options = Options(
        now_utc=now_utc, signers=signers, load=loader(store), sample=store.read_sample, recompute=RECOMPUTE
    )
    _mine["store"] = (store, options)


def _end_with_the_parent() -> None:
    """A verification that was killed cannot tell its processes: they see that it is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _examine_chunk(chunk: Sequence[Named]) -> list[Examined]:
    store, options = _mine["store"]
    return [_examine(store, options, name, envelope_names) for name, envelope_names in chunk]
