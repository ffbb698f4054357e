"""Measures the steps of a plan's programs once, outside a hold, so that their bounds have evidence behind them.

Only a rehearsal does this: on stand-in hardware the arm's services can run beside production. A first hold measures
lease, snapshot, stop and restore; this measures the rest; together they back every bound that HOLD 1 asks for
(DECISIONS 12). The numbers of the trial are step times and nothing else: no counter of it is evidence for a comparison.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.arm_values import arm_values, hold_values
from coordinator.errors import GateFailed
from coordinator.guard_client import Json
from coordinator.host import Outcome
from coordinator.production import TRIAL_PREFIX
from coordinator.programs import host_values
from coordinator.session import HostSession
from windows.commands import ArmService, Command
from windows.plan import StepKind
from windows.template import fill, fill_argv

if TYPE_CHECKING:
    from coordinator.campaign import Campaign

_REQUIRE_HOLD = "--require-hold"
_PHASES = {
    StepKind.WARM_UP: "warmup",
    StepKind.GREEDY_CHECK: "greedy",
    StepKind.HEADLINE: "headline",
    StepKind.PROFILED: "profiled",
}
"""Steps whose time the load program reports itself, as ``<phase>.elapsed_ns``."""


def measure_steps(campaign: Campaign, session: HostSession) -> dict[StepKind, int]:
    """Run pair-qualify and one ON arm on one host and time every step.

    Args:
        campaign: The campaign whose plan is tried.
        session: The one host of the rehearsal.

    Returns:
        Nanoseconds per step kind, from PAIR_QUALIFY to TEARDOWN.

    Raises:
        GateFailed: A program or service of the plan does not work at all.
    """
    plan = campaign.compiled.plan
    assert plan.pair_qualify is not None
    assert plan.load is not None
    assert plan.arms is not None
    clock = campaign.clock
    values = {
        **hold_values(campaign.compiled, "trial", 1),
        **host_values(session),
        **arm_values(campaign.compiled, campaign.manifest, session, "B1", plan.arms.B.mode),
        **plan.arms.B.settings,
    }
    measured: dict[StepKind, int] = {}

    def timed(kind: StepKind, action: Callable[[], object]) -> None:
        start = clock.monotonic_ns()
        action()
        measured[kind] = clock.monotonic_ns() - start

    qualify, load = plan.pair_qualify, plan.load
    timed(StepKind.PAIR_QUALIFY, lambda: _run(session, qualify, "pair-qualify", values, qualify.timeout_s))
    services = [_service(session, service, values) for service in sorted(plan.services, key=lambda s: s.boot_order)]
    try:
        timed(StepKind.BOOT, lambda: [_guard(session, "service-start", service) for service in services])
        start = clock.monotonic_ns()
        folder = _run(session, load.program, "load", values, load.program.timeout_s)
        whole = clock.monotonic_ns() - start
        timed(StepKind.EVIDENCE, lambda: session.host.read(f"{folder}/requests.jsonl", max_bytes=64 << 20))
        measured |= phase_times(json.loads(session.host.read(f"{folder}/observation.json", max_bytes=4 << 20)), whole)
    finally:
        timed(StepKind.TEARDOWN, lambda: [_guard(session, "service-stop", service) for service in reversed(services)])
    return measured


def phase_times(observation: Json, whole_ns: int) -> dict[StepKind, int]:
    """Times of the steps inside the load program.

    A reading of the counters is timed between the last two, which nothing separates. What no phase accounts for
    (interpreter start, waiting for READY, identity) is counted as IDENTITY: the bound is an upper one.
    """
    values = observation["values"]
    times = {kind: int(values[f"{phase}.elapsed_ns"]) for kind, phase in _PHASES.items()}
    reading = max(int(values["final.at_ns"]) - int(values["profiled.at_ns"]), 1)
    times |= {StepKind.BASELINE: reading, StepKind.FINAL: reading}
    return {**times, StepKind.IDENTITY: max(whole_ns - sum(times.values()), 1)}


def _run(session: HostSession, command: Command, name: str, values: Mapping[str, str | int], timeout_s: int) -> str:
    folder = f"{session.spec.work_dir}/trial/{name}"
    filled = {**values, "output_dir": folder}
    # Outside a hold there is nothing to prove; inside one the same program refuses to run without the proof.
    argv = [word for word in fill_argv(command.argv, filled) if word != _REQUIRE_HOLD]
    env = {**{key: fill(text, filled) for key, text in command.env.items()}, "PYTHONPATH": session.package.path}
    words = ["/usr/bin/env", *(f"{key}={value}" for key, value in sorted(env.items())), *argv]
    session.host.run(["/bin/mkdir", "-p", folder], timeout_s=20)
    result = session.host.run(words, timeout_s=timeout_s)
    if result.outcome is not Outcome.EXITED or result.code != 0:
        raise GateFailed(
            f"the trial of {name} failed; no hold was opened",
            where=session.name,
            expected="exited 0",
            found=f"{result.outcome.value} {result.code}: {result.stderr[-400:].decode('utf-8', 'replace')}",
        )
    return folder


def _service(session: HostSession, service: ArmService, values: Mapping[str, str | int]) -> Json:
    """The arm's service as a process the guard can start outside a hold, with its probe as the sign of life."""
    name = f"{TRIAL_PREFIX}{service.name}"
    filled = {**values, "output_dir": f"{session.spec.work_dir}/trial/{name}"}
    probe = None
    if service.probe is not None:
        probe = {**service.probe.model_dump(mode="json"), "url": fill(service.probe.url, filled)}
    return {
        "name": name,
        "kind": "process",
        "start": list(fill_argv(service.argv, filled)),
        "cwd": session.spec.work_dir,
        "env": {
            **{key: fill(text, filled) for key, text in service.env.items()},
            "PYTHONPATH": session.package.path,
        },
        "log": str(Path(session.spec.work_dir) / "trial" / f"{name}.log"),
        "ports": list(service.ports),
        "probe": probe,
        "start_s": 120,
        "drain_s": service.stop_s,
        "stop_s": service.stop_s + 20,
        "watch_s": 0,
    }


def _guard(session: HostSession, verb: str, service: Json) -> Json:
    return session.guard.call(verb, {"service": service}, with_claim=False, timeout_s=200)
