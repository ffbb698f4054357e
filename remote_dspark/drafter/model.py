"""The DSpark network in plain torch: fused target states, injected keys and values, one bidirectional block.

One module serves training and inference; its parameter names are the checkpoint's (DeepSpec ``Qwen3DSparkModel``).
The rules of this file:

* A context position is a position strictly before the anchor. Its keys and values come from the *target's* hidden
  states, ``hidden_norm(fc(cat))``, through each draft layer's own projections, without the layer's input norm.
* A block is ``[anchor, MASK, MASK, ...]`` of exactly ``block_size`` rows at positions anchor, anchor+1, ...;
  row i predicts the token at position anchor + i + 1. Inside a block attention has no order.
* Block keys and values are never stored: after a rejection there is nothing to undo.

Not covered: CUDA graphs, tensor parallelism, batching of requests with different context lengths in one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remote_dspark.drafter.config import DSparkConfig


@dataclass(frozen=True)
class CheckpointIdentity:
    """What was loaded: SHA-256 of every file by name, and one digest over them in name order."""

    files: dict[str, str] = field(default_factory=dict)
    sha256: str = ""


class Projection(nn.Module):
    """A linear map whose weights are left unset: loading overwrites them, and drawing them first costs seconds."""

    def __init__(self, in_width: int, out_width: int, *, has_bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_width, in_width))
        self.bias = nn.Parameter(torch.empty(out_width)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_width] to [..., out_width]."""
        return F.linear(x, self.weight, self.bias)


class Table(nn.Module):
    """An embedding table whose rows are left unset, for the same reason."""

    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, width))

    def forward(self, ids: Tensor) -> Tensor:
        """Rows [..., width] of ids [...]."""
        return F.embedding(ids, self.weight)


class RMSNorm(nn.Module):
    """Root-mean-square norm; the mean is taken in FP32 whatever the input dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``x``; same shape and dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [..., head_dim] FP32, for integer ``positions`` [...] (half-split layout)."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angle = positions.float().unsqueeze(-1) * (theta**-exponent)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` [B, heads, n, head_dim] by tables [B, n, head_dim]; same dtype as ``x``."""
    cos, sin = cos.unsqueeze(1).to(x.dtype), sin.unsqueeze(1).to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class BlockAttention(nn.Module):
    """Queries from the block; keys and values from the context, then the block."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        d, h, kv, hd = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.head_dim = hd
        self.num_kv_heads = kv
        self.num_groups = h // kv
        self.q_proj = Projection(d, h * hd)
        self.k_proj = Projection(d, kv * hd)
        self.v_proj = Projection(d, kv * hd)
        self.o_proj = Projection(h * hd, d)
        self.q_norm = RMSNorm(hd, config.rms_norm_eps)
        self.k_norm = RMSNorm(hd, config.rms_norm_eps)

    def key_value(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, each [B, kv_heads, n, head_dim], of ``x`` [B, n, d]."""
        shape = (*x.shape[:2], self.num_kv_heads, self.head_dim)
        key = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        return apply_rope(key, *rope), self.v_proj(x).view(shape).transpose(1, 2)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Tensor:
        """Attend from ``x`` [B, Q, d] to context [B, kv, T, head_dim] and to ``x`` itself; returns [B, Q, d]."""
        query = self.q_norm(self.q_proj(x).view(*x.shape[:2], -1, self.head_dim)).transpose(1, 2)
        query = apply_rope(query, *rope)
        key, value = self.key_value(x, rope)
        key, value = torch.cat((context[0], key), dim=2), torch.cat((context[1], value), dim=2)
        if mask is not None and self.num_groups > 1:
            # fused masked attention wants as many key heads as query heads
            key, value = key.repeat_interleave(self.num_groups, 1), value.repeat_interleave(self.num_groups, 1)
        is_grouped = key.shape[1] != query.shape[1]
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=is_grouped)
        joined: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return joined


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        d, f = config.hidden_size, config.intermediate_size
        self.gate_proj = Projection(d, f)
        self.up_proj = Projection(d, f)
        self.down_proj = Projection(f, d)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] to [..., d]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftLayer(nn.Module):
    """Pre-norm attention and MLP, with residuals."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.self_attn = BlockAttention(config)
        self.mlp = GatedMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Tensor:
        """One layer over the block ``x`` [B, Q, d]."""
        x = x + self.self_attn(self.input_layernorm(x), rope, context, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class MarkovHead(nn.Module):
    """Low-rank bias from the previous token: ``W2 @ W1[previous]``. This is the training form, in any dtype.

    Serving uses `remote_dspark.drafter.markov`, whose sum has a fixed order (DECISIONS 7).
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.markov_w1 = Table(config.vocab_size, config.markov_rank)
        self.markov_w2 = Projection(config.markov_rank, config.vocab_size)

    def forward(self, previous_ids: Tensor) -> Tensor:
        """Bias [..., V] for ids [...]."""
        out: Tensor = self.markov_w2(self.markov_w1(previous_ids))
        return out


