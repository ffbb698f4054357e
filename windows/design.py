"""The order of the arms as a paired, balanced design (DESIGN section 6).

Rules: a pair is run whole inside one hold, so that what happens between holds cannot leak into it; as many pairs
start with A as with B, so that a drift inside the holds cancels: A1 B1 | B2 A2 has a bias of exactly zero for it.
"""

from __future__ import annotations

from collections.abc import Mapping


def require_consecutive(holds: Mapping[str, object]) -> list[str]:
    """The keys in numeric order.

    Raises:
        ValueError: They are not 1, 2, 3, … without a gap.
    """
    keys = sorted(holds, key=int)
    if [int(key) for key in keys] != list(range(1, len(keys) + 1)) or not keys:
        raise ValueError(f"expected holds numbered 1, 2, … without a gap, found {', '.join(keys) or 'none'}")
    return keys


def require_design(orders: list[tuple[str, ...]]) -> None:
    """Checks that the arm order is a paired, balanced design.

    Each hold runs whole pairs (A1 with B1), each arm boots once, pairs are numbered 1, 2, …, and as many pairs start
    with A as with B (one more at most), so that a drift inside the holds cancels (coordination facts 0.14).

    Raises:
        ValueError: Says which rule the order breaks.
    """
    a_first = 0
    pairs: list[int] = []
    for number, order in enumerate(orders, start=1):
        if len(order) % 2:
            raise ValueError(f"expected whole pairs in hold {number}, found {', '.join(order)}")
        for first, second in zip(order[::2], order[1::2], strict=True):
            if first[0] == second[0] or first[1:] != second[1:]:
                raise ValueError(f"expected {first} beside its partner in hold {number}, found {second}")
            pairs.append(int(first[1:]))
            a_first += first.startswith("A")
    if sorted(pairs) != list(range(1, len(pairs) + 1)):
        raise ValueError(f"expected pairs numbered 1, 2, … each once, found {sorted(pairs)}")
    if abs(2 * a_first - len(pairs)) > 1:
        raise ValueError(f"expected A first as often as B first, found {a_first} of {len(pairs)} pairs A first")
