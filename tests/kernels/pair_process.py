"""One rank of an emulated pair as a process: runs every scenario of `SCENARIOS` with the real kernels, interpreted.

    python tests/kernels/pair_process.py RANK FOLDER

The inboxes are files that both processes map, one pair of them per scenario; results are saved to the folder. Waits are
bounded by a number of reads of the signal, because the interpreter has no global timer.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch

from remote_dspark.kernels import naive
from remote_dspark.kernels.pair_head import launch_pair_position
from remote_dspark.kernels.pair_markov import launch_pair_markov
from remote_dspark.kernels.pair_rank import PairRank, PairSettings, inbox_words
from remote_dspark.kernels.rows import pack_control
from remote_dspark.oracle.philox import derive_key

VOCAB, K, TILE, RANK = 75, 16, 32, 32
"""Odd, so that the shards differ in size; two tiles a rank."""

PATIENT, HASTY = 2_000_000, 60
"""Reads of the signal: minutes, and a moment."""

NONCE = 77


def fields_of(num_rows: int, start: int = 0) -> dict[str, Any]:
    """Fields of `naive.sampled_head`; the last of several rows is greedy."""
    return {
        "tau": torch.full((num_rows,), 0.7),
        "keys": torch.tensor([derive_key(row + start, 3) for row in range(num_rows)]),
        "rounds": torch.arange(num_rows) + start,
        "positions": torch.arange(num_rows) * 10 + 100,
        "greedy": torch.arange(num_rows) == (num_rows - 1 if num_rows > 1 else -1),
    }


def random_rows(seed: int, *shape: int) -> torch.Tensor:
    """Seeded bf16 rows."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2
    return naive.round_to_bf16(values).to(torch.bfloat16)


CACHE = random_rows(5, 4, VOCAB)
SLOTS = torch.arange(VOCAB, dtype=torch.int32) % 4
W1, W2 = random_rows(6, VOCAB, RANK), random_rows(7, VOCAB, RANK)


def chain_logits(seed: int, depth: int, num_rows: int) -> torch.Tensor:
    """Logits of a chain, coarse enough for ties across the shards."""
    return (random_rows(seed, depth, num_rows, VOCAB).float() * 2).round().to(torch.bfloat16)


class Process:
    """This rank in one scenario after the other."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder
        # a rank knows its peer's inbox by address only: the mapping must stay
        self.mapped: list[torch.Tensor] = []

    def make(self, name: str, depth: int, num_rows: int, **options: Any) -> PairRank:
        """A rank over this scenario's two inbox files."""
        bound = options.pop("bound", PATIENT)
        settings = PairSettings(VOCAB, tile=TILE, k=K, bound=bound)
        size = inbox_words(num_rows)
        boxes = [
            torch.from_file(str(self.folder / f"{name}.{side}"), shared=True, size=size, dtype=torch.int64)
            for side in (0, 1)
        ]
        self.mapped += boxes
        pair = PairRank(settings, self.rank, depth, num_rows, boxes[self.rank], options.pop("nonce", NONCE), **options)
        pair.connect(boxes[1 - self.rank].data_ptr())
        pair.buffers.poison()
        return pair

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's columns."""
        start, end = PairSettings(VOCAB).shard(self.rank)
        return tensor[..., start:end].contiguous()

    def run(self, pair: PairRank, logits: torch.Tensor, anchors: torch.Tensor, fields: dict[str, Any]) -> None:
        """One chain of cached rows."""
        depth, previous, control = logits.shape[0], anchors, pack_control(**fields)
        for step in range(depth):
            launch_pair_position(
                pair,
                step,
                self.part(logits[step]),
                self.part(CACHE),
                control,
                last=step == depth - 1,
                previous=previous,
                slots=SLOTS,
            )
            previous = pair.buffers.token[step]

    def save(self, name: str, pair: PairRank, steps: int) -> None:
        """Rows of each step, errors, epochs and the fields that a test asks for."""
        rows = [vars(pair.buffers.rows(step)) for step in range(steps)]
        found = {"rows": rows, "errors": int(pair.errors()), "epochs": pair.epochs(), "waited": pair.longest_wait()}
        torch.save(found, self.folder / f"{name}.{self.rank}.partial")
        (self.folder / f"{name}.{self.rank}.partial").rename(self.folder / f"{name}.{self.rank}.pt")

    def await_peer(self, name: str) -> None:
        """Waits until the peer has saved a result."""
        while not (self.folder / f"{name}.{1 - self.rank}.pt").exists():
            time.sleep(0.01)


