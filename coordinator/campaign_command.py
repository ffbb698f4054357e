"""``coordinator campaign`` and ``coordinator hold open``: the same holds as a rehearsal's, on the site's hosts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from coordinator.campaign import Campaign, open_campaign
from coordinator.campaign_lock import campaign_lock
from coordinator.campaign_result import CampaignResult
from coordinator.clock import Clock, SystemClock
from coordinator.evidence_search import find_evidence, read_all
from coordinator.gate_admission import OPEN_STAGE, AdmitRequest, plain_writer, require_admissible, require_stage
from coordinator.hold_receipts import refusals_kept
from coordinator.identity import source_digests
from coordinator.keys import signer_from
from coordinator.production import require_free
from coordinator.render import Reporter, print_json
from coordinator.session import open_sessions, stage_programs
from coordinator.show_plan import compile_files
from coordinator.signals import InterruptFlag
from coordinator.store import Store
from receipts.fields import Kind, Outcome
from receipts.policy import Policy
from windows.compiled import CompiledPlan
from windows.exit_codes import ExitCode
from windows.plan import Purpose

_BEAT_S = 1.0


def run_campaign_command(site: Path, plan: Path, request: AdmitRequest, *, json: bool) -> int:
    """Run a plan on the site's hosts: a campaign, or the one hold of another plan, between the stages of its policy.

    Args:
        site: Site file.
        plan: Plan file.
        request: Store, key, signers and policy; without a policy, ``live`` for a campaign and ``first-hold`` else.
        json: One document on stdout.
    """
    compiled = compile_files(site, plan)
    purpose = compiled.plan.purpose
    has_arms = purpose is Purpose.CAMPAIGN
    asked = replace(request, policy=request.policy or ("live" if has_arms else "first-hold")).on(compiled.site)
    # Before any host: what is wrong here must not be found out after two holds.
    policy = require_admissible(asked)
    with ExitStack() as stack:
        campaign = _opened(stack, compiled, site, plan, asked, policy=policy, json=json)
        result = CampaignResult(compiled, asked.store)
        if has_arms:
            result = campaign.run()
        else:
            if purpose is Purpose.MEASUREMENT:
                campaign.measure()
            else:
                campaign.measure_budget(compiled)
            result.holds += campaign.holds
        if not has_arms or result.comparison is not None:
            result.admissions.append(campaign.admit(asked))
        campaign.verify_store(result, asked.signers)
    is_denied = any(not admission.is_admitted for admission in result.admissions)
    # What the comparison says is worth more than that a policy denies for it.
    code = ExitCode.GATE_FAILED if is_denied and result.exit_code is ExitCode.DONE else result.exit_code
    if json:
        print_json(result.to_document() | {"exit_code": int(code), "meaning": code.meaning})
    else:
        result.render(campaign.reporter)
    return int(code)


def open_hold(site: Path, plan: Path, request: AdmitRequest, *, number: int, reason: str, json: bool) -> int:
    """Open one hold and keep it until a signal, the deadline or a loss ends it; then production comes back.

    The command stays in the foreground because the hosts restore as soon as nobody beats any more: a hold that no
    process stands behind is exactly what the dead-man is for.
    """
    compiled = compile_files(site, plan)
    with ExitStack() as stack:
        campaign = _opened(stack, compiled, site, plan, request, policy=None, json=json)
        held = campaign.hold_open(number, reason)
    if json:
        print_json({"hold_id": held.window.hold_id, "receipt": held.receipt, "exit_code": int(held.exit_code)})
    # A person ends this command with a signal: that is its normal end once production is back.
    return int(ExitCode.DONE if held.exit_code is ExitCode.INTERRUPTED else held.exit_code)


def _opened(
    stack: ExitStack,
    compiled: CompiledPlan,
    site: Path,
    plan: Path,
    request: AdmitRequest,
    *,
    policy: Policy | None,
    json: bool,
) -> Campaign:
    """Evidence first, then the policy's opening stage, then hosts: a refusal for either has contacted nobody."""
    store, signer = request.store, signer_from(request.key)
    clock: Clock = SystemClock()
    reporter = Reporter(clock.utc, quiet=json)
    reporter.step(
        f"plan {compiled.plan.name} {compiled.sha256}: {len(compiled.site.hosts)} hosts of {compiled.site.name}"
    )
    writer = plain_writer(store, clock, signer)
    with refusals_kept(writer, "campaign", "evidence"):
        find_evidence(
            writer.store,
            compiled.plan.required_evidence,
            source_sha256=source_digests()["coordinator"],
            now_utc=clock.utc(),
        )
    interrupt = stack.enter_context(InterruptFlag())
    # Beside the store, as everything is that is no evidence.
    journals = store.absolute().parent / f"{store.name}-journals"
    stack.enter_context(campaign_lock(journals, f"plan {compiled.plan.name}", clock))
    if policy is not None and any(stage.name == OPEN_STAGE for stage in policy.document.stage):
        require_stage(writer, request, OPEN_STAGE, reporter)
    with refusals_kept(writer, "campaign", "hosts"):
        sessions = stack.enter_context(open_sessions(compiled.site, clock))
        require_free(sessions, site, store)
        stage_programs(sessions, compiled, plan.parent, reporter, clock)
    load = compiled.plan.load
    campaign = open_campaign(
        compiled,
        sessions,
        store=store,
        journals=journals,
        keep=store.parent / f"{store.name}-raw",
        reporter=reporter,
        interrupt=interrupt,
        clock=clock,
        is_rehearsal=False,
        manifest=plan.parent / load.manifest if load is not None else plan,
        site=site,
        signer=signer,
    )
    for receipt, predicate in read_all(Store(store)):
        if predicate.kind == Kind.BUDGET and predicate.verdict.outcome is Outcome.PASS:
            campaign.adopt_budget(receipt, predicate.body)
    return campaign
