"""A real hold over a link that loses single answers: each is asked for again, and nothing is done twice.

The link is ``tests.hosts.simulated``, which keeps the contract of the real ways to a host; guard and production are
real processes of this machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from coordinator.clock import SystemClock
from coordinator.guard_client import GuardClient
from coordinator.session import HostSession, new_operation_id
from coordinator.window import Window
from tests.coordinator.conftest import SmallSite
from tests.hosts.simulated import AFTER, BEFORE, SimulatedHost
from windows.exit_codes import ExitCode

VERBS = ("acquire", "confirm", "snapshot", "arm", "stop", "restore", "close")


@contextmanager
def over_a_link(small_site: SmallSite) -> Iterator[tuple[Window, SimulatedHost]]:
    """A window on the small site, its only host behind a simulated link."""
    with small_site.running() as (compiled, sessions):
        plain = sessions[0]
        link = SimulatedHost("here")
        guard = GuardClient(
            link,
            python=plain.spec.python,
            archive=plain.guard.archive,
            state_dir=plain.spec.state_dir,
            operation_ids=new_operation_id,
            clock=SystemClock(),
        )
        yield small_site.window(compiled, [HostSession(plain.spec, link, guard, plain.guard_sha256)]), link


def events(small_site: SmallSite) -> list[str]:
    lines = (small_site.root / "state" / "events.jsonl").read_text().splitlines()
    return [str(json.loads(line)["event"]) for line in lines]


@pytest.mark.parametrize("moment", [BEFORE, AFTER])
@pytest.mark.parametrize("verb", VERBS)
def test_one_lost_answer_changes_nothing(verb: str, moment: str, small_site: SmallSite) -> None:
    """Red when a lost answer is guessed, or the repetition acts a second time."""
    with over_a_link(small_site) as (window, link):
        link.lose(verb, moment)
        with window:
            window.open()
        assert link.lost == [f"{verb} {moment}"]
        assert window.exit_code is ExitCode.DONE
    said = events(small_site)
    assert [said.count(name) for name in ("acquired", "stop-begins", "restored", "ended")] == [1, 1, 1, 1]
