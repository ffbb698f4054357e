"""Replies survive noise around them, and nothing damaged is ever taken for a reply."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windows.guard import framing

REPLY = {"ok": True, "result": {"text": "ü \x1b[31m", "number": 3, "list": [None, False]}}


@given(st.binary(max_size=200), st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_noise_around_a_reply(before: bytes, after: bytes) -> None:
    assert framing.parse_reply(before + framing.encode_reply(REPLY) + after) == REPLY


def test_every_truncation_and_every_flipped_bit_is_refused() -> None:
    data = framing.encode_reply(REPLY)
    for length in range(len(data) - 1):
        with pytest.raises(framing.FrameError):
            framing.parse_reply(data[:length])
    for position in range(1, len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x04
        with pytest.raises(framing.FrameError):
            framing.parse_reply(bytes(damaged))


def test_two_replies_are_no_reply() -> None:
    with pytest.raises(framing.FrameError):
        framing.parse_reply(framing.encode_reply(REPLY) * 2)


def test_a_reply_inside_a_string_of_a_reply_is_data() -> None:
    inner = framing.encode_reply(REPLY).decode()
    outer = {"ok": True, "result": {"stdout_tail": inner}}
    assert framing.parse_reply(framing.encode_reply(outer)) == outer


def test_a_login_shell_with_a_noisy_profile(host: Any, tmp_path: Any) -> None:
    noisy = tmp_path / "noisy.sh"
    command = " ".join(f"'{part}'" for part in host.argv())
    noisy.write_text(f"echo '@@guard1 10 abc'; printf 'no newline'; {command}; echo '@@end'; exit 3\n")
    done = subprocess.run(
        ["sh", str(noisy)], input=host.request("hello", op=None), capture_output=True, timeout=60, check=False
    )
    reply = framing.parse_reply(done.stdout)
    assert reply["result"]["digest"] == host.archive.name[len("guard-") : -len(".pyz")]
