"""Measure one arm on a running target server: ``python -m remote_dspark.qualify.arm --url URL ...``.

In order: identity of the running process, warm-up, greedy check, immutable baseline of the counters, headline run,
profiled run, final snapshot, identity again. Everything is recorded raw; whether the arm counts is decided elsewhere,
from these records. Exit 0: all phases ran. Exit 3: a phase failed; what was seen until then is written all the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

from remote_dspark.contract import ComputeKind, DraftMode, Metric, ObservationKind, ServerState
from remote_dspark.observe import ObserveError, Recorder, output_folder
from remote_dspark.qualify.arm_config import ArmConfig, add_options, read_options
from remote_dspark.qualify.hold import prove_hold
from remote_dspark.qualify.load import Client, LoadError, LoadRun, Sampling, run_closed_loop
from remote_dspark.qualify.manifest import Manifest, load_manifest
from remote_dspark.target.metrics import parse_metrics

PROGRAM: Final = "remote_dspark.qualify.arm"
PHASES: Final = ("warmup", "greedy", "headline", "profiled")
SNAPSHOTS: Final = ("baseline", "headline", "profiled", "final")
WARMUP_OFFSET: Final = 1_000_000
"""Warm-up requests are numbered from here: the same prompts under seeds that no measured request uses."""

POLL_S: Final = 0.1
EXIT_REFUSED: Final = 2
EXIT_INCOMPLETE: Final = 3
_IDENTITY_LABELS: Final = (
    "mode",
    "config_sha256",
    "target_sha256",
    "draft_sha256",
    "tokenizer_sha256",
    "source_sha256",
    "boot_id",
    "started_utc",
    "model",
    "q_semantics",
    "device",
    "dtype",
)
_SETTINGS: Final = (
    "concurrency",
    "warm_up_requests",
    "greedy_requests",
    "requests",
    "profiled_requests",
    "max_tokens",
)
_IDENTITY_VALUES: Final = ("pid", "start_ticks", "depth", "draft_temperature_ppm", "support", "threads")


class Arm:
    """One arm in progress; each phase adds to the recorder."""

    def __init__(self, config: ArmConfig, manifest: Manifest, recorder: Recorder) -> None:
        self._config = config
        self._manifest = manifest
        self._recorder = recorder
        self._client = Client(*config.host_port, config.request_timeout_s)
        self._sampling = Sampling(config.max_tokens, config.temperature)
        self._runs: dict[str, LoadRun] = {}
        self._counters: dict[str, dict[str, int]] = {}

    def run(self) -> None:
        """All phases.

        Raises:
            LoadError: The server did not become READY, refused, or was cut off; earlier records stay.
        """
        config = self._config
        self._await_ready()
        before = self._identity()
        self._record_identity(before)
        first = WARMUP_OFFSET * len(self._manifest.entries)
        self._phase("warmup", range(first, first + config.warm_up_requests), self._sampling, config.concurrency)
        self._greedy_check()
        self._snapshot("baseline")
        self._phase("headline", range(config.requests), self._sampling, config.concurrency)
        self._snapshot("headline")
        start = config.requests
        self._phase("profiled", range(start, start + config.profiled_requests), self._sampling, config.concurrency)
        self._snapshot("profiled")
        self._snapshot("final")
        after = self._identity()
        self._recorder.check("server.same_process", expected=_process(before), found=_process(after))
        self._record_mechanism()

    def write_samples(self) -> None:
        """Raw samples of the phases that ran."""
        rows = [_row(PHASES.index(name), record) for name, run in self._runs.items() for record in run.records]
        self._recorder.samples("requests.jsonl", "mixed", rows)
        headline = self._runs.get("headline")
        gaps = [gap for record in headline.records for gap in record.inter_token_ns()] if headline else []
        self._recorder.samples("inter_token.jsonl", "ns", gaps)
        for index, name in enumerate(PHASES):
            self._recorder.label(f"requests.phase.{index}", name)

    def _await_ready(self) -> None:
        deadline = time.monotonic() + self._config.ready_timeout_s
        while True:
            try:
                status, body = self._client.get("/health")
                state = json.loads(body)["state"] if body.startswith(b"{") else body.decode(errors="replace")
            except LoadError as cause:
                status, state = 0, str(cause)
            if status == 200:
                return
            if time.monotonic() > deadline:
                bound = self._config.ready_timeout_s
                raise LoadError(f"server: expected {ServerState.READY} within {bound} s, found {state}")
            time.sleep(POLL_S)

    def _identity(self) -> dict[str, Any]:
        status, body = self._client.get("/identity")
        document = json.loads(body) if status == 200 else {}
        if not isinstance(document, dict) or "mode" not in document:
            raise LoadError(f"GET /identity: expected the running server's identity, found {status} {body[:100]!r}")
        return document

    def _record_identity(self, identity: Mapping[str, Any]) -> None:
        for name in _IDENTITY_LABELS:
            self._recorder.label("mode" if name == "mode" else f"server.{name}", str(identity.get(name, "")))
        for name in _IDENTITY_VALUES:
            self._recorder.value(f"server.{name}", int(identity.get(name, -1)))
        # The numbers are computed where the server runs; a GPU's facts are those of this host, which is the same one.
        is_cpu = str(identity.get("device", "cpu")) == "cpu"
        self._recorder.compute = ComputeKind.CPU if is_cpu else ComputeKind.CUDA
        self._recorder.check("server.mode", expected=self._config.mode.value, found=identity["mode"])

    def _phase(self, name: str, indices: range, sampling: Sampling, concurrency: int) -> LoadRun:
        run = run_closed_loop(self._client, self._manifest, indices, sampling, concurrency)
        self._runs[name] = run
        expected = len(indices) * sampling.max_tokens
        self._recorder.check(f"{name}.tokens", expected=expected, found=run.num_tokens)
        self._recorder.value(f"{name}.num_requests", len(run.records))
        self._recorder.value(f"{name}.num_tokens", run.num_tokens)
        self._recorder.value(f"{name}.elapsed_ns", run.end_ns - run.start_ns)
        return run

    def _greedy_check(self) -> None:
        """Temperature 0, one at a time: the same tokens whatever the drafts are, so two arms must agree."""
        sampling = Sampling(self._config.max_tokens, "0")
        run = self._phase("greedy", range(self._config.greedy_requests), sampling, 1)
        tokens = json.dumps([list(record.token_ids) for record in run.records], separators=(",", ":"))
        self._recorder.label("greedy_sha256", hashlib.sha256(tokens.encode()).hexdigest())

    def _snapshot(self, name: str) -> None:
        status, body = self._client.get("/metrics")
        if status != 200:
            raise LoadError(f"GET /metrics: expected 200, found {status}")
        self._recorder.value(f"{name}.at_ns", time.monotonic_ns())
        health_status, health = self._client.get("/health")
        self._recorder.label(f"{name}.health", str(json.loads(health)["state"]) if health_status else "")
        self._counters[name] = parse_metrics(body.decode())
        for metric, count in self._counters[name].items():
            self._recorder.value(f"{name}.{metric}", count)
        if name != SNAPSHOTS[0]:
            ours = sum(len(self._runs[phase].records) for phase in ("headline", "profiled") if phase in self._runs)
            foreign = self._growth(name, Metric.REQUESTS) - ours
            self._recorder.value(f"{name}.foreign_requests", foreign)
            self._recorder.check(f"{name}.foreign_requests", expected=0, found=foreign)

    def _growth(self, snapshot: str, metric: Metric) -> int:
        return self._counters[snapshot][metric] - self._counters[SNAPSHOTS[0]][metric]

    def _record_mechanism(self) -> None:
        """What the switch must show, and what must stay flat, as comparisons for a person to read."""
        for name in SNAPSHOTS[1:]:
            for metric in (Metric.FAILED_ROUNDS, Metric.PREFIX_CACHE_HITS, Metric.ZERO_RESIDUAL):
                self._recorder.check(f"{name}.growth.{metric}", expected=0, found=self._growth(name, metric))
        sampled = self._growth("headline", Metric.SAMPLED_ROUNDS)
        if self._config.mode is DraftMode.ON:
            self._recorder.check("headline.sampled_rounds", expected="> 0", found=sampled, ok=sampled > 0)
        else:
            sampled = self._counters["final"][Metric.SAMPLED_ROUNDS]
            self._recorder.check("final.sampled_rounds", expected=0, found=sampled)


def main(argv: list[str]) -> int:
    """Parse, prove the hold, run, write the observation."""
    parser = argparse.ArgumentParser(prog=PROGRAM)
    add_options(parser)
    parser.add_argument("--output", help="folder of the observation; DSPARK_OUTPUT_DIR inside a hold")
    parser.add_argument("--require-hold", action="store_true", help="refuse to run outside an open hold")
    args = parser.parse_args(argv)
    try:
        config = read_options(args)
        manifest = load_manifest(config.manifest).with_seeds(config.seeds)
        folder = output_folder(args.output, os.environ)
        hold = prove_hold(os.environ, required=args.require_hold)
        recorder = Recorder(ObservationKind.ARM, PROGRAM, argv=argv, compute=ComputeKind.CPU, folder=folder, hold=hold)
        return _observe(Arm(config, manifest, recorder), config, manifest, recorder)
    except ObserveError as cause:
        sys.stderr.write(f"arm: {cause}\n")
        return EXIT_REFUSED


def _observe(arm: Arm, config: ArmConfig, manifest: Manifest, recorder: Recorder) -> int:
    recorder.label("manifest_sha256", manifest.sha256)
    recorder.label("settings_sha256", config.settings_sha256(manifest.sha256))
    recorder.label("settings.temperature", config.temperature)
    for name in _SETTINGS:
        recorder.value(f"settings.{name}", getattr(config, name))
    try:
        arm.run()
    except LoadError as cause:
        sys.stderr.write(f"arm: {cause}\n")
        recorder.check("phases.complete", expected="all phases", found=str(cause), ok=False)
        return EXIT_INCOMPLETE
    else:
        recorder.check("phases.complete", expected="all phases", found="all phases")
        return 0
    finally:
        arm.write_samples()
        recorder.write()


def _process(identity: Mapping[str, Any]) -> tuple[object, ...]:
    return tuple(identity.get(name) for name in ("boot_id", "pid", "start_ticks", "config_sha256"))


def _row(phase: int, record: Any) -> dict[str, int]:
    return {
        "phase": phase,
        "index": record.index,
        "start_ns": record.start_ns,
        "first_token_ns": record.first_token_ns,
        "end_ns": record.end_ns,
        "num_tokens": len(record.token_ids),
        "num_rounds": record.num_rounds,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
