"""Operation ids: a repeated call is answered, never done twice; an interrupted one is finished or owned up to.

Red when: results are not stored before the reply, a launch is repeated, or a mismatch is not noticed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def program(host: Any, argv: list[str], **changes: Any) -> Json:
    args = {
        "name": "arm",
        "argv": argv,
        "env": {},
        "cwd": "/",
        "timeout_s": 30,
        "memory_max_bytes": None,
        "output_dir": str(host.folder / "out"),
        "stdout_cap_bytes": 100_000,
    }
    return dict(args, **changes)


def forget_result(host: Any, op: str) -> None:
    """As if the guard had died after its intent, before its result."""
    path = host.state / "ops" / f"{op}.json"
    path.write_text(json.dumps(dict(json.loads(path.read_text()), reply=None)))


def test_a_repeated_call_is_replayed(host: Any, make_service: Callable[..., Json]) -> None:
    service = make_service(expected="stopped", probe=None)
    args = host.acquire_args([service])
    first = host.reply("acquire", args, op="a-1")
    again = host.reply("acquire", args, op="a-1")
    assert again == dict(first, replayed=True)
    other = host.reply("acquire", dict(args, owner="someone"), op="a-1")
    assert other["error"]["code"] == "OP_MISMATCH"
    assert host.reply("acquire", args, op="a-2")["error"]["code"] == "HELD"
    # a refusal is an answer too: it stays what it was after the host became free
    host.claim = first["result"]["claim"]
    host.ask("close")
    assert host.reply("acquire", args, op="a-2")["error"]["code"] == "HELD"


def test_an_interrupted_acquire_gives_the_same_claim(host: Any, make_service: Callable[..., Json]) -> None:
    args = host.acquire_args([make_service(expected="stopped", probe=None)])
    first = host.reply("acquire", args, op="a-1")
    forget_result(host, "a-1")
    assert host.reply("acquire", args, op="a-1")["result"]["claim"] == first["result"]["claim"]


def test_concurrent_calls_with_one_id_start_one_program(host: Any, make_service: Callable[..., Json]) -> None:
    host.to("held", [make_service(expected="stopped", probe=None)])
    marker = host.folder / "started"
    args = program(host, ["sh", "-c", f"echo x >> {marker}"])
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda _: host.reply("run", args, host.claim, "r-1"), range(4)))
    assert len({reply["result"]["run"] for reply in replies}) == 1
    host.ask("wait", {"run": replies[0]["result"]["run"], "wait_s": 10}, op=None)
    assert marker.read_text() == "x\n"
    # the caller that died adopts what it left; it does not start it again
    forget_result(host, "r-1")
    assert host.reply("run", args, host.claim, "r-1")["result"] == replies[0]["result"]
    assert marker.read_text() == "x\n"
    # nothing left to adopt: the outcome is unknown, and says so
    forget_result(host, "r-1")
    shutil.rmtree(host.state / "holds" / host.claim["hold_id"] / "runs" / replies[0]["result"]["run"])
    assert host.reply("run", args, host.claim, "r-1")["error"]["code"] == "OP_UNKNOWN_OUTCOME"
    assert marker.read_text() == "x\n"


def test_a_stop_killed_in_the_middle_is_finished_by_its_repetition(
    host: Any, make_service: Callable[..., Json]
) -> None:
    deaf = make_service(mode="deaf", drain_s=2, stop_s=5)
    host.ask("service-start", {"service": deaf})
    host.to("armed", [deaf])
    request = host.request("stop", {}, host.claim, "s-1")
    stopping = subprocess.Popen(host.argv(), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert stopping.stdin is not None
    stopping.stdin.write(request)
    stopping.stdin.close()
    host.wait_for(lambda: host.ask("status", op=None)["state"] == "stopping")
    os.kill(stopping.pid, signal.SIGKILL)
    stopping.wait()
    assert host.ask("status", op=None)["in_debt"]
    done = host.reply("stop", {}, host.claim, "s-1")
    assert done["ok"], done
    assert host.ask("status", op=None)["state"] == "held"
    assert host.ask("restore")["proven"]


def test_service_start_is_not_repeated_blindly(host: Any, make_service: Callable[..., Json]) -> None:
    service = make_service()
    first = host.ask("service-start", {"service": service}, op="s-1")
    forget_result(host, "s-1")
    assert host.ask("service-start", {"service": service}, op="s-1")["pid"] == first["pid"]
    host.ask("service-stop", {"service": service})
    forget_result(host, "s-1")
    assert host.refuse("service-start", {"service": service}, op="s-1")["code"] == "OP_UNKNOWN_OUTCOME"


def test_service_start_takes_only_the_same_program_for_its_own(host: Any, make_service: Callable[..., Json]) -> None:
    """Red when whatever runs under a service's name passes for it: another program, or the rest of a dead one."""
    service = make_service("target", "child")
    first = host.ask("service-start", {"service": service})
    assert host.ask("service-start", {"service": service})["pid"] == first["pid"]
    refused = host.refuse("service-start", {"service": dict(service, env={"KIND": "other"})})
    assert (refused["code"], refused["found"].split(":")[0]) == ("NOT_OURS", f"pid {first['pid']}")
    os.kill(first["pid"], signal.SIGKILL)
    host.wait_for(lambda: host.reply("service-start", {"service": service})["error"]["code"] == "START_FAILED")
    host.ask("service-stop", {"service": service})
    assert host.ask("service-start", {"service": service})["pid"] != first["pid"]


def test_a_restore_ends_what_a_dead_service_left(host: Any, make_service: Callable[..., Json]) -> None:
    """Red when the child of a first process that died at its start keeps the service from ever coming back."""
    service = make_service(start_s=3)
    host.ask("service-start", {"service": service})
    host.to("held", [service])
    program_file = Path(service["start"][2])
    right = program_file.read_text()
    program_file.write_text("import os, time\nif os.fork() == 0:\n    time.sleep(600)\n")
    assert host.ask("restore")["proven"] is False
    assert host.pids_with(str(program_file)), "the child lives"
    program_file.write_text(right)
    assert host.ask("restore")["proven"] is True
    host.ask("close")
