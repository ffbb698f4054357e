"""Proof that replays follow their inputs: changed keys, anchors, masks and logits against eager references.

CUDA only. Kept apart from `checks`, which also runs where there are no graphs.
"""

from __future__ import annotations

from typing import Any

import torch

from remote_dspark.contract import Check
from remote_dspark.kernels import naive
from remote_dspark.kernels.graphs import ChainGraph, GraphKey
from remote_dspark.kernels.rows import Control, pack_control, stamp_of
from remote_dspark.kernels.sampled_head import HeadSettings, Tiling
from remote_dspark.oracle.philox import derive_key


def check_graph_replays(device: str, vocab_size: int, *, tile: int, replays: int = 6, depth: int = 3) -> Check:
    """Two overlapping-safe graphs replayed alternately with fresh inputs; every output compared with the reference."""
    generator = torch.Generator().manual_seed(3)
    cache = torch.randn(64, vocab_size, generator=generator).to(torch.bfloat16)
    slots = torch.randint(0, 64, (vocab_size,), generator=generator, dtype=torch.int32)
    settings = HeadSettings(Tiling(vocab_size, tile), emit_weights=True)
    graphs = [ChainGraph(GraphKey(rows, 32, depth), settings, cache.to(device), slots.to(device)) for rows in (2, 4)]
    compared = 0
    for replay in range(replays):
        graph = graphs[replay % 2]
        num_rows = graph.inputs.anchors.shape[0]
        logits = (torch.randn(depth, num_rows, vocab_size, generator=generator) * 3).to(torch.bfloat16)
        anchors = torch.randint(0, vocab_size, (num_rows,), generator=generator, dtype=torch.int32)
        fields: dict[str, Any] = {
            "tau": torch.full((num_rows,), 0.7),
            "keys": torch.tensor([derive_key(replay * 10 + row, 2) for row in range(num_rows)]),
            "rounds": torch.full((num_rows,), replay),
            "greedy": torch.arange(num_rows) == replay % (num_rows + 1),
        }
        first = torch.full((num_rows,), 100 * replay)
        control = pack_control(**fields, positions=first, epochs=torch.full((num_rows,), replay))
        graph.buffers.poison()
        buffers = graph.replay(control.to(device), anchors.to(device), logits.to(device))
        torch.cuda.synchronize()
        previous = anchors
        for step in range(depth):
            wanted = naive.sampled_head(
                logits[step], cache[slots[previous.long()].long()], **fields, positions=first + step
            )
            found = buffers.rows(step)
            same = torch.equal(found.ids, wanted.ids) and torch.equal(found.error, wanted.error)
            if not same or not torch.equal(found.stamp, stamp_of(control)):
                return Check("graph-replays", "equal to the reference", f"replay {replay} step {step} differs", False)
            # the token is the device's own: its weights may differ from the reference's by an ulp
            previous = found.token
            compared += num_rows
    return Check("graph-replays", "equal to the reference", f"{compared} rows equal", compared > 0)


def check_overlapping_graphs(device: str, vocab_size: int, *, tile: int, replays: int = 200, depth: int = 3) -> Check:
    """Two graphs replayed at the same time on two streams, each with new rounds: equal to replays one after the other.

    Graphs own their scratch, and a position's early programs write nothing before the one before has ended, so what
    else runs on the device cannot matter.
    """
    torch.manual_seed(5)
    cache = torch.randn(64, vocab_size, device=device).to(torch.bfloat16)
    slots = torch.randint(0, 64, (vocab_size,), device=device, dtype=torch.int32)
    settings = HeadSettings(Tiling(vocab_size, tile))
    graphs = [ChainGraph(GraphKey(rows, 32, depth), settings, cache, slots) for rows in (2, 4)]
    streams = [torch.cuda.Stream() for _ in graphs]
    inputs = [_random_inputs(graph, vocab_size, device) for graph in graphs]
    alone = [_replay_rounds(graph, inputs[at], replays) for at, graph in enumerate(graphs)]
    torch.cuda.synchronize()
    together = []
    for at, (graph, stream) in enumerate(zip(graphs, streams, strict=True)):
        with torch.cuda.stream(stream):
            together.append(_replay_rounds(graph, inputs[at], replays))
    torch.cuda.synchronize()
    different = sum(int((left != right).sum()) for left, right in zip(alone, together, strict=True))
    distinct = min(int(tokens.unique().numel()) for tokens in together)
    found = f"{replays} replays of each, {different} tokens or ids differ, at least {distinct} distinct values"
    return Check("overlapping-graphs", "no difference", found, different == 0 and distinct > depth)


def _random_inputs(graph: ChainGraph, vocab_size: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Control, anchors and logits of one graph."""
    num_rows = graph.inputs.anchors.shape[0]
    control = pack_control(
        tau=torch.full((num_rows,), 0.7),
        keys=torch.tensor([derive_key(row, 9) for row in range(num_rows)]),
        rounds=torch.zeros(num_rows, dtype=torch.int64),
        positions=torch.full((num_rows,), 10),
        greedy=torch.zeros(num_rows, dtype=torch.bool),
    )
    logits = torch.randn(graph.inputs.logits.shape, device=device) * 3
    return control.to(device), torch.arange(num_rows, dtype=torch.int32, device=device), logits.to(torch.bfloat16)


def _replay_rounds(
    graph: ChainGraph, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], replays: int
) -> torch.Tensor:
    """Tokens and ids of replays of rounds 1, 2, ... on the current stream, int32 [replays, n]."""
    control, anchors, logits = inputs
    control = control.clone()
    found = []
    for _ in range(replays):
        control[:, Control.ROUND_LOW] += 1
        buffers = graph.replay(control, anchors, logits)
        found.append(torch.cat([buffers.token.flatten(), buffers.ids.flatten()]))
    return torch.stack(found)
