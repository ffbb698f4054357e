"""What a window writes down: which action of the tables a verb is, which event an error is, what each host said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from coordinator.errors import (
    AdmissionRefused,
    GateFailed,
    HardwareHeld,
    HostUnreachable,
    Interrupted,
    LinkLost,
    OwnershipLost,
)
from coordinator.guard_client import Json
from windows.hold_table import Action, HoldEvent

ACTIONS = {
    "acquire": Action.LEASE,
    "confirm": Action.READ,
    "witness": Action.READ,
    "snapshot": Action.SNAPSHOT,
    "arm": Action.ARM,
    "stop": Action.STOP,
    "run": Action.RUN,
    "end-run": Action.RUN,
    "restore": Action.RESTORE,
    "close": Action.RELEASE,
}
"""Guard verb to the action of the hold machine. ``confirm`` and ``witness`` change no production."""

CAUSES: tuple[tuple[type[BaseException], HoldEvent], ...] = (
    (HardwareHeld, HoldEvent.HELD_BY_OTHER),
    (HostUnreachable, HoldEvent.UNREACHABLE),
    (AdmissionRefused, HoldEvent.REFUSED),
    (GateFailed, HoldEvent.GATE_FAILED),
    (Interrupted, HoldEvent.INTERRUPTED),
    (KeyboardInterrupt, HoldEvent.INTERRUPTED),
    (LinkLost, HoldEvent.LINK_LOST),
    (OwnershipLost, HoldEvent.OWNERSHIP_LOST),
)


@dataclass
class HostRecord:
    """What one host reported during the hold; becomes its part of the hold receipt."""

    epoch: int = 0
    snapshot_sha256: str | None = None
    stop_rows: list[Json] = field(default_factory=list)
    restore_rows: list[Json] = field(default_factory=list)
    service_ns: int = 0
    restored_by: Literal["close", "none"] = "none"
    witness_open: Json = field(default_factory=dict)
    witness_close: Json = field(default_factory=dict)


@dataclass(frozen=True)
class StateChange:
    """The hold entered a phase, so long after it was opened."""

    state: str
    monotonic_ns: int
    reason: str
