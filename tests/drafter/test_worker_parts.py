"""The worker's configuration, health and refusals, without a process."""

from __future__ import annotations

import asyncio
import inspect
import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from remote_dspark.contract import DraftMode, ServerState
from remote_dspark.drafter.checkpoint import load_drafter
from remote_dspark.drafter.engine import DraftEngine
from remote_dspark.drafter.errors import DeviceFaultError
from remote_dspark.drafter.shapes import synthetic_identity
from remote_dspark.drafter.synthetic import synthetic_drafter
from remote_dspark.serve.config import load_config
from remote_dspark.serve.errors import BootError, ConfigError
from remote_dspark.serve.handler import WorkerHandler
from remote_dspark.serve.health import Health
from remote_dspark.serve.http import StatusServer
from remote_dspark.serve.identity import read_identity
from remote_dspark.serve.metrics import render_codes, render_engine, render_state
from remote_dspark.serve.timings import StepLog
from remote_dspark.wire.handler import DrafterRefusal
from remote_dspark.wire.messages import Cancel, Open, Reset, State, Step, StepRequest

pytestmark = pytest.mark.models

MINIMAL = """
[model]
path = "drafter"
[listen]
address = "127.0.0.1:0"
[metrics]
address = "127.0.0.1:0"
"""
SESSION = 77


class ManualClock:
    def __init__(self):
        self.now_ns = 0

    def __call__(self):
        return self.now_ns


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "worker.toml"
    path.write_text(text)
    return path


def pair_of(*devices):
    """The minimal file with a pair's devices."""
    return MINIMAL.replace('path = "drafter"', f'synthetic = "tiny"\ndevices = {json.dumps(devices)}')


def test_two_ranks_are_named_and_off_stays_the_default(tmp_path):
    # red when a pair is anything but a field of the file, an emulated one is taken for two GPUs, or the bound is lost
    solo = load_config(write(tmp_path, MINIMAL))
    assert (solo.devices, solo.is_pair) == (("cpu",), False)
    pair = load_config(write(tmp_path, pair_of("cuda:1", "cuda:0") + "[limits]\npeer_bound_ms = 20\n"))
    assert (pair.device, pair.devices, pair.dtype) == ("cuda:1", ("cuda:1", "cuda:0"), "bfloat16")
    assert (pair.is_pair, pair.is_emulated, pair.peer_bound_ns, pair.mode) == (True, False, 20_000_000, DraftMode.OFF)
    emulated = load_config(write(tmp_path, pair_of("cpu", "cpu")))
    assert (emulated.is_pair, emulated.is_emulated) == (True, True)
    document = read_identity(emulated, synthetic_drafter("tiny")).to_document()
    assert (document["device"], document["topology"]) == ("cpu,cpu", "emulated")
    assert (solo.has_engine_thread, pair.has_engine_thread, emulated.has_engine_thread) == (True, False, True)
    assert "topology" not in read_identity(replace(emulated, devices=("cpu",)), synthetic_drafter("tiny")).to_document()


def test_defaults_are_off_and_siblings_of_the_checkpoint(tmp_path):
    # red when the default mode samples, or a relative path is taken from the working directory
    config = load_config(write(tmp_path, MINIMAL))
    assert config.mode is DraftMode.OFF
    assert config.model == tmp_path / "drafter"
    assert config.target == tmp_path / "target"
    assert config.tokenizer == tmp_path / "tokenizer.json"
    assert (config.max_requests, config.depth, config.support) == (4, 5, 32)


