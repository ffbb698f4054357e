"""The rehearsal's own services: what a killed rehearsal left is ended, and one that does not come up opens no hold."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from coordinator.clock import SystemClock
from coordinator.errors import GateFailed, HardwareHeld
from coordinator.hold_commands import end_hold, status_rows
from coordinator.production import TRIAL_PREFIX, production, require_free
from coordinator.rehearsal_site import free_ports
from coordinator.render import Reporter
from coordinator.session import HostSession, open_sessions
from coordinator.show_plan import compile_files
from tests.coordinator.conftest import SmallSite
from windows.guard.proc import is_alive


def record_of(session: HostSession, name: str) -> dict[str, Any]:
    text = (Path(session.spec.state_dir) / "services" / f"{name}.json").read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def test_what_a_killed_rehearsal_left_running_is_ended_first(small_site: SmallSite) -> None:
    compiled, clock = compile_files(*small_site.write()), SystemClock()
    with open_sessions(compiled.site, clock) as (session,):
        # The same names with other ports, as every rehearsal has its own: nobody ended them.
        for name in ("web", TRIAL_PREFIX + "web"):
            port = free_ports(1)[0]
            left = {
                **session.spec.services[0].to_guard(),
                "name": name,
                "start": [sys.executable, str(small_site.root / "service.py"), str(port)],
                "ports": [port],
                "probe": None,
            }
            session.guard.call("service-start", {"service": left}, with_claim=False, timeout_s=60)
        before = [record_of(session, name) for name in ("web", TRIAL_PREFIX + "web")]
        assert all(is_alive(record["pid"], record["start_ticks"]) for record in before)
        with production([session], Reporter(clock.utc, quiet=True)):
            assert not any(is_alive(record["pid"], record["start_ticks"]) for record in before)
            assert record_of(session, "web")["argv"][-1] == str(small_site.port)
        after = record_of(session, "web")
        assert not is_alive(after["pid"], after["start_ticks"])


def test_a_service_that_does_not_come_up_opens_no_hold_and_names_its_log(small_site: SmallSite) -> None:
    small_site.extra = {"start": [sys.executable, "-c", "raise SystemExit('no model here')"], "start_s": 5}
    with pytest.raises(GateFailed) as caught, small_site.running():
        pass
    assert "did not come up" in caught.value.message
    assert caught.value.next_step.endswith("web.log")
    assert "no model here" in (small_site.root / "web.log").read_text()


def test_a_living_hold_is_held_and_not_a_debt(small_site: SmallSite, tmp_path: Path) -> None:
    site, store = tmp_path / "my site.toml", tmp_path / "its store"
    with small_site.running() as (compiled, sessions):
        window = small_site.window(compiled, sessions)
        with window:
            window.open()
            with pytest.raises(HardwareHeld) as caught:
                require_free(sessions, site, store)
            rows = dict(row[1:] for row in status_rows({"here": sessions[0].guard.call("status")}, site, store))
    assert window.hold_id in caught.value.found
    assert f"hold recover --site '{site}' --store '{store}'" in caught.value.next_step
    assert re.fullmatch(r"\d+ s ago; the host acts in \d+ s", rows["heartbeat"])
    assert f"hold recover --site '{site}' --store '{store}'" in rows["next"]


def test_a_free_host_needs_nothing(small_site: SmallSite) -> None:
    with small_site.running() as (_, sessions):
        rows = status_rows({"here": sessions[0].guard.call("status")}, Path("site.toml"), Path("store"))
    assert rows[-1][1:] == ("next", "nothing to do")


def test_status_says_that_the_dead_man_is_gone(small_site: SmallSite) -> None:
    with small_site.running() as (compiled, sessions), small_site.window(compiled, sessions) as window:
        window.open()
        before = status_rows({"here": sessions[0].guard.call("status")}, Path("site.toml"), Path("store"))
        record = Path(sessions[0].spec.state_dir) / "holds" / window.hold_id / "deadman.json"
        os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)
        after = status_rows({"here": sessions[0].guard.call("status")}, Path("site.toml"), Path("store"))
    assert "dead-man" not in [row[1] for row in before]
    assert "NOT RUNNING" in dict(row[1:] for row in after)["dead-man"]


def test_recovery_without_a_place_for_its_receipt_still_says_what_became_of_production(
    small_site: SmallSite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "a-file"
    taken.write_text("")
    with small_site.running() as (compiled, sessions):
        with small_site.window(compiled, sessions) as window:
            window.open()
        code = end_hold(
            tmp_path / "site.toml", taken / "store", verb="recover", hold_id=window.hold_id, reason="test", json=False
        )
    said = capsys.readouterr()
    assert code == 0
    assert "no receipt was written" in said.err
    assert window.hold_id in said.out
