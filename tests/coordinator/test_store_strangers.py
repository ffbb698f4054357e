"""What does not belong into a store is found and named; what is wrong with its lists says which list."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "receipts"))

from receipt_kit import draft, raw_sample

from coordinator.cli import run
from coordinator.store import Store
from receipts.fields import Kind


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two receipts, one of them with a raw file."""
    raw, folder = tmp_path / "raw", tmp_path / "store"
    raw.write_bytes(b"7\n")
    store = Store(folder)
    store.append(draft(Kind.SOURCE_IDENTITY))
    store.append(draft(Kind.HOST_FACTS, samples=(raw_sample("a.jsonl", b"7\n"),)), samples={"a.jsonl": raw})
    return folder


def verify(store: Path, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, list[tuple[str, str]]]:
    code = run(["receipts", "verify", str(store), "--state", str(store.parent / "state"), "--json", *argv])
    found = json.loads(capsys.readouterr().out)["findings"]
    return code, [(finding["code"], finding["where"]) for finding in found]


@pytest.mark.parametrize("name", ["notes.txt", "HEAD.bak", "receipts2", "\u202egnp.exe", "a\r\nb", "samples/notes.txt",
                                  "samples/" + "0" * 64, "pending/notes.txt"])  # fmt: skip
def test_a_foreign_file_anywhere_is_found_and_named(store: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Red when only `receipts/` is looked at: an auditor must be able to sign for the whole folder."""
    (store / name).write_bytes(b"x")
    assert verify(store, capsys) == (60, [("foreign-receipt", name)])
    (store / name).unlink()
    assert verify(store, capsys) == (0, [])


def test_what_a_dead_writer_leaves_is_not_foreign(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red when a store that the next writer repairs by itself counts as damaged."""
    (store / "HEAD.new").write_bytes(b"")
    (store / "pending" / f"sample-{'0' * 64}").write_bytes(b"1\n")
    (store / "samples" / ("0" * 64)).hardlink_to(store / "pending" / f"sample-{'0' * 64}")
    assert verify(store, capsys) == (0, [])


def test_since_does_not_call_older_raw_files_foreign(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = Store(store).head().head
    assert head is not None
    assert verify(store, capsys, "--since", head) == (0, [])
    (store / "notes.txt").write_bytes(b"x")
    assert verify(store, capsys, "--since", head) == (60, [("foreign-receipt", "notes.txt")])


@pytest.mark.parametrize("name", ["receipts", "samples"])
def test_a_folder_that_is_a_link_is_refused(store: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Red when a store may point at folders elsewhere."""
    (store / name).rename(store.parent / "elsewhere")
    (store / name).symlink_to(store.parent / "elsewhere")
    code, found = verify(store, capsys)
    assert code == 60
    assert found[0][0] == "not-a-regular-file"
    assert found[0][1].endswith(name)


@pytest.mark.parametrize("content", [b"", b"{", b'{"count":1,"he', b"\xff\xfe", b"[" * 10**6, b"{}\n"])
@pytest.mark.parametrize("command", ["verify", "admit"])
def test_a_torn_head_exits_60_and_is_named(
    store: Path, content: bytes, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when the refusal does not say which file to restore, or when a gate calls it a usage error."""
    (store / "HEAD").write_bytes(content)
    asked = ["receipts", "verify", str(store)] if command == "verify" else ["admit", "live", "--store", str(store)]
    assert run([*asked, "--state", str(store.parent / "state"), "--json"]) == 60
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["where"] == "HEAD"
    assert finding["code"] in {"torn-write", "head-mismatch", "too-large", "too-deep"}


def test_a_damaged_mark_is_named_by_its_path(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red when the refusal blames the store's HEAD for a damaged memory of ours."""
    assert verify(store, capsys)[0] == 0
    (mark,) = (store.parent / "state" / "high-water").glob("*.json")
    os.truncate(mark, 5)
    assert verify(store, capsys) == (60, [("torn-write", str(mark))])


def test_show_says_only_what_a_receipt_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red when a recovery, which belongs to no numbered hold, is shown with the word None."""
    receipt = Store(tmp_path / "s").append(draft(Kind.RECOVERY, position={"hold_id": "hold-1"}))
    assert run(["receipts", "show", receipt, "--store", str(tmp_path / "s")]) == 0
    out = capsys.readouterr().out
    assert "hold id hold-1, try 1" in out
    assert "None" not in out
