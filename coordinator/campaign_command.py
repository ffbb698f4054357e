"""``coordinator campaign`` and ``coordinator hold open``: the same holds as a rehearsal's, on the site's hosts."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from coordinator.campaign import Campaign, open_campaign
from coordinator.campaign_lock import campaign_lock
from coordinator.campaign_result import CampaignResult
from coordinator.clock import Clock, SystemClock
from coordinator.data import policy_path
from coordinator.evidence_search import find_evidence, read_all
from coordinator.identity import source_digests
from coordinator.production import require_free
from coordinator.render import Reporter, print_json
from coordinator.session import open_sessions, stage_programs
from coordinator.show_plan import compile_files
from coordinator.signals import InterruptFlag
from coordinator.store import Store
from receipts.fields import Kind, Outcome
from windows.compiled import CompiledPlan
from windows.exit_codes import ExitCode
from windows.plan import Purpose

_BEAT_S = 1.0


def run_campaign_command(site: Path, plan: Path, store: Path, policy: str, *, json: bool) -> int:
    """Run a plan on the site's hosts: a first hold, or a whole campaign with its admission."""
    compiled = compile_files(site, plan)
    # Before any host: a name that is wrong here must not be found out after two holds.
    policy_file = policy_path(policy)
    with ExitStack() as stack:
        campaign = _opened(stack, compiled, site, plan, store, json=json)
        if compiled.plan.purpose is Purpose.FIRST_HOLD:
            campaign.measure_budget(compiled)
            result = CampaignResult(compiled, store)
            result.holds += campaign.holds
        else:
            result = campaign.run()
            if result.comparison is not None:
                result.admissions.append(campaign.admit(policy_file))
        campaign.verify_store(result)
    if json:
        print_json(result.to_document())
    else:
        result.render(campaign.reporter)
    return int(result.exit_code)


def open_hold(site: Path, plan: Path, store: Path, *, number: int, reason: str, json: bool) -> int:
    """Open one hold and keep it until a signal, the deadline or a loss ends it; then production comes back.

    The command stays in the foreground because the hosts restore as soon as nobody beats any more: a hold that no
    process stands behind is exactly what the dead-man is for.
    """
    compiled = compile_files(site, plan)
    with ExitStack() as stack:
        campaign = _opened(stack, compiled, site, plan, store, json=json)
        held = campaign.hold_open(number, reason)
    if json:
        print_json({"hold_id": held.window.hold_id, "receipt": held.receipt, "exit_code": int(held.exit_code)})
    # A person ends this command with a signal: that is its normal end once production is back.
    return int(ExitCode.DONE if held.exit_code is ExitCode.INTERRUPTED else held.exit_code)


def _opened(stack: ExitStack, compiled: CompiledPlan, site: Path, plan: Path, store: Path, *, json: bool) -> Campaign:
    """Evidence first, then hosts: a refusal for missing evidence has contacted nobody."""
    clock: Clock = SystemClock()
    reporter = Reporter(clock.utc, quiet=json)
    reporter.step(
        f"plan {compiled.plan.name} {compiled.sha256}: {len(compiled.site.hosts)} hosts of {compiled.site.name}"
    )
    find_evidence(
        Store(store),
        compiled.plan.required_evidence,
        source_sha256=source_digests()["coordinator"],
        now_utc=clock.utc(),
    )
    interrupt = stack.enter_context(InterruptFlag())
    stack.enter_context(campaign_lock(store.absolute(), f"plan {compiled.plan.name}", clock))
    sessions = stack.enter_context(open_sessions(compiled.site, clock))
    require_free(sessions, site)
    for session in sessions:
        stage_programs(session)
    load = compiled.plan.load
    campaign = open_campaign(
        compiled,
        sessions,
        store=store,
        journals=store.parent / f"{store.name}-journals",
        keep=store.parent / f"{store.name}-raw",
        reporter=reporter,
        interrupt=interrupt,
        clock=clock,
        is_rehearsal=False,
        manifest=plan.parent / load.manifest if load is not None else plan,
    )
    for receipt, predicate in read_all(Store(store)):
        if predicate.kind == Kind.BUDGET and predicate.verdict.outcome is Outcome.PASS:
            campaign.adopt_budget(receipt, predicate.body)
    return campaign
