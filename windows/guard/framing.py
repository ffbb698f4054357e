"""Requests and replies as bytes. Pure.

A reply is found by its header line and accepted only when length and digest agree, so that whatever a login shell
prints before or after it can neither corrupt nor imitate it by accident. The control side uses ``parse_reply``.
"""

from __future__ import annotations

import hashlib
import json

from windows.guard import PROTOCOL
from windows.guard.errors import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_REQUEST_BYTES = 1 << 20
HEADER = b"@@guard1 "
TRAILER = b"\n@@end\n"
_REQUEST_KEYS = {"protocol", "verb", "op", "claim", "args"}
_CLAIM_KEYS = {"incarnation": str, "hold_id": str, "epoch": int, "token": str}


class FrameError(Exception):
    """No whole reply in these bytes: the outcome is unknown, ask again with the same operation id."""


def encode_reply(document: dict[str, Any]) -> bytes:
    """Frame one reply."""
    body = json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii")
    return b"\n%s%d %s\n%s%s" % (HEADER, len(body), hashlib.sha256(body).hexdigest().encode("ascii"), body, TRAILER)


def parse_reply(data: bytes) -> dict[str, Any]:
    """Find the reply in everything a call printed.

    Raises:
        FrameError: Nothing whole is there, or more than one whole reply is.
    """
    found: list[bytes] = []
    start = data.find(HEADER)
    while start >= 0:
        body = _body_at(data, start)
        if body is not None:
            found.append(body)
        start = data.find(HEADER, start + 1 if body is None else start + len(body))
    if len(found) != 1:
        raise FrameError(f"expected one framed reply, found {len(found)} in {len(data)} bytes")
    document = json.loads(found[0])
    if not isinstance(document, dict) or not isinstance(document.get("ok"), bool):
        raise FrameError("the framed reply is not an object with ok")
    return document


def _body_at(data: bytes, start: int) -> bytes | None:
    """The body whose header begins at ``start``, or None when anything about it does not agree."""
    end = data.find(b"\n", start)
    fields = data[start + len(HEADER) : end].split(b" ") if end > 0 else []
    if len(fields) != 2 or not fields[0].isdigit() or len(fields[0]) > 9:
        return None
    body = data[end + 1 : end + 1 + int(fields[0])]
    whole = data[end + 1 + int(fields[0]) :].startswith(TRAILER)
    digest = hashlib.sha256(body).hexdigest().encode("ascii")
    return body if whole and digest == fields[1] else None


def parse_request(data: bytes) -> dict[str, Any]:
    """Parse and check the outer shape of one request; ``args`` is checked by the verb.

    Raises:
        Refusal: ``BAD_REQUEST`` or ``PROTOCOL``.
    """
    if len(data) > MAX_REQUEST_BYTES:
        raise _bad("the request is too long", f"at most {MAX_REQUEST_BYTES} bytes", f"{len(data)} bytes")
    try:
        request = json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _bad("the request is not one JSON document", "one JSON object on stdin", str(error)[:200]) from error
    if not isinstance(request, dict) or set(request) != _REQUEST_KEYS:
        keys = sorted(request) if isinstance(request, dict) else type(request).__name__
        raise _bad("the request's keys are wrong", ", ".join(sorted(_REQUEST_KEYS)), str(keys)[:200])
    if request["protocol"] != PROTOCOL:
        raise Refusal(
            "PROTOCOL",
            "another protocol version",
            str(PROTOCOL),
            str(request["protocol"])[:40],
            "use the guard that belongs to this coordinator",
        )
    if not isinstance(request["verb"], str) or not isinstance(request["args"], dict):
        raise _bad("verb or args has the wrong type", "a string and an object", str(request["verb"])[:60])
    _check_op(request["op"])
    _check_claim(request["claim"])
    return request


def _bad(message: str, expected: str, found: str) -> Refusal:
    return Refusal("BAD_REQUEST", message, expected, found, "see docs/guard-protocol.md")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("an object has the same key twice")
    return result


def _check_op(op: Any) -> None:
    if op is None:
        return
    allowed = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    if not isinstance(op, str) or not 1 <= len(op) <= 80 or not set(op) <= allowed or op.startswith("."):
        raise _bad("op is not an operation id", "[A-Za-z0-9_-][A-Za-z0-9._-]{0,79} or null", str(op)[:100])


def _check_claim(claim: Any) -> None:
    if claim is None:
        return
    if not isinstance(claim, dict) or set(claim) != set(_CLAIM_KEYS):
        raise _bad("the claim's keys are wrong", ", ".join(sorted(_CLAIM_KEYS)), str(claim)[:100])
    for key, kind in _CLAIM_KEYS.items():
        if type(claim[key]) is not kind:
            raise _bad(f"claim.{key} has the wrong type", kind.__name__, type(claim[key]).__name__)
