"""A real hold on this machine: every way out of it leads back to production, and the lease is exclusive."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from coordinator.errors import AdmissionRefused, GateFailed, HardwareHeld, OwnershipLost
from coordinator.guard_client import GuardClient
from coordinator.journal import read_journal
from coordinator.session import open_sessions
from coordinator.window import Window
from tests.coordinator.conftest import SmallSite
from windows.exit_codes import ExitCode
from windows.hold import replay
from windows.hold_table import Phase


def answer(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as reply:
        return str(reply.read().decode())


def leave_with(window: Window, error: BaseException) -> None:
    with window:
        window.open()
        raise error


def hold_until_broken(window: Window, guard: GuardClient) -> None:
    with window:
        window.open()
        guard.call("break", {"hold_id": window.hold_id, "reason": "test"}, with_claim=False)
        window.prove_ownership()


def hold_until_the_holder_dies(window: Window, state: Path) -> None:
    with window:
        window.open()
        window.prove_ownership()
        record = state / "holds" / window.hold_id / "holder.json"
        os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)
        window.prove_ownership()


def test_production_is_down_inside_and_back_after(small_site: SmallSite) -> None:
    """Red when stop or restore is skipped, or the journal tells another story than the hold."""
    with small_site.running() as (compiled, sessions):
        window = small_site.window(compiled, sessions)
        before = answer(small_site.port)
        with window:
            window.open()
            with pytest.raises(urllib.error.URLError):
                answer(small_site.port)
        assert answer(small_site.port) == before
        assert window.exit_code is ExitCode.DONE
        assert window.journal.state.has_ended_well
        assert replay(read_journal(window.journal.path)) == window.journal.state
        assert all(row["ok"] is True for row in window.records["here"].restore_rows)
        assert sessions[0].guard.call("status")["state"] == "free"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GateFailed("gate"), ExitCode.GATE_FAILED),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
        # After a stop "nothing touched" (10) would be untrue.
        (AdmissionRefused("late"), ExitCode.GATE_FAILED),
    ],
)
def test_an_error_inside_restores_first(small_site: SmallSite, error: BaseException, code: int) -> None:
    """Red when an exception leaves the block before production is back."""
    with small_site.running() as (compiled, sessions):
        window = small_site.window(compiled, sessions)
        with pytest.raises(type(error)):
            leave_with(window, error)
        assert answer(small_site.port)
        assert window.journal.state.phase is Phase.CLOSED
        assert window.exit_code == code


def test_a_second_window_is_refused_and_names_the_holder(small_site: SmallSite) -> None:
    """Red when two holders are possible, or the refused one disturbs the first."""
    with small_site.running() as (compiled, sessions):
        first = small_site.window(compiled, sessions)
        with first:
            first.open()
            with open_sessions(compiled.site, first._clock) as others:
                second = small_site.window(compiled, others)
                with pytest.raises(HardwareHeld) as caught, second:
                    second.open()
                assert first.hold_id in "\n".join(caught.value.lines())
                assert second.exit_code is ExitCode.HELD_BY_OTHER
                assert second.journal.state.phase is Phase.CLOSED
            first.check_ownership()
        assert first.exit_code is ExitCode.DONE
        assert answer(small_site.port)


def test_a_broken_lease_stops_us_from_touching_the_host(small_site: SmallSite) -> None:
    """Red when a late holder may still restore or run: its epoch is old."""
    with small_site.running() as (compiled, sessions):
        window = small_site.window(compiled, sessions)
        guard = sessions[0].guard
        with pytest.raises(OwnershipLost):
            hold_until_broken(window, guard)
        assert window.exit_code in (ExitCode.OWNERSHIP_LOST, ExitCode.NOT_RESTORED)
        assert window.records["here"].restored_by == "none"
        assert guard.call("status", with_claim=False)["in_debt"]
        outcome = guard.call("recover", {"hold_id": window.hold_id, "epoch": None}, with_claim=False, timeout_s=60)
        assert outcome["proven"] is True
        assert answer(small_site.port)


def test_a_holder_that_died_since_the_last_beat_is_noticed(small_site: SmallSite) -> None:
    """Red when a measurement counts although nobody kept the device's lock at its end."""
    with small_site.running() as (compiled, sessions):
        window = small_site.window(compiled, sessions)
        with pytest.raises(OwnershipLost, match="holder is gone"):
            hold_until_the_holder_dies(window, small_site.root / "state")
        assert window.exit_code is ExitCode.OWNERSHIP_LOST
        assert answer(small_site.port)


def test_a_planted_secret_is_in_nothing_that_was_written(small_site: SmallSite, tmp_path: Path) -> None:
    """Red when a secret reaches argv, snapshot, journal, state or log (DECISIONS 19)."""
    secret = "planted-" + hashlib.sha256(str(tmp_path).encode()).hexdigest()
    kept = tmp_path / "outside" / "key"
    kept.parent.mkdir()
    kept.write_text(secret)
    small_site.extra = {"secret_env": {"SERVICE_KEY": str(kept)}}
    with small_site.running() as (compiled, sessions):
        window = small_site.window(compiled, sessions)
        with window:
            window.open()
        # The service got it: otherwise this test would prove nothing.
        assert answer(small_site.port) == hashlib.sha256(secret.encode()).hexdigest()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                assert secret.encode() not in (process / "cmdline").read_bytes()
            except OSError:
                continue
    for path in tmp_path.rglob("*"):
        if path.is_file() and path != kept:
            assert secret.encode() not in path.read_bytes(), path
