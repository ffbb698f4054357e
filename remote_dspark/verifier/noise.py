"""The verifier's random numbers of one round: acceptance, correction and bonus, each in its own domain.

The counter names the absolute position of the token that a draw decides, never the batch row; the proposal's domain is
not reachable from here.
"""

from __future__ import annotations

from dataclasses import dataclass

from remote_dspark.contract import Domain
from remote_dspark.oracle.philox import Key, acceptance_draw, wide_draw


@dataclass(frozen=True)
class RoundNoise:
    """Draws of one round of one request.

    Attributes:
        key: RNG key of the request's generation.
        round: Round number within the generation, below 2**32.
        first_position: Absolute position of the first proposed token.
    """

    key: Key
    round: int
    first_position: int

    def acceptance(self, index: int) -> int:
        """32-bit draw that tests proposed token ``index``."""
        return acceptance_draw(self.key, self.round, self.first_position + index)

    def correction(self, index: int) -> int:
        """64-bit draw of the token that replaces rejected token ``index``."""
        return wide_draw(self.key, self.round, self.first_position + index, Domain.CORRECTION)

    def bonus(self, depth: int) -> int:
        """64-bit draw of the token after ``depth`` accepted ones; depth 0 is a target-only round."""
        return wide_draw(self.key, self.round, self.first_position + depth, Domain.BONUS)
