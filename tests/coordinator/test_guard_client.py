"""Frames survive noise, damage is a lost answer, and an operation is asked again under its own id."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from coordinator.clock import ManualClock
from coordinator.errors import HostUnreachable, LinkLost, OwnershipLost
from coordinator.guard_client import GuardClient, GuardRefusal, as_coordinator_error, whole_reply
from coordinator.host import CommandResult, Outcome


def frame(document: object) -> bytes:
    body = json.dumps(document).encode()
    return b"@@guard1 %d %s\n%s\n@@end\n" % (len(body), hashlib.sha256(body).hexdigest().encode(), body)


class ScriptedHost:
    """A host whose replies are given; records what was asked."""

    name = "scripted"

    def __init__(self, replies: Sequence[bytes]) -> None:
        self.replies = list(replies)
        self.requests: list[dict[str, object]] = []

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float, cap_bytes: int = 0) -> CommandResult:
        self.requests.append(json.loads(stdin))
        reply = self.replies.pop(0)
        outcome = Outcome.EXITED if reply else Outcome.LINK_LOST
        return CommandResult(outcome, 0 if reply else None, reply, b"", False, 1)

    def put(self, data: bytes, path: str, *, mode: int = 0o644) -> str:
        raise NotImplementedError

    def fetch(self, path: str, destination: Path, *, sha256: str, size_bytes: int) -> None:
        raise NotImplementedError

    def read(self, path: str, *, max_bytes: int) -> bytes:
        raise NotImplementedError

    def fingerprint(self) -> str:
        return "local"

    def close(self) -> None:
        return


def client(host: ScriptedHost) -> GuardClient:
    numbers = iter(range(100))
    return GuardClient(
        host,
        python="/usr/bin/python3",
        archive="/guard.pyz",
        state_dir="/state",
        operation_ids=lambda: f"op{next(numbers)}",
        clock=ManualClock(),
    )


@pytest.mark.parametrize(
    "noise", [b"", b"Welcome!\n", b"@@guard1 5 short\n", b"@@guard1 2 " + b"0" * 64 + b"\n{}\n@@end\n"]
)
def test_noise_around_a_frame_is_skipped(noise: bytes) -> None:
    assert whole_reply(noise + frame({"ok": True, "result": {}}) + noise) == {"ok": True, "result": {}}


def test_every_truncation_and_every_flipped_bit_is_no_frame() -> None:
    """Red when the digest, the length or the end mark is not checked."""
    whole = frame({"ok": True, "result": {"value": 7}})
    assert whole_reply(whole + whole) is None
    for size in range(len(whole) - 1):
        assert whole_reply(whole[:size]) is None
    for index in range(len(whole) * 8):
        flipped = bytearray(whole)
        flipped[index // 8] ^= 1 << (index % 8)
        assert whole_reply(bytes(flipped)) is None, index


def test_a_lost_reply_is_asked_again_under_the_same_operation_id() -> None:
    """Red when a retry makes a new id: the action would run twice."""
    host = ScriptedHost([b"", b"", frame({"ok": True, "result": {"done": 1}})])
    assert client(host).call("restore") == {"done": 1}
    assert len({request["op"] for request in host.requests}) == 1


def test_no_reply_outside_a_hold_is_unreachable_and_inside_is_link_lost() -> None:
    outside = client(ScriptedHost([b""] * 3))
    with pytest.raises(HostUnreachable):
        outside.call("facts")
    inside = client(ScriptedHost([b""] * 3))
    inside.claim = {"epoch": 1}
    with pytest.raises(LinkLost):
        inside.call("restore")


def test_a_refusal_keeps_its_code_and_details() -> None:
    error = {"code": "STALE_CLAIM", "message": "m", "expected": "e", "found": "f", "next": "n", "details": {"rows": []}}
    with pytest.raises(GuardRefusal) as caught:
        client(ScriptedHost([frame({"ok": False, "error": error})])).call("stop")
    assert caught.value.code == "STALE_CLAIM"
    assert caught.value.details == {"rows": []}
    assert isinstance(as_coordinator_error(caught.value), OwnershipLost)
