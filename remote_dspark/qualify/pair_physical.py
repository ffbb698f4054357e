"""The qualification of a physical pair: what ``qualify.pair --physical`` observes on two GPUs.

Exactness against oracle and solo head, replays with changed inputs and mixed temperature 0, stress, exhaustion,
mismatch, a lone rank in its own process, compiled barriers, times, link, clocks and temperatures. Times are recorded,
and judged only where a wrong one would mean that the exchange does not work as designed.

Not here: whole workers on the pair; `whole_worker --physical` observes those.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from remote_dspark.contract import Check
from remote_dspark.kernels.pair_devices import PairFacts, PairRefusedError, read_facts, require_pair
from remote_dspark.kernels.pair_rank import PairSettings
from remote_dspark.observe import HoldProof, ObserveError, Recorder
from remote_dspark.qualify import pair_device_checks as on_device
from remote_dspark.qualify.pair_host import COPY_BYTES, compiled_faults, device_state, peer_copies
from remote_dspark.qualify.pair_locks import require_locked
from remote_dspark.qualify.pair_lone import check_lone
from remote_dspark.qualify.pair_timing import POSITIONS, TimedCase, cases, goal_faults

TOPOLOGY: Final = "physical"
"""Label of an observation that two GPUs made; gates ask for it."""

KINDS: Final = ("plain", "ties", "flat", "masked", "wide", "greedy", "bad")
NUM_POSITIONS: Final = 100_000
NUM_UNCACHED: Final = 2_000
NUM_EXCHANGES: Final = 1_000_000
SECONDS: Final = 60.0
"""Time box of a long check; on two H200 each takes 10 s."""


def require_devices(devices: Sequence[int], bound_ns: int, hold: HoldProof | None) -> PairFacts:
    """Facts of the devices, once they are a pair and, inside a hold, both locked by it.

    Raises:
        ObserveError: They are not.
    """
    try:
        facts = read_facts(devices)
        require_pair(facts, bound_ns)
    except PairRefusedError as cause:
        raise ObserveError(f"--physical: {cause}") from cause
    except (AssertionError, RuntimeError) as cause:
        # torch says so when there is no such device, or no CUDA at all
        raise ObserveError(f"--physical: expected CUDA devices {list(devices)}, found {cause}") from cause
    if hold is not None:
        require_locked(facts.uuids, hold)
    return facts


def device_checks(devices: Sequence[int], vocab_size: int, bound_ns: int, *, share: int = 1) -> Iterator[Check]:
    """All checks, one after the other; ``share`` divides the long ones, and so does an earlier failure."""
    settings = PairSettings(vocab_size, bound=bound_ns)
    emitting = PairSettings(vocab_size, bound=bound_ns, emit_weights=True)
    uncached = PairSettings(vocab_size, tile=512, num_warps=8, bound=bound_ns)
    is_good = True

    def size(number: int) -> int:
        return number // share if is_good else number // 50

    steps: list[Callable[[], list[Check]]] = [
        lambda: on_device.check_oracle(devices, emitting, KINDS, range(1)),
        lambda: [on_device.check_exhaustion(devices, settings)],
        lambda: [on_device.check_mismatch(devices, settings)],
        lambda: check_lone(devices, bound_ns)[0],
        lambda: [on_device.check_replays(devices, settings, positions=size(NUM_POSITIONS), seconds=SECONDS)],
        lambda: [
            on_device.check_replays(devices, uncached, positions=size(NUM_UNCACHED), seconds=SECONDS, uncached=True)
        ],
        lambda: [on_device.check_stress(devices, settings, exchanges=size(NUM_EXCHANGES), seconds=SECONDS)],
        lambda: [_barriers(devices)],
    ]
    for step in steps:
        for check in _ended(step):
            is_good = is_good and check.ok is True
            yield check


def _ended(step: Callable[[], list[Check]]) -> list[Check]:
    """A step's checks; one that broke down is a failed check, so that the observation still says what else was seen."""
    try:
        return step()
    except (RuntimeError, ValueError) as cause:
        # among them a pair with an error, and whatever the driver says of a device that was lost
        return [Check("ended", "the checks of this step", f"{type(cause).__name__}: {cause}"[:200], False)]


def _barriers(devices: Sequence[int]) -> Check:
    faults = compiled_faults(devices)
    return Check("barriers", "none missing", "; ".join(faults)[:200] or "none missing", faults == [])


def observe(recorder: Recorder, devices: Sequence[int], vocab_size: int, bound_ns: int, hold: HoldProof | None) -> None:
    """Records everything; the caller writes the observation.

    Raises:
        ObserveError: These devices are no pair, or not locked by the hold.
    """
    facts = require_devices(devices, bound_ns, hold)
    recorder.label("topology", TOPOLOGY)
    for rank, uuid in enumerate(facts.uuids):
        recorder.label(f"rank.{rank}.uuid", uuid)
    _record_state(recorder, "before", facts.uuids)
    for name, number in (("vocab_size", vocab_size), ("bound_ns", bound_ns), ("positions", NUM_POSITIONS)):
        recorder.value(f"settings.{name}", number)
    for check in device_checks(devices, vocab_size, bound_ns):
        recorder.check(check.name, expected=check.expected, found=check.found, ok=bool(check.ok))
    _record_times(recorder, devices, vocab_size, bound_ns)
    _record_link(recorder, devices)
    _record_state(recorder, "after", facts.uuids)


def _record_times(recorder: Recorder, devices: Sequence[int], vocab_size: int, bound_ns: int) -> None:
    recorder.value("times.positions_per_replay", POSITIONS)
    for case in cases(vocab_size):
        try:
            timed = TimedCase(case, devices, bound_ns)
            with timed.pair:
                times = timed.measure()
        except (RuntimeError, ValueError) as cause:
            recorder.check(f"times.{case.name}", expected="times", found=f"{type(cause).__name__}: {cause}", ok=False)
            continue
        for name in ("pair", "half", "full"):
            recorder.samples(f"{case.name}-{name}.jsonl", "ns", getattr(times, name))
            recorder.value(f"times.{case.name}.{name}.position_ns", times.position_ns(name))
        recorder.label(f"times.{case.name}.goals", "; ".join(goal_faults(case, times)) or "met")
        pair, full = times.position_ns("pair"), times.position_ns("full")
        if case.uncached:
            recorder.check(f"times.{case.name}", expected=f"below {full} ns", found=f"{pair} ns", ok=pair < full)


def _record_link(recorder: Recorder, devices: Sequence[int]) -> None:
    recorder.value("peer.copy_bytes", COPY_BYTES)
    for one, other in ((0, 1), (1, 0)):
        copies = peer_copies(devices[one], devices[other])
        recorder.samples(f"peer-copy-{one}-{other}.jsonl", "ns", copies)
        recorder.value(f"peer.{one}-{other}.copy_ns", int(statistics.median(copies)))


def _record_state(recorder: Recorder, when: str, uuids: Sequence[str]) -> None:
    states = {state["uuid"]: state for state in device_state()}
    for rank, uuid in enumerate(uuids):
        for name, text in states[uuid].items():
            if name != "uuid":
                recorder.label(f"{when}.{rank}.{name}", text)
