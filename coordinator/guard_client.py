"""Talks to the guard of one host: one framed JSON request and reply per call (docs/guard-protocol.md).

A reply that did not arrive decides nothing: the same operation id is asked again, and the guard answers with the stored
result or says that it does not know. Shell noise around the frame is skipped; a damaged frame is a lost link.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from coordinator.clock import Clock, SystemClock
from coordinator.errors import (
    AdmissionRefused,
    CoordinatorError,
    GateFailed,
    HardwareHeld,
    HostTimedOut,
    HostUnreachable,
    LinkLost,
    NotRestored,
    OwnershipLost,
)
from coordinator.host import CommandResult, Host, Outcome
from windows.guard.framing import FrameError, parse_reply

_MAX_REPLY_BYTES = 8 << 20

Json = dict[str, Any]


class GuardRefusal(Exception):
    """The guard's own refusal, with its stable code (docs/guard-protocol.md)."""

    def __init__(
        self, host: str, code: str, message: str, expected: str, found: str, next_step: str, details: Json | None = None
    ) -> None:
        super().__init__(f"{host}: {code}: {message}")
        self.host = host
        self.code = code
        self.message = message
        self.expected = expected
        self.found = found
        self.next_step = next_step
        self.details: Json = details or {}


_REFUSAL_ERRORS: dict[str, type[CoordinatorError]] = {
    "HELD": HardwareHeld,
    "DEVICE_BUSY": HardwareHeld,
    "STALE_CLAIM": OwnershipLost,
    "HOLD_ENDED": OwnershipLost,
    "HOLDER_DEAD": OwnershipLost,
    "DEBT": NotRestored,
    "OPEN_RECORD": NotRestored,
    "DEGRADED": NotRestored,
    "NOT_RESTORED": NotRestored,
    "VOID": NotRestored,
    "STOP_UNPROVEN": GateFailed,
    "START_FAILED": GateFailed,
    "DEADLINE": GateFailed,
}


def as_coordinator_error(refusal: GuardRefusal) -> CoordinatorError:
    """The error whose exit code says what state the hardware is in."""
    kind = _REFUSAL_ERRORS.get(refusal.code, AdmissionRefused)
    return kind(
        f"{refusal.host}: {refusal.message}",
        expected=refusal.expected,
        found=refusal.found,
        where=f"{refusal.host} ({refusal.code})",
        next_step=refusal.next_step,
    )


class GuardClient:
    """The guard of one host, by digest path.

    Args:
        host: Where it runs.
        python: Interpreter on that host, 3.9 or newer.
        archive: Absolute path of the zipapp there; its name carries its digest.
        state_dir: The guard's state folder there.
        operation_ids: Makes a fresh operation id for each new action.
    """

    def __init__(
        self,
        host: Host,
        *,
        python: str,
        archive: str,
        state_dir: str,
        operation_ids: Callable[[], str],
        clock: Clock | None = None,
    ) -> None:
        self.host = host
        self.archive = archive
        self.state_dir = state_dir
        self.claim: Json | None = None
        self._argv = [python, "-I", "-S", archive, "--state", state_dir]
        self._operation_ids = operation_ids
        self._clock = clock or SystemClock()

    def call(
        self,
        verb: str,
        args: Json | None = None,
        *,
        op: str | None = None,
        with_claim: bool = True,
        timeout_s: float = 30.0,
        attempts: int = 3,
    ) -> Json:
        """Run one verb; ask again by the same operation id when the reply got lost.

        Raises:
            GuardRefusal: The guard refused, with its code.
            LinkLost: No whole reply after ``attempts`` tries; the outcome is unknown here.
        """
        request = {
            "protocol": 1,
            "verb": verb,
            "op": op or self._operation_ids(),
            "claim": self.claim if with_claim else None,
            "args": args or {},
        }
        body = json.dumps(request).encode()
        result: CommandResult | None = None
        for attempt in range(attempts):
            if attempt:
                self._clock.sleep(0.2 * 2**attempt)
            result = self.host.run(self._argv, stdin=body, timeout_s=timeout_s, cap_bytes=_MAX_REPLY_BYTES)
            reply = whole_reply(result.stdout)
            if reply is not None:
                return self._unwrap(reply)
        assert result is not None
        raise self._lost(verb, result)

    def _unwrap(self, reply: Json) -> Json:
        if reply.get("ok") is True and isinstance(reply.get("result"), dict):
            value: Json = reply["result"]
            return value
        error = reply.get("error") or {}
        code, message, expected, found, following = (
            str(error.get(name, "")) for name in ("code", "message", "expected", "found", "next")
        )
        details = error.get("details")
        raise GuardRefusal(
            self.host.name, code, message, expected, found, following, details if isinstance(details, dict) else None
        )

    def _lost(self, verb: str, result: CommandResult) -> CoordinatorError:
        kind: type[CoordinatorError] = LinkLost
        if self.claim is None:
            kind = HostTimedOut if result.outcome is Outcome.TIMED_OUT else HostUnreachable
        tail = result.stderr[-400:].decode("utf-8", "replace").strip()
        return kind(
            f"no whole answer from the guard to `{verb}`",
            where=self.host.name,
            expected="one framed reply",
            found=f"{result.outcome.value} {result.code if result.code is not None else ''} {tail}".strip(),
            next_step="`coordinator hold status` asks the host what happened",
        )


def whole_reply(stdout: bytes) -> Json | None:
    """The one framed reply in all that a call printed, or None: then nothing is known and the guard is asked again."""
    try:
        return parse_reply(stdout)
    except (FrameError, ValueError):
        return None
