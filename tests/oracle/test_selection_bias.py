"""Admission that looks at its own draw is biased; the sequential rule is not."""

from __future__ import annotations

import itertools
from fractions import Fraction

from remote_dspark.oracle.enumerate import completed_law, target_law
from remote_dspark.oracle.selection_bias import (
    best_depth,
    first_drop_depth,
    law_with_selection,
    law_with_stopping,
    throughputs,
)

F = Fraction
TARGET, DRAFT = (F(7, 10), F(3, 10)), (F(1, 2), F(1, 2))
SPEEDS = (F(1), F(1, 2), F(9, 20))


def scores_after(first_token):
    """Scores of depths 0, 1, 2: the second confidence depends on the first proposed token."""
    second = F(9, 10) if first_token == 0 else F(0)
    return throughputs((F(4, 5), F(4, 5) * second), SPEEDS)


def test_scores_of_the_published_counterexample():
    """Red if throughput leaves out the bonus token, or multiplies confidences wrongly."""
    assert scores_after(0) == (F(1), F(9, 10), F(1134, 1000))
    assert scores_after(1) == (F(1), F(9, 10), F(81, 100))


def test_global_search_gives_085_instead_of_070():
    """Red if the emulated search stops at the first drop, or the verifier could undo the selection."""
    law = law_with_selection(TARGET, DRAFT, lambda token: best_depth(scores_after(token)) > 0)
    assert law == (F(85, 100), F(15, 100))


def test_stopping_at_the_first_drop_is_free_of_it():
    """Red if the first-drop rule looks beyond the drop."""
    assert {first_drop_depth(scores_after(token)) for token in (0, 1)} == {0}
    law = law_with_selection(TARGET, DRAFT, lambda token: first_drop_depth(scores_after(token)) > 0)
    assert law == TARGET


def test_selective_admission_gives_three_quarters_instead_of_one_half():
    """Red if resampling after a refused draw were harmless: it is not, even with q = p."""
    uniform = (F(1, 2), F(1, 2))
    assert law_with_selection(uniform, uniform, lambda token: token == 0) == (F(3, 4), F(1, 4))


def test_constant_admission_is_harmless():
    """Red if the emulation itself is biased."""
    for admits in (lambda token: True, lambda token: False):
        assert law_with_selection(TARGET, DRAFT, admits) == TARGET


def tables(prefixes, values):
    """Every assignment of a value to every prefix."""
    for chosen in itertools.product(values, repeat=len(prefixes)):
        yield dict(zip(prefixes, chosen, strict=True))


def test_every_sequential_rule_is_exact():
    """Red if a rule may see the token it decides about, or re-open a stopped prefix.

    All 2**7 rules of depth 3 over two tokens, with p and q that depend on the prefix.
    """
    prefixes = [prefix for size in range(3) for prefix in itertools.product((0, 1), repeat=size)]

    def p_after(prefix):
        share = F(1 + sum(prefix) + len(prefix), 7)
        return (share, 1 - share)

    def q_after(prefix):
        share = F(1 + 2 * len(prefix), 6)
        return (share, 1 - share)

    exact = target_law(p_after, 4)
    for rule in tables(prefixes, (True, False)):
        law = law_with_stopping(p_after, q_after, 3, rule.__getitem__)
        assert completed_law(law, p_after, 4) == exact


def test_exactly_the_anticipating_rules_can_be_biased():
    """Red if the emulation cannot tell a rule that looks from one that does not: 2 of 4 rules look, both are biased."""
    biased = []
    for rule in itertools.product((True, False), repeat=2):
        if law_with_selection(TARGET, DRAFT, lambda token, rule=rule: rule[token]) != TARGET:
            biased.append(rule)
    assert biased == [(True, False), (False, True)]
