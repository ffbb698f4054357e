"""The gates of one arm and of a pair of arms: pure functions of what they left behind.

Rules: a gate that lacks a reading finds UNKNOWN, never PASS; a gate says expected and found; speed is not looked at
here. What a finding does to the comparison (excluded block or INVALID) is decided in ``windows.compare`` from the
plan's declared exclusions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Final

from remote_dspark.contract import ComputeKind, DraftMode, Metric
from windows.arm import (
    BASELINE,
    FINAL,
    HEADLINE,
    LABEL_GREEDY,
    LABEL_MANIFEST,
    LABEL_MODE,
    POINTS,
    PROFILED,
    REQUESTS_FILE,
    ArmBlock,
)
from windows.verdicts import Finding

MODE: Final = "mode"
MECHANISM: Final = "mechanism"
FAILED_ROUNDS: Final = "failed-rounds"
MANIFEST: Final = "manifest"
GREEDY: Final = "greedy-check"
PREFIX_HITS: Final = "prefix-hits"
FOREIGN_REQUESTS: Final = "foreign-requests"
MIN_ROUNDS: Final = "min-rounds"
RAW_SAMPLES: Final = "raw-samples"
CHECKS: Final = "checks"
MONOTONIC: Final = "monotonic-counters"
IN_HOLD: Final = "in-hold"
BOOT_ID: Final = "boot-id"
CLOCK_OFFSET: Final = "clock-offset"
DEVICE_CLOCKS: Final = "device-clocks"
THROTTLED: Final = "throttled"
SAME_SOURCES: Final = "same-sources"
SAME_IDENTITY: Final = "same-identity"
SAME_SETTINGS: Final = "same-settings"

IDENTITY_LABELS: Final = (
    "server.target_sha256",
    "server.draft_sha256",
    "server.tokenizer_sha256",
    "server.source_sha256",
    "server.model",
    "server.device",
    "server.dtype",
)
"""What the running server says of itself and must say in every arm: one runtime, one switch. Its configuration file
is not among them, because the switch is in it; `SAME_SETTINGS` covers the load."""

SETTINGS_PREFIX: Final = "settings."


def arm_findings(block: ArmBlock, *, mode: DraftMode, manifest_sha256: str, min_rounds: int) -> tuple[Finding, ...]:
    """All gates of one arm.

    Args:
        block: What the arm left behind.
        mode: What the plan says this arm is.
        manifest_sha256: The plan's load manifest.
        min_rounds: Fewest rounds of the headline.
    """
    return (
        mode_gate(block, mode),
        mechanism_gate(block, mode),
        *(failed_rounds_gate(block, point) for point in (HEADLINE, PROFILED, FINAL)),
        monotonic_gate(block),
        manifest_gate(block, manifest_sha256),
        greedy_gate(block),
        foreign_requests_gate(block),
        min_rounds_gate(block, min_rounds),
        raw_samples_gate(block),
        checks_gate(block),
        in_hold_gate(block),
        boot_id_gate(block),
        clock_offset_gate(block),
        *device_findings(block),
    )


def identity_findings(first: ArmBlock, second: ArmBlock) -> tuple[Finding, ...]:
    """What must be equal between any two arms of a campaign: one runtime, one switch.

    Args:
        first: One arm.
        second: Another arm, of any pair.
    """
    sources = (first.observation.get("source_sha256"), second.observation.get("source_sha256"))
    findings = [
        _same(first, second, "greedy-equal", first.label_text(LABEL_GREEDY), second.label_text(LABEL_GREEDY)),
        _same(first, second, "manifest-equal", first.label_text(LABEL_MANIFEST), second.label_text(LABEL_MANIFEST)),
        _same(first, second, SAME_SOURCES, *sources),
        _same(first, second, "same-compute", first.observation.get("compute"), second.observation.get("compute")),
        _same(first, second, SAME_IDENTITY, _identity(first), _identity(second)),
        _same(first, second, SAME_SETTINGS, _settings(first), _settings(second)),
    ]
    if first.hold == second.hold:
        findings.append(_same(first, second, "same-boot", _boots(first), _boots(second)))
    return tuple(findings)


def pair_findings(first: ArmBlock, second: ArmBlock, *, max_clock_delta_ppm: int) -> tuple[Finding, ...]:
    """What must be equal inside a pair, because its ratio is what the outcome rests on.

    Args:
        first: One arm.
        second: Its partner.
        max_clock_delta_ppm: Largest tolerated difference of device clocks.
    """
    # Zero hits, or the same warm state in both arms: never one arm warmer than the other.
    findings = [_same(first, second, PREFIX_HITS, _prefix_hits(first), _prefix_hits(second))]
    if _is_cuda(first) or _is_cuda(second):
        findings.append(device_clocks_gate(first, second, max_clock_delta_ppm))
    return tuple(findings)


def mode_gate(block: ArmBlock, mode: DraftMode) -> Finding:
    """The arm ran in the mode that the plan gives it, by its own word."""
    found = block.label_text(LABEL_MODE)
    return _finding(block, MODE, mode.value, found, None if found is None else found == mode.value)


def mechanism_gate(block: ArmBlock, mode: DraftMode) -> Finding:
    """ON shows sampled rounds; OFF shows exactly none, since its boot and not only since the baseline."""
    if mode is DraftMode.ON:
        growth = block.growth(HEADLINE, Metric.SAMPLED_ROUNDS)
        return _finding(block, MECHANISM, "sampled rounds > 0", growth, None if growth is None else growth > 0)
    total = block.reading(FINAL, Metric.SAMPLED_ROUNDS)
    return _finding(block, MECHANISM, "exactly 0 sampled rounds", total, None if total is None else total == 0)


def failed_rounds_gate(block: ArmBlock, point: str) -> Finding:
    """Failed rounds do not grow over the immutable baseline (seeds: review corrections)."""
    growth = block.growth(point, Metric.FAILED_ROUNDS)
    # A shrinking counter means that the server was restarted: that is no pass either.
    return _finding(
        block,
        f"{FAILED_ROUNDS}-{point}",
        "growth of 0 over the baseline",
        growth,
        None if growth is None else growth == 0,
    )


def monotonic_gate(block: ArmBlock) -> Finding:
    """No counter ever falls between two points: it would have been another process."""
    fallen = []
    num_read = 0
    counters = tuple(metric.value for metric in Metric)
    for name in {key.split(".", 1)[1] for key in block.observation["values"] if key.startswith(f"{BASELINE}.")}:
        if not name.startswith(counters):
            continue
        readings = [block.observation["values"].get(f"{point}.{name}") for point in POINTS]
        known = [value for value in readings if type(value) is int]
        num_read += len(known) > 1
        if any(later < earlier for earlier, later in itertools.pairwise(known)):
            fallen.append(name)
    found = f"{', '.join(sorted(fallen))} fell" if fallen else f"{num_read} counters, none fell"
    return _finding(block, MONOTONIC, "no counter falls", found, None if not num_read else not fallen)


def manifest_gate(block: ArmBlock, manifest_sha256: str) -> Finding:
    """The load was the plan's."""
    found = block.label_text(LABEL_MANIFEST)
    return _finding(block, MANIFEST, manifest_sha256, found, None if found is None else found == manifest_sha256)


