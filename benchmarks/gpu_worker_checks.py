"""What must hold on the device before a block is timed; each check names what it compared."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.gpu_worker_inputs import DEPTH, block_input, block_inputs, state_rows
from remote_dspark.contract import TICKET_TOTAL, Check
from remote_dspark.drafter.context import ContextCache
from remote_dspark.drafter.device import DeviceCompute
from remote_dspark.drafter.model import DSparkDrafter
from remote_dspark.kernels import naive
from remote_dspark.oracle.philox import proposal_draw
from remote_dspark.oracle.tickets import draw_token

TOLERANCE = 1.25
"""A device block may be this much further from the FP32 statement than the BF16 torch statement is."""


def fill_contexts(compute: DeviceCompute, context: int) -> None:
    """The same seeded states in every seat's context, sent in uneven pieces that differ from seat to seat."""
    model = compute.backbone.model
    for seat in range(compute.backbone.num_seats):
        rows, done = state_rows(model, 1, context), 0
        for size in (1, 5, 40 + seat, 17, 3, context):
            piece = rows[done : done + size]
            if len(piece):
                compute.write(seat, done, piece)
            done += len(piece)


def run_checks(compute: DeviceCompute, context: int) -> list[Check]:
    """All checks; fills every seat's context."""
    fill_contexts(compute, context)
    return [
        check_chunks(compute, context),
        check_reference(compute, context),
        check_neighbours(compute, context),
        *(check_rows(compute, context, tau) for tau in (0.7, 0.0)),
    ]


def check_chunks(compute: DeviceCompute, context: int) -> Check:
    """Seats whose states came in different pieces hold the same bits."""
    keys, values = (t[:, :, :, :context] for t in (compute.backbone.keys, compute.backbone.values))
    same = all(torch.equal(t[:, 0], t[:, seat]) for t in (keys, values) for seat in range(1, keys.shape[1]))
    good = same and bool(keys.abs().sum() > 0) and bool(keys.isfinite().all())
    return Check("context-chunks", "the same bits", "the same bits" if good else "they differ", good)


def check_reference(compute: DeviceCompute, context: int) -> Check:
    """Distance of base logits to the FP32 statement, against that of the BF16 torch statement."""
    model, block = compute.backbone.model, block_input(0, context, 0.7, 7, 0)
    device = next(model.parameters()).device
    found = compute.base_logits([block], DEPTH)[0].float()
    with torch.device(device):
        wide = DSparkDrafter(model.config)
    wide.load_state_dict(model.state_dict())
    rows = state_rows(model, 1, context)
    base = []
    for each in (wide.eval(), model):
        cache = ContextCache(each, context)
        with torch.inference_mode():
            cache.append(0, rows)
            hidden = each.draft_hidden(block.anchor, context, cache.view())
            base.append(torch.nn.functional.linear(hidden[:DEPTH], each.lm_head.weight).float())
    exact, plain = base
    ours, theirs = ((one - exact).norm() / exact.norm() for one in (found, plain))
    good = bool(ours <= TOLERANCE * theirs)
    text = f"{float(ours):.5f} against {float(theirs):.5f}"
    return Check("base-logits", f"at most {TOLERANCE} x the distance of torch", text, good)


def check_neighbours(compute: DeviceCompute, context: int) -> Check:
    """A request's base logits and proposal in every batch, place and seat."""
    expected: tuple[torch.Tensor, list[int]] | None = None
    compared = 0
    for batch in range(1, compute.backbone.num_seats + 1):
        for place in range(batch):
            # the seats hold the same context, so any of them may serve
            blocks = [block_input(request + 1, context, 0.7, 7, request) for request in range(batch)]
            blocks[place] = block_input(0, context, 0.7, 7, place)
            base = compute.base_logits(blocks, DEPTH)[place]
            rows = compute.draft(blocks, DEPTH)
            found = (base, [*rows.tokens[place].tolist(), *rows.ids[place].ravel().tolist(), *rows.q[place].ravel()])
            if expected is None:
                expected = found
            if not torch.equal(found[0], expected[0]) or found[1] != expected[1]:
                different = int((found[0] != expected[0]).sum())
                text = f"batch {batch} place {place}: {different} logits differ"
                return Check("neighbours", "the same bits", text, False)
            compared += 1
    return Check("neighbours", "the same bits", f"{compared} batches and places equal", compared > 3)


def check_rows(compute: DeviceCompute, context: int, tau: float) -> Check:
    """Proposals of a full batch against the torch reference of the heads on the device's own base logits."""
    blocks = block_inputs(compute.backbone.num_seats, context, tau)
    base = compute.base_logits(blocks, DEPTH)
    rows = compute.draft(blocks, DEPTH)
    head = compute.backbone.model.markov_head
    worst = 0
    for index, block in enumerate(blocks):
        previous = block.anchor
        for position in range(DEPTH):
            bias = naive.markov_bias(head.markov_w1.weight[previous : previous + 1], head.markov_w2.weight)
            logits = naive.corrected_logits(base[index, position : position + 1], bias)
            token, count = int(rows.tokens[index, position]), int(rows.counts[index, position])
            if tau == 0:
                good = count == 0 and token == int((logits[0] == logits[0].max()).nonzero()[0, 0])
            else:
                ids = rows.ids[index, position, :count].astype(np.int64)
                tickets = np.rint(rows.q[index, position, :count] * TICKET_TOTAL).astype(np.int64)
                draw = proposal_draw(block.key, block.round, block.position + 1 + position)
                wanted = naive.sampled_head(
                    base[index, position : position + 1].cpu(),
                    bias.cpu(),
                    tau=torch.tensor([tau]),
                    keys=torch.tensor([block.key]),
                    rounds=torch.tensor([block.round]),
                    positions=torch.tensor([block.position + 1 + position]),
                    greedy=torch.tensor([False]),
                )
                expected_ids, expected = wanted.sparse_row(0)
                good = tickets.sum() == TICKET_TOTAL and draw_token(ids, tickets, draw) == token
                good = good and ids.tolist() == expected_ids
                if good:
                    worst = max(worst, int(np.abs(tickets - np.array(expected)).max()))
            if not good or worst > 64:
                text = f"request {index} position {position}: token {token}, {count} entries, {worst} tickets off"
                return Check(f"rows tau {tau}", "equal to the reference", text, False)
            previous = token
    return Check(f"rows tau {tau}", "equal to the reference", f"{len(blocks) * DEPTH} rows, {worst} tickets off", True)
