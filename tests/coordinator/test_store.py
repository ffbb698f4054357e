"""The store on a real file system: killed writers, many writers, torn writes, files that are not what they seem."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "receipts"))

from receipt_kit import allowed, draft, raw_sample, signer

from coordinator.store import Store
from coordinator.store_merged import loader
from coordinator.store_verify import StoreVerdict, verify_store
from coordinator.store_walk import Trust, walk
from receipts.errors import Code, ReceiptError
from receipts.fields import Kind
from receipts.reader import read_receipt


class Writers:
    """The writer process; see ``store_writer``."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("store_writer.py"))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(30)


@pytest.fixture(scope="module")
def writers() -> Iterator[Writers]:
    made = Writers()
    yield made
    made.close()


def fill(path: Path, number: int = 2) -> Path:
    """A store of a few signed receipts with a raw file each."""
    store = Store(path)
    for index in range(number):
        raw = path.parent / f"raw-{index}"
        raw.write_bytes(b"%d\n" % index)
        made = draft(Kind.HOST_FACTS, samples=(raw_sample("rounds.jsonl", raw.read_bytes()),))
        store.append(made, samples={"rounds.jsonl": raw}, signer=signer())
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return fill(tmp_path / "base")


def signed(path: Path) -> StoreVerdict:
    """Verify with signatures required of nobody but counted."""
    return StoreVerdict(walk(Store(path), Trust(signers=allowed("operator", "auditor"))))


def sha256sum(path: Path) -> bool:
    """What a stranger runs. An empty list is a failure there, so it is left out."""
    command = ["sha256sum", "--check", "--quiet", "--strict", "SHA256SUMS"]
    done = subprocess.run(command, cwd=path, capture_output=True, check=False)
    return done.returncode == 0


def names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


# -- a writer that dies ------------------------------------------------------------------------------------------------


def test_killed_before_every_step_of_an_append(writers: Writers, base: Path, tmp_path: Path) -> None:
    """At every step: what was there still verifies, the new receipt is wholly there or not at all, and the next writer
    goes on. Red when HEAD moves before the files, when staging is not whole before the first link, or when what a dead
    writer left counts as damage.
    """
    raw = tmp_path / "raw"
    raw.write_bytes(b"5\n6\n")
    counts = []
    for step in range(1, 200):
        store = tmp_path / f"step-{step}"
        shutil.copytree(base, store)
        ended = writers.ask(do="append", store=str(store), raw=str(raw), who="dead", step=step)
        verdict = signed(store)
        assert verdict.is_whole, (step, verdict.report.findings)
        counts.append(verdict.report.num_receipts)
        if ended["code"] == 0:
            break
        assert ended["code"] == -9
        again = writers.ask(do="append", store=str(store), raw=str(raw), who="next")
        assert again["code"] == 0
        verdict = signed(store)
        assert verdict.is_whole, (step, verdict.report.findings)
        # Committed means: the next writer finishes it. The dead one's receipt is there, or nothing of it is.
        assert verdict.report.num_receipts in (3, 4)
        assert verdict.report.num_receipts >= counts[-1] + 1
        assert names(store / "pending") == set()
        assert sha256sum(store)
        shutil.rmtree(store)
    assert ended["code"] == 0
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (2, 3)
    assert len(counts) > 20


@pytest.mark.parametrize("max_bytes", [0, 1, 3, 100, 450, 600, 700, 1200, 1700])
def test_killed_in_the_middle_of_a_write(writers: Writers, base: Path, tmp_path: Path, max_bytes: int) -> None:
    """No file can grow beyond ``max_bytes``: the writer dies inside a write and leaves a torn file. Red when a torn
    staging file is published, or a torn last line of SHA256SUMS is not repaired.
    """
    raw = tmp_path / "raw"
    raw.write_bytes(b"5\n6\n")
    ended = writers.ask(do="append", store=str(base), raw=str(raw), who="torn", max_bytes=max_bytes)
    assert ended["code"] != 0
    verdict = signed(base)
    assert verdict.is_whole, verdict.report.findings
    assert writers.ask(do="append", store=str(base), raw=str(raw), who="next")["code"] == 0
    verdict = signed(base)
    assert verdict.is_whole, verdict.report.findings
    assert verdict.report.num_receipts in (3, 4)
    assert sha256sum(base)