class ConfidenceHead(nn.Module):
    """Acceptance estimate. Loaded so that checkpoints round-trip; never consulted: the depth is fixed (seeds)."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        width = config.hidden_size + (config.markov_rank if config.confidence_with_markov else 0)
        self.proj = Projection(width, 1, has_bias=True)


class DSparkDrafter(nn.Module):
    """A DSpark drafter: ``context_kv`` for committed positions, ``draft_hidden`` and ``base_logits`` for a block."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        d = config.hidden_size
        self.config = config
        self.identity = CheckpointIdentity()
        self.embed_tokens = Table(config.vocab_size, d)
        self.fc = Projection(config.fused_width, d)
        self.hidden_norm = RMSNorm(d, config.rms_norm_eps)
        self.layers = nn.ModuleList([DraftLayer(config) for _ in range(config.num_layers)])
        self.norm = RMSNorm(d, config.rms_norm_eps)
        self.lm_head = Projection(d, config.vocab_size)
        self.markov_head = MarkovHead(config)
        if config.has_confidence_head:
            self.confidence_head = ConfidenceHead(config)

    def fuse(self, states: Tensor) -> Tensor:
        """Fused context states [B, n, d] of unfused ones [B, n, m*d], in the order of ``target_layer_ids``."""
        out: Tensor = self.hidden_norm(self.fc(states))
        return out

    def context_kv(self, states: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values that committed positions inject into every draft layer.

        Args:
            states: Unfused target states [B, n, m*d], any floating dtype; converted to the model's.
            positions: Absolute positions [B, n], integer.

        Returns:
            Per draft layer (key, value), each [B, kv_heads, n, head_dim], keys already rotated.
        """
        fused = self.fuse(states.to(self.fc.weight.dtype))
        rope = rope_tables(positions, self.config.head_dim, self.config.rope_theta)
        return [layer.self_attn.key_value(fused, rope) for layer in self._draft_layers()]

    def forward(
        self, ids: Tensor, positions: Tensor, context: Sequence[tuple[Tensor, Tensor]], mask: Tensor | None = None
    ) -> Tensor:
        """Final hidden states of block rows.

        Args:
            ids: Block ids [B, Q]: the anchor and masks, several blocks side by side when ``mask`` separates them.
            positions: Absolute positions [B, Q].
            context: As returned by `context_kv`, T positions.
            mask: Boolean [B, 1, Q, T + Q], True where a row may attend; None when everything may.

        Returns:
            Normalised hidden states [B, Q, d].
        """
        x = self.embed_tokens(ids)
        rope = rope_tables(positions, self.config.head_dim, self.config.rope_theta)
        for layer, pair in zip(self._draft_layers(), context, strict=True):
            x = layer(x, rope, pair, mask)
        out: Tensor = self.norm(x)
        return out

    def draft_hidden(self, anchor_id: int, anchor_position: int, context: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Hidden rows [block_size, d] of one request; ``context`` holds exactly the positions before the anchor."""
        device = self.embed_tokens.weight.device
        ids = torch.full((1, self.config.block_size), self.config.mask_token_id, dtype=torch.long, device=device)
        ids[0, 0] = anchor_id
        positions = torch.arange(anchor_position, anchor_position + self.config.block_size, device=device).unsqueeze(0)
        return self.forward(ids, positions, context)[0]

    def base_logits(self, hidden: Tensor) -> Tensor:
        """BF16 logits [..., V] of hidden rows [..., d], before the Markov bias."""
        return F.linear(hidden, self.lm_head.weight).to(torch.bfloat16)

    def _draft_layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]
