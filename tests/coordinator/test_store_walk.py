"""One process or several: the same findings, word for word; a process that dies is named, nothing is called whole."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "receipts"))

from receipt_kit import allowed, draft, raw_sample, signer

from coordinator import store_walk
from coordinator.errors import CoordinatorError
from coordinator.store import Store
from coordinator.store_walk import Trust, walk
from receipts.errors import Code, ReceiptError
from receipts.fields import Kind
from receipts.findings import Finding, LogReport, Outline

NUM_RECEIPTS = 12
TRUST = Trust(now_utc="2026-07-01T00:00:00Z", signers=allowed("operator", "auditor"))


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_walk, "_CHUNK", 3)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A log of signed receipts, each with a raw file of its own."""
    made = Store(tmp_path / "store")
    for index in range(NUM_RECEIPTS):
        raw = tmp_path / f"raw-{index}"
        raw.write_bytes(b"%d\n" % index)
        receipt = draft(Kind.HOST_FACTS, samples=(raw_sample("rounds.jsonl", raw.read_bytes()),))
        made.append(receipt, samples={"rounds.jsonl": raw}, signer=signer())
    return made


def receipt_files(store: Store) -> list[Path]:
    return [store.path / "receipts" / name for name in store.snapshot().receipts]


def walked(store: Store, jobs: int) -> tuple[LogReport, list[tuple[Outline, tuple[Finding, ...]]]]:
    noted: list[tuple[Outline, tuple[Finding, ...]]] = []
    report = walk(store, TRUST, note=lambda outline, found: noted.append((outline, found)), jobs=jobs)
    return report, noted


def edit(store: Store) -> None:
    path = receipt_files(store)[4]
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b'"elapsed_ns":', b'"elapsed_ns":1', 1))


def remove(store: Store) -> None:
    receipt_files(store)[5].unlink()


def tear(store: Store) -> None:
    path = receipt_files(store)[-1]
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-40])


def lose_raw_file(store: Store) -> None:
    next((store.path / "samples").iterdir()).unlink()


def swap(store: Store) -> None:
    first, second = receipt_files(store)[2:4]
    first.rename(first.with_suffix(".x"))
    second.rename(first)
    first.with_suffix(".x").rename(second)


def test_several_processes_find_what_one_finds(store: Store) -> None:
    sound, _ = walked(store, jobs=1)
    assert walked(store, jobs=2)[0] == sound
    assert (sound.num_signed, sound.findings) == (NUM_RECEIPTS, ())
    for damage in (swap, edit, remove, lose_raw_file, tear):
        damage(store)
    report, noted = walked(store, jobs=1)
    assert walked(store, jobs=2) == (report, noted)
    assert {finding.code for finding in report.findings} >= {
        Code.DIGEST_MISMATCH, Code.CHAIN_GAP, Code.MISSING_SAMPLE, Code.TORN
    }  # fmt: skip
    assert report.num_signed == sum(outline.facts.is_signed for outline, _ in noted if outline.facts)


def test_whole_receipts_and_outlines_are_judged_alike(store: Store) -> None:
    edit(store)
    kept = []
    report = walk(store, TRUST, keep=lambda entry, verified: kept.append((entry.name, verified)))
    outlined, noted = walked(store, jobs=1)
    assert report == outlined
    assert [name for name, _ in kept] == [outline.name for outline, _ in noted]
    for (_, verified), (_, found) in zip(kept, noted, strict=True):
        assert verified is None or verified.findings == found


def test_a_process_that_dies_ends_the_walk_with_its_name(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_walk, "_start_examining", die)
    with pytest.raises(CoordinatorError, match="ended by itself") as caught:
        walk(store, TRUST, jobs=2)
    assert "--jobs 1" in caught.value.next_step


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_long_log_is_examined_in_one_process_per_core(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def pool(jobs: int, *rest: Any) -> ProcessPoolExecutor:
        asked.append(jobs)
        return ProcessPoolExecutor(1, *rest)

    monkeypatch.setattr(store_walk, "ProcessPoolExecutor", pool)
    assert walk(store, TRUST, jobs=None).num_receipts == NUM_RECEIPTS
    assert asked == []
    monkeypatch.setattr(store_walk, "_WORTH_PROCESSES", NUM_RECEIPTS)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(30)))
    assert walk(store, TRUST, jobs=None).num_receipts == NUM_RECEIPTS
    monkeypatch.setattr(store_walk, "_CHUNK", 1)
    assert walk(store, TRUST, jobs=None).num_receipts == NUM_RECEIPTS
    # No more than there are chunks, and no more than eight.
    assert asked == [4, 8]


ORPHANS = """
import os, sys, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from coordinator.store_walk import _start_examining
pool = ProcessPoolExecutor(1, get_context("spawn"), _start_examining, (Path(sys.argv[1]), None, None))
print(pool.submit(os.getpid).result(), flush=True)
time.sleep(600)
"""


def test_processes_end_with_a_verification_that_was_killed(store: Store) -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHANS, str(store.path)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        examining = Path("/proc", parent.stdout.readline().decode().strip())
        assert examining.exists()
        parent.kill()
        parent.wait()
    ends = time.monotonic() + 30
    while examining.exists() and (examining / "stat").read_text().split()[2] != "Z":
        assert time.monotonic() < ends, "a process outlived its verification"
        time.sleep(0.05)


def test_a_refusal_is_the_same_on_the_other_side() -> None:
    error = ReceiptError(Code.TORN, "half a file", "HEAD")
    found = pickle.loads(pickle.dumps(error))
    assert (found.code, found.message, found.where, str(found)) == (error.code, error.message, error.where, str(error))
