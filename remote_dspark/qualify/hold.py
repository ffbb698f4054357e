"""Prove, through the guard of this host, that a program runs inside the hold it was started for.

The guard is asked as its own process: ``python3 -I $DSPARK_GUARD --state $DSPARK_GUARD_STATE`` with one JSON request
on stdin and one framed reply on stdout. The environment alone proves nothing: hold id and epoch count only when the
guard confirms them. This file does not take, extend or end a hold.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import uuid
from collections.abc import Mapping
from typing import Any, Final

from remote_dspark.contract import ENV_GUARD, ENV_GUARD_STATE, ENV_HOLD_EPOCH, ENV_HOLD_ID
from remote_dspark.observe import MAX_TEXT, HoldProof, ObserveError

GUARD_PROTOCOL: Final = 1
_GUARD_HEADER: Final = b"@@guard1 "
_GUARD_END: Final = b"\n@@end\n"


class HoldNotProvenError(ObserveError):
    """This process is not, or not provably, inside the hold that it names."""


def prove_hold(environ: Mapping[str, str], *, required: bool, timeout_s: float = 10.0) -> HoldProof | None:
    """Ask the guard of this host whether the hold and epoch in our environment are current.

    Args:
        environ: The process environment.
        required: Refuse when the environment names no hold (``--require-hold``). A hold that is named is always proven.
        timeout_s: Bound of the guard's answer.

    Returns:
        The proven hold, or None outside one when it is not required.

    Raises:
        HoldNotProvenError: No hold is named although required, the environment is incomplete, or the guard refuses.
    """
    names = (ENV_HOLD_ID, ENV_HOLD_EPOCH, ENV_GUARD, ENV_GUARD_STATE)
    present = [name for name in names if environ.get(name)]
    if not present and not required:
        return None
    missing = [name for name in names if name not in present]
    if missing:
        raise HoldNotProvenError(
            f"hold: expected {', '.join(missing)} in the environment, found nothing; "
            "start this program through the guard, inside an open hold"
        )
    hold_id, epoch = environ[ENV_HOLD_ID], environ[ENV_HOLD_EPOCH]
    if not epoch.isdecimal():
        raise HoldNotProvenError(f"hold: expected a decimal {ENV_HOLD_EPOCH}, found {epoch!r}")
    args = {"hold_id": hold_id, "epoch": int(epoch)}
    request = {"protocol": GUARD_PROTOCOL, "verb": "prove", "op": uuid.uuid4().hex, "claim": None, "args": args}
    reply = _ask_guard(environ[ENV_GUARD], environ[ENV_GUARD_STATE], request, timeout_s)
    if reply.get("ok") is not True:
        found = json.dumps(reply.get("error", reply), sort_keys=True)[:MAX_TEXT]
        raise HoldNotProvenError(f"hold {hold_id} epoch {epoch}: expected the guard's proof, found {found}")
    result = reply.get("result") or {}
    return HoldProof(hold_id, int(epoch), tuple(str(device) for device in result.get("devices", ())))


def parse_guard_frame(data: bytes) -> dict[str, Any]:
    """The document of the only guard frame in ``data``; lines before the frame (a login banner) are skipped.

    Raises:
        HoldNotProvenError: No frame, wrong length or wrong digest.
    """
    start = data.find(_GUARD_HEADER)
    header, _, rest = data[max(start, 0) :].partition(b"\n")
    parts = header.split(b" ")
    if start < 0 or len(parts) != 3 or not parts[1].isdigit():
        raise HoldNotProvenError(f"guard reply: expected a line '@@guard1 <nbytes> <sha256>', found {data[:80]!r}")
    size = int(parts[1])
    body, tail = rest[:size], rest[size:]
    if len(body) != size or not tail.startswith(_GUARD_END):
        raise HoldNotProvenError(f"guard reply: expected {size} bytes and '@@end', found {len(rest)} bytes")
    if hashlib.sha256(body).hexdigest().encode() != parts[2]:
        raise HoldNotProvenError("guard reply: the body does not have the digest that its header names")
    document = json.loads(body)
    if not isinstance(document, dict):
        raise HoldNotProvenError(f"guard reply: expected a JSON object, found {type(document).__name__}")
    return document


def _ask_guard(guard: str, state: str, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    command = [sys.executable, "-I", "-S", guard, "--state", state]
    try:
        done = subprocess.run(
            command, input=json.dumps(request).encode(), capture_output=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as cause:
        raise HoldNotProvenError(f"guard {guard}: expected an answer within {timeout_s} s, found {cause}") from cause
    return parse_guard_frame(done.stdout)
