"""A drafter's weights as the device reads them: products that share their input become one product.

Query, key and value projections lie behind each other; gate and up rows alternate, so that one program holds both
halves of an output; the key and value projections of all layers form one matrix, because all of them multiply the
same fused context state. The model's own parameters become views of the packed ones: nothing is held twice but the
key and value projections.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from remote_dspark.drafter.config import DSparkConfig
from remote_dspark.drafter.errors import UnsupportedShapeError
from remote_dspark.drafter.model import DraftLayer, DSparkDrafter, rope_tables

MAX_BLOCK_ROWS = 8
"""Rows that a request owns in the device's activations; a block must fit."""


@dataclass(frozen=True)
class PackedLayer:
    """Weights of one draft layer, all BF16.

    Attributes:
        qkv: [(query heads + 2 * key heads) * head_dim, d].
        out: [d, query heads * head_dim].
        gate_up: [2 * intermediate, d], gate and up rows in turn.
        down: [d, intermediate].
        input_norm: [d].
        post_norm: [d].
        q_norm: [head_dim].
        k_norm: [head_dim].
    """

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor
    k_norm: Tensor


@dataclass(frozen=True)
class PackedModel:
    """All weights of the device path.

    Attributes:
        layers: Per draft layer.
        context_kv: [layers * 2 * key heads * head_dim, d]: per layer keys, then values.
        k_norms: [layers, head_dim].
        rope: BF16 cosines and sines [positions + `MAX_BLOCK_ROWS`, head_dim / 2].
    """

    layers: tuple[PackedLayer, ...]
    context_kv: Tensor
    k_norms: Tensor
    rope: tuple[Tensor, Tensor]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the layer weights that one block reads."""
        matrices = [m for layer in self.layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return sum(matrix.numel() * matrix.element_size() for matrix in matrices)


def require_device_shape(config: DSparkConfig, dtype: torch.dtype) -> None:
    """Refuse, by name, a model that the device path does not compute.

    Raises:
        UnsupportedShapeError: Block size, head width, Markov rank or dtype.
    """
    is_power = config.head_dim & (config.head_dim - 1) == 0
    for name, good, expected, found in (
        ("block_size", config.block_size <= MAX_BLOCK_ROWS, f"at most {MAX_BLOCK_ROWS}", config.block_size),
        ("head_dim", is_power, "a power of two", config.head_dim),
        ("markov_rank", config.markov_rank % 32 == 0, "a multiple of 32", config.markov_rank),
        ("dtype", dtype is torch.bfloat16, "bfloat16", str(dtype).removeprefix("torch.")),
    ):
        if not good:
            raise UnsupportedShapeError(f"device path: {name}: expected {expected}, found {found}; serve it on the CPU")


@torch.no_grad()
def pack_model(model: DSparkDrafter, max_positions: int) -> PackedModel:
    """Pack a loaded BF16 model in place.

    Raises:
        UnsupportedShapeError: See `require_device_shape`.
    """
    config, dtype = model.config, model.fc.weight.dtype
    require_device_shape(config, dtype)
    layers = [layer for layer in model.layers if isinstance(layer, DraftLayer)]
    positions = torch.arange(max_positions + MAX_BLOCK_ROWS, device=model.fc.weight.device)
    cos, sin = rope_tables(positions, config.head_dim, config.rope_theta)
    half = config.head_dim // 2
    projections: list[Tensor] = [p.weight for layer in layers for p in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
    return PackedModel(
        layers=tuple(_pack_layer(layer) for layer in layers),
        context_kv=torch.cat(projections),
        k_norms=torch.stack([layer.self_attn.k_norm.weight for layer in layers]),
        rope=(cos[:, :half].to(dtype).contiguous(), sin[:, :half].to(dtype).contiguous()),
    )


def _pack_layer(layer: DraftLayer) -> PackedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    qkv = torch.cat([part.weight for part in parts])
    for part, view in zip(parts, torch.split(qkv, [part.weight.shape[0] for part in parts]), strict=True):
        part.weight = nn.Parameter(view, requires_grad=False)
    gate_up = torch.stack([mlp.gate_proj.weight, mlp.up_proj.weight], dim=1)
    for index, part in enumerate((mlp.gate_proj, mlp.up_proj)):
        part.weight = nn.Parameter(gate_up[:, index], requires_grad=False)
    return PackedLayer(
        qkv=qkv,
        out=attention.o_proj.weight.contiguous(),
        gate_up=gate_up.flatten(0, 1),
        down=mlp.down_proj.weight.contiguous(),
        input_norm=layer.input_layernorm.weight,
        post_norm=layer.post_attention_layernorm.weight,
        q_norm=attention.q_norm.weight,
        k_norm=attention.k_norm.weight,
    )
