"""Exit codes: their numbers, and who wins."""

from __future__ import annotations

import itertools

import pytest

from windows.exit_codes import PRECEDENCE, ExitCode, combine

ORDER = [50, 51, 40, 130, 33, 30, 31, 32, 60, 21, 20, 22, 11, 10, 2, 0]


def test_the_order_is_that_of_the_decisions() -> None:
    assert [code.value for code in PRECEDENCE] == ORDER
    assert set(PRECEDENCE) == set(ExitCode)


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(ORDER, 2)))
def test_the_earlier_of_two_wins_in_both_orders(first: int, second: int) -> None:
    assert combine([first, second]) == combine([second, first]) == first


def test_nothing_is_no_success() -> None:
    with pytest.raises(ValueError, match="found no code"):
        combine([])


def test_a_number_that_is_none_of_ours_is_refused() -> None:
    with pytest.raises(ValueError, match="1 is not a valid ExitCode"):
        combine([0, 1])


def test_every_code_says_what_state_the_hardware_is_in() -> None:
    assert all(code.meaning for code in ExitCode)
