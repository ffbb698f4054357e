"""``config.json`` of a DeepSpec DSpark checkpoint, parsed into one frozen object.

Rules: a field that changes the arithmetic and that this build does not implement is refused by name; fields that do
not change it are ignored, as published checkpoints carry many. Field names: DeepSpec ``Qwen3DSparkModel`` (MIT).
Not covered: Gemma4 checkpoints, reduced draft vocabularies, Markov heads other than ``vanilla``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from remote_dspark.drafter.errors import ConfigFieldError, TruncatedFileError, UnsupportedHeadError, VocabularyError

ARCHITECTURE: Final = "Qwen3DSparkModel"
KNOWN_HEADS: Final = ("vanilla", "gated", "rnn")
SUPPORTED_HEADS: Final = ("vanilla",)
MAX_CONFIG_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class DSparkConfig:
    """Shapes and constants of one drafter.

    Attributes:
        vocab_size: Real columns of the head; ids are global target ids.
        hidden_size: Width d, equal to the target's.
        num_layers: Draft layers.
        num_target_layers: Layers of the target this drafter was trained for.
        num_heads: Query heads.
        num_kv_heads: Key/value heads; divides ``num_heads``.
        head_dim: Width of one head; even (rotary halves).
        intermediate_size: Width of the gated MLP.
        block_size: Query rows per block, anchor included; row i predicts position anchor + i + 1.
        mask_token_id: Id that fills rows 1.. of a block.
        target_layer_ids: Strictly increasing target layers whose outputs are fused; -1 is the embedding output.
        markov_rank: Rank r of the previous-token bias.
        markov_head_type: Always ``vanilla`` here.
        has_confidence_head: Whether the checkpoint stores one; it is loaded and never used for admission.
        confidence_with_markov: Whether that head also reads the previous token's Markov embedding.
        rms_norm_eps: Epsilon of every RMS norm.
        rope_theta: Base of the rotary embedding.
        max_positions: Positions the rotary embedding was trained for; a hard limit.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_target_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int
    markov_head_type: str
    has_confidence_head: bool
    confidence_with_markov: bool
    rms_norm_eps: float
    rope_theta: float
    max_positions: int

    @property
    def fused_width(self) -> int:
        """Width of one unfused state row: m * d (what a STATE frame carries per token, in BF16)."""
        return len(self.target_layer_ids) * self.hidden_size


class _Fields:
    """Typed access to a JSON object; every refusal names the field."""

    def __init__(self, where: str, document: Mapping[str, Any]) -> None:
        self.where = where
        self.document = document

    def integer(self, name: str, low: int = 1, high: int = 1 << 31) -> int:
        found = self.document.get(name)
        if isinstance(found, bool) or not isinstance(found, int) or not low <= found <= high:
            raise ConfigFieldError(self.where, name, f"an integer in [{low}, {high}]", found)
        return found

    def number(self, name: str, found: object) -> float:
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < 1e18:
            raise ConfigFieldError(self.where, name, "a positive number", found)
        return float(found)

    def boolean(self, name: str, default: bool) -> bool:
        found = self.document.get(name, default)
        if not isinstance(found, bool):
            raise ConfigFieldError(self.where, name, "true or false", found)
        return found

    def require(self, name: str, expected: object, *, default: object = None) -> None:
        found = self.document.get(name, default)
        if found != expected:
            raise ConfigFieldError(self.where, name, repr(expected), found)


def read_config(folder: Path, *, expected_vocab_size: int | None = None) -> DSparkConfig:
    """Read and check ``config.json`` of a model folder.

    Args:
        folder: The checkpoint folder.
        expected_vocab_size: The target's vocabulary, when the caller knows it.

    Raises:
        ConfigFieldError: A field is missing, ill-typed or not implemented.
        UnsupportedHeadError: A Markov head other than ``vanilla``.
        VocabularyError: The vocabulary is reduced or not the expected one.
        TruncatedFileError: The file is not one JSON object within the size limit.
    """
    path = folder / "config.json"
    try:
        raw = path.read_bytes()
    except OSError as cause:
        raise TruncatedFileError(f"{path}: expected a readable config.json, found {cause.strerror}") from cause
    if len(raw) > MAX_CONFIG_BYTES:
        raise TruncatedFileError(f"{path}: expected at most {MAX_CONFIG_BYTES} bytes, found {len(raw)}")
    try:
        document = json.loads(raw)
    except ValueError as cause:
        raise TruncatedFileError(f"{path}: expected one JSON object, found {cause}; copy the file again") from cause
    if not isinstance(document, dict):
        raise TruncatedFileError(f"{path}: expected one JSON object, found {type(document).__name__}")
    return parse_config(document, where=str(path), expected_vocab_size=expected_vocab_size)


