"""The rank processes of an emulated pair: started, commanded by JSON lines, ended by their own pid.

A rank is ``python -m remote_dspark.qualify.pair_rank``. Every read of an answer is bounded by the rank's own bound;
what is left after the end of the ``with`` block is killed by its process handle, never by name.
"""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np

from remote_dspark.contract import Q_FLOOR_FIRST
from remote_dspark.observe import ObserveError
from remote_dspark.qualify.pair_checks import BlockOutputs
from remote_dspark.qualify.pair_inputs import BlockInputs, bias_table
from remote_dspark.qualify.pair_memory import PairMemory, PairShape

ANSWER_TIMEOUT_S: Final = 300.0
"""Of a rank that starts beside many others on a busy machine."""

QUIT_TIMEOUT_S: Final = 60.0
PAIR_TIMEOUT_MS: Final = 5000
UNLIMITED_EPOCHS: Final = 1 << 40


@dataclass(frozen=True)
class LaunchAnswer:
    """What a rank says about one launch."""

    sticky: int
    elapsed_ns: int


class _RankProcess:
    def __init__(self, path: Path, shape: PairShape, rank: int, timeout_ms: int) -> None:
        command = [sys.executable, "-m", "remote_dspark.qualify.pair_rank", "--memory", str(path)]
        command += ["--rank", str(rank), "--timeout-ms", str(timeout_ms)]
        command += ["--num-requests", str(shape.num_requests), "--depth", str(shape.depth)]
        command += ["--vocab-size", str(shape.vocab_size), "--num-ranks", str(shape.num_ranks)]
        self._rank = rank
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._selector = selectors.DefaultSelector()
        assert self._process.stdout is not None
        self._selector.register(self._process.stdout, selectors.EVENT_READ)

    def send(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline() if self._selector.select(ANSWER_TIMEOUT_S) else b""
        if not line:
            raise ObserveError(
                f"rank {self._rank}: expected an answer within {ANSWER_TIMEOUT_S} s, found none; see stderr"
            )
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def quit(self) -> int:
        """Ask it to end; kill it if it does not. Returns the exit code."""
        try:
            self.send({"quit": True})
            return self._process.wait(QUIT_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            return self._process.wait()
        finally:
            self._selector.close()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None and not stream.closed:
                    stream.close()


class EmulatedPair:
    """Two or more ranks over one memory; a context manager.

    Attributes:
        bias: uint16 ``[V, V]``, the Markov bias table both ranks hold.
        neutral_token: A previous token whose bias row is zero.
        elapsed_ns: Duration of each good launch, as the leader measured it.
        exit_codes: After the end of the block: how the processes ended.
    """

    def __init__(self, path: Path, shape: PairShape, rng: np.random.Generator) -> None:
        self.memory = PairMemory(path, shape)
        self.neutral_token = 0
        self.memory.bias[:] = bias_table(rng, shape.vocab_size)
        self.memory.bias[self.neutral_token] = 0
        self.memory.epoch_limit[0] = UNLIMITED_EPOCHS
        self.bias = self.memory.bias.copy()
        self.elapsed_ns: list[int] = []
        self.exit_codes: list[int] = []
        self._ranks = [_RankProcess(path, shape, rank, PAIR_TIMEOUT_MS) for rank in range(shape.num_ranks)]
        self._epoch = 0
        for rank in self._ranks:
            rank.receive()

    def __enter__(self) -> EmulatedPair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.exit_codes = [rank.quit() for rank in self._ranks]

    def launch(self, inputs: BlockInputs, semantics: str = Q_FLOOR_FIRST) -> list[int]:
        """Set the inputs, poison the outputs, run all ranks. Returns the sticky code of each."""
        for name in ("base", "previous", "tau", "keys", "rounds", "positions", "greedy"):
            getattr(self.memory, name)[:] = getattr(inputs, name)
        self.memory.poison_outputs()
        for rank in self._ranks:
            rank.send({"semantics": semantics})
        answers = [rank.receive() for rank in self._ranks]
        sticky = [int(answer["sticky"]) for answer in answers]
        if not any(sticky):
            self._epoch += self.memory.shape.depth
            self.elapsed_ns.append(int(answers[0]["elapsed_ns"]))
        return sticky

    def outputs(self, rank: int) -> BlockOutputs:
        """Copies of one rank's outputs."""
        names = ("ids", "tickets", "weights", "token", "error")
        return BlockOutputs(**{name: getattr(self.memory, name)[rank].copy() for name in names})

    def limit_epochs(self, remaining: int) -> None:
        """Let only so many more epochs exist."""
        self.memory.epoch_limit[0] = self._epoch + remaining


class LoneRank:
    """Rank 0 of a pair whose peer never answers, in its own process and memory."""

    def __init__(self, path: Path, shape: PairShape, timeout_ms: int) -> None:
        memory = PairMemory(path, shape)
        memory.epoch_limit[0] = UNLIMITED_EPOCHS
        memory.tau[:] = 1.0
        self._rank = _RankProcess(path, shape, 0, timeout_ms)
        self._is_ready = False

    def launch(self) -> LaunchAnswer:
        """One launch, which cannot succeed."""
        if not self._is_ready:
            self._rank.receive()
            self._is_ready = True
        self._rank.send({"semantics": Q_FLOOR_FIRST})
        answer = self._rank.receive()
        return LaunchAnswer(int(answer["sticky"]), int(answer["elapsed_ns"]))

    def quit(self) -> int:
        """End it; returns the exit code."""
        return self._rank.quit()
