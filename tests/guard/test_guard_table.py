"""The product of states and verbs: the table is total, and the running guard refuses exactly what the table refuses.

Red when: a verb loses its row, a refused verb changes the record, or a state grants more than the table says.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from windows.guard import __main__ as program
from windows.guard import clock, framing, table
from windows.guard.state import State, effective_state, fires_at_ns, run_deadline_ns

Json = dict[str, Any]

ARGS: dict[str, Json] = {
    "events": {"since": 0},
    "wait": {"run": "x-1", "wait_s": 0},
    "prove": {"hold_id": "h", "epoch": 1},
    "heartbeat": {"step_bound_s": None},
    "witness": {"log": "aa", "head": None, "sequence": None},
    "end-run": {"run": "x-1"},
    "recover": {"hold_id": "other", "epoch": 1},
    "abort": {"hold_id": "other", "reason": "r"},
    "clear": {"hold_id": "other", "reason": "r"},
    "break": {"hold_id": "other", "reason": "r"},
}
RUN: Json = {
    "name": "x",
    "argv": ["true"],
    "env": {},
    "cwd": "/",
    "timeout_s": 1,
    "memory_max_bytes": None,
    "output_dir": "/nonexistent",
    "stdout_cap_bytes": 1,
}


def test_every_pair_has_an_answer() -> None:
    for verb in table.VERBS:
        for state in table.STATES:
            code = table.refusal_code(state, verb)
            assert (code is None) == (state in table.ALLOWED[verb])
    assert set(table.NEXT_STEP) == set(table.STATES)


def test_debt_grants_only_what_ends_it() -> None:
    for state in (table.DEGRADED, table.VOID):
        granted = {verb for verb in table.VERBS if table.refusal_code(state, verb) is None}
        assert granted - table.READING == {"witness", "recover", "abort", "clear", "restore", "end-run"} | (
            {"heartbeat"} if state == table.DEGRADED else set()
        )


def test_only_held_runs_programs() -> None:
    assert [state for state in table.STATES if table.refusal_code(state, "run") is None] == [table.HELD]


def put(state: State, name: str, hold: Json) -> Json:
    """Write the records that mean ``name``."""
    record = dict(hold, state=name, boot_id="another-boot" if name == table.VOID else hold["boot_id"])
    if name == table.VOID:
        record["state"] = table.HELD
    for path in (Path(state.folder, "record.json"), Path(state.debt_folder, "debt.json")):
        path.unlink(missing_ok=True)
    if name == table.FREE:
        return record
    state.write_record(record)
    if name not in table.UNTOUCHED and name != table.RESTORED:
        state.write_debt(dict(record, since_utc="2026-01-01T00:00:00Z"))
    return record


@pytest.fixture
def opened(host: Any, make_service: Callable[..., Json]) -> tuple[State, Json, Json]:
    """A state folder with a real hold, its record and its claim."""
    host.acquire([make_service(expected="stopped", probe=None)])
    state = State(str(host.state))
    record = state.record()
    assert record is not None
    # the records are about to be written by hand: the holder must not act on them
    os.kill(record["holder"]["pid"], signal.SIGKILL)
    host.wait_for(lambda: not host.pids_with(f"{host.state} --internal"))
    return state, record, host.claim


def test_the_guard_refuses_what_the_table_refuses(opened: tuple[State, Json, Json]) -> None:
    state, hold, claim = opened
    refused = 0
    for name in table.STATES:
        for verb in table.VERBS:
            code = table.refusal_code(name, verb)
            if code is None:
                continue
            put(state, name, hold)
            assert state.state_name() == name
            before = state.record()
            args = RUN if verb == "run" else ARGS.get(verb, {})
            if verb == "acquire":
                args = acquire_args(hold)
            if verb.startswith("service-"):
                args = {"service": hold["services"][0]}
            request = {"protocol": 1, "verb": verb, "op": secrets.token_hex(8), "claim": claim, "args": args}
            reply = program.answer(state, hold["guard_sha256"], json.dumps(request).encode())
            assert not reply["ok"], (name, verb)
            found = reply["error"]["code"]
            # without an open record a claim is refused first
            expected = ({code, "OPEN_RECORD"} if code == "HELD" else {code}) | (
                {"STALE_CLAIM"} if name == table.FREE and verb in table.CLAIMED else set()
            )
            assert found in expected, (name, verb, reply["error"])
            assert reply["error"]["next"], (name, verb)
            assert state.record() == before, (name, verb)
            refused += 1
    assert refused > 100
    put(state, table.FREE, hold)


def acquire_args(hold: Json) -> Json:
    keys = ("owner", "reason", "plan_sha256", "devices", "restore_reserve_s", "orphan_after_s", "services", "notify")
    return dict({key: hold[key] for key in keys}, hold_id="another", provisional_s=60, deadline_s=100)


def test_effective_state_from_what_is_on_disk() -> None:
    record = {"boot_id": "b", "state": table.HELD, "hold_id": "h"}
    debt = {"hold_id": "h"}
    assert effective_state(None, None, "b") == table.FREE
    assert effective_state(None, debt, "b") == table.DEGRADED
    assert effective_state(record, debt, "b") == table.HELD
    assert effective_state(record, debt, "c") == table.VOID
    assert effective_state(dict(record, state=table.ARMED), None, "c") == table.FREE
    # debt is written before the state: a crash between the two is a stop that began
    assert effective_state(dict(record, state=table.ARMED), debt, "b") == table.STOPPING
    assert effective_state(dict(record, state=table.RESTORED, restored_boot_id="c"), None, "c") == table.RESTORED


@pytest.mark.parametrize(
    ("at", "step", "expected"),
    [(0, None, 30), (50, None, 80), (50, 90, 90), (50, 60, 80), (95, None, 100), (50, 500, 100)],
)
def test_when_the_dead_man_fires(at: int, step: int | None, expected: int) -> None:
    record = {"acquired_ns": 0, "deadline_ns": 100 * 10**9, "orphan_after_s": 30, "restore_reserve_s": 20}
    pulse = {"at_ns": at * 10**9, "step_until_ns": None if step is None else step * 10**9}
    assert fires_at_ns(record, pulse) == expected * 10**9
    assert run_deadline_ns(record) == 80 * 10**9
    assert clock.boottime_ns() > 0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'{"protocol":1}',
        b'{"protocol":1,"verb":"hello","op":null,"claim":null,"args":{},"more":1}',
        b'{"protocol":1,"protocol":1,"verb":"hello","op":null,"claim":null,"args":{}}',
        b'{"protocol":2,"verb":"hello","op":null,"claim":null,"args":{}}',
        b'{"protocol":1,"verb":"nothing","op":null,"claim":null,"args":{}}',
        b'{"protocol":1,"verb":"hello","op":"../x","claim":null,"args":{}}',
        b'{"protocol":1,"verb":"hello","op":null,"claim":{"epoch":true},"args":{}}',
        b'{"protocol":1,"verb":"confirm","op":null,"claim":null,"args":{}}',
        b"[" * 100_000,
        b" " * (framing.MAX_REQUEST_BYTES + 1),
    ],
)
def test_bad_requests_are_answered_not_crashed(data: bytes, tmp_path: Path) -> None:
    reply = program.answer(State(str(tmp_path / "state")), "", data)
    assert reply["error"]["code"] in ("BAD_REQUEST", "PROTOCOL")
