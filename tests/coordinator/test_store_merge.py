"""Merging stores: each chain is kept byte for byte, a receipt links it, and what happens to either later is found."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "receipts"))

from receipt_kit import draft, parent, raw_sample, signer

from coordinator.cli import run
from coordinator.store import Store
from receipts.fields import Kind


class Two:
    """Two stores of two operators, and the commands."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys
        self.mine, self.theirs = folder / "mine", folder / "theirs"
        raw = folder / "raw"
        raw.write_bytes(b"7\n")
        Store(self.mine).append(draft(Kind.SOURCE_IDENTITY))
        other = Store(self.theirs)
        other.append(draft(Kind.SOURCE_IDENTITY), signer=signer())
        made = draft(Kind.HOST_FACTS, samples=(raw_sample("a.jsonl", b"7\n"),))
        self.facts = other.append(made, samples={"a.jsonl": raw})
        self.log = other.head().log
        self.merged = self.mine / "logs" / self.log

    def __call__(self, *argv: str) -> tuple[int, Any]:
        self._capsys.readouterr()
        code = run([*argv, "--json"])
        out = self._capsys.readouterr().out
        return code, json.loads(out) if out.strip() else None

    def merge(self, other: Path | None = None) -> int:
        return self("receipts", "merge", str(other or self.theirs), "--store", str(self.mine))[0]

    def verify(self, store: Path | None = None, *argv: str) -> tuple[int, list[tuple[str, str]]]:
        state = ("--state", str(self.folder / "state"))
        code, document = self("receipts", "verify", str(store or self.mine), *state, *argv)
        return code, [(finding["code"], finding["where"].split("/")[0]) for finding in document["findings"]]


@pytest.fixture
def two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Two:
    return Two(tmp_path, capsys)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def test_a_merged_log_is_the_same_bytes_and_verifies_alone_and_together(two: Two) -> None:
    before = files(two.theirs)
    assert two.merge() == 0
    assert files(two.merged) == files(two.theirs) == before
    assert two.verify() == (0, [])
    assert two.verify(two.merged) == (0, [])
    link = two("receipts", "list", str(two.mine), "--kind", "attempt")[1][0]
    assert (link["verdict"], link["sequence"]) == ("PASS", 1)
    shown = two("receipts", "show", link["id"], "--store", str(two.mine))[1]
    assert shown["statement"]["predicate"]["body"]["labels"]["count"] == "2"


def test_receipts_after_the_link_may_build_on_a_merged_one_and_none_before(two: Two) -> None:
    """Red when a merged log counts before the receipt that links it."""
    child = draft(Kind.BUDGET, parents=(parent(Kind.HOST_FACTS, two.facts, "facts"),))
    assert two.merge() == 0
    Store(two.mine).append(child)
    assert two.verify() == (0, [])
    link = two("receipts", "list", str(two.mine))[1][1]["id"]
    assert two.verify(two.mine, "--since", link) == (0, [])
    early = two.folder / "early"
    Store(early).append(child)
    assert two("receipts", "merge", str(two.theirs), "--store", str(early))[0] == 60
    assert not (early / "logs").exists()


@pytest.mark.parametrize(
    ("damage", "code"),
    [("edit", "digest-mismatch"), ("append", "head-mismatch"), ("remove", "chain-gap"), ("link", "not-a-regular-file"),
     ("foreign", "foreign-receipt"), ("unlinked", "foreign-receipt"), ("head", "torn-write"),
     ("countersign", "head-mismatch")],
)  # fmt: skip
def test_whatever_happens_to_a_merged_log_is_found(two: Two, damage: str, code: str) -> None:
    """Red when only the store's own log is looked at."""
    assert two.merge() == 0
    if damage == "edit":
        path = next(two.merged.glob("receipts/00000000-*-????????????.json"))
        path.chmod(0o644)
        path.write_bytes(path.read_bytes().replace(b"C.UTF-8", b"D.UTF-8"))
    elif damage == "append":
        Store(two.merged).append(draft(Kind.ATTEMPT))
    elif damage == "remove":
        shutil.rmtree(two.merged)
    elif damage == "link":
        two.merged.rename(two.folder / "elsewhere")
        two.merged.symlink_to(two.folder / "elsewhere")
    elif damage == "foreign":
        (two.merged / "notes.txt").write_bytes(b"x")
    elif damage == "unlinked":
        shutil.copytree(two.merged, two.merged.with_name("f" * 32))
    elif damage == "head":
        (two.merged / "HEAD").chmod(0o644)
        (two.merged / "HEAD").write_bytes(b"{")
    else:
        Store(two.merged).countersign(two.facts, signer("auditor"))
    code_found, findings = two.verify()
    assert code_found == 60
    assert (code, "logs") in findings


def test_what_is_refused_changes_nothing(two: Two, tmp_path: Path) -> None:
    """Itself, twice, a damaged store, one that is not there."""
    assert two.merge(two.mine) == 2
    assert two.merge(tmp_path / "nowhere") == 60
    assert two.merge() == 0
    before = files(two.mine)
    assert two.merge() == 2
    damaged = tmp_path / "damaged"
    Store(damaged).append(draft(Kind.ATTEMPT))
    (damaged / "notes.txt").write_bytes(b"x")
    assert two.merge(damaged) == 60
    assert files(two.mine) == before
    assert two.verify() == (0, [])


def test_a_merge_that_died_is_done_again(two: Two) -> None:
    """Red when a copy that nothing links stays in the way."""
    (two.mine / "logs").mkdir()
    shutil.copytree(two.theirs, two.merged)
    (two.merged / "HEAD").write_bytes(b"")
    shutil.copytree(two.theirs, two.merged.with_name(f"{two.log}.part"))
    assert {where for _, where in two.verify()[1]} == {"logs"}
    shutil.rmtree(two.merged.with_name(f"{two.log}.part"))
    shutil.rmtree(two.merged)
    shutil.copytree(two.theirs, two.merged.with_name(f"{two.log}.part"))
    code, findings = two.verify()
    assert (code, findings) == (60, [("foreign-receipt", "logs")])
    shutil.rmtree(two.mine / "logs")
    assert two.merge() == 0
    assert two.verify() == (0, [])


def test_a_store_with_a_merged_log_merges_whole(two: Two, tmp_path: Path) -> None:
    """A fresh store takes in one that has taken in another."""
    assert two.merge() == 0
    fresh = tmp_path / "fresh"
    assert two("receipts", "merge", str(two.mine), "--store", str(fresh))[0] == 0
    assert two.verify(fresh) == (0, [])
    deep = fresh / "logs" / Store(two.mine).head().log / "logs" / two.log / "HEAD"
    deep.chmod(0o644)
    deep.write_bytes(b"{}")
    assert two.verify(fresh)[0] == 60
