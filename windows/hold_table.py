"""The transition tables of a hold and of each host in it. This file is the protocol; nothing else decides.

Two machines. The *hold* moves by events of the control side; each *host* moves by what was intended there and what
came of it. Rules of the tables:

1. They are total: every state meets every event, with a next state or with a refusal that says why.
2. An intent moves a host to a doubtful state (``-ing``) before the action, so that a crash in between is visible. An
   unknown outcome leaves it in doubt; doubt counts as touched, so only a proof ends it.
3. Bad news never goes anywhere but towards RESTORING, and DEGRADED is left by a person only.
4. Nothing is stopped before every host is armed; nothing is released before its production is proven back.

Rule 4 needs to see all hosts at once: `windows.hold` checks it, from the conditions named here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Phase(StrEnum):
    """Where a hold is (DESIGN section 5)."""

    PLANNED = "planned"
    ADMITTED = "admitted"
    LEASED = "leased"
    SNAPSHOT = "snapshot"
    HELD = "held"
    QUALIFYING = "qualifying"
    MEASURING = "measuring"
    RESTORING = "restoring"
    CLOSED = "closed"
    DEGRADED = "degraded"


class HoldEvent(StrEnum):
    """What the control side records about the hold as a whole."""

    ADMITTED = "admitted"
    ALL_LEASED = "all-leased"
    ALL_SNAPSHOT = "all-snapshot"
    ALL_HELD = "all-held"
    QUALIFY_STARTED = "qualify-started"
    QUALIFIED = "qualified"
    ARM_STARTED = "arm-started"
    ARM_FINISHED = "arm-finished"
    RESTORE_STARTED = "restore-started"
    ALL_RELEASED = "all-released"
    REFUSED = "refused"
    HELD_BY_OTHER = "held-by-other"
    UNREACHABLE = "unreachable"
    STEP_FAILED = "step-failed"
    GATE_FAILED = "gate-failed"
    BUDGET_SPENT = "budget-spent"
    INTERRUPTED = "interrupted"
    ABORTED = "aborted"
    LINK_LOST = "link-lost"
    HOST_REBOOTED = "host-rebooted"
    RECOVERED = "recovered"
    OWNERSHIP_LOST = "ownership-lost"
    RESTORE_UNPROVEN = "restore-unproven"
    CLEARED = "cleared"


BAD_NEWS: Final = frozenset(
    {
        HoldEvent.REFUSED,
        HoldEvent.HELD_BY_OTHER,
        HoldEvent.UNREACHABLE,
        HoldEvent.STEP_FAILED,
        HoldEvent.GATE_FAILED,
        HoldEvent.BUDGET_SPENT,
        HoldEvent.INTERRUPTED,
        HoldEvent.ABORTED,
        HoldEvent.LINK_LOST,
        HoldEvent.HOST_REBOOTED,
        HoldEvent.RECOVERED,
    }
)
"""Events after which the only way is back to production. RECOVERED: the coordinator died and another one closes."""


class HostPhase(StrEnum):
    """Where one host of a hold is, as far as the journal knows."""

    UNTOUCHED = "untouched"
    LEASING = "leasing"
    LEASED = "leased"
    SNAPSHOT = "snapshot"
    ARMING = "arming"
    ARMED = "armed"
    STOPPING = "stopping"
    STOPPED = "stopped"
    RESTORING = "restoring"
    RESTORED = "restored"
    DEBT = "debt"
    RELEASING = "releasing"
    RELEASED = "released"


class Action(StrEnum):
    """What is done on a host. READ and STAGE change no production; RUN starts an owned program."""

    READ = "read"
    STAGE = "stage"
    LEASE = "lease"
    SNAPSHOT = "snapshot"
    ARM = "arm"
    STOP = "stop"
    RUN = "run"
    RESTORE = "restore"
    RELEASE = "release"


class Moment(StrEnum):
    """Before the action, or one of the three things that can come of it."""

    INTENT = "intent"
    DONE = "done"
    FAILED = "failed"
    UNKNOWN = "unknown"


class HostFact(StrEnum):
    """What a host says when asked, without an action of ours behind it."""

    FOUND_RESTORED = "found-restored"
    """Its dead-man, boot unit or another recoverer restored and proved it."""
    FOUND_DEBT = "found-debt"
    FOUND_RELEASED = "found-released"
    """The guard has no open record of this hold and no debt: it is closed there."""


HostEvent = tuple[Action, Moment] | HostFact

HOST_EVENTS: Final[tuple[HostEvent, ...]] = (
    *((action, moment) for action in Action for moment in Moment),
    *HostFact,
)


@dataclass(frozen=True)
class Refusal:
    """An entry of a table: this cannot happen here, and why."""

    reason: str


HOLD_TABLE: Final[dict[tuple[Phase, HoldEvent], Phase | Refusal]] = {}
HOST_TABLE: Final[dict[tuple[HostPhase, HostEvent], HostPhase | Refusal]] = {}

ACTION_PHASES: Final[dict[Action, frozenset[Phase]]] = {
    Action.READ: frozenset(Phase),
    Action.STAGE: frozenset({Phase.PLANNED, Phase.ADMITTED}),
    Action.LEASE: frozenset({Phase.ADMITTED}),
    Action.SNAPSHOT: frozenset({Phase.LEASED}),
    Action.ARM: frozenset({Phase.SNAPSHOT}),
    Action.STOP: frozenset({Phase.SNAPSHOT}),
    Action.RUN: frozenset({Phase.QUALIFYING, Phase.MEASURING}),
    Action.RESTORE: frozenset({Phase.RESTORING, Phase.DEGRADED}),
    Action.RELEASE: frozenset({Phase.RESTORING, Phase.DEGRADED}),
}
"""In which phases of the hold an action may be intended. Its outcome may come later, in any phase."""

_HOLDING: Final = (Phase.LEASED, Phase.SNAPSHOT, Phase.HELD, Phase.QUALIFYING, Phase.MEASURING)

_FORWARD: Final[dict[HoldEvent, dict[Phase, Phase]]] = {
    HoldEvent.ADMITTED: {Phase.PLANNED: Phase.ADMITTED},
    HoldEvent.ALL_LEASED: {Phase.ADMITTED: Phase.LEASED},
    HoldEvent.ALL_SNAPSHOT: {Phase.LEASED: Phase.SNAPSHOT},
    HoldEvent.ALL_HELD: {Phase.SNAPSHOT: Phase.HELD},
    HoldEvent.QUALIFY_STARTED: {Phase.HELD: Phase.QUALIFYING},
    HoldEvent.QUALIFIED: {Phase.QUALIFYING: Phase.MEASURING},
    HoldEvent.ARM_STARTED: {Phase.MEASURING: Phase.MEASURING},
    HoldEvent.ARM_FINISHED: {Phase.MEASURING: Phase.MEASURING},
    # A first-hold goes from HELD straight back; a campaign after its last arm.
    HoldEvent.RESTORE_STARTED: {
        Phase.HELD: Phase.RESTORING,
        Phase.MEASURING: Phase.RESTORING,
    },
    HoldEvent.ALL_RELEASED: {Phase.RESTORING: Phase.CLOSED},
    HoldEvent.RESTORE_UNPROVEN: {Phase.RESTORING: Phase.DEGRADED, Phase.DEGRADED: Phase.DEGRADED},
    HoldEvent.CLEARED: {Phase.DEGRADED: Phase.CLOSED},
    HoldEvent.OWNERSHIP_LOST: {
        Phase.ADMITTED: Phase.DEGRADED,
        **dict.fromkeys(_HOLDING, Phase.DEGRADED),
        Phase.RESTORING: Phase.DEGRADED,
        Phase.DEGRADED: Phase.DEGRADED,
    },
}

_WHY_NOT: Final[dict[Phase, str]] = {
    Phase.PLANNED: "the hold is only planned: admission comes first",
    Phase.ADMITTED: "the hold has no leases yet",
    Phase.LEASED: "production is not recorded yet",
    Phase.SNAPSHOT: "production is not proven stopped yet",
    Phase.HELD: "qualification comes first in every hold",
    Phase.QUALIFYING: "qualification has not passed yet",
    Phase.MEASURING: "the hold is past that and only goes forward",
    Phase.RESTORING: "the hold is going back to production and nothing turns that round",
    Phase.CLOSED: "the hold is closed: open a new one",
    Phase.DEGRADED: "the hold is degraded: only a person clears it, with a reason",
}

_ONCE_ONLY: Final[dict[tuple[Phase, HoldEvent], str]] = {
    (Phase.HELD, HoldEvent.CLEARED): "nothing is degraded",
    (Phase.RESTORING, HoldEvent.RESTORE_STARTED): "the restore has started already: wait for its result",
    (Phase.SNAPSHOT, HoldEvent.RESTORE_STARTED): "name what happened instead (refused, step-failed, aborted, …)",
    (Phase.QUALIFYING, HoldEvent.RESTORE_STARTED): "name what happened instead (gate-failed, aborted, …)",
    (Phase.PLANNED, HoldEvent.OWNERSHIP_LOST): "nothing is owned yet",
}
"""Reasons that say more than the phase's own."""


