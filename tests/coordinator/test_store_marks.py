"""High-water marks: only forward, never read as none when damaged, and never in the way of a verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.store_marks import Marks, state_folder
from coordinator.store_verify import remember
from receipts.chain import Head
from receipts.errors import ReceiptError

LOG = "a" * 32


def head(count: int) -> Head:
    return Head(LOG, count, f"{count:064x}")


def test_a_mark_moves_only_forward(tmp_path: Path) -> None:
    """Red when an older head can replace a newer one."""
    marks = Marks(tmp_path)
    assert marks.get(LOG) is None
    for count in (3, 2, 5, 1):
        marks.advance(head(count))
    assert marks.get(LOG) == head(5)
    assert marks.get("b" * 32) is None


def test_a_damaged_mark_is_an_error_and_not_none(tmp_path: Path) -> None:
    """Red when damaging the memory makes the verifier forget."""
    marks = Marks(tmp_path)
    marks.advance(head(3))
    (tmp_path / "high-water" / f"{LOG}.json").write_bytes(b"{")
    with pytest.raises(ReceiptError):
        marks.get(LOG)


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_bytes(b"")
    remember(Marks(tmp_path / "file"), head(1))
    assert "could not be remembered" in capsys.readouterr().err


def test_the_folder_does_not_follow_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Red when an environment variable can move the memory away."""
    before = state_folder()
    for name in ("HOME", "XDG_STATE_HOME", "PWD"):
        monkeypatch.setenv(name, str(tmp_path))
    assert state_folder() == before
