"""Shows a compiled plan: steps, bounds, budget, evidence needed, digest. Offline and deterministic."""

from __future__ import annotations

from pathlib import Path

from coordinator import __version__
from coordinator.clock import SystemClock
from coordinator.config import read_plan, read_site
from coordinator.errors import UsageError
from coordinator.identity import source_digests
from coordinator.render import Reporter, print_json
from windows.compiled import CompiledPlan, compile_plan
from windows.errors import PlanError
from windows.exit_codes import ExitCode


def compile_files(site_path: Path, plan_path: Path) -> CompiledPlan:
    """Read both files and compile them against the sources of this installation.

    Raises:
        UsageError: A file is refused, or they do not make a plan together.
    """
    site, _ = read_site(site_path)
    plan, _ = read_plan(plan_path)
    try:
        return compile_plan(site, plan, source_digests(), tool_version=__version__)
    except PlanError as error:
        raise UsageError(str(error), where=f"{site_path}, {plan_path}") from error


def show_plan(site_path: Path, plan_path: Path, *, json: bool) -> int:
    """Print the compiled plan."""
    compiled = compile_files(site_path, plan_path)
    if json:
        print_json({"sha256": compiled.sha256, "plan": compiled.document})
        return int(ExitCode.DONE)
    reporter = Reporter(SystemClock().utc)
    rows = [(step.id, f"{step.bound_s} s" if step.bound_s else "in the restore reserve") for step in compiled.steps]
    reporter.table(f"plan {compiled.plan.name}  {compiled.sha256}", ("step", "bound"), rows)
    budget = [
        (f"hold {b.hold}", f"{b.steps_s} s", f"{b.restore_reserve_s} s", f"{b.total_s} s", f"{b.bound_s} s")
        for b in compiled.budgets
    ]
    reporter.table("budget", ("hold", "steps", "restore reserve", "total", "bound"), budget)
    if compiled.plan.models:
        models = [(m.name, m.role.value, str(len(m.files)), f"{m.size_bytes}", m.sha256) for m in compiled.plan.models]
        reporter.table("models staged before the hold", ("name", "role", "files", "bytes", "sha256"), models)
    needed = [(e.kind, ", ".join(e.classes), str(e.max_age_s or "any")) for e in compiled.plan.required_evidence]
    reporter.table("evidence needed before any host is contacted", ("kind", "classes", "max age s"), needed)
    return int(ExitCode.DONE)
