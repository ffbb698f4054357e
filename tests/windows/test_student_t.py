"""The t quantiles against published tables, and the inverse against the distribution."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest

from windows.student_t import critical, exp, ln, two_sided

# Two-sided critical values as printed in the usual tables.
TABLE = {
    (1, 900_000): "6.313752",
    (1, 950_000): "12.706205",
    (1, 990_000): "63.656741",
    (2, 950_000): "4.302653",
    (3, 950_000): "3.182446",
    (4, 950_000): "2.776445",
    (5, 990_000): "4.032143",
    (10, 950_000): "2.228139",
    (11, 900_000): "1.795885",
    (30, 950_000): "2.042272",
    (120, 950_000): "1.979930",
}


@pytest.mark.parametrize(("df", "level"), TABLE)
def test_critical_values_are_those_of_the_tables(df: int, level: int) -> None:
    assert critical(df, level).quantize(Decimal("0.000001")) == Decimal(TABLE[df, level])


@pytest.mark.parametrize("df", [1, 2, 3, 4, 7, 20])
def test_the_distribution_inverts_the_quantile(df: int) -> None:
    assert abs(two_sided(critical(df, 950_000), df) - Decimal("0.95")) < Decimal("1e-35")


def test_all_digits_are_the_same_everywhere() -> None:
    # One degree of freedom is the Cauchy distribution: tan(0.95 * pi / 2); pinned as computed.
    assert str(critical(1, 950_000))[:36] == "12.706204736174704646021679978842087"


@pytest.mark.parametrize(("df", "level"), [(0, 950_000), (401, 950_000), (1, 0), (1, 1_000_000)])
def test_out_of_range_is_refused(df: int, level: int) -> None:
    with pytest.raises(ValueError, match="expected df"):
        critical(df, level)


def test_logarithms() -> None:
    assert abs(exp(ln(Fraction(7, 5))) - Decimal("1.4")) < Decimal("1e-45")
    with pytest.raises(ValueError, match="positive"):
        ln(Fraction(0))
