"""Checks of a physical pair on two GPUs: against the oracle, against the solo head, and between the ranks.

Each function builds its own pair, because an error is for life, and returns `contract.Check`s with counts of what was
compared. Outputs are poisoned before every launch. CUDA only. Not covered: the lone rank (`pair_lone`), speed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from remote_dspark.contract import Check
from remote_dspark.kernels import checks
from remote_dspark.kernels.pair_chain import PairChain, PhysicalPair
from remote_dspark.kernels.pair_rank import PairError, PairSettings
from remote_dspark.kernels.rows import Control, pack_control
from remote_dspark.oracle.philox import derive_key
from remote_dspark.qualify.pair_feed import FeedShape, PairFeed, SoloHead, chain_launch

OUTPUTS = ("ids", "q", "count", "token", "error", "stamp")
NUM_ROWS = 4


def make_control(num_rows: int, *, greedy_row: int | None = None) -> torch.Tensor:
    """Control block of sampled requests at tau 0.7 on the CPU, one of them perhaps at temperature 0."""
    greedy = torch.zeros(num_rows, dtype=torch.bool)
    if greedy_row is not None:
        greedy[greedy_row] = True
    return pack_control(
        tau=torch.full((num_rows,), 0.7),
        keys=torch.tensor([derive_key(row, 1) for row in range(num_rows)]),
        rounds=torch.zeros(num_rows, dtype=torch.int64),
        positions=torch.full((num_rows,), 100),
        greedy=greedy,
    )


def check_oracle(devices: Sequence[int], settings: PairSettings, kinds: Sequence[str], seeds: range) -> list[Check]:
    """Single positions of every kind of row: both ranks against oracle and reference, and with the solo head."""
    size, compared = settings.vocab_size, 0
    shape = FeedShape(1, NUM_ROWS, size, NUM_ROWS)
    feed = PairFeed(shape, settings, devices, seed=1)
    # the cache row of token r is row r, so that the anchors choose the bias row of their own request
    for part in (feed.solo, *feed.ranks):
        part.slots.copy_(torch.arange(size, dtype=torch.int32) % NUM_ROWS)
    solo = SoloHead(feed, settings, 1)
    expected_bad = PairError.BAD_LOGITS if "bad" in kinds else PairError.NONE
    with PhysicalPair(settings, 1, NUM_ROWS, devices) as pair:
        chain = PairChain(pair, chain_launch(feed, 1), 1)
        chain.prime()
        for kind in kinds:
            for seed in seeds:
                case = checks.make_case(seed, NUM_ROWS, size, kind, padding=0)
                feed.set_logits(case.logits[None].cuda(devices[0]), slice(0, 1), settings)
                feed.set_cache(case.bias.cuda(devices[0]), settings)
                feed.set(pack_control(**case.fields), torch.arange(NUM_ROWS, dtype=torch.int32))
                for buffers in (solo.buffers, *(rank.buffers for rank in pair.ranks)):
                    buffers.poison()
                pair.synchronize()
                chain.run()
                with pair.on(0):
                    solo.launch(0)
                pair.synchronize()
                rows = [rank.buffers.rows(0) for rank in pair.ranks]
                problems = [checks.row_mismatch(case, rows[0], row, settings.semantics, 32) for row in range(NUM_ROWS)]
                same = checks.same_rows(rows[0], rows[1]) and checks.same_rows(rows[0], solo.buffers.rows(0))
                if any(problems) or not same:
                    found = f"{kind} seed {seed}: {problems}, same {same}"[:200]
                    return [Check("pair-oracle", "no mismatch", found, False)]
                compared += NUM_ROWS
        errors = pair.errors()
    wanted = [expected_bad, expected_bad]
    return [
        Check("pair-oracle", "no mismatch", f"no mismatch in {compared} rows of {', '.join(kinds)}", compared > 0),
        Check("pair-bad-logits", str(wanted), str(errors), errors == wanted),
    ]


class Mismatches:
    """Counts of positions that differ, kept on rank 0's device."""

    def __init__(self, device: int) -> None:
        self.names = ("between_ranks", "against_solo", "refused")
        self.counts = torch.zeros(len(self.names), dtype=torch.int64, device=f"cuda:{device}")

    def add(self, pair: PhysicalPair, solo: SoloHead) -> None:
        """Compares every output of every position and row; on the current streams."""
        first, second = (rank.buffers for rank in pair.ranks)
        device = self.counts.device
        for name in OUTPUTS:
            mine, alone = getattr(first, name), getattr(solo.buffers, name)
            theirs = getattr(second, name).to(device, non_blocking=True)
            self.counts[0] += (mine != theirs).sum()
            self.counts[1] += (mine != alone).sum()
        self.counts[2] += (first.error != 0).sum()

    def text(self) -> str:
        """Counts by name; waits for the device."""
        return " ".join(f"{name}={int(count)}" for name, count in zip(self.names, self.counts.tolist(), strict=True))


