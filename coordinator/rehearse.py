"""The whole campaign on this machine: real processes, real locks, a real hold, twice; receipts that say what they are.

Production is the tiny pair in OFF mode, started before and ended after. Everything between is the code of a campaign on
live hosts: only the site and plan files are generated, and the receipts say REHEARSED or EMULATED.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from coordinator.campaign import open_campaign
from coordinator.campaign_lock import campaign_lock
from coordinator.campaign_result import CampaignResult
from coordinator.clock import Clock, SystemClock
from coordinator.config import read_site
from coordinator.data import load_manifest, tiny_pair
from coordinator.errors import UsageError
from coordinator.gate_admission import AdmitRequest
from coordinator.local import LocalHost
from coordinator.production import production, require_free
from coordinator.rehearsal_site import (
    HOST,
    Layout,
    campaign_document,
    first_hold_document,
    free_ports,
    site_document,
    write_server_files,
    write_toml,
)
from coordinator.render import Reporter, print_json
from coordinator.session import HostSession, open_sessions, stage_programs
from coordinator.show_plan import compile_files
from coordinator.signals import InterruptFlag
from coordinator.staging import stage_package
from remote_dspark.contract import DraftMode
from windows.exit_codes import ExitCode, combine


@dataclass(frozen=True)
class Files:
    """What was generated for one rehearsal."""

    site: Path
    first_plan: Path
    plan: Path
    store: Path
    journals: Path
    keep: Path


def run_rehearsal(root: Path, *, quick: bool, json: bool, state_dir: Path | None = None) -> int:
    """Run it and return the exit code; 0 for any valid comparison (DECISIONS 16)."""
    clock = SystemClock()
    reporter = Reporter(clock.utc, quiet=json)
    state = state_dir or default_state_dir()
    with InterruptFlag() as interrupt, campaign_lock(state, "rehearsal", clock):
        files = prepare(root, state, clock, quick=quick)
        reporter.step(
            f"rehearsal in {root}: site {files.site.name}, plans {files.first_plan.name} and {files.plan.name}"
        )
        site, _ = read_site(files.site)
        with open_sessions(site, clock) as sessions:
            require_free(sessions, files.site, files.store)
            # Only now: a refused rehearsal must not take the name from the run whose receipts a person wants to read.
            point_latest(root / "latest", files.site.parent)
            stage_programs(sessions, compile_files(files.site, files.plan), files.plan.parent, reporter, clock)
            with production(sessions, reporter):
                result = _campaign(files, sessions, reporter, interrupt, clock)
    if json:
        print_json(result.to_document())
    else:
        result.render(reporter)
    code = combine([result.exit_code])
    # Which of the arms is better is a finding, not a failure, of a rehearsal.
    return int(ExitCode.DONE if code in (ExitCode.WORSE, ExitCode.INCONCLUSIVE) else code)


def _campaign(
    files: Files, sessions: list[HostSession], reporter: Reporter, interrupt: InterruptFlag, clock: Clock
) -> CampaignResult:
    """First hold for the budget, then the campaign, then both policies."""
    campaign = open_campaign(
        compile_files(files.site, files.plan),
        sessions,
        store=files.store,
        journals=files.journals,
        keep=files.keep,
        reporter=reporter,
        interrupt=interrupt,
        clock=clock,
        is_rehearsal=True,
        manifest=load_manifest(),
        site=files.site,
    )
    first = compile_files(files.site, files.first_plan)
    campaign.measure_budget(first)
    campaign.measure_steps(sessions[0])
    result = campaign.run()
    if result.comparison is not None:
        for policy in ("rehearsal", "live"):
            result.admissions.append(campaign.admit(AdmitRequest(policy=policy, store=files.store)))
    campaign.verify_store(result)
    return result


def default_state_dir() -> Path:
    """The guard's state of rehearsals: one per user and machine, so that two rehearsals meet at the lease."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "coordinator-rehearsal"


def prepare(root: Path, state_dir: Path, clock: Clock, *, quick: bool) -> Files:
    """Generate site, plans and server files for one rehearsal in a folder of its own below ``root``."""
    stamp = clock.utc()[:19].replace("-", "").replace(":", "").lower()
    run = root / f"run-{stamp}-{os.getpid()}"
    work = run / "work"
    try:
        work.mkdir(parents=True)
        (run / "logs").mkdir()
    except OSError as error:
        raise UsageError(
            f"the rehearsal's folder cannot be made: {error.strerror}",
            where=str(run),
            expected="a folder that you can write",
            next_step="name another one with --dir",
        ) from error
    package = stage_package(LocalHost(HOST), sys.executable, str(work)).path
    layout = Layout(run, state_dir, sys.executable, package, tiny_pair(), load_manifest())
    ports = free_ports(6)
    production_ports, arm_ports = (ports[0], ports[1], ports[2]), (ports[3], ports[4], ports[5])
    drafter, target = write_server_files(layout, prefix="production", mode=DraftMode.OFF, ports=production_ports)
    arms = {
        "A": write_server_files(layout, prefix="arm-a", mode=DraftMode.OFF, ports=arm_ports),
        "B": write_server_files(layout, prefix="arm-b", mode=DraftMode.ON, ports=arm_ports),
    }
    return Files(
        site=write_toml(run / "site.toml", site_document(layout, drafter, target, production_ports)),
        first_plan=write_toml(run / "plan-first-hold.toml", first_hold_document()),
        plan=write_toml(run / "plan.toml", campaign_document(layout, arms, arm_ports[2], quick=quick)),
        store=run / "receipts",
        journals=run / "journals",
        keep=run / "raw",
    )


def point_latest(link: Path, run: Path) -> None:
    """``latest`` names the newest run; replaced in one step."""
    temporary = link.with_name(f".latest-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(run.name)
    temporary.replace(link)