def greedy_gate(block: ArmBlock) -> Finding:
    """The greedy check ran and left a digest; `pair_findings` compares it across arms."""
    found = block.label_text(LABEL_GREEDY)
    return _finding(block, GREEDY, "a digest of the greedy check", found, True if found else None)


def foreign_requests_gate(block: ArmBlock) -> Finding:
    """The server counted exactly the requests that the load sent."""
    counted, sent = block.growth(HEADLINE, Metric.REQUESTS), len(block.headline_requests())
    ok = None if counted is None or not sent else counted == sent
    return _finding(block, FOREIGN_REQUESTS, f"{sent} requests counted by the server", counted, ok)


def min_rounds_gate(block: ArmBlock, min_rounds: int) -> Finding:
    """Enough rounds to say anything."""
    rounds = block.growth(HEADLINE, Metric.ROUNDS)
    return _finding(
        block, MIN_ROUNDS, f">= {min_rounds} rounds", rounds, None if rounds is None else rounds >= min_rounds
    )


def raw_samples_gate(block: ArmBlock) -> Finding:
    """The raw file holds as many requests as the observation says, and their tokens are those the server emitted."""
    declared = next((s["num_samples"] for s in block.observation["samples"] if s["name"] == REQUESTS_FILE), None)
    tokens = sum(request.num_tokens for request in block.headline_requests())
    emitted = block.growth(HEADLINE, Metric.EMITTED_TOKENS)
    known = declared is not None and emitted is not None
    found = f"{len(block.requests)} lines, {tokens} tokens"
    return _finding(
        block,
        RAW_SAMPLES,
        f"{declared} lines, {emitted} tokens",
        found,
        (len(block.requests) == declared and tokens == emitted) if known else None,
    )


def checks_gate(block: ArmBlock) -> Finding:
    """Every check of the program itself ran and held; no check at all is UNKNOWN."""
    checks = block.observation["checks"]
    failed = [check["name"] for check in checks if check["ok"] is False]
    skipped = [check["name"] for check in checks if check["ok"] is None]
    ok = False if failed else None if skipped or not checks else True
    found = f"{len(checks)} checks, failed: {', '.join(failed) or 'none'}, not run: {', '.join(skipped) or 'none'}"
    return _finding(block, CHECKS, "every check ran and held", found, ok)


