"""Random deaths: every call may be killed at any moment, and so may the guard's own programs; production comes back.

A schedule is a seed. Red when: a crash window loses debt, starts a service twice, leaves an operation that can neither
be repeated nor recovered, or ends a hold without a proof. ``DSPARK_CHAOS_SEEDS=first:last`` runs other seeds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from windows.guard import framing

Json = dict[str, Any]

FIRST, LAST = (int(part) for part in os.environ.get("DSPARK_CHAOS_SEEDS", "0:3").split(":"))


def call_with_deaths(host: Any, chance: random.Random, verb: str, args: Json, op: str) -> Json:
    """One operation, killed and repeated with the same id until it answers; at most six deaths."""
    for deaths_left in range(6, -1, -1):
        calling = subprocess.Popen(
            host.argv(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        killer_s = chance.expovariate(1 / 0.15) if deaths_left and chance.random() < 0.6 else 60.0
        assert calling.stdin is not None
        calling.stdin.write(host.request(verb, args, host.claim, op))
        calling.stdin.close()
        calling.stdin = None
        try:
            calling.wait(killer_s)
        except subprocess.TimeoutExpired:
            calling.kill()
        assert calling.stdout is not None
        data = calling.stdout.read()
        calling.stdout.close()
        calling.wait()
        try:
            return framing.parse_reply(data)
        except framing.FrameError:
            continue
    raise AssertionError(f"{verb} never answered")


def kill_something(host: Any, chance: random.Random) -> None:
    """One of the guard's own programs, or none."""
    pids = host.pids_with(f"{host.state} --internal")
    if pids and chance.random() < 0.25:
        os.kill(chance.choice(pids), signal.SIGKILL)


@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_random_deaths(host: Any, make_service: Callable[..., Json], seed: int) -> None:
    chance = random.Random(seed)
    services = [make_service("target", watch_s=0.1), make_service("drafter", watch_s=0.1, stop_order=1)]
    for service in services:
        host.ask("service-start", {"service": service})
    asked = host.acquire_args(services, deadline_s=60)
    reply = call_with_deaths(host, chance, "acquire", asked, f"acquire-{seed}")
    assert reply["ok"], reply
    host.claim = reply["result"]["claim"]
    program = {
        "name": "arm",
        "argv": ["sleep", "600"],
        "env": {},
        "cwd": "/",
        "timeout_s": 20,
        "memory_max_bytes": None,
        "output_dir": str(host.folder / "out"),
        "stdout_cap_bytes": 10,
    }
    steps = [
        ("confirm", {}),
        ("snapshot", {}),
        ("arm", {}),
        ("stop", {}),
        ("run", program),
        ("restore", {}),
        ("close", {}),
    ]
    last = chance.randrange(len(steps) + 1)
    for verb, args in steps[:last]:
        reply = call_with_deaths(host, chance, verb, args, f"{verb}-{seed}")
        kill_something(host, chance)
        if not reply["ok"]:
            # named refusals that deaths of holder or supervisor explain; nothing else may happen
            allowed = ("HOLDER_DEAD", "OP_UNKNOWN_OUTCOME", "START_FAILED", "SELF_TEST")
            assert reply["error"]["code"] in allowed, (verb, json.dumps(reply, indent=1))
            if verb != "run":
                break
    told = {"hold_id": host.claim["hold_id"], "epoch": host.claim["epoch"]}
    outcome = call_with_deaths(host, chance, "recover", told, f"recover-{seed}")
    assert outcome["ok"], json.dumps(outcome, indent=1)
    assert outcome["result"]["proven"], outcome
    check_end(host, services)


def check_end(host: Any, services: list[Json]) -> None:
    status = host.ask("status", op=None)
    assert (status["state"], status["in_debt"]) == ("free", False), status
    for service in services:
        with urllib.request.urlopen(service["probe"]["url"], timeout=5) as answer:
            assert answer.status == 200
        assert len(host.pids_with(" ".join(service["start"][2:]))) == 1
    host.wait_for(lambda: not host.pids_with(f"{host.state} --internal"))
    host.wait_for(lambda: not [pid for pid in host.pids_with("sleep 600") if owned_by(host, pid)])
    host.acquire(services)
    host.ask("close")


def owned_by(host: Any, pid: int) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"DSPARK_HOLD_ID={host.claim['hold_id']}".encode() in environment
