"""Which verb is allowed in which state of a host. Pure, total: every (state, verb) has an answer.

Rules of the table: debt grants only what ends debt; nothing starts outside ``held``; whatever a state refuses, it says
what is safe next. The verbs that need no claim name the hold they mean in their arguments.
"""

from __future__ import annotations

FREE = "free"
PROVISIONAL = "provisional"
LEASED = "leased"
SNAPSHOTTED = "snapshotted"
ARMED = "armed"
STOPPING = "stopping"
HELD = "held"
RESTORING = "restoring"
RESTORED = "restored"
DEGRADED = "degraded"
VOID = "void"

STATES = (FREE, PROVISIONAL, LEASED, SNAPSHOTTED, ARMED, STOPPING, HELD, RESTORING, RESTORED, DEGRADED, VOID)

UNTOUCHED = frozenset([PROVISIONAL, LEASED, SNAPSHOTTED, ARMED])
"""An open hold under which nothing was stopped: it can simply end."""

_OPEN = frozenset(STATES) - {FREE}
_RESTORABLE = _OPEN - {PROVISIONAL, LEASED}
_ALL = frozenset(STATES)

READING = frozenset(["hello", "facts", "status", "events", "wait", "prove", "service-status"])
"""Change nothing, so they take no operation id."""

UNJOURNALLED = READING | {"heartbeat"}

CLAIMED = frozenset(["confirm", "heartbeat", "snapshot", "arm", "stop", "run", "end-run", "restore", "close"])
"""Need a claim that equals the open record."""

ALLOWED = {
    "hello": _ALL,
    "facts": _ALL,
    "status": _ALL,
    "events": _ALL,
    "witness": _ALL,
    "wait": _ALL,
    "prove": _ALL,
    "service-status": _ALL,
    "recover": _ALL,
    "abort": _ALL,
    "acquire": frozenset([FREE]),
    "confirm": frozenset([PROVISIONAL, LEASED]),
    "heartbeat": _OPEN - {VOID},
    "snapshot": frozenset([LEASED, SNAPSHOTTED]),
    "arm": frozenset([SNAPSHOTTED, ARMED]),
    "stop": frozenset([ARMED, STOPPING, HELD]),
    "run": frozenset([HELD]),
    "end-run": _OPEN,
    "restore": _RESTORABLE,
    "close": UNTOUCHED | {RESTORED},
    "clear": frozenset([DEGRADED, VOID]),
    "break": _OPEN - {DEGRADED, VOID},
    "service-start": frozenset([FREE]),
    "service-stop": frozenset([FREE]),
    "uninstall": frozenset([FREE]),
}

VERBS = tuple(ALLOWED)

ONCE = frozenset(["run", "service-start"])
"""Starting twice is harm: after a crash in the middle they adopt what was left behind or say that they do not know."""

NEXT_STEP = {
    FREE: "acquire a hold first",
    PROVISIONAL: "confirm or close",
    LEASED: "snapshot or close",
    SNAPSHOTTED: "arm or close",
    ARMED: "stop or close",
    STOPPING: "restore",
    HELD: "restore, then close",
    RESTORING: "wait for the restore that runs, then status",
    RESTORED: "close",
    DEGRADED: "look at production, then recover (or clear --reason)",
    VOID: "recover: this host was rebooted inside the hold",
}


def refusal_code(state: str, verb: str) -> str | None:
    """None when ``verb`` is allowed in ``state``, otherwise the code of the refusal."""
    if state in ALLOWED[verb]:
        return None
    if verb == "acquire":
        return "DEBT" if state in (DEGRADED, VOID) else "HELD"
    if state == FREE and verb in CLAIMED | {"clear", "break"}:
        return "NO_HOLD"
    if verb == "close":
        return "NOT_RESTORED"
    if state == VOID:
        return "VOID"
    return "WRONG_STATE"