def _hold_entry(phase: Phase, event: HoldEvent) -> Phase | Refusal:
    """One entry of the hold's table."""
    if event in BAD_NEWS:
        if phase is Phase.CLOSED:
            return Refusal(_WHY_NOT[phase])
        if phase is Phase.PLANNED:
            return Phase.CLOSED
        # DEGRADED is sticky and RESTORING is already the way back: the news is only noted.
        return phase if phase in (Phase.DEGRADED, Phase.RESTORING) else Phase.RESTORING
    following = _FORWARD[event].get(phase)
    return Refusal(_ONCE_ONLY.get((phase, event), _WHY_NOT[phase])) if following is None else following


_TOUCHED_PATH: Final = (
    HostPhase.ARMING,
    HostPhase.ARMED,
    HostPhase.STOPPING,
    HostPhase.STOPPED,
    HostPhase.RESTORING,
    HostPhase.DEBT,
)
"""Phases that only a proven restore may leave."""

_HOST_MOVES: Final[dict[HostEvent, dict[HostPhase, HostPhase]]] = {
    (Action.LEASE, Moment.INTENT): {HostPhase.UNTOUCHED: HostPhase.LEASING},
    (Action.LEASE, Moment.DONE): {HostPhase.LEASING: HostPhase.LEASED},
    (Action.LEASE, Moment.FAILED): {HostPhase.LEASING: HostPhase.UNTOUCHED},
    (Action.LEASE, Moment.UNKNOWN): {HostPhase.LEASING: HostPhase.LEASING},
    (Action.SNAPSHOT, Moment.INTENT): {HostPhase.LEASED: HostPhase.LEASED},
    (Action.SNAPSHOT, Moment.DONE): {HostPhase.LEASED: HostPhase.SNAPSHOT},
    (Action.SNAPSHOT, Moment.FAILED): {HostPhase.LEASED: HostPhase.LEASED},
    (Action.SNAPSHOT, Moment.UNKNOWN): {HostPhase.LEASED: HostPhase.LEASED},
    (Action.ARM, Moment.INTENT): {HostPhase.SNAPSHOT: HostPhase.ARMING},
    (Action.ARM, Moment.DONE): {HostPhase.ARMING: HostPhase.ARMED},
    # A failed arm may have left a timer: only restore disarms, under the host's lock (DECISIONS 26).
    (Action.ARM, Moment.FAILED): {HostPhase.ARMING: HostPhase.ARMING},
    (Action.ARM, Moment.UNKNOWN): {HostPhase.ARMING: HostPhase.ARMING},
    (Action.STOP, Moment.INTENT): {HostPhase.ARMED: HostPhase.STOPPING},
    (Action.STOP, Moment.DONE): {HostPhase.STOPPING: HostPhase.STOPPED},
    (Action.STOP, Moment.FAILED): {HostPhase.STOPPING: HostPhase.STOPPING},
    (Action.STOP, Moment.UNKNOWN): {HostPhase.STOPPING: HostPhase.STOPPING},
    (Action.RUN, Moment.INTENT): {HostPhase.STOPPED: HostPhase.STOPPED},
    (Action.RESTORE, Moment.INTENT): dict.fromkeys(_TOUCHED_PATH, HostPhase.RESTORING),
    (Action.RESTORE, Moment.DONE): {HostPhase.RESTORING: HostPhase.RESTORED},
    (Action.RESTORE, Moment.FAILED): {HostPhase.RESTORING: HostPhase.DEBT},
    (Action.RESTORE, Moment.UNKNOWN): {HostPhase.RESTORING: HostPhase.RESTORING},
    (Action.RELEASE, Moment.INTENT): {
        HostPhase.LEASING: HostPhase.RELEASING,
        HostPhase.LEASED: HostPhase.RELEASING,
        HostPhase.SNAPSHOT: HostPhase.RELEASING,
        HostPhase.RESTORED: HostPhase.RELEASING,
        HostPhase.RELEASING: HostPhase.RELEASING,
    },
    (Action.RELEASE, Moment.DONE): {HostPhase.RELEASING: HostPhase.RELEASED},
    (Action.RELEASE, Moment.FAILED): {HostPhase.RELEASING: HostPhase.RELEASING},
    (Action.RELEASE, Moment.UNKNOWN): {HostPhase.RELEASING: HostPhase.RELEASING},
    HostFact.FOUND_RESTORED: {
        **dict.fromkeys(_TOUCHED_PATH, HostPhase.RESTORED),
        HostPhase.RESTORED: HostPhase.RESTORED,
    },
    HostFact.FOUND_DEBT: dict.fromkeys(_TOUCHED_PATH, HostPhase.DEBT),
    HostFact.FOUND_RELEASED: {
        **dict.fromkeys(_TOUCHED_PATH, HostPhase.RELEASED),
        HostPhase.LEASING: HostPhase.RELEASED,
        HostPhase.LEASED: HostPhase.RELEASED,
        HostPhase.SNAPSHOT: HostPhase.RELEASED,
        HostPhase.RESTORED: HostPhase.RELEASED,
        HostPhase.RELEASING: HostPhase.RELEASED,
        HostPhase.RELEASED: HostPhase.RELEASED,
    },
}

