"""Site + window plan + source digests -> one frozen plan, its bytes and its digest.

Rules: pure and deterministic (same inputs, same bytes, on any machine and in any year); everything after this names
the digest made here; the site goes in by digest and by what a reader needs, never with its environments. ``schema``
of the result changes when the meaning of a step changes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from windows.document import canonical_bytes, sha256_hex
from windows.errors import BudgetError, PlanError
from windows.plan import ARM_STEPS, OPENING_STEPS, RESTORING_STEPS, StepKind, WindowPlan
from windows.site import Host, Role, ServiceState, Site

COMPILED_SCHEMA: Final = "coordinator/compiled-plan/v1"

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class PlanStep:
    """One step of a hold.

    Attributes:
        id: Unique in the plan, e.g. ``hold1/A1/boot``; the operation ids of a hold begin with it.
        hold: Number of the hold.
        kind: What is done.
        arm: Label of the arm, or None.
        bound_s: Longest it may take; 0 for the steps that live in the restore reserve.
    """

    id: str
    hold: int
    kind: StepKind
    arm: str | None
    bound_s: int


@dataclass(frozen=True)
class HoldBudget:
    """The time table of one hold.

    Attributes:
        steps_s: Sum of the bounds of all steps from the lease on; the preflight runs before the clock starts.
        total_s: ``steps_s`` plus the restore reserve.
    """

    hold: int
    bound_s: int
    restore_reserve_s: int
    steps_s: int

    @property
    def total_s(self) -> int:
        """What the hold may take in the worst case."""
        return self.steps_s + self.restore_reserve_s


@dataclass(frozen=True)
class CompiledPlan:
    """The frozen plan that every receipt of the campaign names.

    Attributes:
        document: Plain values; ``data`` are its canonical bytes and ``sha256`` their digest.
        steps: All steps of all holds, in order.
        budgets: One table per hold.
    """

    site: Site
    plan: WindowPlan
    document: dict[str, Any] = field(repr=False)
    data: bytes = field(repr=False)
    sha256: str
    steps: tuple[PlanStep, ...] = field(repr=False)
    budgets: tuple[HoldBudget, ...]

    def hold_steps(self, hold: int) -> tuple[PlanStep, ...]:
        """The steps of one hold, in order."""
        return tuple(step for step in self.steps if step.hold == hold)

    def budget(self, hold: int) -> HoldBudget:
        """The time table of one hold."""
        return self.budgets[hold - 1]

    def lease_order(self) -> tuple[str, ...]:
        """Host names in the one fixed order in which leases are taken."""
        return tuple(sorted(host.name for host in self.site.hosts))

    def hosts_of(self, role: Role) -> tuple[Host, ...]:
        """Hosts of a role in the site's order; the first is the leader."""
        return tuple(host for host in self.site.hosts if role in host.roles)


def compile_plan(
    site: Site, plan: WindowPlan, source_digests: Mapping[str, str], *, tool_version: str = "0"
) -> CompiledPlan:
    """Compiles a plan.

    Args:
        site: The hosts.
        plan: What to run on them.
        source_digests: Name to sha256 of every source tree and input that will run, e.g. ``coordinator``,
            ``remote_dspark``, ``guard``, ``manifest``.
        tool_version: Version of the coordinator.

    Raises:
        PlanError: A role has no host, a service expects to be stopped in a hold, a digest is none or contradicts
            the plan, or (`BudgetError`) a hold cannot fit its bound.
    """
    _require_hosts(site, plan)
    _require_sources(plan, source_digests)
    steps = tuple(step for number in plan.hold_numbers() for step in _hold_steps(plan, number))
    budgets = tuple(_hold_budget(plan, steps, number) for number in plan.hold_numbers())
    document = _document(site, plan, source_digests, tool_version=tool_version, steps=steps, budgets=budgets)
    data = canonical_bytes(document)
    return CompiledPlan(site, plan, document, data, sha256_hex(data), steps, budgets)


def _require_hosts(site: Site, plan: WindowPlan) -> None:
    """Every role that the plan uses has a host, and there is production to hold."""
    roles = {host_role for host in site.hosts for host_role in host.roles}
    commands = [*plan.services]
    used = [(f"services[{i}].role", service.role) for i, service in enumerate(commands)]
    if plan.pair_qualify is not None:
        used.append(("pair_qualify.role", plan.pair_qualify.role))
    if plan.load is not None:
        used.append(("load.program.role", plan.load.program.role))
    used += [(f"measurements[{i}].role", program.role) for i, program in enumerate(plan.measurements)]
    used += [(f"models[{i}].role", model.role) for i, model in enumerate(plan.models)]
    for where, role in used:
        if role not in roles:
            raise PlanError(f"{where}: found {role.value!r}, expected a role that a host of site {site.name!r} has")
    running = [s for host in site.hosts for s in host.services if s.expected is ServiceState.RUNNING]
    if not running:
        raise PlanError(
            f"site {site.name!r}: found no service expected to run, expected at least one: "
            "a hold stops production and proves it back, and nothing can be proven here"
        )


