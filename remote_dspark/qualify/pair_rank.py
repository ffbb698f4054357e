"""One emulated rank of a drafter pair: ``python -m remote_dspark.qualify.pair_rank`` (started by ``qualify.pair``).

It owns its part of the vocabulary. For each position it sends its 32 best packed candidates to every peer's inbox,
merges all with its own, computes the same support, tickets and token as its peers, and acknowledges with the token and
a digest of the counts. The arithmetic is ``kernels.naive``: the reference that drafts on a CPU. Commands and answers
are JSON lines on stdin and stdout. A sticky error is for life: later launches are refused and the exit code is 3.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from remote_dspark.contract import TICKET_TOTAL, Domain
from remote_dspark.kernels import naive
from remote_dspark.kernels.rows import RowError
from remote_dspark.qualify.pair_memory import (
    CANDIDATES,
    MAX_RANKS,
    PairMemory,
    PairShape,
    Sticky,
    StickyError,
    wait_for,
)

EXIT_STICKY: Final = 3
_MASK32: Final = 0xFFFFFFFF
_NO_CANDIDATE: Final = -(1 << 63)


class Rank:
    """The state of one rank between launches: its epoch and its sticky error."""

    def __init__(self, memory: PairMemory, rank: int, timeout_s: float) -> None:
        self.memory = memory
        self.rank = rank
        self.peers = [peer for peer in range(memory.shape.num_ranks) if peer != rank]
        self.timeout_s = timeout_s
        self.epoch = 0
        self.sticky = Sticky.NONE
        # Read once: the bias table is a weight, it does not change between launches.
        start, end = memory.shape.shard(rank)
        self.columns = torch.arange(start, end)
        self.bias = torch.from_numpy(memory.bias[:, start:end].copy()).view(torch.bfloat16)

    def launch(self, semantics: str) -> None:
        """Draft one block: all positions of all requests, from the inputs as they are now.

        Raises:
            StickyError: A peer error, now or earlier.
        """
        if self.sticky:
            raise StickyError(self.sticky, f"rank {self.rank} is stopped by {self.sticky.name}; end the process")
        previous = torch.from_numpy(self.memory.previous.copy())
        flags = torch.zeros(len(previous), dtype=torch.int64)
        try:
            for position in range(self.memory.shape.depth):
                previous, flags = self._position(position, previous, flags, semantics)
        except StickyError as cause:
            self.sticky = cause.code
            raise

    def _position(
        self, position: int, previous: torch.Tensor, flags: torch.Tensor, semantics: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        memory = self.memory
        if self.epoch >= int(memory.epoch_limit[0]):
            raise StickyError(
                Sticky.EPOCH_EXHAUSTED, f"epoch: expected below {int(memory.epoch_limit[0])}, found it used"
            )
        self.epoch += 1
        start, end = memory.shape.shard(self.rank)
        base = torch.from_numpy(memory.base[:, position, start:end].copy()).view(torch.bfloat16)
        values = naive.corrected_logits(base, self.bias[previous])
        own_flags = flags | _column_errors(values)
        packed = self._exchange(_pack(torch.where(own_flags[:, None] == 0, values, 0.0), self.columns), own_flags)
        flags = own_flags
        for peer in self.peers:
            flags = flags | torch.from_numpy(memory.flags[self.rank, peer].copy())
        flags = flags | torch.where(packed[:, 0] == _NO_CANDIDATE, int(RowError.ZERO_MASS), 0)
        ids, tickets, weights, token = self._finish(packed, flags, position, semantics)
        # An invalid intermediate continues with an in-range token and keeps its flag; it is never a proposal.
        token = torch.where(flags == 0, token, 0)
        self._acknowledge(token, ids, tickets)
        memory.ids[self.rank, :, position] = ids.numpy()
        memory.tickets[self.rank, :, position] = tickets.numpy()
        memory.weights[self.rank, :, position] = weights.numpy()
        memory.error[self.rank, :, position] = flags.numpy()
        memory.token[self.rank, :, position] = token.numpy()
        return token, flags

    def _exchange(self, packed: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
        memory = self.memory
        # every peer has consumed the previous epoch (its acknowledgement was awaited), so its inbox is free
        for peer in self.peers:
            memory.payload[peer, self.rank] = packed.numpy()
            memory.flags[peer, self.rank] = flags.numpy()
            memory.signal[peer, self.rank] = self.epoch
        parts = [packed]
        for peer in self.peers:
            wait_for(memory.signal[self.rank, peer], self.epoch, self.timeout_s, f"rank {self.rank}, inbox of {peer}")
            parts.append(torch.from_numpy(memory.payload[self.rank, peer].copy()))
        # the best 32 of N times 32 are the best 32 of the vocabulary, whatever N is
        return torch.topk(torch.cat(parts, dim=1), CANDIDATES, dim=1, sorted=True).values

    def _finish(
        self, packed: torch.Tensor, flags: torch.Tensor, position: int, semantics: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Support in ascending id, tickets, weights and token of the merged candidates, the same on both ranks."""
        memory = self.memory
        ids, values = _unpack(packed)
        leader = ids[:, 0]
        top = values[:, :1]
        order = ids.argsort(dim=1)
        ids, values = ids.gather(1, order), values.gather(1, order)
        first = (ids < leader[:, None]).sum(dim=1)
        present = ids < memory.shape.vocab_size
        tau = torch.from_numpy(memory.tau.copy())[:, None]
        weights = torch.where(present, naive.fixed_weights(values, top, tau), 0)
        weights = torch.where(flags[:, None] == 0, weights, torch.nn.functional.one_hot(first, CANDIDATES))
        tickets, in_range = naive.allocate_tickets(weights, first, semantics)
        assert bool(in_range.all()), "a remainder outside [0, k) cannot follow from these weights"
        counter = (
            torch.from_numpy(memory.rounds.copy()),
            torch.from_numpy(memory.positions.copy()) + position,
            int(Domain.PROPOSAL),
            0,
        )
        draw = naive.philox(counter, torch.from_numpy(memory.keys.astype(np.int64)))[0] >> 8
        index = (tickets.cumsum(dim=1) <= draw[:, None]).sum(dim=1)
        greedy = torch.from_numpy(memory.greedy.copy()) != 0
        token = torch.where(greedy, leader, ids.gather(1, index[:, None])[:, 0])
        sampled = present & (~greedy & (flags == 0))[:, None]
        shown = sampled & (tickets > 0)
        return (
            torch.where(shown, ids, -1).to(torch.int32),
            torch.where(shown, tickets, 0),
            torch.where(sampled, weights, 0),
            token,
        )

    def _acknowledge(self, token: torch.Tensor, ids: torch.Tensor, tickets: torch.Tensor) -> None:
        memory = self.memory
        mine = torch.stack([token, _digests(ids, tickets)], dim=1).numpy()
        for peer in self.peers:
            memory.ack[peer, self.rank, :, :2] = mine
            memory.ack[peer, self.rank, :, 2] = self.epoch
        for peer in self.peers:
            theirs = memory.ack[self.rank, peer]
            wait_for(theirs[:, 2], self.epoch, self.timeout_s, f"rank {self.rank}, acknowledgement of {peer}")
            if not np.array_equal(theirs[:, :2], mine):
                found = f"found {theirs[:, :2].tolist()} from rank {peer}"
                raise StickyError(Sticky.PEER_MISMATCH, f"rank {self.rank}: expected {mine.tolist()}, {found}")


