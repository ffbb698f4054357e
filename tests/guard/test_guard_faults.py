"""What operators meet at 3 a.m., on real processes: frozen guards, late dead-men, deaf services, reboots, secrets.

Each test names what must hold: production back as recorded, or degraded and in debt; one restore at a time; nothing
secret written anywhere.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def answers(service: Json) -> bool:
    try:
        with urllib.request.urlopen(service["probe"]["url"], timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def start(host: Any, *services: Json) -> None:
    for service in services:
        host.ask("service-start", {"service": service})


def events(host: Any, name: str) -> list[Json]:
    return [event for event in host.ask("events", {"since": 0}, op=None)["records"] if event["event"] == name]


def test_a_planted_secret_is_written_nowhere(host: Any, make_service: Callable[..., Json]) -> None:
    secret = "s3cr3t-0123456789-planted"
    vault = host.folder.parent / f"{host.folder.name}-vault"
    vault.mkdir()
    (vault / "key").write_text(secret + "\n")
    service = make_service(secret_env={"API_KEY": str(vault / "key")}, start_s=2)
    service["probe"]["expect_contains"] = "secret-ok"
    replies = [host.reply("service-start", {"service": service})]
    args = host.acquire_args([service])
    replies.append(host.reply("acquire", args))
    host.claim = replies[-1]["result"]["claim"]
    for verb in ("confirm", "snapshot", "arm", "stop"):
        replies.append(host.reply(verb, {}, host.claim))
    for pid in host.pids_with(f"{host.state} --internal"):
        assert secret.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    # a secret that cannot be read degrades, and says which file, not what was in it
    (vault / "key").rename(vault / "away")
    replies.append(host.reply("restore", {}, host.claim))
    assert replies[-1]["result"]["proven"] is False
    (vault / "away").rename(vault / "key")
    replies.append(host.reply("restore", {}, host.claim))
    assert replies[-1]["result"]["proven"] is True
    replies += [host.reply("status", {}, None, None), host.reply("events", {"since": 0}, None, None)]
    assert secret not in json.dumps(replies)
    written = host.files()
    assert len(written) > 20
    for path in written:
        assert secret.encode() not in path.read_bytes(), path
    for pid in host.pids_with(service["start"][2]):
        assert secret.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    host.ask("close")


def test_dead_man_and_close_at_the_same_moment(host: Any, make_service: Callable[..., Json]) -> None:
    service = make_service()
    start(host, service)
    host.to("held", [service], deadline_s=15, restore_reserve_s=1)
    fires = host.ask("status", op=None)["hold"]["fires_in_s"]
    time.sleep(max(0.0, fires - 0.2))
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(host.reply, "restore", {}, host.claim) for _ in range(2)]
        asked.append(pool.submit(host.reply, "recover", {"hold_id": host.claim["hold_id"], "epoch": None}))
        replies = [call.result() for call in asked]
    host.wait_for(lambda: host.ask("status", op=None)["state"] in ("free", "restored"))
    assert len(events(host, "restore-begins")) == 1
    for reply in replies:
        assert reply["ok"] or reply["error"]["code"] in ("HOLD_ENDED", "STALE_CLAIM"), reply
    assert answers(service)
    assert len(host.pids_with(" ".join(service["start"][2:]))) == 1


def test_two_restores_at_once_are_one(host: Any, make_service: Callable[..., Json]) -> None:
    service = make_service()
    start(host, service)
    host.to("held", [service])
    with ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(lambda _: host.reply("restore", {}, host.claim), range(3)))
    assert len(events(host, "restore-begins")) == 1
    assert all(reply["result"]["proven"] for reply in replies)
    assert host.ask("restore")["proven"]
    assert len(events(host, "restore-begins")) == 1
    host.ask("close")


def test_a_frozen_stop_does_not_keep_the_dead_man_out(host: Any, make_service: Callable[..., Json]) -> None:
    deaf, other = make_service("target", mode="deaf", drain_s=30, stop_s=40), make_service("drafter", stop_order=-1)
    start(host, deaf, other)
    host.to("armed", [deaf, other], deadline_s=10, restore_reserve_s=1)
    stopping = subprocess.Popen(host.argv(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert stopping.stdin is not None
    stopping.stdin.write(host.request("stop", {}, host.claim))
    stopping.stdin.close()
    host.wait_for(lambda: not answers(other))
    os.kill(stopping.pid, signal.SIGSTOP)
    outcome = host.wait_for(lambda: host.ask("status", op=None)["last_outcome"], 30)
    assert (outcome["outcome"], outcome["proven"]) == ("restored-by-dead-man", True)
    assert answers(deaf)
    assert answers(other)
    assert stopping.wait() == -signal.SIGKILL
    assert stopping.stdout is not None
    stopping.stdout.close()


def test_a_service_that_ignores_term_and_escapes_its_session(host: Any, make_service: Callable[..., Json]) -> None:
    services = [make_service("target", mode="deaf", drain_s=0.5, stop_s=5), make_service("drafter", mode="child")]
    start(host, *services)
    assert host.pids_with(f"time.sleep(600) {services[1]['start'][2]}")
    host.acquire(services)
    for verb in ("confirm", "snapshot", "arm"):
        host.ask(verb)
    result = host.ask("stop")
    assert all(row["ok"] for row in result["rows"])
    assert result["service_ns"] <= result["elapsed_ns"]
    for service in services:
        assert not host.pids_with(" ".join(service["start"][2:]))
    assert not host.pids_with(f"time.sleep(600) {services[1]['start'][2]}")
    assert host.ask("restore")["proven"]


def test_a_ghost_restart_is_seen(host: Any, make_service: Callable[..., Json]) -> None:
    service = make_service(watch_s=4)
    start(host, service)
    host.to("armed", [service])
    healer = subprocess.Popen(
        ["sh", "-c", f"while kill -0 $0 2>/dev/null; do sleep 0.1; done; exec {' '.join(service['start'])}",
         str(host.ask("service-status", {"service": service}, op=None)["pid"])]
    )  # fmt: skip
    try:
        error = host.refuse("stop")
        assert error["code"] == "STOP_UNPROVEN"
        assert any(row["field"] == "ghost restart" and not row["ok"] for row in error["details"]["rows"])
        assert host.ask("status", op=None)["in_debt"]
    finally:
        healer.kill()
        healer.wait()
    assert host.ask("restore")["proven"]


def test_after_a_reboot_the_hold_is_void(host: Any, make_service: Callable[..., Json]) -> None:
    service = make_service()
    start(host, service)
    host.to("held", [service])
    for pid in host.pids_with(f"{host.state} --internal"):
        os.kill(pid, signal.SIGKILL)
    # another boot id in the records is what a reboot leaves behind
    for path in (host.state / "record.json", Path(f"{host.state}.debt", "debt.json")):
        path.write_text(json.dumps(dict(json.loads(path.read_text()), boot_id="an-earlier-boot")))
    assert host.ask("status", op=None)["state"] == "void"
    assert host.refuse("run", {})["code"] == "VOID"
    assert host.refuse("acquire", host.acquire_args([service]))["code"] == "DEBT"
    done = subprocess.run(host.argv("--internal", "boot", host.claim["hold_id"]), check=False)
    assert done.returncode == 0
    outcome = host.ask("status", op=None)["last_outcome"]
    assert (outcome["outcome"], outcome["proven"]) == ("restored-by-boot", True)
    assert answers(service)
    assert host.refuse("heartbeat", {"step_bound_s": None})["code"] == "HOLD_ENDED"


def test_degraded_is_sticky_until_cleared_with_a_reason(host: Any, make_service: Callable[..., Json]) -> None:
    told = host.folder / "told"
    service = make_service(start_s=1)
    start(host, service)
    host.to("held", [service], notify=["sh", "-c", f"cat >> {told}"])
    Path(service["start"][2]).rename(host.folder / "away.py")
    assert host.ask("restore")["proven"] is False
    assert '"event": "degraded"' in told.read_text()
    restore_text = (host.state / "RESTORE.txt").read_text()
    assert "restore-now" in restore_text
    assert service["log"] in restore_text
    hold_id = host.claim["hold_id"]
    assert host.refuse("clear", {"hold_id": hold_id, "reason": " "})["code"] == "BAD_REQUEST"
    assert host.refuse("clear", {"hold_id": "other", "reason": "x"})["code"] == "OTHER_HOLD"
    assert host.refuse("recover", {"hold_id": hold_id, "epoch": None})["code"] == "DEGRADED"
    by_hand = subprocess.run(host.argv("restore-now"), capture_output=True, text=True, check=False)
    assert by_hand.returncode == 50
    outcome = host.ask("clear", {"hold_id": hold_id, "reason": "rebuilt by hand"})
    assert (outcome["outcome"], outcome["proven"], outcome["reason"]) == ("cleared", False, "rebuilt by hand")
    assert host.ask("status", op=None)["state"] == "free"


def test_the_fallback_commands_of_restore_txt_start_production(host: Any, make_service: Callable[..., Json]) -> None:
    service = make_service(env={"KIND": "a 'quoted' $value"})
    start(host, service)
    host.to("held", [service])
    lines = [line for line in (host.state / "RESTORE.txt").read_text().splitlines() if line.startswith("( cd ")]
    subprocess.run(["sh", "-c", "\n".join(lines)], check=True)
    host.wait_for(lambda: answers(service))
    with urllib.request.urlopen(service["probe"]["url"], timeout=2) as answer:
        assert b"a 'quoted' $value" in answer.read()
    # production started by hand is not the guard's: it says so and leaves it alone
    assert host.ask("restore")["proven"] is False
    for pid in host.pids_with(" ".join(service["start"][2:])):
        os.kill(pid, signal.SIGKILL)
    assert host.ask("restore")["proven"]


def test_restore_now_by_a_person(host: Any, make_service: Callable[..., Json]) -> None:
    service = make_service()
    start(host, service)
    host.to("held", [service])
    done = subprocess.run(host.argv("restore-now"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "proven: true" in done.stdout
    assert answers(service)
    again = subprocess.run(host.argv("restore-now"), capture_output=True, text=True, check=False)
    assert "nothing to restore" in again.stdout


def test_holder_and_dead_man_cost_nearly_nothing(host: Any, make_service: Callable[..., Json]) -> None:
    host.to("held", [make_service(expected="stopped", probe=None)])
    pids = host.pids_with(f"{host.state} --internal")
    assert len(pids) == 2

    def used_ns() -> int:
        return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids)

    before = used_ns()
    time.sleep(3.0)
    assert (used_ns() - before) / 3e9 < 2 * 0.002


def test_service_restored_as_stopped_stays_stopped(host: Any, make_service: Callable[..., Json]) -> None:
    services = [make_service("target"), make_service("spare", expected="stopped")]
    start(host, services[0])
    host.to("restored", services)
    assert answers(services[0])
    assert not answers(services[1])


def test_uninstall_leaves_nothing_running(host: Any, make_service: Callable[..., Json]) -> None:
    host.acquire([make_service(expected="stopped", probe=None)])
    assert host.refuse("uninstall")["code"] == "WRONG_STATE"
    host.ask("close")
    host.ask("uninstall")
    left = [path for path in host.state.rglob("*") if path.is_file()]
    assert all(
        path.parent.name == "ops" or path.name in ("host.lock",) or path.name.startswith("code-") for path in left
    )
    assert not host.pids_with(f"{host.state} --internal")
