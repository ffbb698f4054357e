"""A rank whose peer never launches, on two GPUs: ``python -m remote_dspark.qualify.pair_lone`` (own process).

Rank 0's graph is launched alone. It must end within the bound, keep its error, and make rank 1 fail at once when that
finally launches. One JSON line on stdout; exit code 3, that of a torn-down worker.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from remote_dspark.contract import Check
from remote_dspark.kernels.pair_chain import PairChain, PhysicalPair
from remote_dspark.kernels.pair_rank import DEFAULT_TIMEOUT_NS, PairError, PairSettings
from remote_dspark.qualify.pair_device_checks import NUM_ROWS, make_control
from remote_dspark.qualify.pair_feed import FeedShape, PairFeed, chain_launch

EXIT_TORN_DOWN: Final = 3
PROCESS_TIMEOUT_S: Final = 120.0
DEPTH: Final = 5
SLACK_NS: Final = 5_000_000
"""Beyond the bound: the head itself, and 16 reads of the signal between two looks at the clock."""

FAST_NS: Final = 10_000_000
"""A launch that does not wait."""


def main(argv: list[str]) -> int:
    """Runs the lone rank."""
    parser = argparse.ArgumentParser(prog="remote_dspark.qualify.pair_lone")
    parser.add_argument("--devices", default="0,1")
    parser.add_argument("--vocab-size", type=int, default=129_280)
    parser.add_argument("--bound-ns", type=int, default=DEFAULT_TIMEOUT_NS)
    args = parser.parse_args(argv)
    devices = [int(device) for device in args.devices.split(",")]
    settings = PairSettings(args.vocab_size, bound=args.bound_ns)
    feed = PairFeed(FeedShape(DEPTH, NUM_ROWS, args.vocab_size, 64), settings, devices, seed=6)
    feed.set(make_control(NUM_ROWS), torch.zeros(NUM_ROWS, dtype=torch.int32))
    with PhysicalPair(settings, DEPTH, NUM_ROWS, devices) as pair:
        chain = PairChain(pair, chain_launch(feed, DEPTH), DEPTH)
        chain.prime()
        chain.capture()
        answer: dict[str, Any] = {"first_ns": _time(pair, chain, 0), "errors": [int(e) for e in pair.errors()]}
        answer["second_ns"] = _time(pair, chain, 0)
        answer["peer_ns"] = _time(pair, chain, 1)
        answer["late_errors"] = [int(error) for error in pair.errors()]
        answer["longest_wait_ns"] = pair.ranks[0].longest_wait()
        answer["refused"] = [int((rank.buffers.error != 0).sum()) for rank in pair.ranks]
    sys.stdout.write(json.dumps(answer) + "\n")
    return EXIT_TORN_DOWN


def _time(pair: PhysicalPair, chain: PairChain, rank: int) -> int:
    """Duration of one rank's graph alone, in ns."""
    with pair.on(rank):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        chain.replay_rank(rank)
        end.record()
    end.synchronize()
    return int(start.elapsed_time(end) * 1e6)


def check_lone(devices: Sequence[int], bound_ns: int = DEFAULT_TIMEOUT_NS) -> tuple[list[Check], dict[str, Any]]:
    """Runs this program and judges its answer; returns the checks and the answer."""
    command = [sys.executable, "-m", "remote_dspark.qualify.pair_lone", "--bound-ns", str(bound_ns)]
    command += ["--devices", ",".join(str(device) for device in devices)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return [Check("lone.ended", f"an end within {PROCESS_TIMEOUT_S} s", "none: the rank hangs", False)], {}
    if done.returncode != EXIT_TORN_DOWN:
        found = f"exit code {done.returncode}: {done.stderr.strip()[-150:]}"
        return [Check("lone.ended", f"exit code {EXIT_TORN_DOWN}", found, False)], {}
    answer = json.loads(done.stdout.splitlines()[-1])
    ended = Check("lone.ended", f"exit code {EXIT_TORN_DOWN}", f"exit code {done.returncode}", True)
    return [ended, *judge_lone(answer, bound_ns)], answer


def judge_lone(answer: Mapping[str, Any], bound_ns: int) -> list[Check]:
    """What the answer of `main` must say.

    Args:
        answer: The JSON line.
        bound_ns: Configured bound of a wait.
    """
    first, second, peer = (int(answer[name]) for name in ("first_ns", "second_ns", "peer_ns"))
    alone, late, refused = answer["errors"], answer["late_errors"], answer["refused"]
    limit = bound_ns + SLACK_NS
    timeout, fault = int(PairError.PEER_TIMEOUT), int(PairError.PEER_FAULT)
    is_sticky = late[0] & timeout != 0 and late[1] & fault != 0
    return [
        Check("lone.bounded", f"{bound_ns} ns..{limit} ns", f"{first} ns", bound_ns <= first <= limit),
        Check("lone.errors", f"[{timeout}, {fault}]", str(alone), alone == [timeout, fault]),
        Check("lone.no_second_wait", f"below {FAST_NS} ns", f"{second} ns", second < FAST_NS),
        Check("lone.peer_told", f"below {FAST_NS} ns", f"{peer} ns", peer < FAST_NS),
        Check("lone.sticky", "timeout on rank 0, fault on rank 1", str(late), is_sticky),
        Check("lone.refused", f"{[NUM_ROWS] * 2}", str(refused), refused == [NUM_ROWS] * 2),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
