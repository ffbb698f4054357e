#!/usr/bin/env python
"""Makes the poison corpus: one campaign, and for every rule of the gates a copy that breaks it. Deterministic."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[2])]

from receipt_kit import (  # noqa: E402 - needs the path above
    EXAMPLES,
    LOG,
    NOW,
    PHYSICAL,
    Log,
    arm,
    comparison,
    digest,
    draft,
    gpu_host,
    held,
    observation,
    parent,
    raw_sample,
    rows,
    signer,
    signers_toml,
)

from receipts import bodies  # noqa: E402
from receipts.chain import Head, parse_head  # noqa: E402
from receipts.fields import Kind, Verdict  # noqa: E402
from receipts.findings import Entry  # noqa: E402
from receipts.gates import Facts, decide, record  # noqa: E402
from receipts.policy import parse_policy  # noqa: E402
from receipts.signing import PAYLOAD_TYPE, parse_allowed_signers  # noqa: E402

POLICIES = HERE.parents[2] / "policies"
RAW = b"7\n9\n8\n"
PASS = Verdict(outcome="PASS")


@dataclass
class Step:
    """One receipt to come: its parents are named by the names of earlier steps."""

    name: str
    kind: Kind
    body: Any
    parents: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)
    signer: str | None = "operator"


@dataclass
class World:
    """A campaign and what the verifier knows besides it."""

    steps: list[Step]
    after: Callable[[dict[str, Any]], None] = lambda _: None
    """Damages the finished document."""
    signers: tuple[str, ...] | None = ("operator", "auditor", "ci")
    high_water: str = "head"
    facts: dict[str, Any] = field(default_factory=dict)
    stage: str = "final"
    policy: str = "live"

    def step(self, name: str) -> Step:
        """The step of this name."""
        return next(step for step in self.steps if step.name == name)

    def edit(self, name: str, body: Any | None = None, **changes: Any) -> World:
        """Change one step."""
        step = self.step(name)
        step.body = step.body if body is None else body
        step.changes |= changes
        return self


def campaign() -> World:
    """Sources, first hold, budget, host facts, two holds of qualification and arms, comparison."""
    first = {"plan_sha256": digest("first-hold plan")}
    steps = [
        Step("sources", Kind.SOURCE_IDENTITY, EXAMPLES[Kind.SOURCE_IDENTITY]),
        Step("first-hold", Kind.HOLD, EXAMPLES[Kind.HOLD], ("sources",), dict(first)),
        Step("budget", Kind.BUDGET, EXAMPLES[Kind.BUDGET], ("first-hold",), dict(first)),
        Step("facts", Kind.HOST_FACTS, EXAMPLES[Kind.HOST_FACTS], ("sources",)),
    ]
    for number, order in ((1, ("A1", "B1")), (2, ("B2", "A2"))):
        place = {"window": f"campaign-1/hold-{number}", "hold_number": number}
        steps.append(
            Step(f"pair-{number}", Kind.PAIR_QUALIFICATION, EXAMPLES[Kind.PAIR_QUALIFICATION], ("sources", "budget"),
                 {"position": place})
        )  # fmt: skip
        for label in order:
            mode = "greedy-v1" if label.startswith("A") else "sampled-top32-v2"
            values = {"raw.rounds.jsonl.p50": 8, "raw.rounds.jsonl.count": 3}
            steps.append(
                Step(label, Kind.ARM, arm(mode, values=values), ("sources", "budget", f"pair-{number}", "facts"),
                     {"position": place | {"arm": label}, "samples": (raw_sample("rounds.jsonl", RAW),)})
            )  # fmt: skip
        steps.append(Step(f"hold-{number}", Kind.HOLD, EXAMPLES[Kind.HOLD], ("sources", "budget"), {"position": place}))
    arms = ("A1", "B1", "B2", "A2", "hold-1", "hold-2")
    place = {"window": "campaign-1/comparison"}
    steps.append(Step("comparison", Kind.COMPARISON, comparison(), arms, {"position": place}))
    return World(steps)


def build(world: World) -> dict[str, Any]:
    """The document of a world, as it is stored."""
    log = Log()
    if any("samples" in step.changes for step in world.steps):
        log.samples[hashlib.sha256(RAW).hexdigest()] = RAW
    ids: dict[str, tuple[Kind, str]] = {}
    signed: list[list[dict[str, str]]] = []
    for step in world.steps:
        body = _witnessed(step.body, log) if step.name in ("hold-1", "hold-2") else step.body
        parents = tuple(
            parent(*ids[name], name) if name in ids else parent(Kind.ARM, digest(name), name) for name in step.parents
        )
        made = draft(step.kind, body, parents=parents, **step.changes)
        ids[step.name] = (step.kind, log.append(made))
        content = log.receipts[-1].content
        signatures = json.loads(signer(step.signer).sign(content))["signatures"] if step.signer else []
        signed.append(signatures)
    entries = [
        {"name": entry.name, "content": entry.content.decode(), "signatures": signatures}
        for entry, signatures in zip(log.entries, signed, strict=True)
    ]
    samples = {sha256: content.decode() for sha256, content in log.samples.items()}
    high_water = {"head": log.head.encode().decode(), "none": None}.get(world.high_water, world.high_water)
    document = {
        "policy": world.policy, "stage": world.stage, "entries": entries, "sums": log.sums(),
        "head": log.head.encode().decode(), "samples": samples, "high_water": high_water,
        "signers": signers_toml(*world.signers).decode() if world.signers is not None else None,
        "facts": world.facts,
    }  # fmt: skip
    world.after(document)
    return document


def _witnessed(body: bodies.HoldBody, log: Log) -> bodies.HoldBody:
    """A guard kept the head as it was when the hold opened."""
    assert log.head.head is not None
    kept = bodies.Witness(host="alpha", log=LOG, sequence=log.head.count - 1, head=log.head.head)
    hosts = tuple(host.model_copy(update={"witness_open": kept}) for host in body.hosts)
    return body.model_copy(update={"hosts": hosts})


# -- the poisons -------------------------------------------------------------------------------------------------------

POISONS: dict[str, tuple[str, Callable[[], World]]] = {}


def poison(reason: str) -> Callable[[Callable[[World], object]], None]:
    """Register a function that spoils a campaign."""

    def register(spoil: Callable[[World], object]) -> None:
        def make() -> World:
            world = campaign()
            spoil(world)
            return world

        POISONS[spoil.__name__.replace("_", "-")] = (reason, make)

    return register


def _drop(world: World, *names: str) -> None:
    world.steps = [step for step in world.steps if step.name not in names]


@poison("there is no receipt at all: nothing evaluated must never admit")
def empty_log(world: World) -> None:
    world.steps = []
    world.high_water = "none"


@poison("the campaign never got to a comparison")
def no_comparison(world: World) -> None:
    _drop(world, "comparison")


@poison("no budget backs the holds")
def no_budget(world: World) -> None:
    _drop(world, "budget")
    for step in world.steps:
        step.parents = tuple(name for name in step.parents if name != "budget")


@poison("one of four arms is not there")
def missing_arm(world: World) -> None:
    _drop(world, "A2")
    world.step("comparison").parents = ("A1", "B1", "B2", "hold-1", "hold-2")


@poison("the second hold was measured without qualifying the pair in it")
def unqualified_hold(world: World) -> None:
    for name in ("B2", "A2"):
        world.step(name).parents = ("sources", "budget", "facts")
    _drop(world, "pair-2")


@poison("the pair was qualified on an emulation")
def emulated_pair(world: World) -> None:
    body = bodies.PairQualificationBody(observations=(observation(compute="interpreted"),), gates=rows("pair"))
    world.edit("pair-2", body, evidence="EMULATED")


@poison("both ranks of the pair ran on one GPU of a host with two")
def pair_on_one_gpu(world: World) -> None:
    labels = PHYSICAL | {"rank.1.uuid": PHYSICAL["rank.0.uuid"]}
    body = bodies.PairQualificationBody(observations=(observation(labels=labels),), gates=rows("pair"))
    world.edit("pair-1", body)


@poison("the pair ran on a GPU that its host does not have")
def pair_elsewhere(world: World) -> None:
    labels = PHYSICAL | {"rank.1.uuid": "GPU-elsewhere-1"}
    body = bodies.PairQualificationBody(observations=(observation(labels=labels),), gates=rows("pair"))
    world.edit("pair-2", body)


@poison("the ranks of the pair ran on two hosts, one GPU each")
def pair_across_hosts(world: World) -> None:
    labels = PHYSICAL | {"rank.1.uuid": "GPU-beta-0"}
    body = bodies.PairQualificationBody(observations=(observation(labels=labels),), gates=rows("pair"))
    world.edit("pair-2", body, hosts=(gpu_host(num_gpus=1), gpu_host("beta", num_gpus=1)))


@poison("the pair was observed outside a hold")
def pair_outside_a_hold(world: World) -> None:
    found = observation(labels=PHYSICAL).model_copy(update={"hold_id": None, "hold_epoch": None})
    world.edit("pair-1", bodies.PairQualificationBody(observations=(found,), gates=rows("pair")))


@poison("the pair was observed in another hold than its receipt says")
def pair_of_another_hold(world: World) -> None:
    step = world.step("pair-2")
    world.edit("pair-2", position=step.changes["position"] | {"hold_id": "campaign-1-2"})


@poison("measured on CUDA, but nothing says that it was a physical pair")
def pair_without_ranks(world: World) -> None:
    body = bodies.PairQualificationBody(observations=(observation(),), gates=rows("pair"))
    world.edit("pair-2", body)


@poison("a rehearsal's arm among measured ones")
def rehearsed_arm(world: World) -> None:
    world.edit("B1", evidence="REHEARSED")
    world.edit("comparison", evidence="REHEARSED")


@poison("a comparison says MEASURED over an arm that was only rehearsed")
def laundered_evidence(world: World) -> None:
    world.edit("B1", evidence="REHEARSED")


@poison("an arm says MEASURED and no GPU is described")
def measured_without_hardware(world: World) -> None:
    world.edit("B1", hosts=(gpu_host(num_gpus=0),))


@poison("one arm was written by another source tree")
def other_source(world: World) -> None:
    world.edit("B2", tool={"name": "coordinator", "version": "0.1.0", "source_sha256": digest("another tree")})


@poison("the second hold ran on another host with other GPUs")
def other_hardware(world: World) -> None:
    for name in ("pair-2", "B2", "A2", "hold-2"):
        world.edit(name, hosts=(gpu_host("beta"),))


@poison("an arm of another plan was put in")
def other_plan(world: World) -> None:
    world.edit("B1", plan_sha256=digest("another plan"))


@poison("the caller asked about a plan that was never measured")
def unknown_plan(world: World) -> None:
    world.facts["plan_sha256"] = digest("a plan nobody ran")


@poison("the same plan was compared twice: the second time it came out well")
def repeated_until_better(world: World) -> None:
    first = replace(world.step("comparison"), name="first", body=comparison(outcome="INCONCLUSIVE"))
    world.steps.insert(-1, first)


@poison("after the comparison a hold of the same plan failed; the older, better one is offered")
def newer_failure(world: World) -> None:
    body = EXAMPLES[Kind.HOLD].model_copy(update={"hosts": (held(debt=True),)})
    place = {"window": "campaign-1/hold-2", "hold_number": 2}
    world.steps.append(Step("later", Kind.HOLD, body, ("sources",), {"position": place}))


@poison("a receipt builds on one that nobody has")
def missing_parent(world: World) -> None:
    world.step("A1").parents = (*world.step("A1").parents, "nobody")


@poison("a receipt that the arms build on failed")
def failed_ancestor(world: World) -> None:
    world.edit("facts", bodies.HostFactsBody(checks=EXAMPLES[Kind.HOST_FACTS].checks, parity=rows("driver", ok=False)))


@poison("the same host had other GPUs in the second hold")
def swapped_gpus(world: World) -> None:
    for name in ("pair-2", "B2", "A2", "hold-2"):
        world.edit(name, hosts=(gpu_host().model_copy(update={"gpus": gpu_host("other").gpus}),))


@poison("the comparison is older than the policy allows")
def stale(world: World) -> None:
    world.edit("comparison", started_utc="2026-04-01T11:00:00Z", ended_utc="2026-04-01T11:00:05Z")


@poison("the comparison ended after the gate's clock")
def from_the_future(world: World) -> None:
    world.edit("comparison", started_utc="2026-06-01T12:02:00Z", ended_utc="2026-06-01T12:02:05Z")


@poison("the clock was given by hand: such an evaluation may be looked at, and never admits")
def clock_given(world: World) -> None:
    world.facts["is_clock_given"] = True


@poison("no allowed signers were given: integrity only")
def integrity_only(world: World) -> None:
    world.signers = None


@poison("one ancestor carries no signature")
def unsigned_ancestor(world: World) -> None:
    world.step("facts").signer = None


@poison("one arm is signed by a key that nobody allowed")
def unknown_signer(world: World) -> None:
    world.step("B1").signer = "stranger"


@poison("the comparison is signed by an auditor, the policy asks for an operator")
def wrong_role(world: World) -> None:
    world.step("comparison").signer = "auditor"


@poison("a signature does not verify")
def broken_signature(world: World) -> None:
    def damage(document: dict[str, Any]) -> None:
        document["entries"][5]["signatures"][0]["sig"] = base64.b64encode(b"\x01" * 64).decode()

    world.after = damage


@poison("steps and reserve together take longer than the policy allows")
def budget_too_long(world: World) -> None:
    body = bodies.BudgetBody(
        steps=EXAMPLES[Kind.BUDGET].steps, restore_reserve_ns=6000 * 10**9, total_ns=6060 * 10**9,
        limit_ns=7200 * 10**9,
    )  # fmt: skip
    world.edit("budget", body)


@poison("a step's bound is only declared; nobody ever measured it")
def unmeasured_budget(world: World) -> None:
    body = bodies.BudgetBody(
        steps=(bodies.StepBudget(step="stop", bound_ns=60 * 10**9, basis="declared"),),
        restore_reserve_ns=180 * 10**9, total_ns=240 * 10**9, limit_ns=5400 * 10**9,
    )  # fmt: skip
    world.edit("budget", body)


@poison("a figure of an arm is not what its raw file gives")
def forged_figure(world: World) -> None:
    world.edit("B1", arm("sampled-top32-v2", values={"raw.rounds.jsonl.p50": 9}))


@poison("the raw file behind an arm is not there: unknown is not a pass")
def missing_raw_file(world: World) -> None:
    world.after = lambda document: document.update(samples={})


@poison("a failed gate under the word PASS")
def forged_verdict(world: World) -> None:
    world.edit("B1", arm("sampled-top32-v2", gates=rows("failed-rounds", ok=False)), verdict=PASS)


@poison("a gate that was not evaluated under the word PASS")
def skipped_gate(world: World) -> None:
    world.edit("B1", arm("sampled-top32-v2", gates=rows("failed-rounds", ok=None)), verdict=PASS)


@poison("production did not come back after the second hold")
def not_restored(world: World) -> None:
    world.edit("hold-2", EXAMPLES[Kind.HOLD].model_copy(update={"hosts": (held(debt=True),)}))


@poison("the command that measured an arm was killed")
def killed_arm(world: World) -> None:
    world.edit("A2", exit={"kind": "signalled", "signal": 9})


@poison("ON is worse than OFF")
def worse(world: World) -> None:
    world.edit("comparison", comparison(outcome="WORSE"))


@poison("the comparison cannot tell")
def inconclusive(world: World) -> None:
    world.edit("comparison", comparison(outcome="INCONCLUSIVE"))


@poison("the comparison is invalid; no policy can accept that")
def invalid(world: World) -> None:
    world.edit("comparison", comparison(outcome="INVALID"))


@poison("nobody outside the store has kept a head")
def no_witness(world: World) -> None:
    for name in ("hold-1", "hold-2"):
        world.step(name).name = f"plain-{name}"
    comparison_step = world.step("comparison")
    comparison_step.parents = ("A1", "B1", "B2", "A2", "plain-hold-1", "plain-hold-2")


@poison("the log was never compared with what was accepted before")
def no_high_water(world: World) -> None:
    world.high_water = "none"
    world.facts["had_high_water"] = False


@poison("a later state of this log was accepted before")
def rolled_back(world: World) -> None:
    world.high_water = Head(LOG, 40, digest("a later head")).encode().decode()


@poison("an arm was edited after it was written")
def edited_receipt(world: World) -> None:
    def damage(document: dict[str, Any]) -> None:
        entry = document["entries"][6]
        entry["content"] = entry["content"].replace('"rounds":90', '"rounds":99')

    world.after = damage


@poison("a receipt was taken out of the middle")
def removed_receipt(world: World) -> None:
    world.after = lambda document: document["entries"].pop(3)


@poison("the comparison says BETTER, and its own mechanism gate failed: an honest FAIL under an accepted outcome")
def failed_mechanism(world: World) -> None:
    world.edit("comparison", comparison(mechanism=rows("A1.mechanism", ok=False)))


@poison("the comparison says EQUIVALENT and its command did not end well")
def comparison_that_crashed(world: World) -> None:
    world.edit("comparison", comparison(outcome="EQUIVALENT_WITHIN_MARGIN"), exit={"kind": "exited", "code": 30})


@poison("the policy is not, byte for byte, the one that the site pins under this name")
def edited_policy(world: World) -> None:
    world.facts["policy_pins"] = {"live": digest("the reviewed policy")}


# The other gates. Each starts from its own good set below.


def before_opening(world: World) -> World:
    """What there is when a campaign asks to open its first hold: a first hold's budget and fresh facts."""
    _drop(world, *(step.name for step in world.steps[4:]))
    world.stage = "open"
    world.facts |= {"num_witnesses": 1, "plan_sha256": digest("a plan that has not run")}
    return world


