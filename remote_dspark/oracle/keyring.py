"""A key is never redrawn: the object that owns what has been drawn.

Counter-based noise is only independent as long as no counter is used twice. Whoever draws for a request (the drafter's
leader for proposals, the verifier for acceptance, correction and bonus) holds one `KeyRing` and asks it for every
draw. Rules:

* Rounds ascend. A draw of an older round is stale; the same draw twice is refused.
* Retry: the bytes of the reply are kept and resent. Nothing is computed again, and once they are kept the round is
  sealed. If they are gone, the generation is reset.
* Reset and reconnection: a strictly higher generation, hence another key. Everything of the old one is void.
* Exhaustion of 2**32 rounds or positions refuses (`philox.counter_of`); reset.

Not covered: where the bytes travel and who decides that a peer is gone.
"""

from __future__ import annotations

from remote_dspark.contract import Domain
from remote_dspark.oracle.errors import DrawReusedError, StaleDrawError
from remote_dspark.oracle.philox import Counter, Key, acceptance_draw, counter_of, derive_key, proposal_draw, wide_draw


class KeyRing:
    """Draws of one request at one end; refuses to give any of them twice.

    Memory is bounded by one round: because rounds ascend, the draws of older rounds need no record.
    """

    def __init__(self, seed: int, generation: int) -> None:
        self._seed = seed
        self._generation = generation
        self._key = derive_key(seed, generation)
        self._round = -1
        self._issued: set[Counter] = set()
        self._reply: bytes | None = None

    @property
    def key(self) -> Key:
        """Key of the current generation."""
        return self._key

    @property
    def generation(self) -> int:
        """The current generation."""
        return self._generation

    def issue(self, round: int, position: int, domain: Domain, draw: int = 0) -> Counter:
        """Takes one counter out of the ring, for good.

        Returns:
            The counter, to be used with `key`.

        Raises:
            CounterRangeError: A field does not fit.
            StaleDrawError: The round is older than one already drawn from.
            DrawReusedError: The counter was issued before, or the round's reply is final.
        """
        counter = counter_of(round, position, domain, draw)
        if round < self._round:
            raise StaleDrawError(f"round {round} is older than round {self._round}; reset the generation to draw again")
        if round > self._round:
            self._round, self._issued, self._reply = round, set(), None
        if self._reply is not None:
            raise DrawReusedError(f"the reply of round {round} is final; resend it or reset the generation")
        if counter in self._issued:
            raise DrawReusedError(
                f"{domain.name} of round {round}, position {position}, draw {draw} was already given in generation "
                f"{self._generation}; resend the stored reply or reset the generation"
            )
        self._issued.add(counter)
        return counter

    def proposal(self, round: int, position: int) -> int:
        """The 24-bit proposal draw, once. Raises as `issue`."""
        self.issue(round, position, Domain.PROPOSAL)
        return proposal_draw(self._key, round, position)

    def acceptance(self, round: int, position: int) -> int:
        """The 32-bit acceptance draw, once. Raises as `issue`."""
        self.issue(round, position, Domain.ACCEPTANCE)
        return acceptance_draw(self._key, round, position)

    def wide(self, round: int, position: int, domain: Domain) -> int:
        """The 64-bit draw of a correction or bonus token, once. Raises as `issue` and `philox.wide_draw`."""
        drawn = wide_draw(self._key, round, position, domain)
        self.issue(round, position, domain)
        return drawn

    def keep_reply(self, round: int, reply: bytes) -> None:
        """Keeps the bytes sent for the current round and seals it.

        Raises:
            StaleDrawError: Not the round last drawn from.
            DrawReusedError: Other bytes are kept for it already.
        """
        if round != self._round:
            raise StaleDrawError(f"expected a reply of round {self._round}, found round {round}")
        if self._reply is not None and self._reply != reply:
            raise DrawReusedError(f"round {round} already has another reply; a round has one")
        self._reply = bytes(reply)

    def resend(self, round: int) -> bytes:
        """The stored bytes of the current round, for a retry.

        Raises:
            StaleDrawError: Another round, or no reply was kept: reset the generation instead of drawing again.
        """
        if round != self._round or self._reply is None:
            raise StaleDrawError(
                f"no reply of round {round} is kept (current round {self._round}); reset the generation"
            )
        return self._reply

    def reset(self, generation: int) -> Key:
        """Starts a higher generation: after RESET, CANCEL, a reconnection, a lost reply or exhaustion.

        Args:
            generation: Strictly greater than the current one.

        Returns:
            The new key.

        Raises:
            StaleDrawError: Not greater: that key may have been drawn from.
            CounterRangeError: The generation does not fit 64 bits.
        """
        if generation <= self._generation:
            raise StaleDrawError(f"expected a generation above {self._generation}, found {generation}")
        self._key = derive_key(self._seed, generation)
        self._generation, self._round, self._issued, self._reply = generation, -1, set(), None
        return self._key
