"""What one rank of a pair owns: its shard, buffers, inbox, epochs and sticky error.

An inbox is one dedicated allocation that the peer writes; everything else here is private to the rank. An incarnation
is one pair of inboxes with one nonce: a message of an earlier incarnation can never be taken for one of this, and a
pair with a sticky error is torn down (both ranks quiesced, then memory freed), never reset.

No streams, graphs or devices here: `pair_chain` drives two ranks of one process, the emulation one per process.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag

import torch

from remote_dspark.contract import Q_FLOOR_FIRST, SUPPORT_K
from remote_dspark.kernels.pair_exchange import (
    BLOCK_WORDS,
    EPOCH,
    LIMIT,
    LONGEST,
    NONCE,
    NUM_SLOTS,
    STATE_WORDS,
    STOPPED,
)
from remote_dspark.kernels.sampled_head import HeadBuffers, HeadSettings, Tiling

NUM_RANKS = 2
EPOCH_LIMIT = (1 << 32) - 1
"""Epochs have 32 bits beside the nonce: 2**32 - 2 messages per channel, then the pair is exhausted."""

NONCE_LIMIT = 1 << 31
DEFAULT_TIMEOUT_NS = 50_000_000


class PairError(IntFlag):
    """Why the reply must be discarded and the worker torn down.

    All but BAD_LOGITS also end the channel they were met in; the other channels end with their next long wait, or with
    the host, which launches nothing on a pair with an error.
    """

    NONE = 0
    PEER_TIMEOUT = 1
    """The peer's message did not come within the bound."""
    PEER_MISMATCH = 2
    """The peer acknowledged another token or other counts."""
    EPOCH_EXHAUSTED = 4
    BAD_LOGITS = 8
    """A row was refused; the flags of the rows say which and why. Both ranks see it in the same position."""
    PEER_FAULT = 16
    """The peer said that it has stopped."""


