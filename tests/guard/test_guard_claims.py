"""Claims, epochs and ownership: who may act, and what is never touched.

Red when: any of the four parts of a claim is not compared, the epoch goes back, a foreign process is signalled, or a
broken hold's debt is forgotten.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from windows.guard import devices, files, proc, release, table
from windows.guard.errors import Refusal
from windows.guard.state import State

Json = dict[str, Any]


@pytest.mark.parametrize("part", ["incarnation", "hold_id", "epoch", "token"])
def test_every_part_of_a_claim_is_compared(host: Any, make_service: Callable[..., Json], part: str) -> None:
    host.acquire([make_service(expected="stopped", probe=None)])
    wrong = dict(host.claim, **{part: host.claim[part] + (1 if part == "epoch" else "x")})
    for verb, args in (("confirm", {}), ("heartbeat", {"step_bound_s": None}), ("close", {})):
        error = host.refuse(verb, args, claim=wrong)
        assert error["code"] == "STALE_CLAIM", (verb, error)
        assert host.claim["token"] not in json.dumps(error)
    assert host.ask("close")["outcome"] == "closed-untouched"


def test_the_epoch_only_grows_also_over_break(host: Any, make_service: Callable[..., Json]) -> None:
    service = make_service(expected="stopped", probe=None)
    epochs = []
    for _ in range(2):
        epochs.append(host.acquire([service])["claim"]["epoch"])
        host.ask("close")
    host.acquire([service])
    epochs.append(host.claim["epoch"])
    late = host.claim
    epochs.append(host.ask("break", {"hold_id": late["hold_id"], "reason": "owner left"})["epoch"])
    epochs.append(host.acquire([service])["claim"]["epoch"])
    assert epochs == sorted(set(epochs))
    assert host.refuse("confirm", claim=late)["code"] == "HOLD_ENDED"
    host.ask("close")


def test_break_of_a_stopped_hold_leaves_debt(host: Any, make_service: Callable[..., Json]) -> None:
    service = make_service()
    host.ask("service-start", {"service": service})
    host.to("held", [service])
    broken = host.ask("break", {"hold_id": host.claim["hold_id"], "reason": "owner left"})
    assert (broken["in_debt"], broken["state"]) == (True, "degraded")
    assert host.refuse("run", {})["code"] == "STALE_CLAIM"
    assert host.refuse("acquire", host.acquire_args([service]))["code"] == "DEBT"
    outcome = host.ask("recover", {"hold_id": host.claim["hold_id"], "epoch": host.claim["epoch"]})
    assert outcome["proven"]
    host.acquire([service])
    host.ask("close")


def test_of_many_racing_coordinators_one_wins(host: Any, make_service: Callable[..., Json]) -> None:
    service = make_service(expected="stopped", probe=None)
    asked = [host.acquire_args([service], owner=f"owner-{number}") for number in range(5)]
    with ThreadPoolExecutor(5) as pool:
        replies = list(pool.map(lambda args: host.reply("acquire", args), asked))
    winners = [reply for reply in replies if reply["ok"]]
    losers = [reply["error"] for reply in replies if not reply["ok"]]
    assert len(winners) == 1
    assert {error["code"] for error in losers} == {"HELD"}
    held_by = winners[0]["result"]["claim"]["hold_id"]
    assert all(error["details"]["hold_id"] == held_by and held_by in error["found"] for error in losers)


def test_an_open_record_without_its_holder_is_refused(host: Any, make_service: Callable[..., Json]) -> None:
    service = make_service(expected="stopped", probe=None)
    host.acquire([service])
    (holder,) = host.pids_with(f"{host.state} --internal holder")
    os.kill(holder, signal.SIGKILL)
    host.wait_for(lambda: not host.ask("status", op=None)["hold"]["holder_alive"])
    assert host.refuse("acquire", host.acquire_args([service]))["code"] == "OPEN_RECORD"
    host.ask("recover", {"hold_id": host.claim["hold_id"], "epoch": None})
    host.acquire([service])


def test_a_device_locked_by_someone_refuses(host: Any, make_service: Callable[..., Json]) -> None:
    service = make_service(expected="stopped", probe=None)
    host.ask("hello", op=None)
    lock = files.try_lock(str(host.state / "devices" / "cpu:0.lock"))
    assert lock is not None
    assert host.refuse("acquire", host.acquire_args([service]))["code"] == "DEVICE_BUSY"
    os.close(lock)
    host.acquire([service])


def test_unconfirmed_and_orphaned_leases_end_by_themselves(host: Any, make_service: Callable[..., Json]) -> None:
    service = make_service(expected="stopped", probe=None)
    for changes, outcome in (({"provisional_s": 1}, "expired"), ({"orphan_after_s": 1}, "orphaned")):
        host.acquire([service], **changes)
        # nobody asks: the holder alone ends it
        record = Path(host.state, "record.json")
        host.wait_for(lambda path=record: not path.exists())
        assert host.ask("status", op=None)["last_outcome"]["outcome"] == outcome
        host.wait_for(lambda: not host.pids_with(f"{host.state} --internal"))


def test_a_foreign_process_on_the_port_is_never_touched(host: Any, make_service: Callable[..., Json]) -> None:
    service = make_service()
    foreign = subprocess.Popen([*service["start"]], env={"PATH": os.environ["PATH"]})
    try:
        host.wait_for(lambda: host.ask("service-status", {"service": service}, op=None)["state"] == "foreign")
        assert host.refuse("service-start", {"service": service})["code"] == "NOT_OURS"
        assert host.refuse("acquire", host.acquire_args([service]))["code"] == "UNEXPECTED_STATE"
        host.ask("service-stop", {"service": service})
        assert foreign.poll() is None
    finally:
        foreign.kill()
        foreign.wait()


def test_a_reused_pid_is_not_ours() -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        me = proc.read_process(other.pid)
        assert me is not None
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        ours = {"boot_id": boot, "pid": me.pid, "start_ticks": me.start_ticks, "cookie": "c"}
        earlier = dict(ours, start_ticks=me.start_ticks - 1)
        assert proc.tree_of(earlier) == []
        assert proc.tree_of(dict(ours, boot_id="another")) == []
        assert not proc.send_signal(me._replace(start_ticks=me.start_ticks - 1), signal.SIGKILL)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_production_that_is_not_as_expected_refuses(host: Any, make_service: Callable[..., Json]) -> None:
    service = make_service()
    error = host.refuse("acquire", host.acquire_args([service]))
    assert (error["code"], error["expected"], error["found"]) == ("UNEXPECTED_STATE", "running", "stopped")
    host.ask("service-start", {"service": service})
    changed = dict(service, env={"KIND": "other"})
    assert host.refuse("acquire", host.acquire_args([changed]))["code"] == "UNEXPECTED_STATE"
    gone = dict(service, secret_env={"API_KEY": str(host.folder / "nowhere")})
    error = host.refuse("acquire", host.acquire_args([gone]))
    assert error["code"] in ("UNEXPECTED_STATE", "UNRESTORABLE")
    assert host.ask("status", op=None)["state"] == "free"


def test_prove_only_inside_the_active_hold(host: Any, make_service: Callable[..., Json]) -> None:
    host.to("armed", [make_service(expected="stopped", probe=None)])
    asked = {"hold_id": host.claim["hold_id"], "epoch": host.claim["epoch"]}
    assert host.refuse("prove", asked, op=None)["code"] == "WRONG_STATE"
    host.ask("stop")
    assert host.ask("prove", asked, op=None)["devices"] == ["cpu:0"]
    assert host.refuse("prove", dict(asked, epoch=asked["epoch"] + 1), op=None)["code"] == "OTHER_HOLD"
    (holder,) = host.pids_with(f"{host.state} --internal holder")
    os.kill(holder, signal.SIGKILL)
    host.wait_for(lambda: host.reply("prove", asked, None, None).get("error", {}).get("code") == "HOLDER_DEAD")
    host.ask("restore")
    host.ask("close")
    assert host.refuse("prove", asked, op=None)["code"] == "NO_HOLD"


def test_another_guard_cannot_go_forward(host: Any, make_service: Callable[..., Json]) -> None:
    host.acquire([make_service(expected="stopped", probe=None)])
    record = Path(host.state, "record.json")
    record.write_text(json.dumps(dict(json.loads(record.read_text()), guard_sha256="0" * 64)))
    assert host.refuse("confirm")["code"] == "GUARD_VERSION"
    assert host.ask("close")["outcome"] == "closed-untouched"


def test_file_systems_without_trustworthy_locks() -> None:
    with pytest.raises(Refusal) as refused:
        files.require_local("/proc")
    assert refused.value.code == "BAD_FILESYSTEM"


def test_a_state_folder_open_to_others_is_refused(host: Any) -> None:
    host.state.mkdir(mode=0o755)
    assert host.refuse("status", op=None)["code"] == "STATE_DIR"


def test_what_nvidia_smi_cannot_say_is_null() -> None:
    text = "1234, GPU-a, python, -m x\nNo running processes found\n[N/A], GPU-b, [Not Supported]\n"
    rows = devices.parse_table(text, 3)
    assert rows == [["1234", "GPU-a", "python, -m x"], [None, "GPU-b", None]]


def test_gpu_facts_are_compared_field_by_field() -> None:
    before = dict.fromkeys(devices.COMPARED, "x") | {"uuid": "GPU-a"}
    assert all(row["ok"] for row in devices.compare([before], [dict(before)]))
    changed = devices.compare([before], [dict(before, compute_mode="Prohibited")])
    assert [row["field"] for row in changed if not row["ok"]] == ["GPU-a compute_mode"]
    assert not any(row["ok"] for row in devices.compare([before], []))


def test_witness_never_goes_back(host: Any) -> None:
    assert host.ask("witness", {"log": "l1", "head": None, "sequence": None}, op=None)["head"] is None
    host.ask("witness", {"log": "l1", "head": "aa", "sequence": 3})
    host.ask("witness", {"log": "l1", "head": "aa", "sequence": 3})
    for head, sequence in (("bb", 3), ("aa", 2)):
        assert host.refuse("witness", {"log": "l1", "head": head, "sequence": sequence})["code"] == "WITNESS_CONFLICT"
    host.ask("witness", {"log": "l1", "head": "bb", "sequence": 4})
    assert host.ask("witness", {"log": "l1", "head": None, "sequence": None}, op=None)["sequence"] == 4
    # Another store is another chain: its first head is no way back.
    host.ask("witness", {"log": "l2", "head": "cc", "sequence": 0})
    assert host.ask("witness", {"log": "l1", "head": None, "sequence": None}, op=None)["head"] == "bb"


def test_a_torn_event_costs_only_itself(tmp_path: Path) -> None:
    """Red when the line after one that a full disk tore is lost with it."""
    state = State(str(tmp_path / "state"))
    state.open()
    state.event("acquired", None)
    with Path(state.path("events.jsonl")).open("ab") as log:
        log.write(b'{"event": "restore-be')
    state.event("ended", None)
    assert [event["event"] for event in state.events(0)] == ["acquired", "torn-line", "ended"]


def test_a_dead_man_that_could_not_be_started_is_not_alive(tmp_path: Path) -> None:
    """Red when a missing record of the dead-man reads as "none was armed" although production is down."""
    state = State(str(tmp_path / "state"))
    state.open()
    said = {name: release.dead_man_alive(state, {"hold_id": "h", "state": name}) for name in table.STATES}
    none = {"provisional", "leased", "snapshotted"}
    assert {name for name, alive in said.items() if alive is None} == none
    assert {name for name, alive in said.items() if alive is False} == set(table.STATES) - none