def before_first_hold(world: World) -> World:
    """What there is before the very first hold: fresh facts."""
    before_opening(world)
    _drop(world, "first-hold", "budget")
    world.policy = "first-hold"
    return world


def after_first_hold(world: World) -> World:
    """What a first hold leaves."""
    _drop(world, *(step.name for step in world.steps[3:]))
    world.policy = "first-hold"
    return world


def rehearsal(world: World) -> World:
    """The same campaign as a rehearsal leaves it: unsigned, of a weaker class."""
    world.policy, world.signers = "rehearsal", None
    for step in world.steps:
        step.changes["evidence"] = "REHEARSED"
    return world


GOOD: dict[str, tuple[str, Callable[[], World]]] = {
    "good": ("nothing is wrong with it", campaign),
    "good-before-opening": ("nothing is wrong with it", lambda: before_opening(campaign())),
    "good-before-first-hold": ("nothing is wrong with it", lambda: before_first_hold(campaign())),
    "good-first-hold": ("nothing is wrong with it", lambda: after_first_hold(campaign())),
    "good-rehearsal": ("nothing is wrong with it", lambda: rehearsal(campaign())),
}


@poison("the preflight before an opening is not signed")
def unsigned_facts_before_opening(world: World) -> None:
    before_opening(world).step("facts").signer = None


