"""Which part of the fault matrix runs: all of it, one of several equal parts, or one case of each family.

Cases are dealt round by a hash of their names, so every part has some of each family, a new case moves no other, and as
many days as there are parts run everything. ``HOSTS_PART`` is read here only: ``all``, ``K/N`` (from 1), ``each``
(one case of each family); ``today``, or nothing, lets the date choose K.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import date

CASES_PER_PART = 105
VARIABLE = "HOSTS_PART"
BOX_S = 900.0
"""Cases of a part that nobody asked for do not begin later: a busy machine runs fewer, and says so."""


def resolve(wanted: str | None, num_cases: int, today: date) -> str:
    """The part as text.

    Raises:
        ValueError: ``wanted`` is none of the three forms.
    """
    if wanted in ("all", "each"):
        return wanted
    if not wanted or wanted == "today":
        num_parts = max(num_cases // CASES_PER_PART, 1)
        return f"{today.toordinal() % num_parts + 1}/{num_parts}"
    number, _, total = wanted.partition("/")
    if not (number.isdigit() and total.isdigit() and 1 <= int(number) <= int(total)):
        raise ValueError(f"{VARIABLE}={wanted!r}: expected all, each, today, or K/N with 1 <= K <= N")
    return wanted


def choose(names: Sequence[str], part: str) -> set[str]:
    """The names of the cases of a part."""
    dealt = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    if part == "all":
        return set(names)
    if part == "each":
        return set({name.partition("[")[0]: name for name in reversed(dealt)}.values())
    number, _, total = part.partition("/")
    return set(dealt[int(number) - 1 :: int(total)])