def test_a_device_computes_in_bf16_and_synthetic_weights_are_named(tmp_path):
    # red when a device defaults to FP32, or a synthetic worker could be taken for a real one
    text = MINIMAL.replace('path = "drafter"', 'synthetic = "tiny"\ndevice = "cuda:1"')
    config = load_config(write(tmp_path, text))
    assert (config.device, config.dtype, config.synthetic) == ("cuda:1", "bfloat16", "tiny")
    identity = read_identity(config, synthetic_drafter("tiny"))
    hello, labels = identity.hello(), [synthetic_identity(name) for name in ("tiny", "qwen3-4b")]
    assert hello.draft_sha256.hex() == labels[0].draft_sha256
    assert len({digest for each in labels for digest in vars(each).values()}) == 8
    assert identity.to_document()["weights"] == labels[0].label
    assert Health(ManualClock(), 1.0, labels[0].label).to_document()["weights"].startswith("synthetic:tiny:")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (MINIMAL.replace("[listen]", "[listen]\nsurprise = 1"), r"listen\.surprise"),
        (MINIMAL + "\n[other]\n", "field other"),
        ('modes = ["sampled-top32-v2", "greedy-v1"]\n' + MINIMAL, "modes.*exactly one"),
        ('modes = ["sampled"]\n' + MINIMAL, "modes"),
        ('modes = "greedy-v1"\n' + MINIMAL, "modes"),
        (MINIMAL + "[limits]\ndepth = 3\n", r"limits\.depth.*4\.\.5"),
        (MINIMAL + "[limits]\nsupport = 16\n", r"limits\.support"),
        (MINIMAL + "[limits]\nmax_requests = 8\n", r"limits\.max_requests"),
        (MINIMAL.replace("[metrics]", "spin_us = 100001\n[metrics]"), r"listen\.spin_us"),
        (MINIMAL + "[limits]\nwedge_after_s = 0\n", "wedge_after_s"),
        (MINIMAL.replace('path = "drafter"', 'path = "drafter"\ndevice = "tpu"'), r"model\.device"),
        (pair_of("cuda:0", "cuda:1", "cuda:2"), r"model\.devices.*two devices"),
        (pair_of("cuda:0"), r"model\.devices.*two devices"),
        (pair_of("cuda:0", "cuda:0"), r"model\.devices.*two different"),
        (pair_of("cuda:0", "cpu"), r"model\.devices.*two different"),
        (pair_of("cuda:0", "cuda:1").replace("devices", 'device = "cuda"\ndevices'), r"model\.devices.*either"),
        (pair_of("cpu", "cpu").replace("devices", 'dtype = "float32"\ndevices'), r"model\.dtype"),
        (pair_of("cuda:0", "cuda:1") + "[limits]\npeer_bound_ms = 0\n", r"limits\.peer_bound_ms"),
        (MINIMAL.replace('path = "drafter"', 'path = "drafter"\ndevice = "cuda"\ndtype = "float32"'), r"model\.dtype"),
        (MINIMAL.replace('path = "drafter"', 'synthetic = "qwen3-5b"'), r"model\.synthetic.*qwen3-4b"),
        (MINIMAL.replace('path = "drafter"', 'path = "drafter"\nsynthetic = "tiny"'), r"model\.path"),
        (MINIMAL.replace('path = "drafter"', ""), r"model\.path"),
        (MINIMAL.replace('[metrics]\naddress = "127.0.0.1:0"', '[metrics]\naddress = "9000"'), "host:port"),
        ("= broken", "readable TOML"),
    ],
)
def test_config_refusals_name_field_and_expectation(tmp_path, text, field):
    with pytest.raises(ConfigError, match=field):
        load_config(write(tmp_path, text))


def test_states_follow_progress_not_the_port():
    # red when a long call is still READY, a finished one stays WEDGED, or poison can be left
    clock = ManualClock()
    health = Health(clock, wedge_after_s=2.0)
    assert health.state is ServerState.BOOTING
    health.enter(ServerState.WARMING)
    health.enter(ServerState.READY)
    health.call_started()
    clock.now_ns = 2_000_000_000
    assert health.state is ServerState.READY
    clock.now_ns += 1
    assert health.state is ServerState.WEDGED
    health.call_ended()
    health.count_rounds(3)
    assert health.to_document() == {
        "state": "ready",
        "rounds": 3,
        "in_flight_ns": 0,
        "detail": "",
        "weights": "checkpoint",
    }
    health.poison("first")
    health.poison("second")
    health.enter(ServerState.READY)
    health.call_started()
    clock.now_ns += 10_000_000_000
    assert health.to_document()["state"] == "poisoned"
    assert health.to_document()["detail"] == "first"


