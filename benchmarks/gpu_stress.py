"""Proofs that need a GPU's speed: every row of a million checked on the device, and 10^8 retirements counted.

The rows are those of a graph with 20 positions of 8 rows, replayed with a new round each time. Inputs stay, so ids and
counts must be the same in every replay; draws change, and each token must be the inverse CDF of the emitted counts at
the recorded draw. Outputs are poisoned before every replay. Time-boxed: what was reached is what is reported.
"""

from __future__ import annotations

import time

import torch

from benchmarks.gpu_inputs import VOCAB, make_control
from remote_dspark.contract import TICKET_TOTAL, Check, Domain
from remote_dspark.kernels import naive
from remote_dspark.kernels.rows import Control
from remote_dspark.kernels.sampled_head import HeadBuffers, HeadSettings, Tiling, launch_position

ROWS = 8
POSITIONS = 20


def stress(seconds: float, tile: int = 2048) -> tuple[Check, dict[str, int]]:
    """Replays until the time is up; returns the check and the counts reached."""
    torch.manual_seed(77)
    settings = HeadSettings(Tiling(VOCAB, tile, 2, 4))
    logits = (torch.randn(POSITIONS, ROWS, VOCAB, device="cuda") * 3).to(torch.bfloat16)
    # a quarter of the positions are full of ties
    logits[::4] = (logits[::4] / 2).round()
    bias = torch.randn(ROWS, VOCAB, device="cuda").to(torch.bfloat16)
    bias[::2] = bias[::2].round()
    control = make_control(ROWS)
    buffers = HeadBuffers(settings, POSITIONS, ROWS, "cuda")

    def body() -> None:
        for step in range(POSITIONS):
            launch_position(settings, buffers, step, logits[step], bias, control)

    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    ids, q = _expected(logits, bias, buffers)
    bad = torch.zeros(4, dtype=torch.int64, device="cuda")
    keys = control[:, :2].to(torch.int64) & 0xFFFFFFFF
    positions = control[:, Control.POSITION].to(torch.int64)[None] + torch.arange(POSITIONS, device="cuda")[:, None]
    started, replays = time.monotonic(), 0
    while time.monotonic() - started < seconds:
        for _ in range(50):
            control[:, Control.ROUND_LOW] += 1
            buffers.poison()
            graph.replay()
            rounds = control[:, Control.ROUND_LOW].to(torch.int64)[None].expand(POSITIONS, ROWS)
            _compare(buffers, ids, q, rounds, positions, keys, bad)
            replays += 1
        torch.cuda.synchronize()
    counts = {
        "rows": replays * POSITIONS * ROWS,
        "retirements": replays * POSITIONS * ROWS * settings.tiling.num_tiles,
        "bad_ids": int(bad[0]),
        "bad_sums": int(bad[1]),
        "bad_tokens": int(bad[2]),
        "bad_errors": int(bad[3]),
    }
    clean = int(bad.sum()) == 0 and replays > 0
    return Check("stress", "no bad row", " ".join(f"{name}={value}" for name, value in counts.items()), clean), counts


def _expected(logits: torch.Tensor, bias: torch.Tensor, buffers: HeadBuffers) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids by an independent top-k, and the counts of the first run."""
    ids = []
    for row in logits:
        found, _ = naive.select_support(naive.corrected_logits(row, bias), 32)
        ids.append(found.to(torch.int32))
    return torch.stack(ids), buffers.q.clone()


def _compare(buffers, ids, q, rounds, positions, keys, bad) -> None:
    """Adds the mistakes of one replay to ``bad`` on the device."""
    tickets = (buffers.q.to(torch.float64) * TICKET_TOTAL).to(torch.int64)
    bad[0] += ((buffers.ids != ids) | (buffers.q != q)).any(dim=2).sum()
    bad[1] += (tickets.sum(dim=2) != TICKET_TOTAL).sum()
    flat_keys = keys[None].expand(POSITIONS, ROWS, 2).reshape(-1, 2)
    draw = naive.philox((rounds.reshape(-1), positions.reshape(-1), Domain.PROPOSAL, 0), flat_keys)[0] >> 8
    index = (tickets.cumsum(dim=2) <= draw.reshape(POSITIONS, ROWS, 1)).sum(dim=2, keepdim=True)
    bad[2] += (buffers.ids.gather(2, index.clamp(max=31))[..., 0] != buffers.token).sum()
    bad[3] += (buffers.error != 0).sum() + (buffers.count != 32).sum()