_HOST_WHY_NOT: Final[dict[HostPhase, str]] = {
    HostPhase.UNTOUCHED: "the host has no lease of this hold",
    HostPhase.LEASING: "whether the host granted the lease is not known yet: ask it",
    HostPhase.LEASED: "the host's production is not recorded yet",
    HostPhase.SNAPSHOT: "the host's dead-man is not armed yet",
    HostPhase.ARMING: "whether the host's dead-man is armed is not known: only restore disarms it",
    HostPhase.ARMED: "the host's production still runs and its dead-man is armed: only restore disarms it",
    HostPhase.STOPPING: "whether the host's production is stopped is not known: only restore settles it",
    HostPhase.STOPPED: "the host's production is stopped and not proven back",
    HostPhase.RESTORING: "a restore of this host is not decided yet: one restore at a time, wait for its result",
    HostPhase.RESTORED: "the host's production is proven back: only the release is left",
    HostPhase.DEBT: "the host is in restore debt: it grants recover and abort only",
    HostPhase.RELEASING: "the host is being released",
    HostPhase.RELEASED: "the host is released: it belongs to nobody or to somebody else",
}


def _host_entry(phase: HostPhase, event: HostEvent) -> HostPhase | Refusal:
    """One entry of a host's table."""
    if isinstance(event, tuple):
        action, moment = event
        if action in (Action.READ, Action.STAGE) or (action is Action.RUN and moment is not Moment.INTENT):
            # They change no production; the outcome of a run may come after the restore that ended it.
            return phase
    following = _HOST_MOVES.get(event, {}).get(phase)
    return Refusal(_HOST_WHY_NOT[phase]) if following is None else following


HOLD_TABLE.update({(phase, event): _hold_entry(phase, event) for phase in Phase for event in HoldEvent})
HOST_TABLE.update({(phase, event): _host_entry(phase, event) for phase in HostPhase for event in HOST_EVENTS})

TOUCHED: Final = frozenset(_TOUCHED_PATH)
"""Host phases in which production is, or may be, changed or a dead-man armed: debt until proven back."""

GONE: Final = frozenset({HostPhase.UNTOUCHED, HostPhase.RELEASED})
"""Host phases in which the host holds nothing for this hold."""

CONDITIONS: Final[dict[HoldEvent, frozenset[HostPhase]]] = {
    HoldEvent.ALL_LEASED: frozenset({HostPhase.LEASED}),
    HoldEvent.ALL_SNAPSHOT: frozenset({HostPhase.SNAPSHOT}),
    HoldEvent.ALL_HELD: frozenset({HostPhase.STOPPED}),
    HoldEvent.ALL_RELEASED: GONE,
}
"""Events about all hosts, and the phases in which every host must be for them."""

STOP_CONDITION: Final = frozenset({HostPhase.ARMED, HostPhase.STOPPING, HostPhase.STOPPED})
"""Every host must be in one of these before the first stop anywhere (DECISIONS 33)."""
