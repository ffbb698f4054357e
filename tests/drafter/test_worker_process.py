"""The worker as an operator runs it: a process, a configuration file, real sockets and signals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from remote_dspark.contract import DraftMode
from remote_dspark.drafter.checkpoint import load_drafter
from remote_dspark.drafter.engine import DraftEngine, DraftRequest
from remote_dspark.serve.config import load_config
from remote_dspark.serve.identity import read_identity
from remote_dspark.wire.client import DrafterClient
from remote_dspark.wire.errors import ProtocolError
from remote_dspark.wire.kinds import Role
from remote_dspark.wire.messages import Cancel, Commit, Open, Reset, State, Step, StepRequest
from remote_dspark.wire.prefix import prefix_digest

pytestmark = [pytest.mark.models, pytest.mark.services]

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny"
START_S = 60.0
WIDTH = 576
SEED = 4242


class RunningWorker:
    """One worker process; ends with the test, whatever happens."""

    def __init__(self, folder: Path, mode: DraftMode, **changes: str) -> None:
        self.config_path = folder / f"{mode.value}.toml"
        self.config_path.write_text(
            f'modes = ["{mode.value}"]\n'
            f'[model]\npath = "{changes.get("model", TINY / "drafter")}"\n{changes.get("extra", "")}\n'
            '[listen]\naddress = "127.0.0.1:0"\n[metrics]\naddress = "127.0.0.1:0"\n'
        )
        argv = [sys.executable, "-m", "remote_dspark.serve", "--config", str(self.config_path)]
        self.process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
        self.events: list[dict[str, str]] = []

    def wait_for(self, event: str) -> dict[str, str]:
        """Read log lines until an event; the stream ends when the process does."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("{"):
                self.events.append(json.loads(line))
                if self.events[-1]["event"] == event:
                    return self.events[-1]
        raise AssertionError(f"no {event!r}; found {self.events}")

    def ready(self) -> str:
        self.health_address = self.wait_for("booting")["health"]
        self.wire_address = self.wait_for("ready")["wire"]
        return self.wire_address

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.health_address}{path}", timeout=5) as answer:
            return answer.read().decode()

    def metric(self, name: str) -> int:
        lines = dict(line.rsplit(" ", 1) for line in self.get("/metrics").splitlines() if not line.startswith("#"))
        return int(lines[f"dspark_worker_{name}"])

    def hello(self):
        config = load_config(self.config_path)
        return replace(read_identity(config, load_drafter(config.model)).hello(), role=Role.CLIENT)

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(START_S)
        finally:
            self.process.kill()
            assert self.process.stderr is not None
            self.process.stderr.close()


@pytest.fixture
def start(tmp_path):
    workers: list[RunningWorker] = []

    def run(mode: DraftMode, **changes: str) -> RunningWorker:
        workers.append(RunningWorker(tmp_path, mode, **changes))
        return workers[-1]

    yield run
    for worker in workers:
        if worker.process.stderr is not None and not worker.process.stderr.closed:
            worker.process.kill()
            worker.process.wait(10)
            worker.process.stderr.close()


def states(count: int) -> np.ndarray:
    values = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(9))
    return values.to(torch.bfloat16).view(torch.uint8).numpy()


def open_slot(client, slot, generation, tau_ppm):
    client.open(Open(client.session, slot, generation, SEED, tau_ppm, 32, 5))


