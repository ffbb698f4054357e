"""The DSpark network as a sequence of launches: context rows into a seat, block rows into base logits.

The same arithmetic as `drafter.model`, which is its reference: BF16 weights, FP32 sums, the same roundings. Rules:

* Every launch has fixed addresses and a fixed grid, so that a sequence can be captured; what changes from call to call
  (anchors, seats, lengths, positions) is read from device memory.
* A request owns `MAX_BLOCK_ROWS` activation rows, and no value of one row enters another request's.
* Calls follow each other on one stream; they share scratch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from remote_dspark.drafter.model import DSparkDrafter
from remote_dspark.drafter.packed import MAX_BLOCK_ROWS, PackedLayer, pack_model
from remote_dspark.kernels.backbone_attention import AttentionScratch, block_attention
from remote_dspark.kernels.backbone_matmul import GATED, LOGITS, PARTIAL, MatmulTiling, skinny_matmul, split_of
from remote_dspark.kernels.backbone_rows import embed_norm, residual_norm, write_context

MIN_ROWS = 16
"""Rows of the smallest product: fewer would take another matrix instruction."""


@dataclass(frozen=True)
class BackboneTiling:
    """Fixed choices.

    Attributes:
        layers: Every product but the head.
        head: Base logits.
        chain_overlap: Programmatic dependent launch between bias rows and selectors.
        chain_flip: Every other position reads W2 from its end.
    """

    layers: MatmulTiling = field(default_factory=MatmulTiling)
    head: MatmulTiling = field(default_factory=MatmulTiling)
    chain_overlap: bool = True
    chain_flip: bool = True


class Backbone:
    """One drafter on one device.

    Args:
        model: Loaded, BF16; its parameters become views of packed ones.
        num_seats: Seats with a context.
        max_positions: Positions of a seat.
        tiling: Fixed choices of the products.

    Attributes:
        keys: bf16 [layers, seats, key heads, positions, head_dim], rotated.
        values: The same shape.
    """

    def __init__(self, model: DSparkDrafter, num_seats: int, max_positions: int, tiling: BackboneTiling) -> None:
        config, device = model.config, model.fc.weight.device
        self.model = model
        self.packed = pack_model(model, max_positions)
        self.num_seats = num_seats
        self.max_positions = max_positions
        self._tiling = tiling
        shape = (config.num_layers, num_seats, config.num_kv_heads, max_positions, config.head_dim)
        self.keys = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self.values = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        groups = config.num_heads // config.num_kv_heads
        self._scratch = AttentionScratch(
            num_seats, config.num_kv_heads, groups, MAX_BLOCK_ROWS, config.head_dim, device
        )
        self._buffers: dict[tuple[str, int, int], Tensor] = {}

    def write_context(self, states: Tensor, header: Tensor) -> None:
        """Launch: keys and values of committed rows into a seat.

        Args:
            states: bf16 [`MIN_ROWS` or 32, m*d] unfused target states; rows beyond the header's count are ignored.
            header: int32 [4]: seat, first position, number of rows, 0.
        """
        model, eps = self.model, self.model.config.rms_norm_eps
        fused = self._rows("fused", states.shape[0], model.config.hidden_size)
        residual_norm(
            self._product("fuse", states, model.fc.weight),
            model.hidden_norm.weight,
            None,
            fused,
            eps=eps,
            overlap=False,
        )
        write_context(
            self._product("context", fused, self.packed.context_kv),
            header,
            self.packed.k_norms,
            self.packed.rope,
            self.keys,
            self.values,
            eps=eps,
        )

    def write_logits(
        self,
        anchors: Tensor,
        seats: Tensor,
        lengths: Tensor,
        logits: Tensor,
        words: tuple[Tensor, Tensor] | None = None,
        clock: Tensor | None = None,
    ) -> None:
        """Launch: base logits of one block per request.

        Args:
            anchors: int32 [B], last committed tokens; with ``words`` in registered host memory.
            seats: int32 [B].
            lengths: int32 [B], committed positions of each seat: the anchors' positions.
            logits: bf16 [positions, B, >= V], written: row i predicts the token at anchor + i + 1.
            words: Inputs at the host and where they go on the device, copied by the first launch (`embed_norm`).
            clock: int64 [1 or more], when it began.
        """
        config = self.model.config
        num_positions, num_requests, _ = logits.shape
        num_rows = max(MIN_ROWS, MAX_BLOCK_ROWS * triton.next_power_of_2(num_requests))
        x = self._rows("x", num_rows, config.hidden_size)
        normed = self._rows("normed", num_rows, config.hidden_size)
        layers = self.packed.layers
        embed_norm(
            anchors,
            self.model.embed_tokens.weight,
            layers[0].input_norm,
            x,
            normed,
            mask_id=config.mask_token_id,
            eps=config.rms_norm_eps,
            pad=MAX_BLOCK_ROWS,
            words=words,
            clock=clock,
            overlap=self._tiling.layers.overlap,
        )
        following = [layer.input_norm for layer in layers[1:]] + [self.model.norm.weight]
        for number, (layer, next_norm) in enumerate(zip(layers, following, strict=True)):
            self._layer(number, layer, next_norm, (x, normed), (seats, lengths))
        skinny_matmul(
            normed,
            self.model.lm_head.weight,
            logits,
            kind=LOGITS,
            tiling=self._tiling.head,
            pad=MAX_BLOCK_ROWS,
            num_requests=num_requests,
            num_positions=num_positions,
        )

    def _layer(
        self,
        number: int,
        layer: PackedLayer,
        next_norm: Tensor,
        rows: tuple[Tensor, Tensor],
        places: tuple[Tensor, Tensor],
    ) -> None:
        config, tiling, (x, normed), (seats, lengths) = self.model.config, self._tiling.layers, rows, places
        num_rows = x.shape[0]
        eps, overlap = config.rms_norm_eps, tiling.overlap
        mixed = self._rows("mixed", num_rows, config.num_heads * config.head_dim)
        block_attention(
            self._product("qkv", normed, layer.qkv),
            seats,
            lengths,
            (layer.q_norm, layer.k_norm),
            self.packed.rope,
            self.keys[number],
            self.values[number],
            mixed,
            self._scratch,
            block_size=config.block_size,
            pad=MAX_BLOCK_ROWS,
            eps=eps,
            overlap=overlap,
        )
        residual_norm(self._product("out", mixed, layer.out), layer.post_norm, x, normed, eps=eps, overlap=overlap)
        gated = self._rows("gated", num_rows, config.intermediate_size)
        skinny_matmul(normed, layer.gate_up, gated, kind=GATED, tiling=tiling)
        residual_norm(self._product("down", gated, layer.down), next_norm, x, normed, eps=eps, overlap=overlap)

    def _product(self, name: str, x: Tensor, weight: Tensor) -> Tensor:
        """Shares of ``x . weight^T``, float32 [shares, rows, columns], in the buffer of this name."""
        tiling, (num_columns, inner_size) = self._tiling.layers, weight.shape
        shares = split_of(num_columns, inner_size, tiling)
        out = self._buffer(name, (shares, x.shape[0], num_columns), torch.float32)
        skinny_matmul(x, weight, out, kind=PARTIAL, tiling=tiling)
        return out

    def _rows(self, name: str, num_rows: int, width: int) -> Tensor:
        return self._buffer(name, (num_rows, width), torch.bfloat16)

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """One buffer per name, rows and shares: made on first use, which is the priming run, never during a capture."""
        key = (name, shape[-2], shape[0])
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(shape, dtype=dtype, device=self.keys.device)
        return self._buffers[key]
