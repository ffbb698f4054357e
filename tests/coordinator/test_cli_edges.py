"""The command line where a person does not do what it expects."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from coordinator.cli import run


def test_a_question_without_an_answer_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "site.toml"
    mine.write_text("# mine\n")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert run(["init", str(tmp_path)]) == 2
    assert mine.read_text() == "# mine\n"
    assert "internal error" not in capsys.readouterr().err
