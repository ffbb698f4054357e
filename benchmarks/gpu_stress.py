"""Proofs that need a GPU's speed: a million rows checked on the device, 10^8 retirements, and replays of the verifier.

Everything is in graphs, the poisoning before and the comparison after each replay too, so the host only counts. Inputs
stay, so ids and counts must be the same in every replay; rounds and with them draws change, and each token must be the
inverse CDF of the emitted counts at the recorded draw. Time-boxed: what was reached is what is reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.gpu_inputs import VOCAB, make_control
from benchmarks.gpu_timing import capture
from benchmarks.gpu_verifier import SETTINGS, make_inputs
from remote_dspark.contract import TICKET_TOTAL, Check, Domain
from remote_dspark.kernels import naive
from remote_dspark.kernels.rows import Control
from remote_dspark.kernels.sampled_head import HeadBuffers, HeadSettings, Tiling, launch_position
from remote_dspark.kernels.verifier import VerifierBuffers, launch_verify

ROWS = 8
POSITIONS = 60
ROWS_WANTED = 1_000_000
RETIREMENTS_WANTED = 100_000_000


def stress(seconds: float, tile: int = 2048) -> Check:
    """Replays the sampled head until enough rows and retirements are counted, or the time is up."""
    settings = HeadSettings(Tiling(VOCAB, tile, 2, 4))
    logits, bias, control = _head_inputs()
    buffers = HeadBuffers(settings, POSITIONS, ROWS, "cuda")
    bad = torch.zeros(4, dtype=torch.int64, device="cuda")

    def launch() -> None:
        for step in range(POSITIONS):
            launch_position(settings, buffers, step, logits[step], bias, control)

    launch()
    ids, q = _expected(logits, bias, buffers)
    keys = control[:, :2].to(torch.int64) & 0xFFFFFFFF
    positions = control[:, Control.POSITION].to(torch.int64)[None] + torch.arange(POSITIONS, device="cuda")[:, None]

    def body() -> None:
        control[:, Control.ROUND_LOW] += 1
        buffers.poison()
        launch()
        rounds = control[:, Control.ROUND_LOW].to(torch.int64)[None].expand(POSITIONS, ROWS)
        _compare(buffers, ids, q, rounds, positions, keys, bad)

    rows = POSITIONS * ROWS
    retirements = rows * settings.tiling.num_tiles
    wanted = max(-(-ROWS_WANTED // rows), -(-RETIREMENTS_WANTED // retirements))
    replays = _replay(body, wanted, seconds)
    counts = {"rows": replays * rows, "retirements": replays * retirements}
    counts.update(zip(("bad_ids", "bad_sums", "bad_tokens", "bad_errors"), bad.tolist(), strict=True))
    clean = int(bad.sum()) == 0 and replays > 0
    return Check("stress", "no bad row", _text(counts), clean)


def stress_verifier(seconds: float, wanted: int = 20_000) -> Check:
    """One launch against one launch per stage, on new rounds of the same rows: every output bit for bit."""
    inputs = make_inputs(4)
    control, ids = inputs[1], inputs[3]
    one, staged = (VerifierBuffers(SETTINGS, 4, inputs[0].shape[0], "cuda") for _ in range(2))
    in_stages = replace(SETTINGS, one_launch=False)
    counts = torch.zeros(3, dtype=torch.int64, device="cuda")

    def body() -> None:
        control[:, Control.ROUND_LOW] += 1
        one.poison()
        launch_verify(SETTINGS, one, *inputs)
        launch_verify(in_stages, staged, *inputs)
        for name, found in vars(one.outputs()).items():
            counts[0] += (found != getattr(staged.outputs(), name)).sum()
        counts[1] += one.error.count_nonzero()
        counts[2] += one.num_accepted.sum()

    replays = _replay(body, wanted, seconds)
    different, refused, accepted = counts.tolist()
    found = {"calls": replays, "rows": replays * 24, "different": different, "refused": refused, "accepted": accepted}
    clean = different == 0 and refused == 0 and 0 < accepted < replays * ids.shape[0] * ids.shape[1]
    return Check("verifier-replays", "no difference", _text(found), clean)


def _replay(body: Callable[[], None], wanted: int, seconds: float) -> int:
    """Captures ``body`` and replays it ``wanted`` times, or until the time is up; returns how often."""
    graph = capture(body)
    started, replays = time.monotonic(), 0
    while replays < wanted and time.monotonic() - started < seconds:
        for _ in range(50):
            graph.replay()
        replays += 50
        torch.cuda.synchronize()
    return replays


def _text(counts: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in counts.items())


def _head_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [POSITIONS, ROWS, V] of which a quarter is full of ties, bias rows [ROWS, V], control."""
    torch.manual_seed(77)
    logits = (torch.randn(POSITIONS, ROWS, VOCAB, device="cuda") * 3).to(torch.bfloat16)
    logits[::4] = (logits[::4] / 2).round()
    bias = torch.randn(ROWS, VOCAB, device="cuda").to(torch.bfloat16)
    bias[::2] = bias[::2].round()
    return logits, bias, make_control(ROWS)


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
