"""Two ranks driven by one process: priming, eager chains, graphs, teardown.

Nothing may compile or load while a rank waits for its peer, so a chain is primed first: every launch of it is made
once on both ranks while both are stopped, which makes them compute but neither send nor wait. Capture and eager runs
refuse an unprimed chain. Launches alternate between the ranks, so that no queue fills up while the other is empty.

A pair with an error is closed and built anew. Not covered: ranks in different processes of a GPU worker.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from types import TracebackType

import torch

from remote_dspark.kernels.pair_devices import dedicated_inbox, enable_peer_access, read_facts, require_pair
from remote_dspark.kernels.pair_rank import (
    EPOCH_LIMIT,
    NONCE_LIMIT,
    NUM_RANKS,
    PairError,
    PairRank,
    PairSettings,
    inbox_words,
    require_two,
)

Launch = Callable[[PairRank, int], None]
"""Launches one rank's part of position ``index`` on the current stream."""


class UnprimedPairError(RuntimeError):
    """A chain that was not primed: its kernels might compile while the peer waits."""


class PairFaultError(RuntimeError):
    """A rank has an error: the reply is discarded, the pair closed."""


class PhysicalPair:
    """Two ranks, one GPU each; a context manager.

    Args:
        settings: Agreed settings.
        depth: Positions of a chain.
        num_rows: Requests B.
        devices: CUDA device of each rank.
        epoch_limit: First epoch that does not exist.

    Attributes:
        ranks: Rank 0 and rank 1.
        streams: One per rank.

    Raises:
        PairRefusedError: Devices that are no pair.
        RankCountError: Not two of them.
    """

    def __init__(
        self, settings: PairSettings, depth: int, num_rows: int, devices: Sequence[int], epoch_limit: int = EPOCH_LIMIT
    ) -> None:
        self.devices = tuple(devices)
        require_two(len(self.devices))
        require_pair(read_facts(self.devices), settings.bound)
        enable_peer_access(self.devices)
        nonce = 1 + secrets.randbelow(NONCE_LIMIT - 1)
        inboxes = [dedicated_inbox(inbox_words(num_rows), device) for device in self.devices]
        self._pools = [pool for _, pool in inboxes]
        self.ranks = [
            PairRank(settings, rank, depth, num_rows, inbox, nonce, epoch_limit)
            for rank, (inbox, _) in enumerate(inboxes)
        ]
        for rank in self.ranks:
            rank.connect(self.ranks[NUM_RANKS - 1 - rank.rank].inbox.data_ptr())
        self.streams = [torch.cuda.Stream(device) for device in self.devices]
        self.synchronize()

    def __enter__(self) -> PhysicalPair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def on(self, rank: int) -> torch.cuda.StreamContext:
        """The context in which a rank's launches are made: its stream, and with it its device."""
        return torch.cuda.stream(self.streams[rank])

    def synchronize(self) -> None:
        """Waits for both devices."""
        for device in self.devices:
            torch.cuda.synchronize(device)

    def errors(self) -> list[PairError]:
        """Errors of both ranks; waits for both devices."""
        self.synchronize()
        return [rank.errors() for rank in self.ranks]

    def require_healthy(self) -> None:
        """What a host asks before it releases a reply.

        Raises:
            PairFaultError: Either rank has an error.
        """
        found = self.errors()
        if any(found):
            raise PairFaultError(f"expected no error on either rank, found {found}; discard the reply, close the pair")

    def close(self) -> None:
        """Quiesces both ranks; after that nothing writes an inbox, so its memory may go."""
        self.synchronize()
        self._pools.clear()


class PairChain:
    """A fixed sequence of launches on both ranks.

    Args:
        pair: The pair.
        launch: Launches one position of one rank; ``last`` of its final position must be set, so that the sequence
            ends acknowledged.
        num_positions: Calls of ``launch`` per rank.
    """

    def __init__(self, pair: PhysicalPair, launch: Launch, num_positions: int) -> None:
        self.pair = pair
        self._launch = launch
        self._num_positions = num_positions
        self._is_primed = False
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def prime(self) -> None:
        """Compiles, loads and runs every launch on both ranks without an exchange."""
        for rank in self.pair.ranks:
            rank.stop()
        self.pair.synchronize()
        for index in range(self._num_positions):
            self._launch_both(index)
        self.pair.synchronize()
        for rank in self.pair.ranks:
            rank.restart()
        self.pair.synchronize()
        self._is_primed = True

    def run(self) -> None:
        """Launches the sequence eagerly.

        Raises:
            UnprimedPairError: Prime it first.
        """
        self._require_primed()
        for index in range(self._num_positions):
            self._launch_both(index)

    def capture(self) -> None:
        """Captures one graph per rank.

        Raises:
            UnprimedPairError: Prime it first.
        """
        self._require_primed()
        self.pair.synchronize()
        for rank in self.pair.ranks:
            graph = torch.cuda.CUDAGraph()
            with (
                torch.cuda.device(self.pair.devices[rank.rank]),
                torch.cuda.graph(graph, stream=self.pair.streams[rank.rank]),
            ):
                for index in range(self._num_positions):
                    self._launch(rank, index)
            self._graphs.append(graph)
        self.pair.synchronize()

    def replay(self) -> None:
        """Launches both graphs, each on its rank's stream."""
        for rank in self.pair.ranks:
            self.replay_rank(rank.rank)

    def replay_rank(self, rank: int) -> None:
        """Launches one rank's graph; the peer's must follow within the bound."""
        with self.pair.on(rank):
            self._graphs[rank].replay()

    def _launch_both(self, index: int) -> None:
        for rank in self.pair.ranks:
            with self.pair.on(rank.rank):
                self._launch(rank, index)

    def _require_primed(self) -> None:
        if not self._is_primed:
            raise UnprimedPairError("expected a primed chain: a rank may wait while the other still compiles; prime()")
