"""What the worker benchmark measures: a compute over a synthetic drafter, its tilings, and the blocks it drafts."""

from __future__ import annotations

import numpy as np
import torch

from remote_dspark.contract import Q_FLOOR_FIRST, SUPPORT_K
from remote_dspark.drafter.backbone import Backbone, BackboneTiling
from remote_dspark.drafter.device import DeviceCompute
from remote_dspark.drafter.model import DSparkDrafter
from remote_dspark.drafter.staging import Block
from remote_dspark.drafter.synthetic import synthetic_drafter
from remote_dspark.kernels.backbone_edges import NUM_CLOCKS
from remote_dspark.kernels.backbone_matmul import MatmulTiling
from remote_dspark.oracle.philox import derive_key

DEPTH = 5
NUM_SEATS = 4
MAX_POSITIONS = 4096
CACHE_BYTES = 1 << 30

PLAIN = MatmulTiling(overlap=False)
FINE = MatmulTiling(block_k=64, num_stages=5)

TILINGS = {
    "default": BackboneTiling(),
    "plain": BackboneTiling(PLAIN, PLAIN, chain_overlap=False),
    "fine": BackboneTiling(FINE, FINE),
}
"""Candidates; the first is what the worker uses."""

WARM_PARTS = ("front1", "front4", "greedy", "greedy4", "sampled", "sampled4", "context")


def build(model: DSparkDrafter, tiling: BackboneTiling, num_seats: int = NUM_SEATS) -> DeviceCompute:
    """A compute with every sequence captured and random context in every seat."""
    compute = DeviceCompute(
        model,
        num_seats,
        support=SUPPORT_K,
        semantics=Q_FLOOR_FIRST,
        cache_bytes=CACHE_BYTES,
        max_positions=min(MAX_POSITIONS, model.config.max_positions),
        max_depth=DEPTH,
        tiling=tiling,
    )
    for seat in range(num_seats):
        compute.context(seat)
    return compute


def state_rows(model: DSparkDrafter, seed: int, count: int) -> np.ndarray:
    """uint8 [count, 2*width] of seeded BF16 states."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, model.config.fused_width, generator=generator).to(torch.bfloat16)
    return values.view(torch.uint8).numpy()


def block_inputs(batch: int, context: int, tau: float, epoch: int = 7, seats: tuple[int, ...] = ()) -> list[Block]:
    """Requests 0..batch-1, each in the seat of its number unless given."""
    return [block_input(request, context, tau, epoch, seats[request] if seats else request) for request in range(batch)]


def block_input(request: int, context: int, tau: float, epoch: int, seat: int) -> Block:
    """One request; everything but the seat and the epoch follows from its number."""
    return Block(seat, 11 + 7 * request, context, tau, derive_key(request, 3), 5, 3, epoch)


def warm(part: str, shape: str, tilings: list[str]) -> None:
    """Compile one part of the kernels by running it once."""
    model = synthetic_drafter(shape, "cuda")
    if part.startswith("front"):
        for label in tilings:
            backbone = Backbone(model, NUM_SEATS, 256, TILINGS[label])
            batch = int(part[-1])
            ids = torch.zeros(batch, dtype=torch.int32, device="cuda")
            logits = torch.zeros(DEPTH, batch, model.config.vocab_size, dtype=torch.bfloat16, device="cuda")
            at_host = torch.zeros(batch, dtype=torch.int32, pin_memory=True)
            clock = torch.zeros(NUM_CLOCKS, dtype=torch.int64, device="cuda")
            backbone.write_logits(at_host, ids, ids, logits, (at_host, ids), clock)
    elif part == "context":
        for label in tilings:
            backbone = Backbone(model, NUM_SEATS, 256, TILINGS[label])
            header = torch.zeros(4, dtype=torch.int32, device="cuda")
            for rows in (16, 32):
                states = torch.zeros(rows, model.config.fused_width, dtype=torch.bfloat16, device="cuda")
                backbone.write_context(states, header)
    else:
        for label in tilings:
            warm_heads(part, model, TILINGS[label])
    torch.cuda.synchronize()


def warm_heads(part: str, model: DSparkDrafter, tiling: BackboneTiling) -> None:
    """Compile bias rows and heads for the batches of one part; as many launches as show every way of launching."""
    from remote_dspark.drafter.device import head_settings
    from remote_dspark.drafter.device_markov import DeviceMarkovRows
    from remote_dspark.kernels.backbone_greedy import greedy_buffers, launch_greedy
    from remote_dspark.kernels.backbone_markov import write_bias_rows
    from remote_dspark.kernels.sampled_head import HeadBuffers, launch_position

    head, vocab_size, overlap = model.markov_head, model.config.vocab_size, tiling.chain_overlap
    markov = DeviceMarkovRows(head.markov_w1.weight, head.markov_w2.weight, 1 << 20, NUM_SEATS)
    markov.fill(0)
    tables = (head.markov_w1.weight, head.markov_w2.weight, markov.slots, markov.rows)
    for batch in (4,) if part.endswith("4") else (1, 2):
        settings = head_settings(vocab_size, batch, SUPPORT_K, Q_FLOOR_FIRST, overlap=overlap)
        control = torch.zeros(batch, 16, dtype=torch.int32, device="cuda")
        previous = torch.zeros(batch, dtype=torch.int32, device="cuda")
        logits = torch.zeros(batch, -(-vocab_size // 64) * 64, dtype=torch.bfloat16, device="cuda")
        clock = torch.zeros(NUM_CLOCKS, dtype=torch.int64, device="cuda")
        places = torch.zeros_like(previous)
        for step in range(2):
            write_bias_rows(previous, *tables, None, places=places, clock=None if step else clock, overlap=overlap)
        if part.startswith("greedy"):
            outputs = (torch.zeros(1, batch, dtype=torch.int32, device="cuda"), previous.clone())
            buffers = greedy_buffers(*outputs, torch.zeros(1, batch, 3, dtype=torch.int64, device="cuda"))
            launch_greedy(buffers, 0, logits, markov.rows, places, control, vocab_size, overlap=overlap)
        else:
            buffers = HeadBuffers(settings, 2, batch, "cuda")
            for step in range(2):
                launch_position(settings, buffers, step, logits, markov.rows, control, places=places, follows=True)