def check_replays(
    devices: Sequence[int],
    settings: PairSettings,
    *,
    positions: int,
    seconds: float,
    uncached: bool = False,
    depth: int = 20,
) -> Check:
    """Graphs of ``depth`` positions replayed with new rounds, anchors and greedy rows until enough were compared.

    Args:
        devices: CUDA device of each rank.
        settings: Of the pair.
        positions: Positions to compare, each of `NUM_ROWS` rows.
        seconds: Time box; what was reached is what is reported, and too little is a failure.
        uncached: Compute every bias row.
        depth: Positions of a graph, one chain.
    """
    shape = FeedShape(depth, NUM_ROWS, settings.vocab_size, 256, rank=256 if uncached else 0)
    feed = PairFeed(shape, settings, devices, seed=2, uncached=uncached)
    solo = SoloHead(feed, settings, depth, uncached=uncached)
    controls = [make_control(NUM_ROWS, greedy_row=row).cuda(devices[0]) for row in (None, *range(NUM_ROWS))]
    anchors = torch.randint(0, settings.vocab_size, (64, NUM_ROWS), dtype=torch.int32).cuda(devices[0])
    found, done = Mismatches(devices[0]), 0
    with PhysicalPair(settings, depth, NUM_ROWS, devices) as pair:
        chain = PairChain(pair, chain_launch(feed, depth, uncached=uncached), depth)
        chain.prime()
        chain.capture()
        with pair.on(1), pair.on(0):
            deadline = time.monotonic() + seconds
            while done < positions and time.monotonic() < deadline:
                control = controls[done // depth % len(controls)]
                control[:, Control.ROUND_LOW] += 1
                for rank in pair.ranks:
                    rank.buffers.poison()
                feed.set(control, anchors[done // depth % 64])
                chain.replay()
                for index in range(depth):
                    solo.launch(index)
                found.add(pair, solo)
                done += depth
                if done // depth % 50 == 0:
                    pair.require_healthy()
        errors = pair.errors()
    text = f"{done} positions of {NUM_ROWS} rows: {found.text()}, errors {errors}"
    clean = int(found.counts.sum()) == 0 and not any(errors)
    name = "pair-replays-uncached" if uncached else "pair-replays"
    return Check(name, f"no mismatch in {positions} positions", text, clean and done >= positions)


def check_stress(devices: Sequence[int], settings: PairSettings, *, exchanges: int, seconds: float) -> Check:
    """Exchanges as fast as they go: chains of 5 in graphs of 100 positions, one row, same input, same answer.

    A chain of 5 positions makes 6 exchanges per row.
    """
    depth, chains = 5, 20
    feed = PairFeed(FeedShape(depth, 1, settings.vocab_size, 64), settings, devices, seed=3)
    feed.set(make_control(1), torch.zeros(1, dtype=torch.int32))
    with PhysicalPair(settings, depth, 1, devices) as pair:
        chain = PairChain(pair, chain_launch(feed, depth), depth * chains)
        chain.prime()
        chain.capture()
        deadline = time.monotonic() + seconds
        while pair.ranks[0].epochs()[0] < exchanges and time.monotonic() < deadline:
            for _ in range(50):
                chain.replay()
            pair.require_healthy()
        epochs = [rank.epochs()[0] for rank in pair.ranks]
        same = torch.equal(pair.ranks[0].buffers.token.cpu(), pair.ranks[1].buffers.token.cpu())
        waits = [rank.longest_wait() for rank in pair.ranks]
    ok = same and epochs[0] == epochs[1] >= exchanges
    text = f"epochs {epochs}, tokens equal {same}, longest waits {waits} ns"
    return Check("pair-stress", f"{exchanges} exchanges on both ranks", text, ok)


def check_exhaustion(devices: Sequence[int], settings: PairSettings) -> Check:
    """The last epoch ends both ranks in the middle of a chain; later launches do not wait; a new pair works."""
    depth = 3
    feed = PairFeed(FeedShape(depth, 1, settings.vocab_size, 64), settings, devices, seed=4)
    feed.set(make_control(1), torch.zeros(1, dtype=torch.int32))
    found = []
    for limit in (depth, 100):
        with PhysicalPair(settings, depth, 1, devices, epoch_limit=limit) as pair:
            chain = PairChain(pair, chain_launch(feed, depth), depth)
            chain.prime()
            chain.run()
            found.append(pair.errors())
            chain.run()
            found.append(pair.errors())
    stopped, good = PairError.EPOCH_EXHAUSTED, PairError.NONE
    ok = all(stopped in error for errors in found[:2] for error in errors) and found[2:] == [[good, good]] * 2
    return Check("pair-exhaustion", "exhausted on both, then a new pair without error", str(found)[:200], ok)


def check_mismatch(devices: Sequence[int], settings: PairSettings) -> Check:
    """Ranks with different keys draw different tokens: the acknowledgement shows it to both."""
    depth = 5
    feed = PairFeed(FeedShape(depth, 1, settings.vocab_size, 64), settings, devices, seed=5)
    feed.set(make_control(1), torch.zeros(1, dtype=torch.int32))
    feed.ranks[1].control[:, Control.KEY0] += 1
    with PhysicalPair(settings, depth, 1, devices) as pair:
        chain = PairChain(pair, chain_launch(feed, depth), depth)
        chain.prime()
        chain.run()
        errors = pair.errors()
    ok = all(PairError.PEER_MISMATCH in error for error in errors)
    return Check("pair-mismatch", "mismatch on both ranks", str(errors), ok)
