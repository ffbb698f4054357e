"""Boot, loss of the worker, drain and refusal: each with processes of its own.

Turns red when: a server without a drafter says READY, a lost worker stops completions or is not counted, a drain cuts a
request off or does not end with 0.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from target_services import ServerPair

from remote_dspark.contract import DraftMode

pytestmark = [pytest.mark.models, pytest.mark.services]


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[ServerPair]:
    servers = ServerPair(DraftMode.ON.value, tmp_path)
    servers.start_worker()
    try:
        yield servers
    finally:
        servers.stop()


def test_a_lost_worker_costs_speed_and_is_counted_and_a_drain_finishes_requests(fresh: ServerPair) -> None:
    fresh.start_target()
    fresh.await_state("ready")
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


def test_a_worker_of_another_mode_or_none_at_all_is_never_ready(fresh: ServerPair, tmp_path: Path) -> None:
    fresh.mode = DraftMode.OFF.value
    fresh.start_target()
    assert fresh.target.process.wait(60) == 3
    assert "draft_mode" in fresh.target.log.read_text()
    fresh.worker.stop()
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
