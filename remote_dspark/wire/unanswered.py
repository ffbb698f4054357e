"""Which request frames still wait for their COMPLETE.

Rules: kept on both ends alike; an answer to nothing is a fault of the peer, and says so.
"""

from __future__ import annotations

from collections import Counter

from remote_dspark.wire.errors import UnexpectedFrameError
from remote_dspark.wire.kinds import FrameType


class Unanswered:
    """Counts by (frame type, slot, generation): several STATE frames of one occupant may wait at once."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[int, int, int]] = Counter()

    def add(self, frame_type: FrameType, slot: int, generation: int) -> None:
        """One more waits."""
        self._counts[frame_type, slot, generation] += 1

    def settle(self, frame_type: int, slot: int, generation: int) -> None:
        """One was answered, or was refused before it counted."""
        key = (frame_type, slot, generation)
        self._counts[key] -= 1
        if self._counts[key] <= 0:
            del self._counts[key]

    def require(self, frame_type: FrameType, slot: int, generation: int) -> None:
        """One waits.

        Raises:
            UnexpectedFrameError: nothing of that kind does.
        """
        if not self._counts[frame_type, slot, generation]:
            raise UnexpectedFrameError(
                f"COMPLETE of {frame_type.name} for slot {slot}, generation {generation}: "
                "nothing of that kind is unanswered"
            )
