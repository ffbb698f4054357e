"""Random checkpoints of any shape, written as a published one would be."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from remote_dspark.drafter.checkpoint import expected_tensors
from remote_dspark.drafter.config import parse_config

torch.set_num_threads(1)

if not torch.cuda.is_available():
    # must be chosen before the first kernel module is imported, as in tests/kernels
    os.environ["TRITON_INTERPRET"] = "1"

TINY_PAIR = Path(__file__).resolve().parents[2] / "examples" / "tiny"

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "vocab_size": 101,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_target_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "block_size": 7,
    "mask_token_id": 3,
    "target_layer_ids": [-1, 1, 3],
    "markov_rank": 32,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 96,
}

Checkpoint = Callable[..., Path]


def random_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_tensors(parse_config(config))
    return {
        name: (torch.randn(shape, generator=generator) * (0.4 if len(shape) > 1 else 1.0)).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Factory: a folder with random weights; keyword arguments change the config, ``edit`` the weights."""

    def write(seed: int = 0, edit: Callable[[dict[str, torch.Tensor]], object] | None = None, **changes: Any) -> Path:
        folder = tmp_path / f"checkpoint-{seed}"
        folder.mkdir(exist_ok=True)
        config = CONFIG | changes
        weights = random_weights(config, seed)
        if edit is not None:
            edit(weights)
        save_file(weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


@pytest.fixture
def state_rows() -> Callable[[int, int, int], np.ndarray]:
    """Factory: uint8 [n, 2*width] of BF16 states at positions start.., the same for the same position and seed."""

    def rows(seed: int, start: int, count: int, width: int = 72) -> np.ndarray:
        each = [
            torch.randn(width, generator=torch.Generator().manual_seed(seed * 100_003 + position)).to(torch.bfloat16)
            for position in range(start, start + count)
        ]
        return torch.stack(each).view(torch.uint8).numpy() if each else np.zeros((0, 2 * width), dtype=np.uint8)

    return rows


@pytest.fixture
def tiny_drafter() -> Path:
    return TINY_PAIR / "drafter"
