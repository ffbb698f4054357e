"""What the compiled exchange must contain: barriers around release and acquire, system scope, no multicast.

The source alone does not say it: a compiler that moved a barrier, or that read the signal without acquire, would still
give right answers nearly always. Reads PTX text; imports neither torch nor triton.
"""

from __future__ import annotations

import re

_RELEASE = re.compile(r"\batom\.global\.sys\.release\.exch\.b64\b")
_ACQUIRE = re.compile(r"\b(?:ld|atom)\.global\.sys\.acquire\.(?:\w+\.)?[bu]64\b")
_BARRIER = re.compile(r"\bbar\.sync\b|\bbarrier\.sync\b")
_STORE = re.compile(r"\bst\.(?:volatile\.)?global\b")
_LOAD = re.compile(r"\bld\.(?:volatile\.)?global\b")
_MULTICAST = re.compile(r"\bmultimem\b")

NUM_MESSAGES = 2
"""A position's own message, and the one that ends a chain."""


def barrier_faults(ptx: str) -> list[str]:
    """What is missing in the PTX of a pair kernel; an empty list when all holds.

    Checked: every release to the peer has a barrier between it and the last store before it; every acquire is followed
    by a barrier before anything else is read from global memory; there are as many messages as expected.
    """
    lines = [line for line in ptx.splitlines() if not line.lstrip().startswith("//")]
    releases = [index for index, line in enumerate(lines) if _RELEASE.search(line)]
    acquires = [index for index, line in enumerate(lines) if _ACQUIRE.search(line)]
    faults = []
    # each message has a release of its signal and one of the fault word
    if len(releases) != 2 * NUM_MESSAGES:
        faults.append(f"expected {2 * NUM_MESSAGES} releases at system scope, found {len(releases)}")
    # each message reads its signal before the loop, in it and after it, and the fault word in it
    if len(acquires) != 4 * NUM_MESSAGES:
        faults.append(f"expected {4 * NUM_MESSAGES} acquires at system scope, found {len(acquires)}")
    for index in releases:
        if _first(lines, range(index - 1, -1, -1), _BARRIER, _STORE) is not _BARRIER:
            faults.append(f"line {index}: expected a barrier between the last store and the release")
    for index in acquires:
        if _first(lines, range(index + 1, len(lines)), _BARRIER, _LOAD) is not _BARRIER:
            faults.append(f"line {index}: expected a barrier between the acquire and the next load")
    if _MULTICAST.search(ptx):
        faults.append("expected no multicast, found multimem")
    return faults


def _first(lines: list[str], order: range, one: re.Pattern[str], other: re.Pattern[str]) -> re.Pattern[str] | None:
    """Which of two patterns comes first in that order."""
    for index in order:
        for pattern in (one, other):
            if pattern.search(lines[index]):
                return pattern
    return None
