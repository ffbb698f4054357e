"""Which part of the fault matrix runs: all of it, one of several equal parts, or one case of each family.

Cases are dealt round by a hash of their names, so every part has some of each family, a new case moves no other, and as
many days as there are parts run everything. ``HOSTS_PART`` is read here only: ``all``, ``K/N`` (from 1), ``each``
(one case of each family); ``today``, or nothing, lets the date choose K; ``left`` are the cases that have not passed
yet according to the ledger, so that a whole run can be interrupted; without its file it begins again. The date decides
the order inside a part too, and the part comes before all other tests of hosts, so that its time box holds no other.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Collection, Sequence
from datetime import UTC, date, datetime
from pathlib import Path

CASES_PER_PART = 100
VARIABLE = "HOSTS_PART"
BOX_S = 480.0
"""Cases of a part that nobody asked for do not begin later: a busy machine runs fewer, and says so."""
BOX_VARIABLE = "HOSTS_BOX_S"
"""A shorter box, from whoever knows how much time the other lanes took."""


def resolve(wanted: str | None, num_cases: int, today: date) -> str:
    """The part as text.

    Raises:
        ValueError: ``wanted`` is none of these forms.
    """
    if wanted in ("all", "each", "left"):
        return wanted
    if not wanted or wanted == "today":
        num_parts = max(num_cases // CASES_PER_PART, 1)
        return f"{today.toordinal() % num_parts + 1}/{num_parts}"
    number, _, total = wanted.partition("/")
    if not (number.isdigit() and total.isdigit() and 1 <= int(number) <= int(total)):
        raise ValueError(f"{VARIABLE}={wanted!r}: expected all, each, left, today, or K/N with 1 <= K <= N")
    return wanted


def box_s(asked: str | None) -> float:
    """Seconds of the time box.

    Raises:
        ValueError: ``asked`` is no whole number of seconds.
    """
    if not asked:
        return BOX_S
    if not asked.isdigit():
        raise ValueError(f"{BOX_VARIABLE}={asked!r}: expected whole seconds")
    return min(float(asked), BOX_S)


def choose(names: Sequence[str], part: str, passed: Collection[str] = ()) -> set[str]:
    """The names of the cases of a part; ``passed`` are those that need not run again."""
    dealt = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    if part == "all":
        return set(names)
    if part == "left":
        return set(names) - set(passed)
    if part == "each":
        return set({name.partition("[")[0]: name for name in reversed(dealt)}.values())
    number, _, total = part.partition("/")
    return set(dealt[int(number) - 1 :: int(total)])


def place(name: str, today: date) -> bytes:
    """Where a case comes in the order of its day: when time runs out, other cases are left each day."""
    return hashlib.sha256(f"{today} {name}".encode()).digest()


class Ledger:
    """What became of each case at which commit: one JSON line for each time it ran."""

    def __init__(self, root: Path) -> None:
        self._path = root / "build" / "hosts-matrix.jsonl"
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=False
        )
        self._commit = said.stdout.strip() or "unknown"

    def passed(self) -> set[str]:
        """Names of the cases whose last run passed."""
        if not self._path.exists():
            return set()
        runs = [json.loads(line) for line in self._path.read_text().splitlines()]
        last = {run["case"]: run["outcome"] for run in runs}
        return {case for case, outcome in last.items() if outcome == "passed"}

    def add(self, case: str, outcome: str, seconds: float) -> None:
        """Append one run; workers may do so at once."""
        utc = datetime.now(UTC).isoformat(timespec="seconds")
        run = {"case": case, "outcome": outcome, "s": round(seconds, 1), "commit": self._commit, "utc": utc}
        self._path.parent.mkdir(exist_ok=True)
        with self._path.open("a") as ledger:
            ledger.write(json.dumps(run) + "\n")
