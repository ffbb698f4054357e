"""Proof that replays follow their inputs: changed keys, anchors, masks and logits against eager references.

CUDA only. Kept apart from `checks`, which also runs where there are no graphs.
"""

from __future__ import annotations

from typing import Any

import torch

from remote_dspark.contract import Check
from remote_dspark.kernels import naive
from remote_dspark.kernels.graphs import ChainGraph, GraphKey
from remote_dspark.kernels.rows import pack_control, stamp_of
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