def in_hold_gate(block: ArmBlock) -> Finding:
    """The program proved the hold it ran in (DECISIONS 13)."""
    hold_id, epoch = block.observation.get("hold_id"), block.observation.get("hold_epoch")
    found = None if hold_id is None or epoch is None else f"{hold_id} epoch {epoch}"
    return _finding(block, IN_HOLD, "a hold and its epoch", found, True if found else None)


def boot_id_gate(block: ArmBlock) -> Finding:
    """No host was booted during the arm."""
    changed = sorted(host for host, (before, after) in block.facts.boot_ids.items() if before != after)
    found = f"changed on {', '.join(changed)}" if changed else f"{len(block.facts.boot_ids)} hosts unchanged"
    return _finding(
        block, BOOT_ID, "the same boot id before and after", found, not changed if block.facts.boot_ids else None
    )


def clock_offset_gate(block: ArmBlock) -> Finding:
    """Every host's clock is near ours, so that times of several hosts can be read together."""
    limit = block.facts.clock_offset_limit_ns
    wrong = {host: offset for host, offset in block.facts.clock_offset_ns.items() if abs(offset) > limit}
    found = _table(wrong) if wrong else f"{len(block.facts.clock_offset_ns)} hosts within it"
    return _finding(
        block, CLOCK_OFFSET, f"within {limit} ns", found, not wrong if block.facts.clock_offset_ns else None
    )


def device_findings(block: ArmBlock) -> tuple[Finding, ...]:
    """Throttling, on CUDA only: a CPU arm is EMULATED, and nothing is claimed about a device."""
    if not _is_cuda(block):
        return ()
    throttled = sorted(device for device, seen in block.facts.throttled.items() if seen)
    found = f"throttled: {', '.join(throttled)}" if throttled else f"{len(block.facts.throttled)} devices, none"
    return (_finding(block, THROTTLED, "no throttle reason", found, not throttled if block.facts.throttled else None),)


def device_clocks_gate(first: ArmBlock, second: ArmBlock, max_delta_ppm: int) -> Finding:
    """SM clocks of both arms differ by no more than the plan allows, at every reading."""
    ours, theirs = first.facts.sm_clock_mhz, second.facts.sm_clock_mhz
    worst = 0
    if not ours or set(ours) != set(theirs):
        return Finding(DEVICE_CLOCKS, _both(first, second), f"<= {max_delta_ppm} ppm apart", "no readings", None)
    for device, readings in ours.items():
        values = (*readings, *theirs[device])
        if min(values) <= 0:
            return Finding(DEVICE_CLOCKS, _both(first, second), "clocks > 0 MHz", f"{device}: {values}", None)
        worst = max(worst, (max(values) - min(values)) * 1_000_000 // min(values))
    return Finding(
        DEVICE_CLOCKS, _both(first, second), f"<= {max_delta_ppm} ppm apart", f"{worst} ppm", worst <= max_delta_ppm
    )


def failed(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Everything that is not a pass."""
    return tuple(finding for finding in findings if finding.ok is not True)


def _finding(block: ArmBlock, gate: str, expected: str, found: object, ok: bool | None) -> Finding:
    """A finding about one arm; a missing reading is named as such."""
    return Finding(gate, block.label, expected, "not recorded" if found is None else str(found), ok)


def _same(first: ArmBlock, second: ArmBlock, gate: str, ours: object, theirs: object) -> Finding:
    """Both arms have it, and it is equal."""
    known = ours is not None and theirs is not None
    found = "equal" if known and ours == theirs else f"{_word(ours)} and {_word(theirs)}"
    return Finding(gate, _both(first, second), "equal in both", found, ours == theirs if known else None)


def _both(first: ArmBlock, second: ArmBlock) -> str:
    return f"{first.label}-{second.label}"


def _word(value: object) -> str:
    text = "not recorded" if value is None else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _identity(block: ArmBlock) -> str | None:
    """Every label that names what ran, as one text; None when one is missing or empty."""
    labels = {name: block.label_text(name) for name in IDENTITY_LABELS}
    return _table(labels) if all(labels.values()) else None


def _settings(block: ArmBlock) -> str | None:
    """Every setting of the load, as one text; None when there is none."""
    recorded = {**block.observation["labels"], **block.observation["values"]}
    settings = {name: value for name, value in recorded.items() if name.startswith(SETTINGS_PREFIX)}
    return _table(settings) if settings else None


def _prefix_hits(block: ArmBlock) -> int | None:
    return block.growth(HEADLINE, Metric.PREFIX_CACHE_HITS)


def _boots(block: ArmBlock) -> str | None:
    """Boot ids after the arm, as one text."""
    return _table({host: after for host, (_, after) in block.facts.boot_ids.items()}) if block.facts.boot_ids else None


def _table(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(values.items()))


def _is_cuda(block: ArmBlock) -> bool:
    return block.observation.get("compute") == ComputeKind.CUDA.value
