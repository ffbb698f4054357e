"""The command line where a person does not do what it expects."""

from __future__ import annotations

import io
import signal
from pathlib import Path

import pytest

from coordinator.cli import run
from coordinator.errors import Interrupted
from coordinator.signals import InterruptFlag
from tests.coordinator.conftest import SmallSite


def test_a_question_without_an_answer_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "site.toml"
    mine.write_text("# mine\n")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert run(["init", str(tmp_path)]) == 2
    assert mine.read_text() == "# mine\n"
    assert "internal error" not in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--state", "--dir"])
def test_a_folder_that_cannot_be_used_is_named(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file, not a folder")
    folders = {"--state": tmp_path / "state", "--dir": tmp_path / "dir", option: taken}
    assert run(["rehearse", *(word for name, path in folders.items() for word in (name, str(path)))]) == 2
    said = capsys.readouterr().err
    assert "internal error" not in said
    assert str(taken) in said
    assert option in said


def test_a_campaign_with_an_unknown_policy_ends_before_any_host(
    small_site: SmallSite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site, plan = small_site.write()
    store = tmp_path / "store"
    words = ["campaign", "--site", str(site), "--plan", str(plan), "--store", str(store), "--policy", "liv"]
    assert run(words) == 2
    said = capsys.readouterr().err
    assert "one of first-hold, live, rehearsal" in said
    assert not store.exists()
    assert not list((small_site.root / "state").iterdir())


def test_an_interruption_is_acknowledged_once(capfd: pytest.CaptureFixture[str]) -> None:
    with InterruptFlag() as flag:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        with pytest.raises(Interrupted, match="SIGTERM"):
            flag.check()
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("SIGTERM: ending; production comes back first")
