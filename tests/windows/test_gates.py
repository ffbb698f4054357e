"""Every gate passes a healthy arm, fails its poisoned one, and finds UNKNOWN where a reading is missing."""

from __future__ import annotations

from typing import Any

import pytest
from arm_examples import arm, healthy_facts
from windows_examples import SHA

from receipts.fields import Outcome, Row
from remote_dspark.contract import ComputeKind, DraftMode
from windows import gates
from windows.arm import ArmBlock
from windows.verdicts import Finding, verdict


def findings(block: ArmBlock) -> dict[str, Finding]:
    mode = DraftMode.ON if block.arm == "B" else DraftMode.OFF
    return {f.gate: f for f in gates.arm_findings(block, mode=mode, manifest_sha256=SHA, min_rounds=100)}


def between(first: ArmBlock, second: ArmBlock) -> tuple[Finding, ...]:
    return (*gates.identity_findings(first, second), *gates.pair_findings(first, second, max_clock_delta_ppm=10))


@pytest.mark.parametrize("label", ["A1", "B1"])
def test_a_healthy_arm_passes_every_gate(label: str) -> None:
    found = findings(arm(label, 1))
    assert verdict(found.values()) is Outcome.PASS
    assert not gates.failed(found.values())


def test_no_findings_are_unknown() -> None:
    assert verdict([]) is Outcome.UNKNOWN


def test_one_fail_beats_unknown_and_one_unknown_beats_pass() -> None:
    ok, unknown, bad = (Finding("g", "A1", "x", "y", value) for value in (True, None, False))
    assert verdict([ok, unknown]) is Outcome.UNKNOWN
    assert verdict([ok, unknown, bad]) is Outcome.FAIL


def test_findings_are_rows_of_a_receipt() -> None:
    for finding in (
        *findings(arm("A1", 1)).values(),
        *between(arm("A1", 1), arm("B1", 1)),
    ):
        Row.model_validate(finding.to_row())


V = "dspark_{}_total"
POISONED: dict[str, tuple[str, str, dict[str, Any], bool | None]] = {
    "off arm sampled": ("A1", gates.MECHANISM, {"values": {"final.dspark_sampled_rounds_total": 1}}, False),
    "off arm sampled before the baseline": (
        "A1",
        gates.MECHANISM,
        {"values": {f"{p}.dspark_sampled_rounds_total": 1 for p in ("baseline", "headline", "profiled", "final")}},
        False,
    ),
    "off arm did not count": ("A1", gates.MECHANISM, {"values": {"final.dspark_sampled_rounds_total": None}}, None),
    "on arm never sampled": ("B1", gates.MECHANISM, {"values": {"headline.dspark_sampled_rounds_total": 11}}, False),
    "on arm without baseline": (
        "B1",
        gates.MECHANISM,
        {"values": {"baseline.dspark_sampled_rounds_total": None}},
        None,
    ),
    "failed round in the headline": (
        "B1",
        "failed-rounds-headline",
        {"values": {"headline.dspark_failed_rounds_total": 3}},
        False,
    ),
    "failed round while profiled": (
        "B1",
        "failed-rounds-profiled",
        {"values": {"profiled.dspark_failed_rounds_total": 3}},
        False,
    ),
    "failed round at the end": (
        "A1",
        "failed-rounds-final",
        {"values": {"final.dspark_failed_rounds_total": 3}},
        False,
    ),
    "failed rounds fell": ("A1", "failed-rounds-final", {"values": {"final.dspark_failed_rounds_total": 1}}, False),
    "failed rounds not read": (
        "A1",
        "failed-rounds-final",
        {"values": {"final.dspark_failed_rounds_total": None}},
        None,
    ),
    "server restarted": ("A1", gates.MONOTONIC, {"values": {"final.dspark_rounds_total": 1}}, False),
    "wrong mode": ("A1", gates.MODE, {"labels": {"mode": DraftMode.ON.value}}, False),
    "mode not told": ("A1", gates.MODE, {"labels": {"mode": None}}, None),
    "other manifest": ("A1", gates.MANIFEST, {"labels": {"manifest_sha256": "cd" * 32}}, False),
    "manifest not told": ("A1", gates.MANIFEST, {"labels": {"manifest_sha256": None}}, None),
    "no greedy check": ("A1", gates.GREEDY, {"labels": {"greedy_sha256": None}}, None),
    "foreign request": ("A1", gates.FOREIGN_REQUESTS, {"values": {"headline.dspark_requests_total": 26}}, False),
    "requests not counted": ("A1", gates.FOREIGN_REQUESTS, {"values": {"headline.dspark_requests_total": None}}, None),
    "too few rounds": ("A1", gates.MIN_ROUNDS, {"rounds": 96, "accepted": 96}, False),
    "tokens from elsewhere": ("A1", gates.RAW_SAMPLES, {"values": {"headline.dspark_emitted_tokens_total": 5}}, False),
    "lines missing": (
        "A1",
        gates.RAW_SAMPLES,
        {"changes": {"samples": [{"name": "requests.jsonl", "num_samples": 99}]}},
        False,
    ),
    "raw file not declared": ("A1", gates.RAW_SAMPLES, {"changes": {"samples": []}}, None),
    "check failed": ("A1", gates.CHECKS, {"changes": {"checks": [{"name": "g", "ok": False}]}}, False),
    "check skipped": ("A1", gates.CHECKS, {"changes": {"checks": [{"name": "g", "ok": None}]}}, None),
    "no checks": ("A1", gates.CHECKS, {"changes": {"checks": []}}, None),
    "outside a hold": ("A1", gates.IN_HOLD, {"changes": {"hold_id": None}}, None),
    "rebooted": ("A1", gates.BOOT_ID, {"facts": healthy_facts(boot_ids={"h": ("1", "2")})}, False),
    "boot id not read": ("A1", gates.BOOT_ID, {"facts": healthy_facts(boot_ids={})}, None),
    "clock off": ("A1", gates.CLOCK_OFFSET, {"facts": healthy_facts(clock_offset_ns={"h": -(10**9) - 1})}, False),
    "clock not read": ("A1", gates.CLOCK_OFFSET, {"facts": healthy_facts(clock_offset_ns={})}, None),
    "throttled": (
        "A1",
        gates.THROTTLED,
        {"compute": ComputeKind.CUDA, "facts": healthy_facts(throttled={"g0": False, "g1": True})},
        False,
    ),
    "throttle reasons not read": ("A1", gates.THROTTLED, {"compute": ComputeKind.CUDA}, None),
}