def parse_config(
    document: Mapping[str, Any], *, where: str = "config.json", expected_vocab_size: int | None = None
) -> DSparkConfig:
    """Parse a decoded ``config.json``; see `read_config` for the errors."""
    fields = _Fields(where, document)
    fields.require("architectures", [ARCHITECTURE])
    fields.require("hidden_act", "silu")
    fields.require("attention_bias", False, default=False)
    fields.require("tie_word_embeddings", False)
    vocab_size = _vocabulary(fields, expected_vocab_size)
    num_layers = fields.integer("num_hidden_layers", 1, 256)
    fields.require("layer_types", ["full_attention"] * num_layers, default=["full_attention"] * num_layers)
    num_heads, num_kv_heads = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    head_dim = fields.integer("head_dim", 2, 1024)
    if num_heads % num_kv_heads:
        raise ConfigFieldError(where, "num_key_value_heads", f"a divisor of {num_heads}", num_kv_heads)
    if head_dim % 2:
        raise ConfigFieldError(where, "head_dim", "an even number", head_dim)
    num_target_layers = fields.integer("num_target_layers", 1, 1024)
    return DSparkConfig(
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        num_layers=num_layers,
        num_target_layers=num_target_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        block_size=fields.integer("block_size", 2, 64),
        mask_token_id=fields.integer("mask_token_id", 0, vocab_size - 1),
        target_layer_ids=_target_layers(fields, num_target_layers),
        markov_rank=fields.integer("markov_rank", 1, 4096),
        markov_head_type=_markov_head(fields),
        has_confidence_head=fields.boolean("enable_confidence_head", False),
        confidence_with_markov=fields.boolean("confidence_head_with_markov", False),
        rms_norm_eps=fields.number("rms_norm_eps", document.get("rms_norm_eps")),
        rope_theta=_rope_theta(fields),
        max_positions=fields.integer("max_position_embeddings"),
    )


def _vocabulary(fields: _Fields, expected: int | None) -> int:
    vocab_size = fields.integer("vocab_size", 2, 1 << 24)
    reduced = fields.document.get("draft_vocab_size")
    if reduced not in (None, vocab_size):
        raise VocabularyError(
            f"{fields.where}: expected a draft over all {vocab_size} target ids, found draft_vocab_size={reduced}; "
            "reduced vocabularies are not served"
        )
    if expected is not None and vocab_size != expected:
        raise VocabularyError(
            f"{fields.where}: expected the target's vocabulary of {expected} ids, found vocab_size={vocab_size}; "
            "pair the drafter with the target it was trained for"
        )
    return vocab_size


def _target_layers(fields: _Fields, num_target_layers: int) -> tuple[int, ...]:
    """Strictly increasing, and never the final layer: frameworks store a normalised state there."""
    found = fields.document.get("target_layer_ids")
    expected = f"strictly increasing layer ids in [-1, {num_target_layers - 2}]"
    if not isinstance(found, list) or not found or not all(type(layer) is int for layer in found):
        raise ConfigFieldError(fields.where, "target_layer_ids", expected, found)
    is_increasing = all(a < b for a, b in itertools.pairwise(found))
    if not is_increasing or found[0] < -1 or found[-1] > num_target_layers - 2:
        raise ConfigFieldError(fields.where, "target_layer_ids", expected, found)
    return tuple(found)


def _markov_head(fields: _Fields) -> str:
    found = fields.document.get("markov_head_type")
    if found not in SUPPORTED_HEADS:
        reason = "known, not computed by this build" if found in KNOWN_HEADS else "unknown"
        raise UnsupportedHeadError(
            f"{fields.where}: field 'markov_head_type': expected one of {SUPPORTED_HEADS}, found {found!r} ({reason})"
        )
    return str(found)


def _rope_theta(fields: _Fields) -> float:
    """Both spellings in use: a flat ``rope_theta``, or ``rope_parameters`` with the default type."""
    document = fields.document
    parameters = document.get("rope_parameters", document.get("rope_scaling"))
    if parameters is None:
        return fields.number("rope_theta", document.get("rope_theta"))
    if not isinstance(parameters, dict) or parameters.get("rope_type", "default") != "default":
        raise ConfigFieldError(fields.where, "rope_parameters", "rope_type 'default'", parameters)
    return fields.number("rope_theta", parameters.get("rope_theta", document.get("rope_theta")))
