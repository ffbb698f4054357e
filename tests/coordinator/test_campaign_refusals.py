"""A campaign that is refused before its first hold: nothing is touched, and the attempt has its receipt."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.campaign import Campaign, open_campaign
from coordinator.clock import SystemClock
from coordinator.errors import AdmissionRefused, HardwareHeld
from coordinator.evidence_search import read_all
from coordinator.hold_receipts import refusals_kept
from coordinator.production import require_free
from coordinator.render import Reporter
from coordinator.session import HostSession
from coordinator.signals import InterruptFlag
from receipts.fields import Kind
from tests.coordinator.conftest import SmallSite
from windows.budget import BudgetEvidence
from windows.compiled import CompiledPlan
from windows.plan import StepKind


def campaign_of(small_site: SmallSite, compiled: CompiledPlan, sessions: list[HostSession]) -> Campaign:
    root, clock = small_site.root, SystemClock()
    return open_campaign(
        compiled,
        sessions,
        store=root / "store",
        journals=root / "journals",
        keep=root / "raw",
        reporter=Reporter(clock.utc, quiet=True),
        interrupt=InterruptFlag(),
        clock=clock,
        is_rehearsal=True,
        manifest=root / "plan.toml",
        site=root / "site.toml",
    )


def attempts(campaign: Campaign) -> list[tuple[str, str, int]]:
    """(stage, error, exit code) of every attempt receipt."""
    bodies = [predicate.body for _, predicate in read_all(campaign.writer.store) if predicate.kind == Kind.ATTEMPT]
    return [(body.stage, body.error_code, body.exit_code) for body in bodies]  # type: ignore[union-attr]


def test_a_budget_that_refuses_the_first_hold_leaves_an_attempt(small_site: SmallSite) -> None:
    """Red when a plan that the budget engine refuses leaves nothing that says so, or a hold is opened first."""
    with small_site.running() as (compiled, sessions):
        campaign = campaign_of(small_site, compiled, sessions)
        campaign.evidence.append(BudgetEvidence("f" * 64, {StepKind.STOP: 10**15}))
        with pytest.raises(AdmissionRefused, match=r"step_bounds_s\.stop"):
            campaign.run()
        assert attempts(campaign) == [("budget", "AdmissionRefused", 10)]
        assert not list((small_site.root / "journals").glob("*"))


def test_a_host_that_is_held_leaves_an_attempt(small_site: SmallSite) -> None:
    """Red when a refusal that touched no host is in no receipt."""
    with small_site.running() as (compiled, sessions):
        campaign = campaign_of(small_site, compiled, sessions)
        with small_site.window(compiled, sessions) as window:
            window.open()
            with pytest.raises(HardwareHeld), refusals_kept(campaign.writer, "campaign", "hosts"):
                require_free(sessions, Path("site.toml"))
        assert attempts(campaign) == [("hosts", "HardwareHeld", 11)]
