"""Measure a whole worker: ``python -m remote_dspark.qualify.whole_worker --config whole_worker.toml``.

From the moment a block's request is handed to the wire until its reply is validated and complete, by batch, depth and
kind of row, against a running worker, as a verifier sees it; with the worker's status address also its parts, which
the worker measures itself. Beside the times: every sampled token is the oracle's draw from the q that came with it, and
a request's proposal does not depend on its neighbours. With ``identity_positions`` also what it proposes, as digests
that another worker's are compared with (`worker_identity`). ``--physical`` refuses all but a pair on two GPUs. Raw
samples in ns; exit 0 means "observed".
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from remote_dspark.contract import ComputeKind, DraftMode, ObservationKind
from remote_dspark.observe import HoldProof, ObserveError, Recorder, output_folder
from remote_dspark.qualify.hold import prove_hold
from remote_dspark.qualify.pair_locks import require_locked
from remote_dspark.qualify.worker_client import ProbeSeat, WorkerProbe, build_hello, compute_of, read_status
from remote_dspark.qualify.worker_config import ProbeConfig, load_probe_config
from remote_dspark.qualify.worker_draws import count_wrong_draws, probe_seat
from remote_dspark.qualify.worker_identity import CONTEXT, IdentityInputs, record_identity
from remote_dspark.wire.errors import ProtocolError
from remote_dspark.wire.messages import PPM, Hello, Reply
from remote_dspark.wire.reply import reply_row

PROGRAM: Final = "remote_dspark.qualify.whole_worker"
KINDS: Final = {DraftMode.OFF: ("greedy",), DraftMode.ON: ("sampled", "greedy", "mixed")}
RANK: Final = re.compile(r"rank\.\d+\.uuid")
EXIT_REFUSED: Final = 2
EXIT_INCOMPLETE: Final = 3


def main(argv: list[str]) -> int:
    """Parse, prove the hold, measure, write the observation."""
    parser = argparse.ArgumentParser(prog=PROGRAM)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--output", help="folder of the observation; DSPARK_OUTPUT_DIR inside a hold")
    parser.add_argument("--require-hold", action="store_true", help="refuse to run outside an open hold")
    parser.add_argument("--physical", action="store_true", help="refuse all but a worker on two GPUs")
    args = parser.parse_args(argv)
    try:
        config = load_probe_config(args.config)
        folder = output_folder(args.output, os.environ)
        hold = prove_hold(os.environ, required=args.require_hold)
        hello = build_hello(config.source, config.mode, config.q_semantics, max(config.depths), max(config.batches))
        recorder = Recorder(
            ObservationKind.WHOLE_WORKER, PROGRAM, argv=argv, compute=ComputeKind.CPU, folder=folder, hold=hold
        )
        worker = {} if config.status is None else read_status(config.status, "/identity", config.timeout_s)
        if args.physical:
            require_physical(worker, hold)
        return _observe(config, hello, worker, recorder)
    except ObserveError as cause:
        sys.stderr.write(f"whole_worker: {cause}\n")
        return EXIT_REFUSED


def require_physical(identity: Mapping[str, Any], hold: HoldProof | None) -> None:
    """Refuses a worker that is not a pair on two GPUs, both locked by the hold.

    Args:
        identity: The worker's ``/identity``.
        hold: Proven, or None outside one.

    Raises:
        ObserveError: Another worker, or a GPU that is not locked.
    """
    uuids = sorted({str(value) for name, value in identity.items() if RANK.fullmatch(name)})
    found = identity.get("topology", "solo")
    if found != "physical" or compute_of(identity) is not ComputeKind.CUDA or len(uuids) < 2:
        raise ObserveError(f"--physical: expected a worker on two CUDA devices, found {found} on {uuids or 'no GPU'}")
    if hold is not None:
        require_locked(uuids, hold)


def _observe(config: ProbeConfig, hello: Hello, worker: Mapping[str, Any], recorder: Recorder) -> int:
    recorder.label("mode", config.mode.value)
    recorder.label("config_sha256", config.sha256)
    recorder.label("draft_sha256", hello.draft_sha256.hex())
    recorder.label("target_sha256", hello.target_sha256.hex())
    recorder.label("q_semantics", config.q_semantics)
    if worker:
        recorder.compute = compute_of(worker)
        for name in ("device", "dtype", "weights", "source_sha256", "config_sha256"):
            recorder.label(f"worker.{name}", str(worker.get(name, "")))
        # a pair's worker says which GPU each rank has; gates look for these
        for name in sorted(name for name in worker if name == "topology" or RANK.fullmatch(name)):
            recorder.label(name, str(worker[name]))
    for name in ("context", "repetitions", "warmup", "seed"):
        recorder.value(f"settings.{name}", getattr(config, name))
    probe = WorkerProbe(config.address, hello, config.timeout_s)
    try:
        _measure(config, probe, recorder)
        _check_neighbours(config, hello, probe, recorder)
        if config.identity_positions:
            record_identity(_identity_inputs(config), probe, recorder, config.identity_expected)
    except (ProtocolError, ObserveError, OSError) as cause:
        sys.stderr.write(f"whole_worker: {cause}\n")
        recorder.check("worker.complete", expected="every reply validated", found=cause, ok=False)
        return EXIT_INCOMPLETE
    else:
        recorder.check("worker.complete", expected="every reply validated", found="every reply validated")
        return 0
    finally:
        probe.close()
        recorder.write()


def _identity_inputs(config: ProbeConfig) -> IdentityInputs:
    return IdentityInputs(
        positions=config.identity_positions,
        kinds=KINDS[config.mode],
        batches=config.batches,
        depth=max(config.depths),
        rounds=config.identity_rounds,
        context=min(config.context, CONTEXT),
        seed=config.seed,
    )


def _measure(config: ProbeConfig, probe: WorkerProbe, recorder: Recorder) -> None:
    generation = 0
    for kind in KINDS[config.mode]:
        for depth in config.depths:
            for batch in config.batches:
                generation += 1
                seats = [_seat(config, slot, generation, kind) for slot in range(batch)]
                for seat in seats:
                    probe.open(seat, config.context, depth)
                samples, wrong = _rounds(config, probe, seats, depth)
                probe.close_seats(seats)
                name = f"{kind}.b{batch}.d{depth}"
                _record_times(recorder, f"step.{name}", samples)
                if config.status is not None:
                    _record_parts(config, recorder, name, samples)
                recorder.check(f"step.{name}.draws", expected=0, found=wrong)


def _record_times(recorder: Recorder, name: str, samples: list[int]) -> None:
    """Raw samples, median, 95th and 99th percentile, worst."""
    recorder.samples(f"{name}.jsonl", "ns", samples)
    for label, percent in (("median", 50), ("p95", 95), ("p99", 99)):
        recorder.value(f"{name}.{label}_ns", int(np.percentile(samples, percent, method="higher")))
    recorder.value(f"{name}.max_ns", max(samples))


def _record_parts(config: ProbeConfig, recorder: Recorder, name: str, samples: list[int]) -> None:
    """The worker's own account of the same steps: nobody else asks it for any, so they are its last ones."""
    document = read_status(str(config.status), "/timings", config.timeout_s)
    steps = document.get("steps", [])[-len(samples) :]
    recorder.samples(f"parts.{name}.jsonl", "mixed", steps)
    if not recorder.check(f"parts.{name}.steps", expected=len(samples), found=len(steps)):
        return
    for part in sorted({key for step in steps for key in step if key.endswith("_ns")}):
        recorder.value(f"parts.{name}.{part[:-3]}.median_ns", int(np.median([step[part] for step in steps])))
    host = [
        whole - step["backbone_ns"] - step["heads_ns"] - step["copy_ns"]
        for whole, step in zip(samples, steps, strict=True)
    ]
    recorder.value(f"parts.{name}.host.median_ns", int(np.median(host)))
    positions = sum(step["num_requests"] * step["depth"] for step in steps)
    recorder.value(f"parts.{name}.cached_ppm", sum(step["num_cached"] for step in steps) * PPM // max(positions, 1))


def _rounds(config: ProbeConfig, probe: WorkerProbe, seats: list[ProbeSeat], depth: int) -> tuple[list[int], int]:
    """Times of the measured rounds, and how many tokens were not the draw from their own q."""
    samples: list[int] = []
    wrong = 0
    for repetition in range(config.warmup + config.repetitions):
        start_ns = time.monotonic_ns()
        reply = probe.step(seats, depth)
        elapsed_ns = time.monotonic_ns() - start_ns
        if repetition >= config.warmup:
            samples.append(elapsed_ns)
        wrong += count_wrong_draws(reply, seats)
        probe.reject_all(seats)
    return samples, wrong


def _check_neighbours(config: ProbeConfig, hello: Hello, probe: WorkerProbe, recorder: Recorder) -> None:
    """The same request alone, in its own session, and last in a full batch: the same proposal, bit for bit."""
    batch, depth, kind = max(config.batches), max(config.depths), KINDS[config.mode][0]
    generation = 1 << 32
    together = [_seat(config, slot, generation, kind) for slot in range(batch)]
    for seat in together:
        probe.open(seat, config.context, depth)
    expected = probe.step(together, depth)
    probe.reject_all(together)
    probe.close_seats(together)
    alone = _seat(config, 0, generation, kind, identity=batch - 1)
    other = WorkerProbe(config.address, hello, config.timeout_s)
    try:
        other.open(alone, config.context, depth)
        found = other.step([alone], depth)
        # a session's end frees its seats too, but some time after this has returned
        other.close_seats([alone])
    finally:
        other.close()
    recorder.check("neighbours.same_proposal", expected=_proposal(expected, batch - 1), found=_proposal(found, 0))


def _proposal(reply: Reply, request: int) -> str:
    """Digest of one request's tokens and rows."""
    content = hashlib.sha256()
    for position in range(reply.depth):
        row = reply_row(reply, request, position)
        content.update(row.token.to_bytes(8, "little") + row.ids.tobytes() + row.tickets.tobytes())
    return content.hexdigest()


def _seat(config: ProbeConfig, slot: int, generation: int, kind: str, identity: int | None = None) -> ProbeSeat:
    return probe_seat(config.seed, slot, generation, kind, number=slot if identity is None else identity)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