def chain(process: Process) -> None:
    """Two chains over the same buffers with changed inputs, one greedy row."""
    pair = process.make("chain", 2, 2)
    for number in range(2):
        process.run(
            pair, chain_logits(10 + number, 2, 2), torch.tensor([4, 74], dtype=torch.int32), fields_of(2, number)
        )
        process.save(f"chain{number}", pair, 2)


def bad(process: Process) -> None:
    """A NaN in rank 1's last column of row 0, at the first of two positions."""
    logits = chain_logits(20, 2, 2)
    logits[0, 0, VOCAB - 1] = torch.nan
    pair = process.make("bad", 2, 2)
    process.run(pair, logits, torch.tensor([4, 5], dtype=torch.int32), fields_of(2))
    process.save("bad", pair, 2)


def mismatch(process: Process) -> None:
    """Rank 1 has another key; rows are flat enough that the draws differ."""
    fields = fields_of(1, process.rank)
    pair = process.make("mismatch", 1, 1)
    process.run(pair, chain_logits(30, 1, 1) * 0, torch.tensor([4], dtype=torch.int32), fields)
    process.save("mismatch", pair, 1)


def exhausted(process: Process) -> None:
    """Only one epoch exists: the position is exchanged, its acknowledgement has none."""
    pair = process.make("exhausted", 1, 1, epoch_limit=2)
    process.run(pair, chain_logits(40, 1, 1), torch.tensor([4], dtype=torch.int32), fields_of(1))
    process.save("exhausted", pair, 1)


def incarnation(process: Process) -> None:
    """Each rank has another nonce: neither takes the other's message for one of its own."""
    pair = process.make("incarnation", 1, 1, nonce=NONCE + process.rank, bound=HASTY)
    process.run(pair, chain_logits(50, 1, 1), torch.tensor([4], dtype=torch.int32), fields_of(1))
    process.save("incarnation", pair, 1)


def lone(process: Process) -> None:
    """Rank 0 launches twice alone, then rank 1 launches: one wait in all, and the late rank is told."""
    pair = process.make("lone", 1, 1, bound=HASTY)
    arguments = chain_logits(60, 1, 1), torch.tensor([4], dtype=torch.int32), fields_of(1)
    if process.rank == 1:
        process.await_peer("lone-again")
        pair.pair = PairSettings(VOCAB, tile=TILE, k=K, bound=PATIENT)
    process.run(pair, *arguments)
    process.save("lone", pair, 1)
    if process.rank == 0:
        pair.state[:, 5] = 0
        process.run(pair, *arguments)
        process.save("lone-again", pair, 1)


def primed(process: Process) -> None:
    """A stopped rank computes without its peer; once restarted, both exchange as if nothing had been."""
    pair = process.make("primed", 1, 1)
    pair.stop()
    arguments = chain_logits(70, 1, 1), torch.tensor([4], dtype=torch.int32), fields_of(1)
    process.run(pair, *arguments)
    process.save("stopped", pair, 1)
    pair.restart()
    process.run(pair, *arguments)
    process.save("primed", pair, 1)


def uncached(process: Process) -> None:
    """Two rows in one launch, of which one takes its bias from the cache."""
    slots = torch.full((VOCAB,), -1, dtype=torch.int32)
    slots[5] = 1
    pair = process.make("uncached", 1, 2)
    start, end = PairSettings(VOCAB).shard(process.rank)
    launch_pair_markov(
        pair,
        0,
        process.part(chain_logits(80, 1, 2)[0]),
        pack_control(**fields_of(2)),
        torch.tensor([70, 5], dtype=torch.int32),
        W1,
        W2[start:end].contiguous(),
        slots,
        process.part(CACHE),
        last=True,
        part=32,
    )
    process.save("uncached", pair, 1)


SCENARIOS: tuple[Callable[[Process], None], ...] = (
    chain, bad, mismatch, exhausted, incarnation, lone, primed, uncached,
)  # fmt: skip


def main() -> int:
    """Runs all scenarios."""
    torch.set_num_threads(1)
    process = Process(int(sys.argv[1]), Path(sys.argv[2]))
    for scenario in SCENARIOS:
        scenario(process)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
