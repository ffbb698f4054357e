"""Documents the tests of this folder start from: one site with two hosts, one campaign with two holds."""

from __future__ import annotations

import copy
from typing import Any

SHA = "ab" * 32
HOST_KEY = {
    "type": "ssh-ed25519",
    "base64": "AAAAC3NzaC1lZDI1NTE5AAAAIIbVq0p7qzTg9zr0ZbRHlHXmS3pCqkLUwtFnpsP0q2Pn",
}


def service(name: str = "target", **changes: Any) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": name,
        "kind": "process",
        "start": ["/usr/bin/python3", "-m", "production"],
        "ports": [8001],
        "probe": {"url": "http://127.0.0.1:8001/health"},
    }
    return {**document, **changes}


def site_document() -> dict[str, Any]:
    return {
        "schema": "coordinator/site/v1",
        "name": "lab",
        "hosts": [
            {
                "name": "spark-a",
                "transport": "ssh",
                "address": "10.0.0.1",
                "user": "ops",
                "host_key": dict(HOST_KEY),
                "identity_file": "/home/ops/.ssh/id",
                "python": "/usr/bin/python3",
                "state_dir": "/var/lib/guard",
                "work_dir": "/srv/work",
                "roles": ["target"],
                "devices": ["GPU-0f1e2d3c-aaaa-bbbb-cccc-000000000001"],
                "services": [service()],
            },
            {
                "name": "local",
                "transport": "local",
                "python": "/usr/bin/python3",
                "state_dir": "/var/lib/guard",
                "work_dir": "/srv/work",
                "roles": ["drafter"],
                "devices": ["cpu0"],
                "services": [service("drafter", ports=[8002], stop_order=1)],
            },
        ],
    }


BOUNDS = {
    "preflight": 60,
    "lease": 20,
    "snapshot": 20,
    "arm-dead-man": 20,
    "stop": 120,
    "pair-qualify": 300,
    "boot": 420,
    "identity": 10,
    "warm-up": 120,
    "greedy-check": 60,
    "baseline": 5,
    "headline": 300,
    "profiled": 60,
    "final": 5,
    "evidence": 60,
    "teardown": 60,
}


def plan_document() -> dict[str, Any]:
    python = ["{python}", "-m"]
    return {
        "schema": "coordinator/plan/v1",
        "name": "tiny",
        "restore_reserve_s": 1200,
        "orphan_after_s": 300,
        "holds": {"1": ["A1", "B1"], "2": ["B2", "A2"]},
        "arms": {
            "A": {"mode": "greedy-v1", "settings": {"tau": "0"}},
            "B": {"mode": "sampled-top32-v2", "settings": {"tau": "0.7"}},
        },
        "services": [
            {"name": "drafter", "role": "drafter", "argv": [*python, "remote_dspark.serve", "--mode", "{mode}"]},
            {
                "name": "target",
                "role": "target",
                "argv": [*python, "remote_dspark.target", "--tau", "{tau}"],
                "boot_order": 1,
            },
        ],
        "pair_qualify": {"role": "drafter", "argv": [*python, "remote_dspark.qualify.pair"], "timeout_s": 300},
        "load": {
            "manifest": "prompts.jsonl",
            "manifest_sha256": SHA,
            "concurrency": 4,
            "requests": 64,
            "warm_up_requests": 8,
            "max_tokens": 128,
            "seeds": [1, 2, 3],
            "program": {
                "role": "target",
                "argv": [*python, "remote_dspark.qualify.arm", "--arm", "{arm}"],
                "timeout_s": 600,
            },
        },
        "comparison": {"margin_ppm": 20_000, "min_rounds": 100},
        "step_bounds_s": dict(BOUNDS),
        "required_evidence": [{"kind": "budget"}, {"kind": "worker-measurement"}],
    }


def first_hold_document() -> dict[str, Any]:
    document = plan_document()
    for name in ("arms", "services", "pair_qualify", "load", "comparison", "required_evidence"):
        del document[name]
    return {**document, "purpose": "first-hold", "holds": {"1": []}}


def changed(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with one value replaced (or removed, with ``...``) at a dotted path."""
    result = copy.deepcopy(document)
    at: Any = result
    *parents, last = [
        int(part) if part.isdigit() and not _is_table_key(path, part) else part for part in path.split(".")
    ]
    for part in parents:
        at = at[part]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return result


def _is_table_key(path: str, part: str) -> bool:
    """Hold numbers are keys of a table, list positions are not."""
    return path.startswith("holds.")
