"""Why depth is fixed before sampling: two counterexamples, and a rule that is free of the bias.

An exact verifier cannot undo a selection made before it. If the decision to verify position i looks at the proposed
token i, directly or through a later confidence that depends on it, the admitted tokens are no longer a sample of q.
`law_with_selection` is that mistake, computed exactly; `law_with_stopping` is the sequential rule, whose decision at
position i sees only what came before token i, and never re-opens a stopped prefix: its law is the target's.

Source: the seed's section on depth admission; DSpark paper (arXiv 2607.05147), appendix A for the 0.85. Adaptive depth
itself is not offered anywhere in this project; this file is why, and what a later policy must satisfy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from remote_dspark.oracle.enumerate import Admits, Law, ProbsAfter, add, round_law
from remote_dspark.oracle.verify import ideal_acceptance, ideal_residual


def law_with_selection(
    p: Sequence[Fraction], q: Sequence[Fraction], admits: Callable[[int], bool]
) -> tuple[Fraction, ...]:
    """Law of one emitted token when admission looks at the proposed token itself.

    Args:
        p: Target distribution.
        q: Draft distribution.
        admits: Whether a proposed token is verified; otherwise it is dropped and the target is sampled afresh.

    Returns:
        The law; equal to p only if ``admits`` is constant or harmless by accident.
    """
    law: Law = {}
    for proposed, mass in enumerate(q):
        if not mass:
            continue
        if not admits(proposed):
            for token, probability in enumerate(p):
                add(law, (token,), mass * probability)
            continue
        accepted = ideal_acceptance(p, q, proposed)
        add(law, (proposed,), mass * accepted)
        for token, probability in enumerate(ideal_residual(p, q)):
            add(law, (token,), mass * (1 - accepted) * probability)
    return tuple(law.get((token,), Fraction(0)) for token in range(len(p)))


def throughputs(survivals: Sequence[Fraction], steps_per_second: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """Expected tokens per second of every depth 0..n.

    Args:
        survivals: n products of confidences: chance that the first i tokens are all accepted.
        steps_per_second: n + 1 speeds of a step that verifies 0..n tokens.

    Returns:
        ``(1 + sum of the first i survivals) * speed_i``.
    """
    expected = [Fraction(1)]
    for survival in survivals:
        expected.append(expected[-1] + survival)
    return tuple(tokens * speed for tokens, speed in zip(expected, steps_per_second, strict=True))


def best_depth(scores: Sequence[Fraction]) -> int:
    """Depth of the highest score: a global search, which lets a later confidence admit an earlier token."""
    return max(range(len(scores)), key=lambda depth: (scores[depth], -depth))


def first_drop_depth(scores: Sequence[Fraction]) -> int:
    """Depth before the first drop: admits i only by scores up to i, so a later one cannot re-open it."""
    depth = 0
    while depth + 1 < len(scores) and scores[depth + 1] >= scores[depth]:
        depth += 1
    return depth


def law_with_stopping(p_after: ProbsAfter, q_after: ProbsAfter, max_depth: int, admits: Admits) -> Law:
    """Law of a round whose depth is decided sequentially.

    At each position the rule is asked once, with the tokens proposed so far and before the next one exists. It stops
    for good at the first refusal; the round is then verified with the depth reached.

    Args:
        p_after: Target distribution after a prefix.
        q_after: Draft distribution after a prefix.
        max_depth: At most so many proposed tokens.
        admits: Whether to propose one more token after a prefix.

    Returns:
        Mass of every emitted tuple.
    """
    return round_law(p_after, q_after, max_depth, admits)
