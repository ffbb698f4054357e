"""What a program on a host wrote is data: an observation that does not fit is a failed gate with a name."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.errors import GateFailed
from coordinator.programs import parse_observation, parse_samples

SAMPLE = {"name": "raw.jsonl", "sha256": "ab" * 32, "size_bytes": 1, "num_samples": 1, "unit": "ns"}


@pytest.mark.parametrize(
    ("document", "names"),
    [
        ({}, "lists no samples"),
        ({"samples": {}}, "lists no samples"),
        ({"samples": ["raw.jsonl"]}, "does not fit"),
        ({"samples": [{**SAMPLE, "name": "../raw.jsonl"}]}, "does not fit"),
        ({"samples": [{**SAMPLE, "size_bytes": -1}]}, "does not fit"),
        ({"samples": [{"name": "raw.jsonl"}]}, "does not fit"),
    ],
)
def test_announced_raw_files_are_checked(document: dict[str, Any], names: str) -> None:
    """Red when a host's words become a path here, or an internal error in the middle of a hold."""
    with pytest.raises(GateFailed, match=names) as caught:
        parse_samples(document, "h0:/srv/work")
    assert "h0" in caught.value.where


def test_whole_announcements_are_taken() -> None:
    """Red when a raw file that fits is refused."""
    assert [sample.name for sample in parse_samples({"samples": [SAMPLE]}, "h0")] == ["raw.jsonl"]


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"schema": "other"}'])
def test_what_is_no_observation_is_refused(data: bytes) -> None:
    """Red when something else is taken for one."""
    with pytest.raises(GateFailed):
        parse_observation(data, "h0")