def draft(client, slot, generation, round_number, ids, tau_ppm):
    """STEP with ``ids[-1]`` as the anchor."""
    one = StepRequest(slot, generation, round_number, len(ids) - 1, ids[-1], prefix_digest(ids), tau_ppm, 32)
    return client.step(Step(client.session, 0, client.next_batch(), 5, (one,)), timeout_s=20)


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_sampled_rounds_over_the_wire_equal_the_engine(start):
    # red when a message field is mixed up, q is not the drawn row's, a reset keeps the key, or SIGTERM is not a drain
    worker = start(DraftMode.ON)
    client = DrafterClient.connect(worker.ready(), worker.hello())
    rows, ids = states(12), [int(token) for token in np.random.default_rng(1).integers(2, 2048, 13)]
    engine = DraftEngine(load_drafter(TINY / "drafter"), 1)
    seat = engine.open(SEED, 1)

    def require_same(reply, generation, round_number, position):
        one = DraftRequest(seat, generation, round_number, position, ids[position], 0.7)
        expected = engine.step([one], 5)
        assert reply.tokens.tolist() == expected.tokens.tolist()
        assert reply.counts.tolist() == expected.counts.tolist()
        kept = np.arange(32) < expected.counts[..., None]
        assert reply.ids.tolist() == expected.ids[kept].tolist()
        assert reply.q.tolist() == expected.q[kept].tolist()

    open_slot(client, 0, 1, 700_000)
    client.state(State(client.session, 0, 1, 0, np.array(ids[:8], dtype=np.int32), rows[:8]))
    engine.append_states(seat, 1, 0, rows[:8])
    first = draft(client, 0, 1, 0, ids[:9], 700_000)
    require_same(first, 1, 0, 8)
    # the target accepted two drafts of its own liking and corrected the third
    ids[9:11] = [int(token) for token in first.tokens[0, :2]]
    client.commit([Commit(client.session, 0, 1, 0, 2, ids[11], False, 11)])
    client.state(State(client.session, 0, 1, 8, np.array(ids[8:11], dtype=np.int32), rows[8:11]))
    engine.append_states(seat, 1, 8, rows[8:11])
    require_same(draft(client, 0, 1, 1, ids[:12], 700_000), 1, 1, 11)
    client.reset(Reset(client.session, 0, 1, 2, 11))
    engine.reset(seat, 1, 2, 11)
    require_same(draft(client, 0, 2, 0, ids[:12], 700_000), 2, 0, 11)
    assert worker.metric("sampled_rounds_total") == 3
    assert worker.metric("accepted_tokens_total") == 2
    client.cancel(Cancel(client.session, 0, 2))
    assert worker.metric("free_seats") == 4
    assert json.loads(worker.get("/health"))["state"] == "ready"
    identity = json.loads(worker.get("/identity"))
    assert (identity["mode"], identity["pid"]) == ("sampled-top32-v2", worker.process.pid)
    client.close()
    assert worker.end() == 0


def test_greedy_worker_clients_that_vanish_and_strangers(start):
    # red when OFF ships q, a dead client keeps its seats, or another checkpoint's client is served
    worker = start(DraftMode.OFF)
    address, hello = worker.ready(), worker.hello()
    with pytest.raises(ProtocolError):
        DrafterClient.connect(address, replace(hello, draft_sha256=bytes(32)))
    with pytest.raises(ProtocolError):
        DrafterClient.connect(address, replace(hello, draft_mode=DraftMode.ON))
    first = DrafterClient.connect(address, hello)
    for slot in range(4):
        open_slot(first, slot, 1, 0)
    assert worker.metric("free_seats") == 0
    first.close()
    wait_until(lambda: worker.metric("free_seats") == 4, "the seats of a vanished client were not freed")
    second = DrafterClient.connect(address, hello)
    open_slot(second, 3, 1, 0)
    second.state(State(second.session, 3, 1, 0, np.arange(6, dtype=np.int32), states(6)))
    reply = draft(second, 3, 1, 0, [0, 1, 2, 3, 4, 5, 30], 0)
    engine = DraftEngine(load_drafter(TINY / "drafter"), 1)
    seat = engine.open(0, 1)
    engine.append_states(seat, 1, 0, states(6))
    assert reply.tokens.tolist() == engine.step([DraftRequest(seat, 1, 0, 6, 30, 0.0)], 5).tokens.tolist()
    assert worker.metric("sampled_rounds_total") == 0
    # a request is still open: the drain waits for it, and a new one is refused meanwhile
    worker.process.send_signal(signal.SIGTERM)
    wait_until(lambda: second.is_draining or second.ping(5.0) < 0, "the client was not told of the drain")
    with pytest.raises(ProtocolError):
        open_slot(second, 0, 2, 0)
    assert worker.process.poll() is None
    second.cancel(Cancel(second.session, 3, 1))
    assert worker.end() == 0
    second.close()


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"model": str(TINY / "nowhere")}, 3, "config.json"),
        ({"model": str(TINY / "target")}, 3, "Qwen3DSparkModel"),
        ({"extra": 'tokenizer = "nowhere.json"'}, 3, "nowhere.json"),
        ({"extra": "threads = 0"}, 2, "model.threads"),
        ({"extra": 'device = "cuda:99"'}, 3, "found 'cuda:99'"),
    ],
)
def test_a_worker_that_cannot_serve_says_why_and_exits(start, changes, code, words):
    # red when a bad checkpoint is served, or the reason is lost
    worker = start(DraftMode.OFF, **changes)
    assert words in worker.wait_for("refused")["detail"]
    # by itself: no signal is needed
    assert worker.process.wait(START_S) == code
