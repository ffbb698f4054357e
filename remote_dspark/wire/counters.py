"""Counters of a connection: a plain dict that has every key from the start, so that growth is always visible."""

from __future__ import annotations

from typing import Final

from remote_dspark.wire import refusals
from remote_dspark.wire.errors import RemoteProtocolError

TRAFFIC: Final = ("frames_in", "frames_out", "bytes_in", "bytes_out")
DEADLINE: Final = "deadline"
"""Connections a worker let go because of silence or a client that did not read."""


def new_counters() -> dict[str, int]:
    """Zero for each refusal's code and for the traffic; codes chosen by a drafter are added when they occur."""
    assert refusals.StaleReplyError.code in RemoteProtocolError.all_codes
    return dict.fromkeys((*TRAFFIC, DEADLINE, *sorted(RemoteProtocolError.all_codes)), 0)


def count(counters: dict[str, int], key: str, amount: int = 1) -> None:
    """Adds ``amount``."""
    counters[key] = counters.get(key, 0) + amount
