"""Placeholders: known ones only, filled once, nothing else touched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windows.errors import PlanError
from windows.template import KNOWN_PLACEHOLDERS, fill, fill_argv, require_known


def test_json_in_an_argument_stays_as_written() -> None:
    assert fill('{"mode": {"a": 1}}', {}) == '{"mode": {"a": 1}}'


def test_a_filled_value_is_not_looked_at_again() -> None:
    assert fill("{mode}", {"mode": "{host}", "host": "x"}) == "{host}"


def test_a_missing_value_is_refused() -> None:
    with pytest.raises(PlanError, match=r"\{epoch\} has no value here"):
        fill("{epoch}", {"mode": "x"})


def test_an_unknown_placeholder_is_refused() -> None:
    require_known(["{mode} {extra}"], ["extra"])
    with pytest.raises(ValueError, match=r"found \{extra\}"):
        require_known(["{mode} {extra}"])


def test_every_known_placeholder_is_described() -> None:
    assert all(KNOWN_PLACEHOLDERS.values())


@given(st.lists(st.text()), st.text())
def test_the_number_of_words_never_changes(argv: list[str], value: str) -> None:
    argv = [word.replace("{", "") for word in argv]
    assert fill_argv([*argv, "{mode}"], {"mode": value}) == (*argv, value)
