"""Qualify a drafter pair: ranks with a vocabulary shard each, against the oracle.

``python -m remote_dspark.qualify.pair [--output DIR] [--require-hold]`` emulates the pair on a CPU: two processes over
shared memory run the protocol of the physical pair (packed candidates, epochs, bounded waits, acknowledgement, sticky
errors) with the reference arithmetic. What it cannot show: weak-memory ordering, speed, the GPU kernels.
``--physical`` runs the kernels on two CUDA devices instead (`pair_physical`); a hold must have locked both.
Exit 0 means "observed", never "passed".
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from remote_dspark.contract import Q_FLOOR_FIRST, Q_STANDARD, ComputeKind, ObservationKind
from remote_dspark.observe import HoldProof, ObserveError, Recorder, output_folder
from remote_dspark.oracle.philox import derive_key, proposal_draw
from remote_dspark.qualify.hold import prove_hold
from remote_dspark.qualify.pair_checks import compare_block, same_outputs
from remote_dspark.qualify.pair_inputs import (
    BOUNDARY_DRAWS,
    BOUNDARY_GENERATION,
    BOUNDARY_POSITION,
    BOUNDARY_SEED,
    BlockInputs,
    boundary_block,
    edge_block,
    from_bf16_bits,
    random_block,
    to_bf16_bits,
)
from remote_dspark.qualify.pair_memory import PairShape, Sticky
from remote_dspark.qualify.pair_processes import EmulatedPair, LoneRank

PROGRAM: Final = "remote_dspark.qualify.pair"
SHAPE: Final = PairShape(num_requests=4, depth=5, vocab_size=515)
"""An odd vocabulary, so that the shards are unequal."""

LONE_TIMEOUT_MS: Final = 300
LONE_SLACK_NS: Final = 2_000_000_000
"""For a host that schedules the waiting process late; the bound proves an end, not a speed."""

EXIT_REFUSED: Final = 2


def main(argv: list[str]) -> int:
    """Parse, prove the hold, run, write the observation."""
    parser = argparse.ArgumentParser(prog=PROGRAM)
    parser.add_argument("--output", help="folder of the observation; DSPARK_OUTPUT_DIR inside a hold")
    parser.add_argument("--require-hold", action="store_true", help="refuse to run outside an open hold")
    parser.add_argument("--physical", action="store_true", help="the kernels, on two CUDA devices")
    parser.add_argument("--devices", default="0,1", help="CUDA devices of rank 0 and rank 1")
    parser.add_argument("--vocab-size", type=int, default=129_280, help="of the physical pair")
    parser.add_argument("--bound-ns", type=int, default=50_000_000, help="longest wait of a physical rank")
    parser.add_argument("--ranks", type=int, default=2, help="of the emulated pair; the kernels exchange between two")
    parser.add_argument("--seed", type=int, default=20)
    args = parser.parse_args(argv)
    try:
        run(args, argv, os.environ)
    except ObserveError as cause:
        sys.stderr.write(f"pair: {cause}\n")
        return EXIT_REFUSED
    return 0


def run(args: argparse.Namespace, argv: list[str], environ: Mapping[str, str]) -> None:
    """One whole qualification.

    Raises:
        ObserveError: Refused, or a rank did not start.
    """
    folder = output_folder(args.output, environ)
    hold = prove_hold(environ, required=args.require_hold)
    if args.physical:
        _run_physical(args, argv, folder, hold)
        return
    recorder = Recorder(ObservationKind.PAIR, PROGRAM, argv=argv, compute=ComputeKind.CPU, folder=folder, hold=hold)
    rng = np.random.default_rng(args.seed)
    shape = shape_of(args.ranks)
    with tempfile.TemporaryDirectory(prefix="dspark-pair-") as name:
        lone = LoneRank(Path(name) / "lone", shape, LONE_TIMEOUT_MS)
        with EmulatedPair(Path(name) / "pair", shape, rng) as pair:
            _check_numerics(recorder, pair, rng)
            _check_replay(recorder, pair, rng)
            _check_bad_logits(recorder, pair, rng)
            _check_exhaustion(recorder, pair, rng)
        _check_timeout(recorder, lone)
        recorder.check("teardown.exit_codes", expected=[3] * args.ranks, found=pair.exit_codes)
    recorder.check("teardown.memory", expected=False, found=Path(name).exists())
    recorder.samples("launch.jsonl", "ns", pair.elapsed_ns)
    recorder.value("settings.seed", args.seed)
    recorder.value("settings.num_ranks", args.ranks)
    recorder.value("settings.num_requests", SHAPE.num_requests)
    recorder.value("settings.depth", SHAPE.depth)
    recorder.value("settings.vocab_size", SHAPE.vocab_size)
    recorder.value("num_launches", len(pair.elapsed_ns))
    recorder.value("num_rows", len(pair.elapsed_ns) * SHAPE.num_requests * SHAPE.depth)
    recorder.write()


def shape_of(num_ranks: int) -> PairShape:
    """The emulated pair with this number of ranks.

    Raises:
        ObserveError: Too few or too many.
    """
    try:
        return replace(SHAPE, num_ranks=num_ranks)
    except ValueError as cause:
        raise ObserveError(f"--ranks: {cause}") from cause


def _run_physical(args: argparse.Namespace, argv: list[str], folder: Path, hold: HoldProof | None) -> None:
    # Triton decides at import whether it compiles or interprets: the emulation must not load it.
    from remote_dspark.qualify.pair_physical import observe

    if not re.fullmatch(r"\d+,\d+", args.devices) or args.ranks != 2:
        raise ObserveError(
            f"--devices: expected two numbers like 0,1, which is what the kernels exchange between, found "
            f"{args.devices!r} for {args.ranks} ranks; the emulated pair takes more"
        )
    devices = [int(device) for device in args.devices.split(",")]
    recorder = Recorder(ObservationKind.PAIR, PROGRAM, argv=argv, compute=ComputeKind.CUDA, folder=folder, hold=hold)
    observe(recorder, devices, args.vocab_size, args.bound_ns, hold)
    recorder.write()


def _judge(recorder: Recorder, name: str, pair: EmulatedPair, inputs: BlockInputs, semantics: str) -> None:
    """One launch: no sticky error, equal to the oracle, and both ranks identical."""
    sticky = pair.launch(inputs, semantics)
    num_ranks = pair.memory.shape.num_ranks
    outputs = [pair.outputs(rank) for rank in range(num_ranks)]
    recorder.check(f"{name}.sticky", expected=[0] * num_ranks, found=sticky)
    recorder.check(f"{name}.oracle", expected=[], found=compare_block(inputs, pair.bias, outputs[0], semantics))
    others = [difference for other in outputs[1:] for difference in same_outputs(outputs[0], other)]
    recorder.check(f"{name}.ranks_identical", expected=[], found=others)


def _check_numerics(recorder: Recorder, pair: EmulatedPair, rng: np.random.Generator) -> None:
    sizes = SHAPE.num_requests, SHAPE.depth, SHAPE.vocab_size
    for semantics in (Q_FLOOR_FIRST, Q_STANDARD):
        for index in range(3):
            _judge(recorder, f"exact.{semantics}.{index}", pair, random_block(rng, *sizes), semantics)
        _judge(recorder, f"edge.{semantics}", pair, edge_block(rng, *sizes), semantics)
    mixed = random_block(rng, *sizes)
    mixed.greedy[:] = [1, 0, 1, 0]
    _judge(recorder, "mixed_t0", pair, mixed, Q_FLOOR_FIRST)
    key = derive_key(BOUNDARY_SEED, BOUNDARY_GENERATION)
    found = {number: proposal_draw(key, number, BOUNDARY_POSITION) for number in BOUNDARY_DRAWS}
    recorder.check("boundary.draws", expected=BOUNDARY_DRAWS, found=found)
    rounds = list(BOUNDARY_DRAWS)
    for start in range(0, len(rounds), SHAPE.num_requests):
        block = boundary_block(rng, rounds[start : start + SHAPE.num_requests], *sizes[1:])
        # A bias would break the ties that put the boundaries where the draws are.
        block.previous[:] = pair.neutral_token
        _judge(recorder, f"boundary.{start // SHAPE.num_requests}", pair, block, Q_FLOOR_FIRST)


def _check_replay(recorder: Recorder, pair: EmulatedPair, rng: np.random.Generator) -> None:
    """The same buffers, changed inputs, changed back: every launch answers its own inputs and nothing older."""
    sizes = SHAPE.num_requests, SHAPE.depth, SHAPE.vocab_size
    first, second = random_block(rng, *sizes), random_block(rng, *sizes)
    _judge(recorder, "replay.first", pair, first, Q_FLOOR_FIRST)
    before = pair.outputs(0)
    _judge(recorder, "replay.changed", pair, second, Q_FLOOR_FIRST)
    changed = len(same_outputs(before, pair.outputs(0)))
    recorder.check("replay.outputs_changed", expected="at least ids, tickets and token", found=changed, ok=changed >= 3)
    _judge(recorder, "replay.back", pair, first, Q_FLOOR_FIRST)
    recorder.check("replay.same_again", expected=[], found=same_outputs(before, pair.outputs(0)))


def _check_bad_logits(recorder: Recorder, pair: EmulatedPair, rng: np.random.Generator) -> None:
    """A bad column in either shard refuses its row on both ranks, for the rest of the block, and no other row."""
    sizes = SHAPE.num_requests, SHAPE.depth, SHAPE.vocab_size
    block = random_block(rng, *sizes)
    for request, (column, value) in enumerate([(0, np.nan), (SHAPE.vocab_size - 1, np.inf)]):
        rows = from_bf16_bits(block.base[request, 1])
        rows[column] = value
        block.base[request, 1] = to_bf16_bits(rows)
    block.base[2, 2] = to_bf16_bits(np.full(SHAPE.vocab_size, -np.inf, dtype=np.float32))
    _judge(recorder, "bad_logits", pair, block, Q_FLOOR_FIRST)
    flagged = (pair.outputs(pair.memory.shape.num_ranks - 1).error != 0).tolist()
    expected = [[position >= start for position in range(SHAPE.depth)] for start in (1, 1, 2, SHAPE.depth)]
    recorder.check("bad_logits.rows", expected=expected, found=flagged)


def _check_exhaustion(recorder: Recorder, pair: EmulatedPair, rng: np.random.Generator) -> None:
    """The last epoch ends both ranks in the middle of a block; a later launch is refused without a wait."""
    sizes = SHAPE.num_requests, SHAPE.depth, SHAPE.vocab_size
    pair.limit_epochs(remaining=2)
    codes = [int(Sticky.EPOCH_EXHAUSTED)] * pair.memory.shape.num_ranks
    recorder.check("epochs.exhausted", expected=codes, found=pair.launch(random_block(rng, *sizes)))
    pair.limit_epochs(remaining=1 << 40)
    recorder.check("epochs.sticky", expected=codes, found=pair.launch(random_block(rng, *sizes)))


def _check_timeout(recorder: Recorder, lone: LoneRank) -> None:
    """A rank without a peer gives up within its bound, stays stopped, and ends with the code of a torn-down worker."""
    first, second = lone.launch(), lone.launch()
    code = int(Sticky.PEER_TIMEOUT)
    recorder.check("timeout.code", expected=code, found=first.sticky)
    bound_ns = LONE_TIMEOUT_MS * 1_000_000 + LONE_SLACK_NS
    ok = LONE_TIMEOUT_MS * 1_000_000 <= first.elapsed_ns <= bound_ns
    recorder.check("timeout.bounded", expected=f"{LONE_TIMEOUT_MS} ms..{bound_ns} ns", found=first.elapsed_ns, ok=ok)
    recorder.check("timeout.sticky", expected=code, found=second.sticky)
    fast = second.elapsed_ns < LONE_TIMEOUT_MS * 1_000_000
    recorder.check("timeout.no_second_wait", expected="refused at once", found=second.elapsed_ns, ok=fast)
    recorder.check("timeout.teardown", expected=3, found=lone.quit())
    recorder.value("timeout.elapsed_ns", first.elapsed_ns)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
