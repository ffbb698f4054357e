"""Observation files: complete or absent, integers only, samples bound by digest; manifests and configurations.

Turns red when: a float or a boolean gets into an observation, a sample file differs from its digest, a half-written
file appears, or a manifest with another text keeps its digest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from remote_dspark.contract import ComputeKind, ObservationKind
from remote_dspark.observe import HoldProof, ObserveError, Recorder, output_folder, source_digest, write_atomically
from remote_dspark.qualify.arm_config import ArmConfig, add_options, read_options
from remote_dspark.qualify.load import RequestRecord
from remote_dspark.qualify.manifest import load_manifest, make_manifest
from remote_dspark.qualify.worker_client import WorkerPaths
from remote_dspark.qualify.worker_config import load_probe_config

ROOT = Path(__file__).resolve().parents[2]


def new_recorder(folder: Path) -> Recorder:
    return Recorder(
        ObservationKind.ARM, "p", argv=["--x"], compute=ComputeKind.CPU, folder=folder, hold=HoldProof("h", 3)
    )


def test_an_observation_says_what_was_recorded_and_nothing_else(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path)
    assert recorder.check("same", expected=[1, 2], found=[1, 2])
    assert not recorder.check("differs", expected="a", found="b" * 500)
    recorder.check_not_run("later", expected="a GPU", reason="none here")
    recorder.value("n", 5)
    recorder.label("l", "x" * 500)
    recorder.samples("s.jsonl", "ns", [3, 1, 2])
    recorder.samples("o.jsonl", "mixed", [{"b": 1, "a": 2}])
    recorder.write()
    document = json.loads((tmp_path / "observation.json").read_text())
    assert [check["ok"] for check in document["checks"]] == [True, False, None]
    assert max(len(check["found"]) for check in document["checks"]) == len(document["labels"]["l"]) == 200
    assert (document["hold_id"], document["hold_epoch"], document["values"]) == ("h", 3, {"n": 5})
    assert document["source_sha256"] == source_digest()
    for sample in document["samples"]:
        data = (tmp_path / sample["name"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (sample["size_bytes"], sample["sha256"])
        assert data.count(b"\n") == sample["num_samples"]
    assert (tmp_path / "s.jsonl").read_text() == "3\n1\n2\n"
    assert (tmp_path / "o.jsonl").read_text() == '{"a":2,"b":1}\n'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o.jsonl", "observation.json", "s.jsonl"]


@pytest.mark.parametrize("bad", [1.5, True, "1", 2**53, None])
def test_only_integers_that_a_receipt_can_hold_are_recorded(tmp_path: Path, bad: object) -> None:
    recorder = new_recorder(tmp_path)
    with pytest.raises(ObserveError, match="integer"):
        recorder.value("n", bad)  # type: ignore[arg-type]
    for row in (bad, {"a": bad}):
        with pytest.raises((ObserveError, AttributeError)):
            recorder.samples("s.jsonl", "ns", [row])  # type: ignore[list-item]
    assert list(tmp_path.iterdir()) == []


def test_names_are_taken_once_and_stay_in_the_folder(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path)
    recorder.value("n", 1)
    with pytest.raises(ObserveError, match="twice"):
        recorder.value("n", 1)
    for name in ("../s", "S.jsonl", "a/b", ""):
        with pytest.raises(ObserveError, match="sample file"):
            recorder.samples(name, "ns", [])


def test_the_output_folder_is_given_or_refused(tmp_path: Path) -> None:
    assert output_folder(None, {"DSPARK_OUTPUT_DIR": str(tmp_path / "a")}) == tmp_path / "a"
    assert output_folder(str(tmp_path / "b"), {"DSPARK_OUTPUT_DIR": str(tmp_path / "a")}) == tmp_path / "b"
    with pytest.raises(ObserveError, match="DSPARK_OUTPUT_DIR"):
        output_folder(None, {})


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_atomically(path, b"first")
    (tmp_path / "locked").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_atomically(tmp_path / "locked", b"x")
    write_atomically(path, b"second")
    assert path.read_bytes() == b"second"


def test_the_source_digest_follows_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x")
    (tmp_path / "ignored.txt").write_text("x")
    first = source_digest(tmp_path)
    (tmp_path / "ignored.txt").write_text("y")
    assert source_digest(tmp_path) == first
    (tmp_path / "a.py").write_text("y")
    second = source_digest(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({first, second, source_digest(tmp_path)}) == 3
    with pytest.raises(ObserveError, match="found none"):
        source_digest(tmp_path / "empty")


def test_the_shipped_manifest_is_what_its_maker_makes() -> None:
    manifest = load_manifest(ROOT / "examples" / "load" / "manifest.json")
    data = make_manifest([entry.prompt for entry in manifest.entries], manifest.source)
    assert hashlib.sha256(data).hexdigest() == manifest.sha256
    assert len({entry.seed for entry in manifest.entries}) == len(manifest.entries) >= 32
    assert "licence" in manifest.source
    # Beyond the end the prompts come again, under other seeds.
    again = manifest.entry(len(manifest.entries))
    assert again.prompt == manifest.entries[0].prompt
    assert again.seed != manifest.entries[0].seed
    assert [manifest.with_seeds((8, 9)).entry(index).seed for index in range(3)] == [8, 9, 8]
    assert manifest.with_seeds(()) == manifest


@pytest.mark.parametrize(
    "document",
    [{}, {"schema": "x", "source": "s", "requests": []}, [], {"schema": "s", "source": "s", "requests": [1]}],
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, document: object) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ObserveError, match=r"m\.json"):
        load_manifest(path)


def test_gaps_of_a_chunk_sum_to_its_gap_exactly() -> None:
    record = RequestRecord(0, 0, 10, 121, tuple(range(8)), ((10, 2), (21, 3), (21, 1), (121, 2)), 4, 1)
    gaps = record.inter_token_ns()
    assert gaps == [4, 4, 3, 0, 50, 50]


def parse_arm(*arguments: str) -> ArmConfig:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return read_options(parser.parse_args(arguments))


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ('url = "http://a"', "url"),
        ('url = "https://a:1"', "url"),
        ('url = "http://a:b"', "url"),
        ('mode = "on"', "mode"),
        ("concurrency = 0", "concurrency"),
        ("temperature = 1.0", "temperature"),
        ('temperature = "hot"', "temperature"),
        ("speed = 1", "speed"),
        ("manifest = 3", "manifest"),
        ("seeds = [-1]", "seeds"),
    ],
)
def test_a_wrong_field_of_an_arm_is_named(tmp_path: Path, line: str, field: str) -> None:
    lines = {"url": 'url = "http://a:80"', "mode": 'mode = "greedy-v1"', "manifest": 'manifest = "m.json"'}
    path = tmp_path / "arm.toml"
    path.write_text("\n".join(lines.values()))
    assert parse_arm("--config", str(path)).manifest == tmp_path / "m.json"
    lines[field] = line
    path.write_text("\n".join(lines.values()))
    with pytest.raises(ObserveError, match=f"field {field}"):
        parse_arm("--config", str(path))


def test_options_override_the_file_and_the_digest_is_of_the_work(tmp_path: Path) -> None:
    path = tmp_path / "arm.toml"
    path.write_text('url = "http://a:80"\nmode = "greedy-v1"\nmanifest = "m.json"\nrequests = 3\n')
    first = parse_arm("--config", str(path))
    second = parse_arm("--config", str(path), "--mode", "sampled-top32-v2", "--url", "http://b:81")
    third = parse_arm("--config", str(path), "--requests", "4", "--seeds", "5,6")
    assert (second.host_port, third.requests, third.seeds) == (("b", 81), 4, (5, 6))
    assert first.settings_sha256("m") == second.settings_sha256("m") != third.settings_sha256("m")
    assert first.settings_sha256("m") != first.settings_sha256("n")
    for missing in ("url", "mode", "manifest"):
        options = {"url": "http://a:1", "mode": "greedy-v1", "manifest": "m"}
        del options[missing]
        with pytest.raises(ObserveError, match=f"field {missing}"):
            parse_arm(*(word for name, value in options.items() for word in (f"--{name}", value)))
    with pytest.raises(ObserveError, match="field seeds"):
        parse_arm("--url", "http://a:1", "--mode", "greedy-v1", "--manifest", "m", "--seeds", "1,x")


@pytest.mark.parametrize(
    ("line", "field"),
    [("depths = [3]", "depths"), ("batches = [5]", "batches"), ("context = 0", "context"), ("x = 1", "x")],
)
def test_a_wrong_field_of_a_worker_probe_is_named(tmp_path: Path, line: str, field: str) -> None:
    path = tmp_path / "ww.toml"
    good = 'address = "a:1"\nmode = "greedy-v1"\ndrafter = "d"\ntarget = "t"\ntokenizer = "k"\n'
    path.write_text(good)
    source = load_probe_config(path).source
    assert isinstance(source, WorkerPaths)
    assert source.drafter == tmp_path / "d"
    path.write_text(good + line)
    with pytest.raises(ObserveError, match=f"field {field}"):
        load_probe_config(path)


def test_programs_and_server_start_without_torch() -> None:
    names = ["arm", "pair", "whole_worker", "frozen_replay", "manifest", "hold"]
    modules = [f"remote_dspark.qualify.{name}" for name in names] + ["remote_dspark.target.server"]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
