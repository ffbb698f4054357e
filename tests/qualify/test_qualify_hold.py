"""Proving a hold through the real guard: its zipapp, its own process, a real open hold.

Turns red when: an environment alone is believed, an epoch that is not the current one is accepted, or a reply whose
digest does not agree is parsed.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from remote_dspark.contract import ENV_GUARD, ENV_GUARD_STATE, ENV_HOLD_EPOCH, ENV_HOLD_ID
from remote_dspark.observe import HoldProof
from remote_dspark.qualify.hold import HoldNotProvenError, parse_guard_frame, prove_hold
from windows.guard import framing
from windows.guard_archive import archive_name, build_archive


class Guard:
    """A state folder, the guard's archive, and the claim of the hold that this test opened."""

    def __init__(self, folder: Path) -> None:
        data = build_archive()
        self.archive = folder / archive_name(data)
        self.archive.write_bytes(data)
        self.state = folder / "state"
        self.claim: Any = None

    def ask(self, verb: str, **args: Any) -> Any:
        request = {"protocol": 1, "verb": verb, "op": secrets.token_hex(8), "claim": self.claim, "args": args}
        command = [sys.executable, "-I", "-S", str(self.archive), "--state", str(self.state)]
        done = subprocess.run(command, input=json.dumps(request).encode(), capture_output=True, timeout=60, check=True)
        reply = framing.parse_reply(done.stdout)
        assert reply["ok"], reply
        return reply["result"]

    def environment(self, hold_id: str, epoch: int) -> dict[str, str]:
        return {
            ENV_HOLD_ID: hold_id,
            ENV_HOLD_EPOCH: str(epoch),
            ENV_GUARD: str(self.archive),
            ENV_GUARD_STATE: str(self.state),
        }


@pytest.fixture
def guard(tmp_path: Path) -> Guard:
    return Guard(tmp_path)


def open_hold(guard: Guard) -> tuple[str, int]:
    acquired = guard.ask(
        "acquire",
        hold_id=f"h-{secrets.token_hex(4)}",
        owner="tester@bench",
        reason="qualification test",
        plan_sha256="0" * 64,
        devices=["cpu:0"],
        provisional_s=60,
        deadline_s=60,
        restore_reserve_s=10,
        orphan_after_s=50,
        services=[],
        notify=None,
    )
    guard.claim = acquired["claim"]
    for verb in ("confirm", "snapshot", "arm", "stop"):
        guard.ask(verb)
    return guard.claim["hold_id"], guard.claim["epoch"]


@pytest.mark.services
def test_the_guard_proves_exactly_the_open_hold(guard: Guard) -> None:
    with pytest.raises(HoldNotProvenError, match="NO_HOLD"):
        prove_hold(guard.environment("h-1", 1), required=True)
    hold_id, epoch = open_hold(guard)
    try:
        assert prove_hold(guard.environment(hold_id, epoch), required=True) == HoldProof(hold_id, epoch, ("cpu:0",))
        for other in ((hold_id, epoch + 1), (hold_id, epoch - 1), ("h-other", epoch)):
            # A named hold is proven even where none is required: a stale environment must not pass for "outside".
            with pytest.raises(HoldNotProvenError, match="OTHER_HOLD"):
                prove_hold(guard.environment(*other), required=False)
        environment = {**os.environ, **guard.environment(hold_id, epoch)}
        code = "import os; from remote_dspark.qualify.hold import prove_hold; prove_hold(os.environ, required=True)"
        assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
    finally:
        guard.ask("restore")
        guard.ask("close")
    with pytest.raises(HoldNotProvenError, match="NO_HOLD"):
        prove_hold(guard.environment(hold_id, epoch), required=True)


def test_outside_a_hold_only_what_does_not_require_one_runs() -> None:
    assert prove_hold({}, required=False) is None
    with pytest.raises(HoldNotProvenError, match=ENV_HOLD_ID):
        prove_hold({}, required=True)
    with pytest.raises(HoldNotProvenError, match=f"{ENV_GUARD}, {ENV_GUARD_STATE}"):
        prove_hold({ENV_HOLD_ID: "h", ENV_HOLD_EPOCH: "1"}, required=False)
    with pytest.raises(HoldNotProvenError, match="decimal"):
        prove_hold({ENV_HOLD_ID: "h", ENV_HOLD_EPOCH: "-1", ENV_GUARD: "g", ENV_GUARD_STATE: "s"}, required=False)


def test_a_guard_that_is_not_there_proves_nothing(tmp_path: Path) -> None:
    environment = {ENV_HOLD_ID: "h", ENV_HOLD_EPOCH: "1", ENV_GUARD: str(tmp_path / "g"), ENV_GUARD_STATE: "s"}
    with pytest.raises(HoldNotProvenError, match="@@guard1"):
        prove_hold(environment, required=True)


def test_only_a_whole_frame_with_its_digest_is_a_reply() -> None:
    good = framing.encode_reply({"ok": True, "result": {}})
    assert parse_guard_frame(b"Last login: today\n" + good + b"logout\n") == {"ok": True, "result": {}}
    for bad in (b"", good[:-2], good.replace(b"true", b"fals"), good.replace(b"guard1", b"guard2")):
        with pytest.raises(HoldNotProvenError):
            parse_guard_frame(bad)
