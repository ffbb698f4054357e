"""What the hosts looked like around one arm: boot ids, clock offsets, GPU clocks and throttle masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from coordinator.clock import Clock
from coordinator.guard_client import Json
from coordinator.session import HostSession
from windows.arm import ArmFacts
from windows.site import Site


def read_arm_facts(sessions: Sequence[HostSession], before: Mapping[str, Json], clock: Clock, site: Site) -> ArmFacts:
    """What the hosts looked like before and after the arm; clock offsets are exact to half a call's round trip."""
    after: dict[str, Json] = {}
    offsets: dict[str, int] = {}
    worst_round_trip_ns = 0
    for session in sessions:
        asked_ns = utc_ns(clock.utc())
        after[session.name] = session.guard.call("facts")
        answered_ns = utc_ns(clock.utc())
        theirs_ns = utc_ns(str(after[session.name]["utc"]))
        offsets[session.name] = theirs_ns - (asked_ns + answered_ns) // 2
        worst_round_trip_ns = max(worst_round_trip_ns, answered_ns - asked_ns)
    return ArmFacts(
        boot_ids={name: (str(before[name]["boot_id"]), str(facts["boot_id"])) for name, facts in after.items()},
        clock_offset_ns=offsets,
        clock_offset_limit_ns=site.clock_offset_limit_ms * 10**6 + worst_round_trip_ns // 2,
        sm_clock_mhz=device_pairs(before, after, lambda gpu: (gpu.get("clocks") or {}).get("sm_mhz")),
        throttled={
            device: any(is_throttled(str(reading)) for reading in readings)
            for device, readings in device_pairs(before, after, lambda gpu: gpu.get("throttle")).items()
        },
    )


def device_pairs(
    before: Mapping[str, Json], after: Mapping[str, Json], read: Callable[[Json], Any]
) -> dict[str, tuple[Any, Any]]:
    """One reading of every GPU that reports it, before and after, by UUID."""
    pairs: dict[str, tuple[Any, Any]] = {}
    for name, facts in after.items():
        earlier = {gpu["uuid"]: read(gpu) for gpu in before[name].get("gpus", ())}
        for gpu in facts.get("gpus", ()):
            values = (earlier.get(gpu["uuid"]), read(gpu))
            if None not in values:
                pairs[str(gpu["uuid"])] = values
    return pairs


_HARMLESS_REASONS = 0x1 | 0x2
"""NVML's throttle reasons that slow nothing down: GPU idle, and application clocks as set."""


def is_throttled(mask: str) -> bool:
    """Whether a driver's throttle mask (hexadecimal text) names anything but idleness; unreadable counts as yes."""
    try:
        return bool(int(mask, 16) & ~_HARMLESS_REASONS)
    except ValueError:
        return True


def utc_ns(text: str) -> int:
    """Nanoseconds since the epoch of an RFC 3339 text."""
    return int(datetime.fromisoformat(text).timestamp() * 1e9)
