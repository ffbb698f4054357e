"""Shapes with synthetic weights: faithful in size, meaningless in content, for timing and nothing else.

A synthetic worker's identities are digests of its label, so no verifier of a real model can agree with it in HELLO,
and the label stands in its identity, health and observations. No torch here: a probe needs these without it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final

from remote_dspark.drafter.config import DSparkConfig, parse_config
from remote_dspark.drafter.errors import ConfigFieldError

SEED: Final = 20261130

_COMMON: Final[dict[str, Any]] = {
    "architectures": ["Qwen3DSparkModel"],
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "block_size": 7,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "num_target_layers": 36,
    "target_layer_ids": [1, 9, 17, 25, 33],
}

SHAPES: Final[dict[str, dict[str, Any]]] = {
    "qwen3-4b": _COMMON
    | {"vocab_size": 151_936, "hidden_size": 2560, "intermediate_size": 9728, "mask_token_id": 151_669},
    "v129280": _COMMON
    | {"vocab_size": 129_280, "hidden_size": 4096, "intermediate_size": 12_288, "mask_token_id": 129_000},
    "tiny": _COMMON
    | {
        "vocab_size": 211,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "markov_rank": 32,
        "max_position_embeddings": 128,
        "mask_token_id": 200,
        "target_layer_ids": [1, 9],
    },
}
"""By name. ``qwen3-4b``: the published drafter of Qwen3-4B. ``v129280``: the seeds' vocabulary on a wider model."""


@dataclass(frozen=True)
class SyntheticIdentity:
    """What a synthetic worker and its probe name in HELLO: hex SHA-256 digests of labels."""

    label: str
    draft_sha256: str
    target_sha256: str
    tokenizer_sha256: str


def synthetic_config(name: str) -> DSparkConfig:
    """The configuration of a shape.

    Raises:
        ConfigFieldError: No such shape.
    """
    if name not in SHAPES:
        raise ConfigFieldError("synthetic", "synthetic", f"one of {sorted(SHAPES)}", name)
    return parse_config(SHAPES[name], where=f"synthetic {name}")


def synthetic_identity(name: str) -> SyntheticIdentity:
    """Digests of a shape's label; errors as of `synthetic_config`."""
    synthetic_config(name)
    document = json.dumps(SHAPES[name], sort_keys=True)
    label = f"synthetic:{name}:{SEED}"

    def digest(role: str) -> str:
        return hashlib.sha256(f"{label}:{role}:{document}".encode()).hexdigest()

    return SyntheticIdentity(label, digest("draft"), digest("target"), digest("tokenizer"))