def fetch(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.read().decode()


def test_only_ready_is_http_200():
    # red when any other state answers 200, or says the word a probe waits for
    health = Health(ManualClock(), 1.0)
    server = StatusServer(
        "127.0.0.1", 0, health=health, identity=lambda: {"a": 1}, metrics=lambda: "m 1\n", timings=dict
    )
    try:
        for state in (ServerState.BOOTING, ServerState.WARMING, ServerState.READY, ServerState.DRAINING):
            health.enter(state)
            status, body = fetch(server.address, "/health")
            assert status == (200 if state is ServerState.READY else 503)
            assert json.loads(body)["state"] == state.value
            assert ("ready" in body) == (state is ServerState.READY)
        assert fetch(server.address, "/metrics") == (200, "m 1\n")
        assert fetch(server.address, "/identity") == (200, '{"a": 1}')
        assert fetch(server.address, "/other")[0] == 404
        host, port = server.address.split(":")
        with pytest.raises(BootError, match=f"{port}.*free address"):
            StatusServer(host, int(port), health=health, identity=dict, metrics=str, timings=dict)
    finally:
        server.close()


async def settle(result):
    """What a plain or an ``async`` method of a handler returns in the end."""
    return await result if inspect.isawaitable(result) else result


@pytest.fixture(params=["thread", "loop"])
def make_handler(checkpoint, tmp_path, request):
    """Factory of (handler, engine, health) over a random checkpoint; the engine on its own thread, or the loop's."""
    thread = ThreadPoolExecutor(max_workers=1) if request.param == "thread" else None

    def make(mode: DraftMode = DraftMode.ON, engine_type: type[DraftEngine] = DraftEngine):
        config = load_config(write(tmp_path, f'modes = ["{mode.value}"]\n' + MINIMAL))
        health = Health(ManualClock(), 1.0)
        health.enter(ServerState.READY)
        engine = engine_type(load_drafter(checkpoint()), config.max_requests)
        return WorkerHandler(engine, config, health, thread, StepLog()), engine, health

    yield make
    if thread is not None:
        thread.shutdown()


def open_(slot=0, generation=1, session=SESSION, ppm=700_000, support=32):
    return Open(session, slot, generation, 5, ppm, support, 5)


def state(rows, slot=0, generation=1, session=SESSION, position=0):
    return State(session, slot, generation, position, np.zeros(len(rows), dtype=np.int32), rows)


def step(position, slot=0, generation=1, session=SESSION, ppm=700_000, support=32, round_number=0):
    one = StepRequest(slot, generation, round_number, position, 9, bytes(32), ppm, support)
    return Step(session, 0, 1, 5, (one,))


def test_sessions_do_not_see_each_other_and_a_vanished_one_frees_its_seats(make_handler, state_rows):
    # red when slots are keyed without the session, or on_disconnect frees too much or too little
    handler, engine, _ = make_handler()

    async def scenario():
        for session in (1, 2):
            for slot in (0, 1):
                await settle(handler.on_open(open_(slot=slot, session=session)))
        with pytest.raises(DrafterRefusal, match="capacity"):
            await settle(handler.on_open(open_(slot=0, session=3)))
        await settle(handler.on_state(state(state_rows(1, 0, 4), session=1)))
        await settle(handler.on_state(state(state_rows(1, 0, 6), session=2)))
        await handler.on_disconnect(1)
        assert (handler.num_held, engine.num_free_seats) == (2, 2)
        with pytest.raises(DrafterRefusal, match="slot_not_open"):
            await settle(handler.on_step(step(4, session=1)))
        reply = await settle(handler.on_step(step(6, session=2)))
        assert reply.tokens.shape == (1, 5)
        await settle(handler.on_cancel(Cancel(2, 0, 1)))
        await settle(handler.on_reset(Reset(2, 1, 1, 2, 0)))
        assert (handler.num_held, engine.num_free_seats) == (1, 3)

    asyncio.run(scenario())


def test_off_refuses_sampling_whatever_a_client_asks(make_handler, state_rows):
    # red when the mode is taken from the request
    handler, engine, _ = make_handler(DraftMode.OFF)

    async def scenario():
        with pytest.raises(DrafterRefusal, match="sampling_is_off"):
            await settle(handler.on_open(open_()))
        await settle(handler.on_open(open_(ppm=0)))
        await settle(handler.on_state(state(state_rows(1, 0, 4))))
        with pytest.raises(DrafterRefusal, match="sampling_is_off"):
            await settle(handler.on_step(step(4)))
        reply = await settle(handler.on_step(step(4, ppm=0)))
        assert not reply.counts.any()

    asyncio.run(scenario())
    assert (engine.counters.sampled_rounds, engine.counters.greedy_rounds) == (0, 1)


def test_refusals_are_counted_and_cost_only_the_request(make_handler, state_rows):
    handler, _, health = make_handler()

    async def scenario():
        await settle(handler.on_open(open_()))
        await settle(handler.on_state(state(state_rows(1, 0, 4))))
        with pytest.raises(DrafterRefusal, match="support_policy"):
            await settle(handler.on_step(step(4, support=16)))
        with pytest.raises(DrafterRefusal, match="state_gap"):
            await settle(handler.on_step(step(5)))
        await settle(handler.on_step(step(4)))

    asyncio.run(scenario())
    assert health.state is ServerState.READY
    assert dict(handler.refusals) == {"support_policy": 1, "state_gap": 1}
    assert 'refusals_total{code="state_gap"} 1' in render_codes("refusals", handler.refusals)


def test_a_device_engine_answers_in_the_turn_that_asked(make_handler, state_rows, request):
    # red when an engine without a thread is awaited for, or one with a thread holds up the event loop
    handler, _, health = make_handler()
    is_plain = request.node.callspec.params["make_handler"] == "loop"

    async def scenario():
        await settle(handler.on_open(open_()))
        await settle(handler.on_state(state(state_rows(1, 0, 4))))
        result = handler.on_step(step(4))
        assert inspect.isawaitable(result) is not is_plain
        assert (await settle(result)).tokens.shape == (1, 5)

    asyncio.run(scenario())
    assert (health.to_document()["rounds"], health.to_document()["in_flight_ns"]) == (1, 0)


class FailingEngine(DraftEngine):
    """An engine whose device fails in a way no request caused."""

    def step(self, requests, depth):
        raise DeviceFaultError("device lost")


def test_an_unforeseen_failure_poisons_and_everything_later_is_refused(make_handler, state_rows):
    # red when a broken device is retried, or the worker still says READY
    handler, _, health = make_handler(engine_type=FailingEngine)

    async def scenario():
        await settle(handler.on_open(open_()))
        await settle(handler.on_state(state(state_rows(1, 0, 4))))
        with pytest.raises(DrafterRefusal, match="device lost"):
            await settle(handler.on_step(step(4)))
        with pytest.raises(DrafterRefusal, match="poisoned"):
            await settle(handler.on_open(open_(slot=1)))
        await handler.on_disconnect(SESSION)

    asyncio.run(scenario())
    assert health.state is ServerState.POISONED
    assert health.to_document()["rounds"] == 0


def test_metrics_are_prometheus_text(make_handler, state_rows):
    # red when a counter is not exposed, or a line is not "name value"
    handler, engine, _ = make_handler()

    async def scenario():
        await settle(handler.on_open(open_()))
        await settle(handler.on_state(state(state_rows(1, 0, 4))))
        await settle(handler.on_step(step(4)))

    asyncio.run(scenario())
    text = render_state(ServerState.READY) + render_engine(engine)
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values['dspark_worker_state{state="ready"}'] == "1"
    assert values["dspark_worker_rounds_total"] == "1"
    assert values["dspark_worker_sampled_rounds_total"] == "1"
    assert values["dspark_worker_state_rows_total"] == "4"
    assert values["dspark_worker_free_seats"] == "3"
    hits, misses = (int(values[f"dspark_worker_markov_cache_{kind}_total"]) for kind in ("hits", "misses"))
    assert hits + misses == 5