@pytest.mark.parametrize("name", POISONED)
def test_a_poisoned_arm_does_not_pass(name: str) -> None:
    label, gate, changes, ok = POISONED[name]
    finding = findings(arm(label, 1, **changes))[gate]
    assert finding.ok is ok
    assert finding.reason.startswith(f"{label}: {gate} {'FAIL' if ok is False else 'UNKNOWN'}: expected ")


def test_every_arm_gate_has_a_poisoned_input() -> None:
    cuda = arm("A1", 1, compute=ComputeKind.CUDA)
    assert set(findings(cuda)) == {gate for _, gate, _, _ in POISONED.values()}


PAIRS: dict[str, tuple[str, dict[str, Any], bool | None]] = {
    "other greedy tokens": ("greedy-equal", {"labels": {"greedy_sha256": "00" * 32}}, False),
    "greedy not told": ("greedy-equal", {"labels": {"greedy_sha256": None}}, None),
    "other manifest": ("manifest-equal", {"labels": {"manifest_sha256": "00" * 32}}, False),
    "other sources": (gates.SAME_SOURCES, {"changes": {"source_sha256": "00" * 32}}, False),
    "other model": (gates.SAME_IDENTITY, {"labels": {"server.target_sha256": "00" * 32}}, False),
    "other device": (gates.SAME_IDENTITY, {"labels": {"server.device": "cuda:1"}}, False),
    "other temperature": (gates.SAME_SETTINGS, {"labels": {"settings.temperature": "0.5"}}, False),
    "other concurrency": (gates.SAME_SETTINGS, {"values": {"settings.concurrency": 5}}, False),
    "settings not told": (gates.SAME_SETTINGS, {"labels": {"settings.temperature": None}}, None),
    "model not told": (gates.SAME_IDENTITY, {"labels": {"server.target_sha256": None}}, None),
    "warmer cache": (gates.PREFIX_HITS, {"values": {"headline.dspark_prefix_cache_hits_total": 18}}, False),
    "cache not read": (gates.PREFIX_HITS, {"values": {"headline.dspark_prefix_cache_hits_total": None}}, None),
    "other boot": ("same-boot", {"facts": healthy_facts(boot_ids={"local": ("2", "2")})}, False),
    "other compute": ("same-compute", {"compute": ComputeKind.INTERPRETED}, False),
}


@pytest.mark.parametrize("name", PAIRS)
def test_arms_that_differ_in_more_than_the_switch_do_not_pass(name: str) -> None:
    gate, changes, ok = PAIRS[name]
    found = {f.gate: f for f in between(arm("A1", 1), arm("B1", 1, **changes))}
    assert found[gate].ok is ok
    assert verdict(found.values()) is not Outcome.PASS


def test_equal_arms_pass() -> None:
    found = between(arm("A1", 1), arm("B1", 1))
    assert verdict(found) is Outcome.PASS


def test_equal_prefix_hits_pass() -> None:
    warm = {"headline.dspark_prefix_cache_hits_total": 21}
    found = between(arm("A1", 1, values=warm), arm("B1", 1, values=warm))
    assert verdict(found) is Outcome.PASS


def test_another_hold_may_have_another_boot() -> None:
    other = arm("B2", 2, facts=healthy_facts(boot_ids={"local": ("2", "2")}))
    assert verdict(between(arm("A1", 1), other)) is Outcome.PASS


@pytest.mark.parametrize(
    ("ours", "theirs", "ok"),
    [
        ((1000, 1000), (1010, 1000), True),
        ((1000, 1000), (1011, 1000), False),
        ((989, 1000), (1000, 1000), False),
        ((0, 1000), (1000, 1000), None),
        (None, (1000, 1000), None),
    ],
)
def test_device_clocks(ours: Any, theirs: Any, ok: bool | None) -> None:
    blocks = [
        arm(label, 1, compute=ComputeKind.CUDA, facts=healthy_facts(sm_clock_mhz={"g0": clocks} if clocks else {}))
        for label, clocks in (("A1", ours), ("B1", theirs))
    ]
    assert gates.device_clocks_gate(*blocks, 10_000).ok is ok
