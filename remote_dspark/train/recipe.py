"""Every number of the tiny pair, in one frozen object that is written beside the weights.

A change of any field makes another pair. Seeds: one per stage, so that a stage can be repeated alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """Sizes, schedules and seeds.

    Attributes:
        vocab_size: Ids of the byte-level tokenizer, special ids included.
        hidden_size: Width of target and drafter.
        intermediate_size: Width of their gated MLPs.
        num_target_layers: Layers of the target.
        num_draft_layers: Layers of the drafter.
        num_heads: Query heads of both.
        num_kv_heads: Key/value heads of both.
        head_dim: Width of one head.
        rope_theta: Base of the rotary embedding.
        rms_norm_eps: Epsilon of the norms.
        max_positions: Training length in tokens and hard limit of both models.
        block_size: Rows of a draft block.
        markov_rank: Rank of the previous-token bias; a power of two keeps its tree sum unpadded.
        target_layer_ids: Target layers the drafter reads; never the last.
        target_steps: Optimiser steps of the target.
        target_batch: Sequences per step of the target.
        target_lr: Peak learning rate of the target.
        draft_steps: Optimiser steps of the drafter.
        draft_batch: Sequences per step of the drafter.
        draft_lr: Peak learning rate of the drafter.
        anchors_per_sequence: Blocks drawn from each sequence and step.
        own_text_sequences: Sequences the target writes itself at T=1, mixed half and half into the drafter's data:
            what it will meet when serving.
        ce_weight: Weight of the cross entropy with the token that follows.
        l1_weight: Weight of the total variation to the target's row.
        confidence_weight: Weight of the confidence head's own loss; it sends no gradient into the backbone.
        loss_decay_gamma: Position i of a block weighs exp(-i / gamma).
        draft_temperature: Temperature at which the draft distribution enters the loss: the one it is served at.
        weight_decay: Decay of matrices.
        matrix_optimiser: ``adamw`` for everything, or ``muon`` for the projections: at equal steps it was ahead on a
            CPU (``docs/tiny-pair.md``).
        warmup_steps: Linear warm-up of both schedules.
        seed: Root seed; stages use seed, seed + 1, ...
    """

    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 512
    num_target_layers: int = 5
    num_draft_layers: int = 3
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_positions: int = 512
    block_size: int = 7
    markov_rank: int = 64
    target_layer_ids: tuple[int, ...] = (1, 2, 3)
    target_steps: int = 1700
    target_batch: int = 128
    target_lr: float = 4e-3
    draft_steps: int = 2600
    draft_batch: int = 128
    draft_lr: float = 3e-3
    anchors_per_sequence: int = 40
    own_text_sequences: int = 8192
    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0
    loss_decay_gamma: float = 4.0
    draft_temperature: float = 0.7
    weight_decay: float = 0.1
    matrix_optimiser: str = "muon"
    warmup_steps: int = 100
    seed: int = 20240611

    def to_document(self) -> dict[str, Any]:
        """The JSON object stored in ``recipe.json``."""
        return asdict(self)

    def target_config(self) -> dict[str, Any]:
        """Fields of the target's ``Qwen3Config``."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_target_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "bos_token_id": None,
            "eos_token_id": 0,
            "pad_token_id": 0,
        }

    def drafter_config(self) -> dict[str, Any]:
        """The drafter's ``config.json``: the target's fields, then DeepSpec's."""
        return self.target_config() | {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            "torch_dtype": "bfloat16",
            "num_hidden_layers": self.num_draft_layers,
            "num_target_layers": self.num_target_layers,
            "layer_types": ["full_attention"] * self.num_draft_layers,
            "block_size": self.block_size,
            "mask_token_id": 1,
            "target_layer_ids": list(self.target_layer_ids),
            "num_anchors": self.anchors_per_sequence,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "markov_rank": self.markov_rank,
            "markov_head_type": "vanilla",
            "tie_word_embeddings": False,
        }
