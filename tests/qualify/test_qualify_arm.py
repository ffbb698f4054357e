"""The arm program and the worker probe against real services.

Turns red when: a snapshot misses a metric, growth of failed rounds or a foreign request goes unnoticed, an arm is taken
for the other switch position, a dead server loses what was measured, or a token that was not drawn from its q passes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from target_services import ROOT, TINY, ServerPair

from remote_dspark.contract import DraftMode, Metric
from remote_dspark.oracle.philox import derive_key, proposal_draw
from remote_dspark.oracle.tickets import draw_token
from remote_dspark.qualify.worker_client import ProbeSeat
from remote_dspark.qualify.worker_draws import count_wrong_draws
from remote_dspark.wire.limits import Shard
from remote_dspark.wire.messages import Step, StepRequest
from remote_dspark.wire.reply import build_reply

pytestmark = pytest.mark.services

SNAPSHOTS = ("baseline", "headline", "profiled", "final")


def write_arm(folder: Path, pair: ServerPair, **changes: object) -> Path:
    fields: dict[str, object] = {
        "url": f"http://127.0.0.1:{pair.port}",
        "mode": "sampled-top32-v2",
        "manifest": str(ROOT / "examples" / "load" / "manifest.json"),
        "concurrency": 2,
        "warm_up_requests": 1,
        "greedy_requests": 1,
        "requests": 4,
        "profiled_requests": 1,
        "max_tokens": 12,
        "ready_timeout_s": 2,
    }
    path = folder / "arm.toml"
    path.write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in {**fields, **changes}.items()))
    return path


def start(module: str, config: Path, output: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"remote_dspark.qualify.{module}", "--config", str(config)]
    return subprocess.Popen([*command, "--output", str(output), *options], stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=90)
    return process.returncode, errors


def observation(folder: Path) -> dict[str, Any]:
    document = json.loads((folder / "observation.json").read_text())
    assert isinstance(document, dict)
    return document


def checks(document: dict[str, Any]) -> dict[str, bool | None]:
    return {check["name"]: check["ok"] for check in document["checks"]}


@pytest.mark.models
def test_an_arm_records_every_phase(on_pair: ServerPair, tmp_path: Path) -> None:
    code, errors = finish(start("arm", write_arm(tmp_path, on_pair), tmp_path / "out"))
    assert code == 0, errors
    document = observation(tmp_path / "out")
    assert [name for name, ok in checks(document).items() if ok is not True] == []
    values, labels = document["values"], document["labels"]
    for name in SNAPSHOTS:
        recorded = {key.removeprefix(f"{name}.").split(".")[0] for key in values if key.startswith(f"{name}.dspark")}
        assert recorded >= {str(metric) for metric in Metric} - {Metric.REPLIES_REJECTED}
        assert labels[f"{name}.health"] == "ready"
    assert values["baseline.at_ns"] < values["headline.at_ns"] < values["profiled.at_ns"] <= values["final.at_ns"]
    assert (values["headline.num_requests"], values["headline.num_tokens"]) == (4, 48)
    emitted = values[f"headline.{Metric.EMITTED_TOKENS}"] - values[f"baseline.{Metric.EMITTED_TOKENS}"]
    assert emitted == 48
    assert values["server.pid"] == on_pair.target.process.pid
    assert labels["mode"] == DraftMode.ON
    lines = [json.loads(line) for line in (tmp_path / "out" / "requests.jsonl").read_text().splitlines()]
    assert [line["phase"] for line in lines] == [0, 1, 2, 2, 2, 2, 3]
    assert all(line["start_ns"] < line["first_token_ns"] <= line["end_ns"] for line in lines)
    gaps = [int(line) for line in (tmp_path / "out" / "inter_token.jsonl").read_text().splitlines()]
    assert sum(gaps) <= sum(line["end_ns"] - line["first_token_ns"] for line in lines if line["phase"] == 2)
    # The same prompts at temperature 0 give the same digest in every run.
    code, _ = finish(start("arm", write_arm(tmp_path, on_pair), tmp_path / "again"))
    assert observation(tmp_path / "again")["labels"]["greedy_sha256"] == labels["greedy_sha256"]


@pytest.mark.models
def test_an_arm_of_the_other_switch_position_and_foreign_requests_are_seen(on_pair: ServerPair, tmp_path: Path) -> None:
    config = write_arm(tmp_path, on_pair, mode="greedy-v1", requests=12)
    start_count = on_pair.metrics()[Metric.REQUESTS]
    process = start("arm", config, tmp_path / "out")
    # Warm-up and greedy check are two requests: from the fourth on, the baseline has been taken.
    deadline = time.monotonic() + 30
    while on_pair.metrics()[Metric.REQUESTS] < start_count + 4 and time.monotonic() < deadline:
        time.sleep(0.005)
    on_pair.complete(prompt="foreign", max_tokens=1)
    code, errors = finish(process)
    assert code == 0, errors
    document = observation(tmp_path / "out")
    found = checks(document)
    assert found["server.mode"] is False
    assert found["final.sampled_rounds"] is False
    assert found["headline.foreign_requests"] is False
    assert document["values"]["final.foreign_requests"] == 1


@pytest.mark.models
def test_a_server_that_dies_leaves_an_observation_of_what_was(tmp_path: Path) -> None:
    pair = ServerPair(DraftMode.ON.value, tmp_path)
    try:
        pair.start()
        process = start("arm", write_arm(tmp_path, pair, requests=200), tmp_path / "out")
        before = pair.metrics()[Metric.REQUESTS]
        killer = threading.Thread(target=lambda: kill_after(pair, before + 6))
        killer.start()
        code, errors = finish(process)
        killer.join(10)
        assert code == 3
        assert "request" in errors
    finally:
        pair.stop()
    document = observation(tmp_path / "out")
    assert checks(document)["phases.complete"] is False
    assert f"baseline.{Metric.ROUNDS}" in document["values"]
    assert f"headline.{Metric.ROUNDS}" not in document["values"]


def kill_after(pair: ServerPair, requests: int) -> None:
    deadline = time.monotonic() + 30
    while pair.metrics()[Metric.REQUESTS] < requests and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pair.target is not None
    pair.target.process.kill()


def test_no_server_at_all_is_an_incomplete_arm(tmp_path: Path) -> None:
    class Nobody:
        port = 9

    code, errors = finish(start("arm", write_arm(tmp_path, Nobody(), ready_timeout_s=1), tmp_path / "out"))  # type: ignore[arg-type]
    assert code == 3
    assert "expected ready within 1 s" in errors
    assert checks(observation(tmp_path / "out"))["phases.complete"] is False


@pytest.mark.models
def test_a_whole_worker_is_measured_by_batch_and_kind(on_pair: ServerPair, tmp_path: Path) -> None:
    config = tmp_path / "ww.toml"
    config.write_text(
        f'address = "{on_pair.address}"\nmode = "sampled-top32-v2"\ndrafter = "{TINY}/drafter"\n'
        f'target = "{TINY}/target"\ntokenizer = "{TINY}/target/tokenizer.json"\n'
        "depths = [4, 5]\nbatches = [1, 3]\nrepetitions = 3\nwarmup = 1\ncontext = 8\n"
    )
    code, errors = finish(start("whole_worker", config, tmp_path / "out"))
    assert code == 0, errors
    document = observation(tmp_path / "out")
    assert [name for name, ok in checks(document).items() if ok is not True] == []
    names = {f"step.{k}.b{b}.d{d}.jsonl" for k in ("sampled", "greedy", "mixed") for b in (1, 3) for d in (4, 5)}
    assert {sample["name"] for sample in document["samples"]} == names
    assert {sample["num_samples"] for sample in document["samples"]} == {3}
    config.write_text(config.read_text().replace("sampled-top32-v2", "greedy-v1"))
    code, errors = finish(start("whole_worker", config, tmp_path / "off"))
    assert code == 2
    assert "draft_mode" in errors


@pytest.mark.models
def test_what_a_worker_proposes_is_compared_by_one_file(on_pair: ServerPair, tmp_path: Path) -> None:
    # red when the digests depend on anything but the seed, a part is left out, or another file passes
    config, known = tmp_path / "ww.toml", tmp_path / "first" / "identity.jsonl"
    text = (
        f'address = "{on_pair.address}"\nmode = "sampled-top32-v2"\ndrafter = "{TINY}/drafter"\n'
        f'target = "{TINY}/target"\ntokenizer = "{TINY}/target/tokenizer.json"\n'
        "depths = [4]\nbatches = [1, 2]\nrepetitions = 1\nwarmup = 0\ncontext = 8\n"
        "identity_positions = 40\nidentity_rounds = 2\n"
    )
    config.write_text(text)
    code, errors = finish(start("whole_worker", config, tmp_path / "first"))
    assert code == 0, errors
    lines = [json.loads(line) for line in known.read_text().splitlines()]
    assert [(line["kind"], line["batch"], line["positions"]) for line in lines] == [(0, 2, 16), (1, 2, 16), (2, 2, 16)]
    digests = {tuple(line[f"{part}.{word}"] for word in range(8)) for line in lines for part in ("ids", "q", "tokens")}
    # greedy rows have no entries, so their ids and q are the same nothing
    assert len(digests) == 8
    for name, passes in (("same", True), ("other", False)):
        expected = tmp_path / f"{name}.jsonl"
        lines[1]["tokens.3"] ^= not passes
        expected.write_text("".join(json.dumps(line, sort_keys=True, separators=(",", ":")) + "\n" for line in lines))
        config.write_text(f'{text}identity_expected = "{expected}"\n')
        code, errors = finish(start("whole_worker", config, tmp_path / name))
        assert code == 0, errors
        document = observation(tmp_path / name)
        assert checks(document)["identity.same"] is passes
        assert (document["values"]["identity.positions"], checks(document)["identity.draws"]) == (48, True)
    [found] = [check["found"] for check in document["checks"] if check["name"] == "identity.same"]
    assert "chunk 1 of batch 2: other tokens" in found
    config.write_text(text.replace("identity_positions = 40\n", "") + f'identity_expected = "{known}"\n')
    refused, errors = finish(start("whole_worker", config, tmp_path / "nothing"))
    assert refused == 2
    assert "identity_positions: expected at least 1 beside identity_expected" in errors
    config.write_text(text)
    refused, errors = finish(start("whole_worker", config, tmp_path / "refused", "--physical"))
    assert refused == 2
    assert "two CUDA devices" in errors


def test_a_token_that_is_not_its_rows_draw_is_counted() -> None:
    seat = ProbeSeat(0, 1, 77, 700_000, np.random.default_rng(0), round=3, position=9)
    step = Step(1, 0, 1, 2, (StepRequest(0, 1, 3, 9, 5, bytes(32), 700_000, 32),))
    ids = np.array([[[1, 4, 6], [2, 3, 9]]], dtype=np.int32)
    q = np.array([[[0.5, 0.25, 0.25]] * 2], dtype=np.float32)
    counts = np.full((1, 2), 3, dtype=np.int32)
    tickets = np.array([1 << 23, 1 << 22, 1 << 22], dtype=np.int64)
    key = derive_key(77, 1)
    good = [draw_token(ids[0, p].astype(np.int64), tickets, proposal_draw(key, 3, 10 + p)) for p in (0, 1)]

    def wrong(tokens: list[int]) -> int:
        array = np.array([tokens], dtype=np.int32)
        return count_wrong_draws(
            build_reply(step, Shard(0, 1, 0, 10), tokens=array, ids=ids, q=q, counts=counts), [seat]
        )

    other = next(int(token) for token in ids[0, 1] if token != good[1])
    assert wrong(good) == 0
    assert wrong([good[0], other]) == 1
    seat.temperature_ppm = 0
    assert wrong(good) == 2
