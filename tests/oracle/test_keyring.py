"""No draw is given twice, whatever the order of draws, retries, resets and reconnections."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from remote_dspark.contract import Domain
from remote_dspark.oracle.errors import CounterError, CounterRangeError, DrawReusedError, StaleDrawError
from remote_dspark.oracle.keyring import KeyRing
from remote_dspark.oracle.philox import acceptance_draw, derive_key, proposal_draw, wide_draw


def test_draws_are_the_documented_ones():
    """Red if the ring draws from another key, domain or width."""
    ring, key = KeyRing(5, 2), derive_key(5, 2)
    assert ring.proposal(0, 10) == proposal_draw(key, 0, 10)
    assert ring.acceptance(0, 10) == acceptance_draw(key, 0, 10)
    assert ring.wide(0, 10, Domain.CORRECTION) == wide_draw(key, 0, 10, Domain.CORRECTION)
    assert ring.wide(0, 11, Domain.BONUS) == wide_draw(key, 0, 11, Domain.BONUS)


@pytest.mark.parametrize("domain", list(Domain))
def test_the_same_draw_twice_is_refused(domain):
    """Red if issued counters are not remembered within a round."""
    ring = KeyRing(1, 0)
    ring.issue(3, 7, domain)
    with pytest.raises(DrawReusedError):
        ring.issue(3, 7, domain)
    ring.issue(3, 7, domain, draw=1)


def test_an_older_round_is_stale():
    """Red if forgetting an older round's draws also forgets that it was over."""
    ring = KeyRing(1, 0)
    ring.proposal(4, 7)
    with pytest.raises(StaleDrawError):
        ring.proposal(3, 8)


def test_a_retry_resends_the_stored_bytes_and_draws_nothing():
    """Red if a sealed round still draws, or if resending returns anything but the kept bytes."""
    ring = KeyRing(1, 0)
    ring.proposal(0, 1)
    ring.keep_reply(0, b"reply")
    assert ring.resend(0) == b"reply"
    assert ring.resend(0) == b"reply"
    with pytest.raises(DrawReusedError):
        ring.proposal(0, 2)
    with pytest.raises(DrawReusedError):
        ring.keep_reply(0, b"other")


def test_a_lost_reply_cannot_be_retried():
    """Red if a retry without stored bytes falls back to anything."""
    ring = KeyRing(1, 0)
    ring.proposal(0, 1)
    with pytest.raises(StaleDrawError):
        ring.resend(0)
    with pytest.raises(StaleDrawError):
        ring.keep_reply(1, b"")


def test_reset_changes_the_key_and_voids_everything():
    """Red if a reset keeps the key, or the old reply, or the old round."""
    ring = KeyRing(1, 0)
    before = ring.proposal(9, 1)
    ring.keep_reply(9, b"reply")
    assert ring.reset(1) == derive_key(1, 1)
    with pytest.raises(StaleDrawError):
        ring.resend(9)
    # the round of a fresh ring is -1, which must not find the old bytes either
    with pytest.raises(StaleDrawError):
        ring.resend(-1)
    assert ring.proposal(0, 1) == proposal_draw(derive_key(1, 1), 0, 1)
    assert ring.proposal(9, 1) != before


@pytest.mark.parametrize("generation", [0, 3, 4])
def test_a_generation_never_comes_back(generation):
    """Red if reset accepts the current or an older generation: its key may have been drawn from."""
    ring = KeyRing(1, 4)
    with pytest.raises(StaleDrawError):
        ring.reset(generation)


def test_a_refused_draw_changes_nothing():
    """Red if the state moves before the checks: an exhausted position would make the round stale."""
    ring = KeyRing(1, 0)
    ring.proposal(1, 5)
    with pytest.raises(CounterRangeError):
        ring.proposal(2, 1 << 32)
    ring.proposal(1, 6)
    with pytest.raises(CounterRangeError):
        ring.reset(1 << 64)
    assert ring.generation == 0


class RingMachine(RuleBasedStateMachine):
    """Any sequence of calls: what comes out is never the same (key, counter) twice."""

    def __init__(self):
        super().__init__()
        self.ring = KeyRing(77, 0)
        self.given = []

    @rule(round=st.integers(0, 3), position=st.integers(0, 2), domain=st.sampled_from(Domain), draw=st.integers(0, 1))
    def issue(self, round, position, domain, draw):
        try:
            self.given.append((self.ring.key, self.ring.issue(round, position, domain, draw)))
        except CounterError:
            return

    @rule(round=st.integers(0, 3), reply=st.sampled_from([b"a", b"b"]))
    def keep(self, round, reply):
        try:
            self.ring.keep_reply(round, reply)
        except CounterError:
            return
        assert self.ring.resend(round) == reply

    @rule(generation=st.integers(0, 6))
    def reset(self, generation):
        try:
            self.ring.reset(generation)
        except StaleDrawError:
            return

    @invariant()
    def nothing_was_given_twice(self):
        """Red if reset accepts an equal generation, or a new round forgets that older ones are over."""
        assert len(self.given) == len(set(self.given))


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=150, stateful_step_count=25, deadline=None, derandomize=True)
