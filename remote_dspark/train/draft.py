"""The drafter's training loss: many anchor-first blocks per sequence in one masked pass.

Per block row i, predicting position anchor + i + 1 with the true previous token in the Markov head:
``decay(i) * (ce * CE(q, next) + l1 * ||q - p||_1 / 2 + confidence * BCE(c, 1 - ||q - p||_1 / 2))`` where p is the
target's row at T=1 and q the draft row at the temperature it is served at. Source of the form: DSpark (arXiv
2607.05147); the serving temperature in q is ours.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remote_dspark.drafter.config import parse_config
from remote_dspark.drafter.model import DSparkDrafter, Projection, Table
from remote_dspark.train.recipe import Recipe


def new_drafter(recipe: Recipe, target: Any) -> DSparkDrafter:
    """A drafter with small random weights and the target's embedding and head, both frozen."""
    drafter = DSparkDrafter(parse_config(recipe.drafter_config()))
    for module in drafter.modules():
        if isinstance(module, Projection | Table):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Projection) and module.bias is not None:
            nn.init.zeros_(module.bias)
    with torch.no_grad():
        drafter.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        drafter.lm_head.weight.copy_(target.get_output_embeddings().weight)
    drafter.embed_tokens.requires_grad_(False)
    drafter.lm_head.requires_grad_(False)
    return drafter


def target_states(target: Any, ids: Tensor, layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Unfused states [B, T, m*d] of ``ids`` [B, T], and the normalised final states [B, T, d].

    Layer -1 is the embedding output; ``hidden_states[l + 1]`` is the output of layer l for every layer but the last.
    """
    out = target.model(input_ids=ids, use_cache=False, output_hidden_states=True)
    return torch.cat([out.hidden_states[layer + 1] for layer in layer_ids], dim=-1), out.last_hidden_state


def block_layout(anchors: Tensor, block_size: int, length: int) -> tuple[Tensor, Tensor]:
    """Positions and mask of ``anchors`` [B, N] laid side by side.

    Returns:
        Positions [B, N*g] and a boolean mask [B, 1, N*g, T + N*g]: a row sees positions strictly before its anchor,
        and the rows of its own block.
    """
    batch, count = anchors.shape
    offsets = torch.arange(block_size, device=anchors.device)
    positions = (anchors.unsqueeze(-1) + offsets).flatten(1)
    owner = torch.arange(count, device=anchors.device).repeat_interleave(block_size)
    row_anchor = anchors.repeat_interleave(block_size, dim=1).unsqueeze(-1)
    sees_context = torch.arange(length, device=anchors.device) < row_anchor
    sees_block = (owner.unsqueeze(0) == owner.unsqueeze(1)).expand(batch, -1, -1)
    return positions, torch.cat((sees_context, sees_block), dim=-1).unsqueeze(1)


def draft_loss(
    drafter: DSparkDrafter, target: Any, ids: Tensor, recipe: Recipe, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Loss of one batch, and the mean overlap sum(min(p, q)) per block position [g] (detached).

    Args:
        drafter: Trained in place by the caller.
        target: Frozen.
        ids: Token ids [B, T] int64.
        recipe: Weights, block size, anchors.
        generator: CPU generator of the anchors.
    """
    batch, length = ids.shape
    size = recipe.block_size
    with torch.no_grad():
        states, final = target_states(target, ids, recipe.target_layer_ids)
    # the last row of a block predicts position anchor + size, which must exist
    anchors = torch.randint(1, length - size, (batch, recipe.anchors_per_sequence), generator=generator)
    positions, mask = block_layout(anchors.to(ids.device), size, length)
    block = torch.full_like(positions, drafter.config.mask_token_id)
    block[:, ::size] = ids.gather(1, positions[:, ::size])
    everywhere = torch.arange(length, device=ids.device).expand(batch, -1)
    hidden = drafter(block, positions, drafter.context_kv(states, everywhere), mask)
    previous, following = ids.gather(1, positions), ids.gather(1, positions + 1)
    logits = F.linear(hidden, drafter.lm_head.weight) + drafter.markov_head(previous)
    with torch.no_grad():
        at_rows = final.gather(1, positions.unsqueeze(-1).expand(-1, -1, final.shape[-1]))
        target_probs = target.lm_head(at_rows).float().softmax(-1)
    log_q = (logits.float() / recipe.draft_temperature).log_softmax(-1)
    distance = 0.5 * (log_q.exp() - target_probs).abs().sum(-1)
    entropy = F.nll_loss(log_q.flatten(0, 1), following.flatten(), reduction="none").view_as(distance)
    row = recipe.ce_weight * entropy + recipe.l1_weight * 2 * distance
    row = row + recipe.confidence_weight * _confidence_loss(drafter, hidden, previous, 1 - distance.detach())
    decay = torch.exp(-torch.arange(size, device=ids.device) / recipe.loss_decay_gamma)
    per_position = row.view(-1, size).mean(0)
    overlap = (1 - distance.detach()).view(-1, size).mean(0)
    return (per_position * decay).sum() / decay.sum(), overlap


def _confidence_loss(drafter: DSparkDrafter, hidden: Tensor, previous: Tensor, label: Tensor) -> Tensor:
    """Trains the confidence head alone: neither the backbone nor the Markov table receives its gradient."""
    features = torch.cat((hidden.detach(), drafter.markov_head.markov_w1(previous).detach().to(hidden.dtype)), dim=-1)
    logit = drafter.confidence_head.proj(features).squeeze(-1).float()
    return F.binary_cross_entropy_with_logits(logit, label.clamp(0, 1), reduction="none")
