"""The main job as a newcomer runs it, and what happens when somebody gets in its way."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from coordinator.config import read_site
from coordinator.store import Store
from receipts.reader import read_receipt
from tests.services.conftest import Rehearsals, wait_until

pytestmark = pytest.mark.services

ARM_RUNNING = '"event":"arm-started"'


def kinds(store: Path) -> list[str]:
    return [read_receipt(entry.content).predicate.kind for entry in Store(store).entries()]


def of_kind(store: Path) -> dict[str, list[Any]]:
    """Bodies by kind, in order."""
    found: dict[str, list[Any]] = {}
    for entry in Store(store).entries():
        predicate = read_receipt(entry.content).predicate
        found.setdefault(predicate.kind, []).append(predicate.body)
    return found


def production_answers(rehearsals: Rehearsals) -> bool:
    """A real completion through the restored production."""
    site, _ = read_site(rehearsals.latest / "site.toml")
    probe = next(service.probe for service in site.hosts[0].services if service.name == "target")
    assert probe is not None
    request = urllib.request.Request(
        probe.url, data=probe.body.encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return "choices" in reply.read().decode()
    except OSError:
        return False


def test_the_whole_job_ends_with_receipts_that_verify(rehearsals: Rehearsals) -> None:
    """Red when a stage leaves no receipt, the chain breaks, the live policy admits emulated evidence, or a closed pipe
    (stderr is read for one line only, as by ``| head -1``) changes anything.
    """
    process = rehearsals.start()
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stderr.readline()
    process.stderr.close()
    out = process.stdout.read()
    assert process.wait(560) == 0, out
    store = rehearsals.latest / "receipts"
    bodies = of_kind(store)
    found = kinds(store)
    assert [body.final_state for body in bodies["hold"]] == ["CLOSED"] * 3
    (comparison,) = bodies["comparison"]
    assert comparison.outcome != "INVALID", comparison.reasons
    for kind, count in {"source-identity": 1, "budget": 2, "hold": 3, "pair-qualification": 2, "arm": 4}.items():
        assert found.count(kind) >= count, found
    results = {admission.policy: admission.result for admission in bodies["admission"]}
    assert results == {"rehearsal": "ADMITTED", "live": "DENIED"}
    assert rehearsals.command("receipts", "verify", str(store)).returncode == 0
    damaged = sorted((store / "receipts").glob("*-arm-*.json"))[0]
    damaged.chmod(0o644)
    damaged.write_bytes(damaged.read_bytes().replace(b'"arm":"A1"', b'"arm":"B1"', 1))
    assert rehearsals.command("receipts", "verify", str(store)).returncode == 60


def test_production_comes_back_when_the_coordinator_is_killed(rehearsals: Rehearsals) -> None:
    """Red when the restore depends on the coordinator, or recover closes another hold than that one."""
    process = rehearsals.start()
    wait_until("an arm runs", lambda: ARM_RUNNING in rehearsals.journal_text() or process.poll() is not None, 240)
    assert process.poll() is None, process.communicate()[1]
    held = rehearsals.status()["hold"]
    process.kill()
    process.wait(10)
    wait_until("the host restores by itself", lambda: not rehearsals.status()["in_debt"], 180)
    assert production_answers(rehearsals)
    store = rehearsals.latest / "receipts"
    site = str(rehearsals.latest / "site.toml")
    recovered = rehearsals.command("hold", "recover", "--site", site, "--store", str(store), "--json")
    assert recovered.returncode == 0, recovered.stderr
    document = json.loads(recovered.stdout)
    assert document["hold_id"] == held["hold_id"]
    outcome = document["hosts"]["here"]
    assert outcome["outcome"] == "restored-by-dead-man"
    assert outcome["epoch"] == held["epoch"]
    assert outcome["proven"] is True
    assert kinds(store)[-1] == "recovery"
    assert rehearsals.command("receipts", "verify", str(store)).returncode == 0


def test_a_second_rehearsal_names_the_holder_and_ctrl_c_restores(rehearsals: Rehearsals) -> None:
    """Red when two rehearsals share a machine, or an interrupt skips the restore or its exit code."""
    process = rehearsals.start()
    wait_until("an arm runs", lambda: ARM_RUNNING in rehearsals.journal_text() or process.poll() is not None, 240)
    second = rehearsals.start()
    _, second_err = second.communicate(timeout=60)
    assert second.returncode == 11
    assert str(process.pid) in second_err
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=180)
    assert process.returncode == 130, err
    store = sorted(rehearsals.root.glob("run/run-*/receipts"))[0]
    last = [read_receipt(entry.content) for entry in Store(store).entries()][-1]
    assert last.predicate.kind == "hold"
    assert last.predicate.body.final_state == "CLOSED"
    assert not last.predicate.body.hosts[0].debt
    assert rehearsals.status()["state"] == "free"


def test_a_wrong_site_names_field_value_and_expectation(tmp_path: Path, rehearsals: Rehearsals) -> None:
    site = tmp_path / "site.toml"
    site.write_text('schema = "coordinator/site/v1"\nname = "x"\n[[hosts]]\nname = "a"\ntransport = "carrier-pigeon"\n')
    done = subprocess.run(
        [*rehearsals.command("--version").args[:3], "plan", "--site", str(site), "--plan", str(site)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    for part in ("hosts[0].transport", "carrier-pigeon", "'local' or 'ssh'"):
        assert part in done.stderr
