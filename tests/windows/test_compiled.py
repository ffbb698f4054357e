"""The compiled plan: deterministic bytes, everything bound, nothing secret, nothing over the bound."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from typing import Any

import pytest
import rfc8785
from windows_examples import SHA, changed, first_hold_document, plan_document, service, site_document

from windows.compiled import compile_plan
from windows.errors import BudgetError, PlanError
from windows.plan import ARM_STEPS, StepKind, parse_plan
from windows.site import Role, parse_site

SOURCES = {"coordinator": SHA, "remote_dspark": "cd" * 32}


def compiled(site: dict[str, Any] | None = None, plan: dict[str, Any] | None = None) -> Any:
    return compile_plan(parse_site(site or site_document()), parse_plan(plan or plan_document()), SOURCES)


def test_the_digest_is_that_of_the_canonical_bytes() -> None:
    result = compiled()
    assert result.sha256 == hashlib.sha256(result.data).hexdigest()
    assert result.data == rfc8785.dumps(result.document)
    assert json.loads(result.data) == result.document


def test_the_same_files_give_the_same_digest_in_another_process() -> None:
    program = (
        "import json, sys\n"
        "from windows.compiled import compile_plan\n"
        "from windows.plan import parse_plan\n"
        "from windows.site import parse_site\n"
        "site, plan, sources = json.load(sys.stdin)\n"
        "print(compile_plan(parse_site(site), parse_plan(plan), sources).sha256)\n"
    )
    reversed_site = dict(reversed(list(site_document().items())))
    given = json.dumps([reversed_site, plan_document(), dict(reversed(SOURCES.items()))])
    found = subprocess.run(
        [sys.executable, "-c", program],
        input=given,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)},
    )
    assert found.stdout.strip() == compiled().sha256


@pytest.mark.parametrize(
    ("which", "path", "value"),
    [
        ("site", "hosts.0.devices", ["GPU-0f1e2d3c-aaaa-bbbb-cccc-000000000002"]),
        ("site", "hosts.0.services.0.start", ["/usr/bin/python3", "-m", "other"]),
        ("plan", "comparison.margin_ppm", 20_001),
        ("plan", "load.seeds", [1, 2, 4]),
        ("plan", "step_bounds_s.boot", 421),
        ("plan", "arms.B.settings", {"tau": "0.8"}),
        ("plan", "services.0.argv", ["{python}", "-m", "remote_dspark.serve", "--mode", "{mode}", "-v"]),
    ],
)
def test_every_choice_is_bound_by_the_digest(which: str, path: str, value: Any) -> None:
    site, plan = site_document(), plan_document()
    if which == "site":
        site = changed(site, path, value)
    else:
        plan = changed(plan, path, value)
    assert compiled(site, plan).sha256 != compiled().sha256


def test_sources_and_tool_version_are_bound() -> None:
    site, plan = parse_site(site_document()), parse_plan(plan_document())
    digests = {
        compile_plan(site, plan, SOURCES).sha256,
        compile_plan(site, plan, {**SOURCES, "guard": SHA}).sha256,
        compile_plan(site, plan, SOURCES, tool_version="0.2").sha256,
    }
    assert len(digests) == 3


def test_environments_of_production_are_in_the_plan_by_digest_only() -> None:
    site = changed(site_document(), "hosts.0.services", [service(env={"REGION": "planted-5f1c"})])
    result = compiled(site)
    assert b"planted-5f1c" not in result.data
    assert result.sha256 != compiled().sha256


def test_a_hold_runs_open_qualify_arms_restore_close_in_this_order() -> None:
    kinds = [(step.kind, step.arm) for step in compiled().hold_steps(2)]
    assert [kind for kind, arm in kinds if arm is None] == [
        StepKind.PREFLIGHT,
        StepKind.LEASE,
        StepKind.SNAPSHOT,
        StepKind.ARM_DEAD_MAN,
        StepKind.STOP,
        StepKind.PAIR_QUALIFY,
        StepKind.RESTORE,
        StepKind.CLOSE,
    ]
    assert [arm for kind, arm in kinds if kind is StepKind.BOOT] == ["B2", "A2"]
    assert [kind for kind, arm in kinds if arm == "B2"] == list(ARM_STEPS)
    assert kinds.index((StepKind.PAIR_QUALIFY, None)) < kinds.index((StepKind.BOOT, "B2"))


def test_a_first_hold_stops_and_restores_only() -> None:
    kinds = {step.kind for step in compiled(plan=first_hold_document()).hold_steps(1)}
    assert kinds.isdisjoint({StepKind.PAIR_QUALIFY, *ARM_STEPS})
    assert StepKind.RESTORE in kinds


def test_step_ids_are_unique() -> None:
    ids = [step.id for step in compiled().steps]
    assert len(set(ids)) == len(ids)


def test_a_hold_that_cannot_fit_is_refused_when_the_plan_is_made() -> None:
    budget = compiled().budget(1)
    fits = changed(plan_document(), "bound_s", budget.total_s)
    assert compiled(plan=fits).budget(1).total_s == budget.total_s
    with pytest.raises(BudgetError, match=f"{budget.total_s} s, expected at most bound_s = {budget.total_s - 1} s"):
        compiled(plan=changed(plan_document(), "bound_s", budget.total_s - 1))


def test_refusals_of_what_does_not_fit_together() -> None:
    only_target = changed(site_document(), "hosts.1.roles", ["target"])
    with pytest.raises(PlanError, match=r"services\[0\]\.role: found 'drafter'"):
        compiled(only_target)
    site = changed(changed(site_document(), "hosts.0.services", []), "hosts.1.services", [])
    with pytest.raises(PlanError, match="no service expected to run"):
        compiled(site)
    parsed = parse_site(site_document()), parse_plan(plan_document())
    with pytest.raises(PlanError, match="found none"):
        compile_plan(*parsed, {})
    with pytest.raises(PlanError, match="64 lower-case hex digits"):
        compile_plan(*parsed, {"guard": "AB" * 32})
    with pytest.raises(PlanError, match="the manifest changed"):
        compile_plan(*parsed, {"manifest": "cd" * 32})


def test_leases_are_taken_in_one_order_whatever_the_file_says() -> None:
    assert compiled().lease_order() == ("local", "spark-a")
    swapped = {**site_document(), "hosts": site_document()["hosts"][::-1]}
    assert compiled(swapped).lease_order() == ("local", "spark-a")
    assert [host.name for host in compiled().hosts_of(Role.DRAFTER)] == ["local"]
