"""Boot, loss of the worker, drain and refusal: each with processes of its own.

Turns red when: a server without a drafter says READY, a lost worker stops completions or is not counted, a drain cuts a
request off or does not end with 0.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from target_services import TINY, ServerPair
from trace_checks import SessionTrace

from remote_dspark.contract import DraftMode
from remote_dspark.wire.capture import read_capture

pytestmark = [pytest.mark.models, pytest.mark.services]


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[ServerPair]:
    servers = ServerPair(DraftMode.ON.value, tmp_path)
    try:
        yield servers
    finally:
        servers.stop()


def test_a_lost_worker_costs_speed_and_is_counted_and_a_drain_finishes_requests(fresh: ServerPair) -> None:
    fresh.start()
    before = fresh.metrics()
    assert before["dspark_failed_rounds_total"] == 0
    results: list[dict[str, object]] = []

    def ask() -> None:
        results.append(fresh.complete(prompt="import os\n", max_tokens=300, seed=3, ignore_eos=True))

    thread = threading.Thread(target=ask)
    thread.start()
    deadline = time.monotonic() + 10
    while fresh.metrics()["dspark_emitted_tokens_total"] < before["dspark_emitted_tokens_total"] + 20:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    fresh.worker.stop(signal.SIGKILL)
    thread.join(60)
    assert results[0]["usage"]["completion_tokens"] == 300  # type: ignore[index]
    after = fresh.metrics()
    assert after["dspark_failed_rounds_total"] == after["dspark_target_only_rounds_total"] > 0
    assert sum(count for name, count in after.items() if "replies_rejected" in name) >= 1
    assert json.loads(fresh.get("/health")[1])["state"] == "ready"
    # The last request is still running when the signal comes.
    thread = threading.Thread(target=ask)
    thread.start()
    while json.loads(fresh.get("/health")[1])["active"] == 0:
        time.sleep(0.005)
    fresh.target.process.send_signal(signal.SIGTERM)
    fresh.await_state("draining", 5)
    status, document = fresh.post(prompt="a")
    assert (status, document["error"]["code"]) == (503, "busy")
    thread.join(60)
    assert results[1]["usage"]["completion_tokens"] == 300  # type: ignore[index]
    assert fresh.target.stop() == 0


def test_a_stalled_worker_costs_failed_rounds_and_then_drafts_again(fresh: ServerPair, tmp_path: Path) -> None:
    fresh.start_worker()
    fresh.start_target(drafter=f'step_timeout_s = 1.0\ncapture = "{tmp_path}/trace.dsw"')
    fresh.await_state("ready")
    assert fresh.worker is not None
    results: list[dict[str, Any]] = []
    thread = threading.Thread(
        target=lambda: results.append(
            fresh.complete(prompt="import os\n", max_tokens=240, temperature=0, ignore_eos=True)
        )
    )
    start = fresh.metrics()["dspark_emitted_tokens_total"]
    thread.start()
    await_growth(fresh, "dspark_emitted_tokens_total", start + 20)
    fresh.worker.process.send_signal(signal.SIGSTOP)
    await_growth(fresh, "dspark_replies_rejected_total.step_timeout", 1)
    # RESET is waiting for its answer now, within the same bound.
    fresh.worker.process.send_signal(signal.SIGCONT)
    await_growth(fresh, "dspark_failed_rounds_total", 1)
    greedy = fresh.metrics()["dspark_greedy_rounds_total"]
    await_growth(fresh, "dspark_greedy_rounds_total", greedy + 20)
    thread.join(60)
    after = fresh.metrics()
    # One proposal was lost, not the session: the text went on, and so did drafting under a new generation.
    assert after["dspark_failed_rounds_total"] == 1
    assert results[0]["usage"]["completion_tokens"] == 240
    again = fresh.complete(prompt="import os\n", max_tokens=240, temperature=0, ignore_eos=True)
    assert again["choices"] == results[0]["choices"]
    assert again["dspark"]["target_only_rounds"] == 0
    sampled = fresh.complete(prompt="import os\n", max_tokens=40, seed=12, temperature=1, ignore_eos=True)
    assert fresh.target is not None
    assert fresh.target.stop() == 0
    trace = SessionTrace(read_capture((tmp_path / "trace.dsw").read_bytes()))
    trace.require_true_states(again["dspark"]["generation"], again["choices"][0]["token_ids"])
    assert trace.require_oracle_outcomes(sampled["dspark"]["generation"]) == sampled["dspark"]["rounds"]


def await_growth(pair: ServerPair, name: str, least: int) -> None:
    deadline = time.monotonic() + 20
    while pair.metrics().get(name, 0) < least:
        assert time.monotonic() < deadline, f"{name} stayed below {least}"
        time.sleep(0.005)


def test_a_target_of_nan_weights_is_never_ready(fresh: ServerPair, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    poisoned = tmp_path / "target"
    shutil.copytree(TINY / "target", poisoned)
    weights = load_file(poisoned / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, poisoned / "model.safetensors", metadata={"format": "pt"})
    fresh.target_model = poisoned
    # No worker is needed to find it out.
    fresh.start_target()
    assert fresh.target is not None
    assert fresh.target.process.wait(60) == 3
    assert "target row 0" in fresh.target.log.read_text()


def test_a_worker_of_another_mode_or_none_at_all_is_never_ready(fresh: ServerPair, tmp_path: Path) -> None:
    fresh.start_worker()
    fresh.mode = DraftMode.OFF.value
    fresh.start_target()
    assert fresh.target.process.wait(60) == 3
    assert "draft_mode" in fresh.target.log.read_text()
    fresh.worker.stop()
    # A signal ends the wait for a worker at once, and that is no failure.
    fresh.start_target(drafter="connect_timeout_s = 60")
    fresh.await_state("warming")
    assert fresh.target.stop() == 0
    fresh.start_target(drafter="connect_timeout_s = 0.5")
    seen = set()
    while fresh.target.process.poll() is None:
        with contextlib.suppress(OSError):
            seen.add(json.loads(fresh.get("/health")[1])["state"])
        time.sleep(0.02)
    assert fresh.target.process.wait() == 3
    assert "ready" not in seen
    assert fresh.address in fresh.target.log.read_text()


def test_a_wrong_configuration_exits_2_and_names_the_field(fresh: ServerPair) -> None:
    fresh.start_target(extra="[limits]\nmax_requests = 9")
    assert fresh.target.process.wait(30) == 2
    assert "limits.max_requests" in fresh.target.log.read_text()