def _require_sources(plan: WindowPlan, source_digests: Mapping[str, str]) -> None:
    """The digests are digests, there are some, and the manifest is the one the plan names."""
    if not source_digests:
        raise PlanError("source_digests: found none, expected the digest of every source tree that will run")
    for name, digest in source_digests.items():
        if not _SHA256.fullmatch(digest):
            raise PlanError(f"source_digests[{name!r}]: found {digest[:80]!a}, expected 64 lower-case hex digits")
    manifest = source_digests.get("manifest")
    if plan.load is not None and manifest is not None and manifest != plan.load.manifest_sha256:
        raise PlanError(
            f"load.manifest_sha256: found {plan.load.manifest_sha256}, expected {manifest} "
            f"(digest of {plan.load.manifest}); the manifest changed after the plan was written"
        )


def _hold_steps(plan: WindowPlan, hold: int) -> tuple[PlanStep, ...]:
    """The steps of one hold: open, qualify first, arms in order or the measurements, restore, close."""

    def step(kind: StepKind, arm: str | None = None) -> PlanStep:
        name = f"hold{hold}/{arm}/{kind.value}" if arm else f"hold{hold}/{kind.value}"
        return PlanStep(name, hold, kind, arm, plan.step_bounds_s.get(kind, 0))

    order = plan.arm_order(hold)
    qualify = (step(StepKind.PAIR_QUALIFY),) if order else ()
    return (
        *(step(kind) for kind in OPENING_STEPS),
        *qualify,
        *(step(kind, arm) for arm in order for kind in ARM_STEPS),
        *(
            PlanStep(f"hold{hold}/measure/{m.name}", hold, StepKind.MEASURE, None, plan.step_bounds_s[StepKind.MEASURE])
            for m in plan.measurements
        ),
        *(step(kind) for kind in RESTORING_STEPS),
    )


def _hold_budget(plan: WindowPlan, steps: tuple[PlanStep, ...], hold: int) -> HoldBudget:
    """The table of one hold; refuses one that cannot fit, whatever the evidence says."""
    timed = [step for step in steps if step.hold == hold and step.kind is not StepKind.PREFLIGHT]
    budget = HoldBudget(hold, plan.bound_s, plan.restore_reserve_s, sum(step.bound_s for step in timed))
    if budget.total_s > budget.bound_s:
        raise BudgetError(
            f"hold {hold}: steps {budget.steps_s} s + restore reserve {budget.restore_reserve_s} s = "
            f"{budget.total_s} s, expected at most bound_s = {budget.bound_s} s; run fewer arms in this hold"
        )
    return budget


def _document(
    site: Site,
    plan: WindowPlan,
    source_digests: Mapping[str, str],
    *,
    tool_version: str,
    steps: tuple[PlanStep, ...],
    budgets: tuple[HoldBudget, ...],
) -> dict[str, Any]:
    """The plain values that are hashed."""
    return {
        "schema": COMPILED_SCHEMA,
        "name": plan.name,
        "purpose": plan.purpose.value,
        "tool_version": tool_version,
        "site": {"name": site.name, "sha256": sha256_hex(canonical_bytes(site.to_document()))},
        "window_plan": plan.to_document(),
        "sources": dict(sorted(source_digests.items())),
        "hosts": [_host_entry(host) for host in site.hosts],
        "policy_pins": dict(sorted(site.policy_pins.items())),
        "steps": [
            {"id": s.id, "hold": s.hold, "kind": s.kind.value, "arm": s.arm, "bound_s": s.bound_s} for s in steps
        ],
        "budgets": [
            {
                "hold": b.hold,
                "bound_s": b.bound_s,
                "restore_reserve_s": b.restore_reserve_s,
                "steps_s": b.steps_s,
                "total_s": b.total_s,
            }
            for b in budgets
        ],
    }


def _host_entry(host: Host) -> dict[str, Any]:
    """What a reader of the plan needs to know of a host: no address, no user, no environment."""
    return {
        "name": host.name,
        "transport": host.transport,
        "roles": [role.value for role in host.roles],
        "devices": list(host.devices),
        "services": [
            {
                "name": s.name,
                "kind": s.kind.value,
                "expected": s.expected.value,
                "stop_order": s.stop_order,
                "stop_s": s.stop_s,
                "start_s": s.start_s,
            }
            for s in host.services
        ],
    }