@poison("the preflight before a first hold was rehearsed on other hosts")
def rehearsed_facts_before_first_hold(world: World) -> None:
    before_first_hold(world).edit("facts", evidence="REHEARSED")


@poison("the preflight before a first hold found something that is not right")
def failed_facts_before_first_hold(world: World) -> None:
    body = bodies.HostFactsBody(checks=(bodies.Check(name="disk free", expected="1 GiB", found="0", ok=False),))
    before_first_hold(world).edit("facts", body)


@poison("a first hold that left a host in debt")
def first_hold_in_debt(world: World) -> None:
    body = EXAMPLES[Kind.HOLD].model_copy(update={"hosts": (held(debt=True),)})
    after_first_hold(world).edit("first-hold", body)


@poison("a first hold's budget of which one step was never measured")
def first_hold_unmeasured(world: World) -> None:
    steps = (bodies.StepBudget(step="stop", bound_ns=60 * 10**9, basis="declared"),)
    after_first_hold(world).edit("budget", EXAMPLES[Kind.BUDGET].model_copy(update={"steps": steps}))


@poison("a rehearsal whose comparison is INVALID")
def rehearsal_invalid(world: World) -> None:
    rehearsal(world).edit("comparison", comparison(outcome="INVALID", reasons=("mechanism",)))


