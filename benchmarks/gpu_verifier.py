"""Times of the verifier, and a dense torch statement of the same acceptance and residual as peer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu_inputs import VOCAB
from benchmarks.gpu_timing import Timing, time_graph
from remote_dspark.kernels import checks
from remote_dspark.kernels.rows import Control
from remote_dspark.kernels.sampled_head import Tiling
from remote_dspark.kernels.verifier import VerifierBuffers, VerifierSettings, launch_verify

if TYPE_CHECKING:
    from benchmarks.gpu import Report

DEPTH = 5
GOAL_US = 8.0
SETTINGS = VerifierSettings(Tiling(VOCAB, 8192, 1, 8), DEPTH)
"""16 tiles of a row, 384 programs for 24 rows."""


def make_inputs(num_requests: int) -> tuple[torch.Tensor, ...]:
    """Rows of requests of depth 5, none greedy."""
    case = checks.make_verify_case(0, 1, DEPTH, VOCAB, padding=0)
    target, control, *drafts = case.arguments("cuda")
    control = control.repeat(num_requests, 1)
    control[:, Control.FIRST_ROW] = torch.arange(num_requests, device="cuda") * (DEPTH + 1)
    control[:, Control.KEY0] += torch.arange(num_requests, device="cuda", dtype=torch.int32)
    repeated = [field.repeat(num_requests, *([1] * (field.dim() - 1))) for field in drafts]
    return (target.repeat(num_requests, 1), control, *repeated)


def dense_peer(target, proposed, ids, q, num_requests: int):
    """Softmax, ratio test, dense residual and an exponential race, as separate torch operations."""
    rows = target.view(num_requests, DEPTH + 1, VOCAB)
    uniform = torch.rand(num_requests, DEPTH, device="cuda")
    noise = torch.empty(num_requests, VOCAB, device="cuda").exponential_()

    def call() -> None:
        probs = torch.softmax(rows, dim=2)
        drafts = torch.zeros(num_requests, DEPTH + 1, VOCAB, device="cuda")
        drafts[:, :DEPTH].scatter_(2, ids.long(), q)
        at = proposed.long()[..., None]
        p, own = probs[:, :DEPTH].gather(2, at)[..., 0], drafts[:, :DEPTH].gather(2, at)[..., 0]
        accepted = (uniform * own < p).to(torch.int32).cumprod(dim=1).sum(dim=1)
        index = accepted.long()[:, None, None].expand(-1, 1, VOCAB)
        residual = (probs.gather(1, index) - drafts.gather(1, index)).clamp(min=0)[:, 0]
        (residual / noise).argmax(dim=1)

    return call


def verify_body(settings: VerifierSettings, inputs: tuple[torch.Tensor, ...], calls: int = 20):
    """A body of ``calls`` verifications and its buffers."""
    buffers = VerifierBuffers(settings, inputs[1].shape[0], inputs[0].shape[0], "cuda")

    def body() -> None:
        for _ in range(calls):
            launch_verify(settings, buffers, *inputs)

    return body, buffers


def measure(report: Report) -> None:
    """Adds 1 and 4 requests of 6 rows: the default, and without one launch or its early set-up."""
    for num_requests in (1, 4):
        inputs = make_inputs(num_requests)
        target, _, proposed, ids, q, _ = inputs
        peer_call = dense_peer(target, proposed, ids, q, num_requests)
        peer = f"torch dense verifier, {num_requests} x 6"
        report.add(peer, time_graph(lambda call=peer_call: [call() for _ in range(20)] and None, 20, replays=20))
        name = f"verifier, {num_requests} x 6"
        report.add(name, _time(SETTINGS, inputs), GOAL_US if num_requests == 4 else None, peer)
        report.add(f"{name}, not set up early", _time(replace(SETTINGS, overlap=False), inputs))
        report.add(f"{name}, a launch for each stage", _time(replace(SETTINGS, one_launch=False), inputs))


def _time(settings: VerifierSettings, inputs: tuple[torch.Tensor, ...]) -> Timing:
    """Times 20 calls and refuses the figure if a request was refused."""
    body, buffers = verify_body(settings, inputs)
    timing = time_graph(body, 20)
    if bool(buffers.error.any()):
        raise RuntimeError(
            f"expected verified requests, found errors {buffers.error.tolist()}: this time means nothing"
        )
    return timing