@dataclass(frozen=True)
class PairSettings:
    """What both ranks of a pair must agree on.

    Attributes:
        vocab_size: V; rank 0 owns the first ``ceil(V / 2)`` columns.
        tile: Columns of a tile.
        num_warps: Warps of a program.
        semantics: Of the tickets.
        k: Entries of the support.
        emit_weights: Whether weights are stored, for checks.
        bound: ns on a GPU; reads of the signal under the CPU interpreter.
    """

    vocab_size: int
    tile: int = 2048
    num_warps: int = 4
    semantics: str = Q_FLOOR_FIRST
    k: int = SUPPORT_K
    emit_weights: bool = False
    bound: int = DEFAULT_TIMEOUT_NS

    def __post_init__(self) -> None:
        """Refuses what cannot be exchanged."""
        if self.k > SUPPORT_K:
            raise ValueError(f"an inbox block has room for {SUPPORT_K} candidates, found k = {self.k}")
        if not 0 < self.bound < 1 << 62:
            raise ValueError(f"the bound of a wait must be positive, found {self.bound}")

    def shard(self, rank: int) -> tuple[int, int]:
        """Global ids [start, end) of a rank."""
        half = -(-self.vocab_size // NUM_RANKS)
        return (0, half) if rank == 0 else (half, self.vocab_size)

    def head(self, rank: int) -> HeadSettings:
        """Settings of a rank's own part."""
        start, end = self.shard(rank)
        tiling = Tiling(end - start, self.tile, 1, self.num_warps)
        return HeadSettings(tiling, k=self.k, semantics=self.semantics, emit_weights=self.emit_weights)


class RankCountError(ValueError):
    """A pair of more or fewer ranks than the kernels exchange between."""


def require_two(num_ranks: int) -> None:
    """Refuses another number of ranks than the kernels were built for.

    Raises:
        RankCountError: Names both numbers.
    """
    if num_ranks != NUM_RANKS:
        raise RankCountError(
            f"expected {NUM_RANKS} ranks, which is what the kernels exchange between, found {num_ranks}; "
            "the emulated pair takes more (qualify.pair --ranks)"
        )


def inbox_words(num_rows: int) -> int:
    """int64 words of an inbox: two slots of blocks, and a block for the fault word."""
    return int((NUM_SLOTS * num_rows + 1) * BLOCK_WORDS.value)


class PairRank:
    """One rank.

    Args:
        pair: Agreed settings.
        rank: 0 or 1.
        depth: Positions of a chain.
        num_rows: Requests B; fixed, like the addresses.
        inbox: int64 [`inbox_words`], zero, on the rank's device (or shared between processes); owned by the caller,
            who frees it only after both ranks are quiesced.
        nonce: Of the incarnation, in [1, 2**31); the same on both ranks, never used before with these inboxes.
        epoch_limit: First epoch that does not exist.

    Attributes:
        buffers: Outputs and scratch, see `sampled_head.HeadBuffers`.
        union: int64 [B, k] scratch.
        result: int64 [B], last result of each row, acknowledged by the next message.
        state: int64 [B, 8], see `pair_exchange`.
        sticky: int32 [1], `PairError` flags.
    """

    def __init__(
        self,
        pair: PairSettings,
        rank: int,
        depth: int,
        num_rows: int,
        inbox: torch.Tensor,
        nonce: int,
        epoch_limit: int = EPOCH_LIMIT,
    ) -> None:
        if inbox.dtype != torch.int64 or inbox.shape != (inbox_words(num_rows),) or not inbox.is_contiguous():
            raise ValueError(f"expected an inbox int64 [{inbox_words(num_rows)}], found {inbox.dtype} {inbox.shape}")
        if not 0 < nonce < NONCE_LIMIT or not 0 < epoch_limit <= EPOCH_LIMIT:
            raise ValueError(f"expected a nonce in [1, 2**31) and a 32-bit limit, found {nonce}, {epoch_limit}")
        self.pair = pair
        self.rank = rank
        self.settings = pair.head(rank)
        self.inbox = inbox
        self.buffers = HeadBuffers(self.settings, depth, num_rows, inbox.device)
        self.union = torch.zeros((num_rows, pair.k), dtype=torch.int64, device=inbox.device)
        self.result = torch.zeros(num_rows, dtype=torch.int64, device=inbox.device)
        self.state = torch.zeros((num_rows, STATE_WORDS.value), dtype=torch.int64, device=inbox.device)
        self.state[:, NONCE.value] = nonce
        self.state[:, LIMIT.value] = epoch_limit
        self.sticky = torch.zeros(1, dtype=torch.int32, device=inbox.device)
        self._peer_address: int | None = None

    @property
    def vocab_size(self) -> int:
        """V of the whole pair."""
        return self.pair.vocab_size

    def connect(self, peer_address: int) -> None:
        """Names the peer's inbox by an address that is valid on this rank's device (or in this process)."""
        self._peer_address = peer_address

    def connection(self) -> tuple[int, int, int, int, int]:
        """Run-time arguments of a launch: both inboxes, bound, rank, first id of the shard."""
        if self._peer_address is None:
            raise ValueError(f"rank {self.rank}: expected the address of the peer's inbox, found none; connect it")
        start, _ = self.pair.shard(self.rank)
        return self.inbox.data_ptr(), self._peer_address, self.pair.bound, self.rank, start

    def stop(self) -> None:
        """Makes this rank compute without sending or waiting, for priming only.

        Raises:
            ValueError: It has an error already.
        """
        self._require_no_error()
        self.state[:, STOPPED.value] = int(PairError.PEER_FAULT)

    def restart(self) -> None:
        """Ends `stop`. Both ranks were stopped for the same launches, so their results still agree.

        Raises:
            ValueError: It has an error, and errors are for life.
        """
        self._require_no_error()
        self.state[:, STOPPED.value] = 0

    def _require_no_error(self) -> None:
        if self.errors():
            raise ValueError(f"rank {self.rank}: expected no error, found {self.errors()!r}; build a new pair")

    def require_rows(self, control: torch.Tensor) -> int:
        """B, when the control block has as many rows as the inbox.

        Raises:
            ValueError: It has not.
        """
        num_rows = self.result.shape[0]
        if control.shape[0] != num_rows:
            raise ValueError(f"this pair was built for {num_rows} rows, found {control.shape[0]}; build one for each B")
        return num_rows

    def errors(self) -> PairError:
        """Sticky errors of this rank, with the peer's report; waits for the rank's device.

        A reply is released only when both ranks answer NONE.
        """
        reported = PairError.PEER_FAULT if int(self.inbox[-BLOCK_WORDS.value]) else PairError.NONE
        return PairError(int(self.sticky[0])) | reported

    def epochs(self) -> list[int]:
        """Last epoch of each channel; waits for the rank's device."""
        return [int(epoch) for epoch in self.state[:, EPOCH.value].tolist()]

    def longest_wait(self) -> int:
        """Longest timed wait of any channel in the unit of the bound, 0 when all were short; waits for the device."""
        return int(self.state[:, LONGEST.value].max())
