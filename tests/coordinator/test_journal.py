"""The journal writes only what the hold machine allows, and reads back what a crash left."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.clock import ManualClock
from coordinator.errors import UsageError
from coordinator.journal import Journal, read_journal
from windows.errors import HoldError
from windows.hold import replay
from windows.hold_table import Action, HoldEvent, Moment, Phase

PLAN = "0" * 64


def journal(path: Path) -> Journal:
    return Journal(path, ManualClock(), hold_id="test-hold-1", hold_number=1, plan_sha256=PLAN, hosts=("a", "b"))


def test_replay_equals_the_live_state(tmp_path: Path) -> None:
    """Red when a record is applied and not written, or written and not applied."""
    live = journal(tmp_path / "j")
    live.note(HoldEvent.ADMITTED)
    for host in ("a", "b"):
        op = live.intent(host, Action.LEASE)
        live.outcome(op, Moment.DONE, epoch=4)
    live.note(HoldEvent.ALL_LEASED)
    live.close()
    assert replay(read_journal(tmp_path / "j")) == live.state
    assert live.state.phase is Phase.LEASED


def test_what_the_tables_refuse_is_not_written(tmp_path: Path) -> None:
    live = journal(tmp_path / "j")
    before = (tmp_path / "j").read_bytes()
    with pytest.raises(HoldError):
        live.note(HoldEvent.ALL_HELD)
    live.close()
    assert (tmp_path / "j").read_bytes() == before


def test_a_torn_last_line_is_dropped_and_a_damaged_middle_refuses(tmp_path: Path) -> None:
    path = tmp_path / "j"
    live = journal(path)
    live.note(HoldEvent.ADMITTED)
    live.close()
    whole = path.read_bytes()
    for cut in range(1, len(whole.split(b"\n")[1])):
        path.write_bytes(whole[: -1 - cut])
        assert len(read_journal(path)) == 1
    lines = whole.split(b"\n")
    path.write_bytes(b"\n".join([lines[0][:-5], lines[1], b""]))
    with pytest.raises(UsageError, match="damaged"):
        read_journal(path)


def test_a_hold_has_one_journal(tmp_path: Path) -> None:
    journal(tmp_path / "j").close()
    with pytest.raises(FileExistsError):
        journal(tmp_path / "j")