@poison("the budget that backs a plan is stale before production is touched")
def stale_budget_before_opening(world: World) -> None:
    before_opening(world).facts.pop("plan_sha256")
    world.edit("budget", started_utc="2026-04-01T11:00:00Z", ended_utc="2026-04-01T11:00:05Z")


# -- reading them back -------------------------------------------------------------------------------------------------


def judge(document: dict[str, Any]) -> tuple[str, list[str]]:
    """Verify and decide: the result, and the rules that did not hold."""
    signers = parse_allowed_signers(document["signers"].encode()) if document["signers"] else None
    log = Log()
    log.samples = {sha256: content.encode() for sha256, content in document["samples"].items()}
    report, verified = log.walk(
        [_entry(entry) for entry in document["entries"]],
        sums=document["sums"],
        head=parse_head(document["head"].encode()),
        high_water=parse_head(document["high_water"].encode()) if document["high_water"] else None,
        signers=signers,
    )
    given = {"num_witnesses": report.num_witnesses, "had_high_water": True} | document["facts"]
    facts = Facts(report=report, records=[record(item) for item in verified], now_utc=NOW, **given)
    policy = parse_policy((POLICIES / f"{document['policy']}.toml").read_bytes())
    decision = decide(policy, document["stage"], facts)
    return decision.result, [row.field for row in decision.rows if row.ok is not True]


def _entry(entry: dict[str, Any]) -> Entry:
    content = entry["content"].encode()
    envelope = {
        "payload": base64.b64encode(content).decode(), "payloadType": PAYLOAD_TYPE, "signatures": entry["signatures"],
    }  # fmt: skip
    envelopes = (json.dumps(envelope).encode(),) if entry["signatures"] else ()
    return Entry(name=entry["name"], content=content, envelopes=envelopes)


def corpus() -> dict[str, str]:
    """File name and content of every set."""
    made = GOOD | POISONS
    files = {}
    for name, (reason, make) in made.items():
        document = {"reason": reason, **build(make())}
        document["rows"] = judge(document)[1]
        files[f"{name}.json"] = json.dumps(document, indent=1, sort_keys=True, ensure_ascii=True) + "\n"
    return files


def main() -> None:
    """Write the corpus beside this script."""
    for name, text in corpus().items():
        (HERE / name).write_text(text, encoding="utf-8")
        document = json.loads(text)
        sys.stdout.write(f"{name:40} {judge(document)[0]:9} {', '.join(document['rows'])}\n")


if __name__ == "__main__":
    main()
