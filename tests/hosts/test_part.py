"""Which cases of the fault matrix run on a day: every one has its day, and none is left out for ever."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path

import pytest

from tests.hosts.part import CASES_PER_PART, Ledger, box_s, choose, place, resolve

NAMES = [f"test_{family}[{number}]" for family in "abcdef" for number in range(95)]
MONDAY = date(2026, 1, 5)


def test_days_in_a_row_run_everything_once() -> None:
    """Red when a case has no day, two days overlap, or a part is smaller than it should be."""
    num_parts = len(NAMES) // CASES_PER_PART
    parts = [choose(NAMES, resolve(None, len(NAMES), MONDAY + timedelta(day))) for day in range(num_parts)]
    assert set().union(*parts) == set(NAMES)
    assert sum(map(len, parts)) == len(NAMES)
    assert all(len(part) >= CASES_PER_PART for part in parts)


def test_each_has_one_case_of_each_family() -> None:
    """Red when a family has no case in the shortest run."""
    assert sorted(name[:6] for name in choose(NAMES, "each")) == [f"test_{family}" for family in "abcdef"]


def test_what_is_last_on_one_day_is_not_on_the_next() -> None:
    """Red when a time box leaves out the same cases every day."""
    last = [sorted(NAMES, key=lambda name: place(name, MONDAY + timedelta(day)))[-50:] for day in (0, 5)]
    assert len(set(last[0]) & set(last[1])) < 25


def test_left_are_the_cases_whose_last_run_did_not_pass(tmp_path: Path) -> None:
    """Red when a failure is forgotten, or a case that passed runs again."""
    ledger = Ledger(tmp_path)
    for name, outcome in ((NAMES[0], "failed"), (NAMES[0], "passed"), (NAMES[1], "passed"), (NAMES[1], "failed")):
        ledger.add(name, outcome, 1.0)
    assert choose(NAMES, "left", ledger.passed()) == set(NAMES) - {NAMES[0]}


@pytest.mark.parametrize("wanted", ["0/3", "4/3", "x", "1/", "/2", "some"])
def test_a_part_that_is_none_is_refused(wanted: str) -> None:
    """Red when a misspelled part runs nothing and passes."""
    with pytest.raises(ValueError, match="HOSTS_PART"):
        resolve(wanted, 100, MONDAY)


def test_a_time_box_is_only_made_shorter() -> None:
    """Red when a typing error lifts the box, or a hurried run has none."""
    assert [box_s(asked) for asked in (None, "", "60", "9999")] == [480.0, 480.0, 60.0, 480.0]
    with pytest.raises(ValueError, match="HOSTS_BOX_S"):
        box_s("soon")