def _column_errors(values: torch.Tensor) -> torch.Tensor:
    """Flags of what no continuation could repair; a shard of -inf alone is legal, the merged row decides."""
    flags = torch.where((values == torch.inf).any(dim=1), int(RowError.POSITIVE_INFINITY), 0)
    return flags | torch.where(values.isnan().any(dim=1), int(RowError.NAN), 0)


def _pack(values: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The 32 best of a shard as int64: value order above, complement of the global id below."""
    keys = naive.order_keys(values)
    packed = (keys << 32) | (_MASK32 - columns)
    packed = torch.where(values == -torch.inf, _NO_CANDIDATE, packed)
    return torch.topk(packed, CANDIDATES, dim=1, sorted=True).values


def _unpack(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Global ids (beyond the vocabulary where there is no candidate) and FP32 values."""
    keys = packed >> 32
    bits = torch.where(keys < 0, keys ^ 0x7FFFFFFF, keys)
    values = bits.to(torch.int32).view(torch.float32)
    ids = _MASK32 - (packed & _MASK32)
    is_none = packed == _NO_CANDIDATE
    return torch.where(is_none, 1 << 31, ids), torch.where(is_none, 0.0, values)


def _digests(ids: torch.Tensor, tickets: torch.Tensor) -> torch.Tensor:
    """Eight bytes of SHA-256 over a row's ids and counts, per request."""
    rows = zip(ids.numpy(), tickets.numpy(), strict=True)
    digests = [hashlib.sha256(i.tobytes() + t.tobytes()).digest()[:8] for i, t in rows]
    return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests])


def main(argv: list[str]) -> int:
    """Serve launches until ``quit`` or end of input."""
    parser = argparse.ArgumentParser(prog="remote_dspark.qualify.pair_rank")
    parser.add_argument("--memory", type=Path, required=True)
    parser.add_argument("--rank", type=int, choices=range(MAX_RANKS), required=True)
    parser.add_argument("--timeout-ms", type=int, required=True)
    for name in ("num-requests", "depth", "vocab-size", "num-ranks"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    memory = PairMemory(args.memory, PairShape(args.num_requests, args.depth, args.vocab_size, args.num_ranks))
    rank = Rank(memory, args.rank, args.timeout_ms / 1000)
    _answer({"ready": True, "ticket_total": TICKET_TOTAL})
    for line in sys.stdin:
        command = json.loads(line)
        if "quit" in command:
            break
        _answer(_launch(rank, command["semantics"]))
    return EXIT_STICKY if rank.sticky else 0


def _launch(rank: Rank, semantics: str) -> dict[str, Any]:
    start_ns = time.monotonic_ns()
    try:
        rank.launch(semantics)
    except StickyError as cause:
        return {"sticky": int(cause.code), "message": str(cause), "elapsed_ns": time.monotonic_ns() - start_ns}
    return {"sticky": 0, "elapsed_ns": time.monotonic_ns() - start_ns}


def _answer(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
