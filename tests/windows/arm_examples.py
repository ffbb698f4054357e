"""Builds arms as the program on a host leaves them: an observation document and raw files."""

from __future__ import annotations

import json
from typing import Any

from windows_examples import SHA

from remote_dspark.contract import (
    Check,
    ComputeKind,
    DraftMode,
    Metric,
    Observation,
    ObservationKind,
    SampleFile,
)
from windows.arm import ArmBlock, ArmFacts
from windows.gates import IDENTITY_LABELS

NUM_REQUESTS = 8
PHASES = ("warmup", "greedy", "headline", "profiled")
DEPTH = 3


def raw_requests(tokens: int, elapsed_ns: int, rounds: int) -> list[dict[str, Any]]:
    """Requests one after the other, and one warm-up request before them that must not count."""
    warm_up = {
        "phase": 0,
        "index": 0,
        "start_ns": 0,
        "first_token_ns": 5,
        "end_ns": 10**9,
        "num_tokens": 9999,
        "num_rounds": 99,
    }
    rows = [warm_up]
    each = elapsed_ns // NUM_REQUESTS
    for index in range(NUM_REQUESTS):
        start = 2 * 10**9 + index * each
        rows.append(
            {
                "phase": 2,
                "index": index,
                "start_ns": start,
                "first_token_ns": start + 1000 + index,
                "end_ns": start + each,
                "num_tokens": tokens // NUM_REQUESTS,
                "num_rounds": rounds // NUM_REQUESTS,
            }
        )
    return rows


def counters(*, is_on: bool, rounds: int, accepted: int, tokens: int) -> dict[str, int]:
    """Readings at the four points; the baseline is not zero, because warm-up came before."""
    values: dict[str, int] = {}
    growth = {
        Metric.ROUNDS: rounds,
        Metric.SAMPLED_ROUNDS: rounds if is_on else 0,
        Metric.GREEDY_ROUNDS: 0 if is_on else rounds,
        Metric.FAILED_ROUNDS: 0,
        Metric.ACCEPTED_TOKENS: accepted,
        Metric.EMITTED_TOKENS: tokens,
        Metric.REQUESTS: NUM_REQUESTS,
        Metric.PREFIX_CACHE_HITS: 0,
    }
    start = {Metric.SAMPLED_ROUNDS: 11 if is_on else 0, Metric.FAILED_ROUNDS: 2}
    for metric, grown in growth.items():
        base = start.get(metric, 17)
        for point, share in (("baseline", 0), ("headline", grown), ("profiled", grown), ("final", grown)):
            values[f"{point}.{metric.value}"] = base + share
    reached = rounds
    for position in range(DEPTH):
        kept = reached * 3 // 4
        for metric, count in ((Metric.PROPOSED_AT_POSITION, reached), (Metric.ACCEPTED_AT_POSITION, kept)):
            values[f"baseline.{metric.value}.{position}"] = 5
            values[f"headline.{metric.value}.{position}"] = 5 + count
        reached = kept
    return values


def arm(
    label: str,
    hold: int,
    *,
    tokens: int = 4000,
    elapsed_ns: int = 10**10,
    rounds: int = 1000,
    accepted: int = 3000,
    values: dict[str, int | None] | None = None,
    labels: dict[str, str | None] | None = None,
    changes: dict[str, Any] | None = None,
    facts: ArmFacts | None = None,
    mode: DraftMode | None = None,
    compute: ComputeKind = ComputeKind.CPU,
    receipt: str | None = None,
) -> ArmBlock:
    """One healthy arm with some readings changed; None removes one."""
    mode = mode or (DraftMode.ON if label.startswith("B") else DraftMode.OFF)
    rows = raw_requests(tokens, elapsed_ns, rounds)
    requests = "".join(json.dumps(row) + "\n" for row in rows).encode()
    inter_token = b"".join(b"%d\n" % (1000 + k) for k in range(100))
    document = Observation(
        kind=ObservationKind.ARM,
        program="remote_dspark.qualify.arm",
        argv=("python", "-m", "remote_dspark.qualify.arm"),
        source_sha256=SHA,
        compute=compute,
        device={},
        started_utc="2026-01-02T03:04:05Z",
        elapsed_ns=elapsed_ns,
        hold_id="tiny-1-0123456789ab",
        hold_epoch=7,
        checks=(Check("greedy", "equal", "equal", True),),
        values=_without(counters(is_on=mode is DraftMode.ON, rounds=rounds, accepted=accepted, tokens=tokens), values),
        labels=_without(
            {
                "mode": mode.value,
                "manifest_sha256": SHA,
                "greedy_sha256": "ef" * 32,
                **{name: f"{name} of both arms" for name in IDENTITY_LABELS},
                **{f"requests.phase.{n}": name for n, name in enumerate(PHASES)},
                "settings.temperature": "1",
            },
            labels,
        ),
        samples=(
            SampleFile("requests.jsonl", "mixed", SHA, len(rows), len(requests)),
            SampleFile("inter_token.jsonl", "ns", SHA, 100, len(inter_token)),
        ),
    ).to_document()
    return ArmBlock.from_files(
        label,
        hold,
        {**document, **(changes or {})},
        {"requests.jsonl": requests, "inter_token.jsonl": inter_token},
        facts or healthy_facts(),
        receipt or f"{ord(label[0]):02x}{int(label[1:]):02x}" + "0" * 60,
    )


def healthy_facts(**changes: Any) -> ArmFacts:
    fields: dict[str, Any] = {
        "boot_ids": {"local": ("boot-1", "boot-1")},
        "clock_offset_ns": {"local": 1000},
        "clock_offset_limit_ns": 10**9,
    }
    return ArmFacts(**{**fields, **changes})


def _without(base: dict[str, Any], changes: dict[str, Any] | None) -> dict[str, Any]:
    merged = {**base, **(changes or {})}
    return {name: value for name, value in merged.items() if value is not None}