def test_killed_before_every_step_of_a_countersignature(writers: Writers, base: Path, tmp_path: Path) -> None:
    receipt = Store(base).head().head
    raw = tmp_path / "raw"
    raw.write_bytes(b"5\n")
    for step in range(1, 100):
        store = tmp_path / f"sign-{step}"
        shutil.copytree(base, store)
        ended = writers.ask(do="countersign", store=str(store), receipt=receipt, step=step)
        assert signed(store).is_whole, (step, signed(store).report.findings)
        if ended["code"] == 0:
            break
        assert writers.ask(do="append", store=str(store), raw=str(raw), who="next")["code"] == 0
        assert signed(store).is_whole, (step, signed(store).report.findings)
        assert sha256sum(store)
        shutil.rmtree(store)
    assert ended["code"] == 0
    assert signed(store).report.num_signed == 2


def test_an_error_while_staging_leaves_nothing(base: Path, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.write_bytes(b"1\n")
    made = draft(Kind.HOST_FACTS, samples=(raw_sample("rounds.jsonl", b"2\n"),))
    with pytest.raises(ReceiptError) as caught:
        Store(base).append(made, samples={"rounds.jsonl": raw})
    assert caught.value.code is Code.DIGEST_MISMATCH
    assert names(base / "pending") == set()
    assert signed(base).report.num_receipts == 2


# -- many writers ------------------------------------------------------------------------------------------------------


def test_concurrent_writers_and_a_reader(writers: Writers, base: Path, tmp_path: Path) -> None:
    """Four processes append ten each while the store is verified all the time. Red when the lock or the snapshot goes:
    links would fork, or a reader would see half a receipt.
    """
    raw = tmp_path / "raw"
    raw.write_bytes(b"5\n")
    crowd = [Writers() for _ in range(4)]
    for number, one in enumerate(crowd):
        one.ask(do="append", store=str(base), raw=str(raw), who=number, times=10, wait=False)
    seen = 0
    deadline = os.times().elapsed + 60
    while seen < 42:
        verdict = verify_store(base)
        assert verdict.is_whole, verdict.report.findings
        assert verdict.report.num_receipts >= seen
        seen = verdict.report.num_receipts
        assert os.times().elapsed < deadline
    for one in crowd:
        one.close()
    assert signed(base).is_whole
    assert sha256sum(base)


# -- what is on disk ---------------------------------------------------------------------------------------------------


def test_files_are_read_only_and_named_by_their_digest(base: Path) -> None:
    for path in (base / "receipts").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o444
        if not path.name.endswith(".dsse.json"):
            content = path.read_bytes()
            assert path.name.split("-")[-1] == hashlib.sha256(content).hexdigest()[:12] + ".json"
            assert not content.endswith(b"\n")
    assert sha256sum(base)


def test_a_linked_receipt_is_refused(base: Path, tmp_path: Path) -> None:
    """Red when opening follows links: the content is right, the file is not ours."""
    path = next(p for p in sorted((base / "receipts").iterdir()) if not p.name.endswith(".dsse.json"))
    moved = tmp_path / "elsewhere.json"
    path.rename(moved)
    path.symlink_to(moved)
    assert verify_store(base).report.findings[0].code is Code.NOT_A_FILE


@pytest.mark.parametrize("make", ["fifo", "folder", "link-envelope"])
def test_odd_files_are_findings_and_nothing_hangs(base: Path, make: str) -> None:
    folder = base / "receipts"
    if make == "fifo":
        os.mkfifo(folder / "00000002-hold-000000000000.json")
    elif make == "folder":
        (folder / "00000002-hold-000000000000.json").mkdir()
    else:
        envelope = next(p for p in folder.iterdir() if p.name.endswith(".dsse.json"))
        envelope.unlink()
        envelope.symlink_to("/etc/hostname")
    assert Code.NOT_A_FILE in {f.code for f in verify_store(base).report.findings}


@pytest.mark.parametrize(
    "name", ["notes.txt", "..json", "00000002-hold-000000000000.json.bak", "\u202e.json", "x\n.json"]
)
def test_a_stranger_in_the_folder(base: Path, name: str) -> None:
    (base / "receipts" / name).write_bytes(b"{}")
    assert {f.code for f in verify_store(base).report.findings} >= {Code.BAD_NAME}


def test_a_removed_or_unlisted_envelope(base: Path) -> None:
    """Red when only receipts are compared with SHA256SUMS: a signature that was taken away must show."""
    envelope = next(p for p in (base / "receipts").iterdir() if p.name.endswith(".dsse.json"))
    content = envelope.read_bytes()
    envelope.unlink()
    assert [f.code for f in verify_store(base).report.findings] == [Code.SUMS_MISMATCH]
    envelope.write_bytes(content)
    assert verify_store(base).is_whole
    envelope.with_name(envelope.name.replace(".dsse.", "x.dsse.")).write_bytes(content)
    sums = base / "SHA256SUMS"
    kept = [line for line in sums.read_text().splitlines(keepends=True) if envelope.name not in line]
    sums.write_text("".join(kept))
    assert Code.SUMS_MISMATCH in {f.code for f in verify_store(base).report.findings}


def test_an_envelope_without_its_receipt(base: Path) -> None:
    (base / "receipts" / "00000007-hold-000000000000.aaaaaaaaaaaa.dsse.json").write_bytes(b"{}")
    assert Code.FOREIGN in {f.code for f in verify_store(base).report.findings}


def test_a_planted_pending_file_is_never_published(base: Path, tmp_path: Path) -> None:
    """Red when recovery trusts what lies in pending: only the very next receipt of this log may come from there."""
    other = fill(tmp_path / "other", 2)
    Store(other).append(draft(Kind.HOLD))
    planted = sorted(p for p in (other / "receipts").iterdir() if not p.name.endswith(".dsse.json"))[2]
    shutil.copy(planted, base / "pending" / planted.name)
    store = Store(base)
    made = store.append(draft(Kind.HOLD))
    assert store.head().head == made
    assert verify_store(base).report.num_receipts == 3
    assert verify_store(base).is_whole


def test_receipts_without_a_head_are_not_a_new_store(base: Path) -> None:
    """Red when a lost HEAD starts a second log in the same folder."""
    (base / "HEAD").unlink()
    with pytest.raises(ReceiptError) as caught:
        Store(base).append(draft(Kind.HOLD))
    assert caught.value.code is Code.HEAD_MISMATCH


def test_samples_must_be_given_exactly(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    raw = tmp_path / "raw"
    raw.write_bytes(b"1\n")
    made = draft(Kind.HOST_FACTS, samples=(raw_sample("a.jsonl", b"1\n"),))
    for files in ({}, {"b.jsonl": raw}, {"a.jsonl": raw, "b.jsonl": raw}):
        with pytest.raises(ReceiptError):
            store.append(made, samples=files)
    store.append(made, samples={"a.jsonl": raw})
    assert verify_store(tmp_path / "s").is_whole


def test_a_receipt_that_is_in_a_log_cannot_be_appended(base: Path) -> None:
    store = Store(base)
    head = store.head().head
    assert head is not None
    content = store.find(head)[1]
    with pytest.raises(ReceiptError):
        store.append(content.replace(b"xx", b""))
    assert store.find(head[:8])[1] == content
    assert loader(store)(head) == content
    assert loader(store)("0" * 64) is None
    assert read_receipt(content).id == head


def test_a_copy_without_empty_folders_verifies(base: Path, tmp_path: Path) -> None:
    """Version control drops empty folders; the evidence is the same."""
    shutil.copytree(base, tmp_path / "copy")
    (tmp_path / "copy" / "pending").rmdir()
    (tmp_path / "copy" / ".lock").unlink()
    assert verify_store(tmp_path / "copy").is_whole
    Store(tmp_path / "copy").append(draft(Kind.HOLD))
    assert verify_store(tmp_path / "copy").is_whole


def test_reading_changes_nothing(base: Path) -> None:
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in base.rglob("*")}
    verify_store(base)
    list(Store(base).entries())
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in base.rglob("*")} == before
