"""The whole life of a hold on this machine, with real services; and what happens when everybody else dies."""

from __future__ import annotations

import os
import shutil
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def answers(service: Json) -> bool:
    try:
        with urllib.request.urlopen(service["probe"]["url"], timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def start_all(host: Any, services: list[Json]) -> None:
    for service in services:
        result = host.ask("service-start", {"service": service})
        assert result["state"] == "running"
        assert all(answer["ok"] for answer in result["probes"])


def program(code: str) -> Json:
    return {
        "name": "arm",
        "argv": ["python3", "-c", code],
        "env": {},
        "cwd": "/",
        "timeout_s": 30,
        "memory_max_bytes": None,
        "output_dir": "",
        "stdout_cap_bytes": 100_000,
    }


def test_from_acquire_to_close(host_any: Any, make_service: Callable[..., Json]) -> None:
    host, services = host_any, [make_service("target", stop_order=1), make_service("drafter", stop_order=2)]
    start_all(host, services)
    host.acquire(services)
    for verb in ("confirm", "snapshot", "arm", "stop"):
        host.ask(verb)
    assert not any(answers(service) for service in services)
    assert host.ask("status", op=None)["stopped"] == ["target", "drafter"]
    args = dict(program("import os; print(os.environ['DSPARK_HOLD_ID'])"), output_dir=str(host.folder / "out"))
    run = host.ask("run", args)["run"]
    done = host.ask("wait", {"run": run, "wait_s": 20}, op=None)
    assert (done["state"], done["code"], done["stdout_tail"].strip()) == ("exited", 0, host.claim["hold_id"])
    restored = host.ask("restore")
    assert restored["proven"]
    assert all(row["ok"] for row in restored["rows"])
    assert len(restored["probes"]) == 2
    assert all(answers(service) for service in services)
    assert host.ask("close")["outcome"] == "closed"
    status = host.ask("status", op=None)
    assert (status["state"], status["debt"]) == ("free", None)
    assert status["last_outcome"]["proven"]


def test_dead_man_restores_when_everything_else_is_killed(host: Any, make_service: Callable[..., Json]) -> None:
    service = make_service()
    start_all(host, [service])
    host.to("held", [service], deadline_s=15, restore_reserve_s=3)
    args = dict(program("import time; time.sleep(60)"), output_dir=str(host.folder / "out"), timeout_s=2)
    host.ask("run", args)
    for role in ("holder", "run"):
        for pid in host.pids_with(f"{host.state} --internal {role}"):
            os.kill(pid, signal.SIGKILL)
    host.wait_for(lambda: answers(service), 40)
    outcome = host.wait_for(lambda: host.ask("status", op=None)["last_outcome"], 10)
    assert (outcome["outcome"], outcome["proven"], outcome["by"]) == ("restored-by-dead-man", True, "dead-man")
    assert host.refuse("restore")["code"] == "HOLD_ENDED"
    recovered = host.ask("recover", {"hold_id": host.claim["hold_id"], "epoch": host.claim["epoch"]})
    assert recovered["outcome"] == "restored-by-dead-man"
    assert host.ask("close")["already"] is True


def test_a_dead_man_that_is_killed_is_started_again(host: Any, make_service: Callable[..., Json]) -> None:
    """Red when production stays down because the dead-man died before its coordinator did."""
    service = make_service()
    start_all(host, [service])
    host.to("held", [service], deadline_s=300, restore_reserve_s=10, orphan_after_s=30)
    beat = {"step_bound_s": None}
    assert host.ask("heartbeat", beat)["dead_man_alive"] is True
    for _ in range(2):
        (pid,) = host.pids_with(f"{host.state} --internal deadman")
        os.kill(pid, signal.SIGKILL)
        host.wait_for(lambda old=pid: set(host.pids_with(f"{host.state} --internal deadman")) - {old}, 20)
        assert host.ask("heartbeat", beat)["dead_man_alive"] is True
        assert len(host.pids_with(f"{host.state} --internal deadman")) == 1
    events = host.ask("events", {"since": 0}, op=None)["records"]
    assert sum(event["event"] == "dead-man-started-again" for event in events) == 2
    host.wait_for(lambda: answers(service), 60)
    host.wait_for(lambda: host.ask("status", op=None)["state"] == "free", 10)


def test_dead_man_restores_an_orphaned_hold_early(host: Any, make_service: Callable[..., Json]) -> None:
    service = make_service()
    start_all(host, [service])
    host.to("held", [service], deadline_s=300, restore_reserve_s=10, orphan_after_s=10)
    host.wait_for(lambda: answers(service), 30)


def test_removed_state_folder_restores_at_once(host: Any, make_service: Callable[..., Json]) -> None:
    service = make_service()
    start_all(host, [service])
    host.to("held", [service])
    shutil.rmtree(host.state)
    host.wait_for(lambda: answers(service), 15)
    host.wait_for(lambda: not Path(f"{host.state}.debt", "debt.json").exists(), 5)


def test_restore_from_another_shell_changes_nothing(
    host: Any, make_service: Callable[..., Json], monkeypatch: Any
) -> None:
    service = make_service()
    start_all(host, [service])

    def environment() -> dict[str, str]:
        pid = host.ask("service-status", {"service": service}, op=None)["pid"]
        pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")[:-1]
        return {key: value for key, _, value in (pair.partition("=") for pair in pairs) if key != "DSPARK_OWNER"}

    before = environment()
    host.to("held", [service])
    monkeypatch.setenv("PATH", os.environ["PATH"] + ":/another/shell")
    monkeypatch.setenv("LANG", "tlh")
    assert host.ask("restore")["proven"]
    assert environment() == before


def test_recover_without_the_claim(host: Any, make_service: Callable[..., Json]) -> None:
    service = make_service()
    start_all(host, [service])
    host.to("held", [service])
    hold_id, epoch = host.claim["hold_id"], host.claim["epoch"]
    assert host.refuse("recover", {"hold_id": "other", "epoch": None})["code"] == "OTHER_HOLD"
    assert host.refuse("recover", {"hold_id": hold_id, "epoch": epoch + 1})["code"] == "OTHER_HOLD"
    assert host.ask("recover", {"hold_id": hold_id, "epoch": epoch})["outcome"] == "recovered"
    assert answers(service)
    assert host.refuse("heartbeat", {"step_bound_s": None})["code"] == "HOLD_ENDED"


def test_debt_after_failed_restore(host: Any, make_service: Callable[..., Json]) -> None:
    service = make_service(start_s=3)
    start_all(host, [service])
    host.to("held", [service])
    program_file = Path(service["start"][2])
    program_file.rename(f"{program_file}.away")
    assert host.ask("restore")["proven"] is False
    assert host.ask("status", op=None)["state"] == "degraded"
    assert host.refuse("close")["code"] == "NOT_RESTORED"
    assert host.refuse("acquire", host.acquire_args([service]))["code"] == "DEBT"
    Path(f"{program_file}.away").rename(program_file)
    hold_id = host.claim["hold_id"]
    assert host.ask("abort", {"hold_id": hold_id, "reason": "fixed"})["proven"] is True
    assert answers(service)
