"""The target model against plain transformers forwards: cache, crop, logits, hidden states.

Turns red when: a crop leaves a rejected token in the cache, hidden states are of the wrong layer or the wrong rows, or
logits lose a row.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from remote_dspark.target.errors import ModelError

if TYPE_CHECKING:
    from remote_dspark.target.model import Sequence, TargetModel

# torch is imported inside functions only: other lanes collect this file without it.
pytestmark = pytest.mark.models

LAYERS = (-1, 0, 2)
VOCAB = 61


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        eos_token_id=3,
    )
    path = tmp_path_factory.mktemp("random-target")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> TargetModel:
    return load(folder, LAYERS)


def load(folder: Path, layers: tuple[int, ...]) -> TargetModel:
    from remote_dspark.target.model import TargetModel

    return TargetModel(folder, layers)


def new_sequence(model: TargetModel) -> Sequence:
    from remote_dspark.target.model import Sequence

    return Sequence(model)


def plain(model: TargetModel, token_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """One forward without any cache, by transformers itself: FP32 logits, bf16 states as uint16."""
    import torch

    with torch.inference_mode():
        output = model._model(torch.tensor([token_ids]), use_cache=False, output_hidden_states=True)
    picked = torch.cat([output.hidden_states[layer + 1][0] for layer in LAYERS], dim=-1)
    return output.logits[0].numpy(), picked.to(torch.bfloat16).view(torch.uint16).numpy()


def require_close(found: np.ndarray, expected: np.ndarray) -> None:
    # Another number of rows changes the order of FP32 sums and so the last bits; a wrong token changes percents.
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def as_float(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_rows_continue_the_cache(model: TargetModel) -> None:
    ids = [5, 7, 11, 13, 17, 19, 23]
    logits, states = plain(model, ids)
    sequence = new_sequence(model)
    first = sequence.extend(ids[:3])
    second = sequence.extend(ids[3:])
    assert (first.logits.shape, first.states.shape) == ((3, VOCAB), (3, model.state_width))
    require_close(np.concatenate([first.logits, second.logits]), logits)
    found = np.concatenate([first.states, second.states])
    # One bf16 unit: the same value may round up in one forward and down in the other.
    np.testing.assert_allclose(as_float(found), as_float(states), rtol=2**-7, atol=1e-4)
    assert sequence.length == len(ids)


def test_a_crop_forgets_rejected_tokens_exactly(model: TargetModel) -> None:
    sequence = new_sequence(model)
    sequence.extend([5, 7, 11])
    sequence.extend([13, 40, 41, 42])
    sequence.crop(4)
    assert sequence.length == 4
    after = sequence.extend([17, 19])
    require_close(after.logits, plain(model, [5, 7, 11, 13, 17, 19])[0][4:])
    sequence.crop(6)
    assert sequence.length == 6
    for bad in (-1, 7):
        with pytest.raises(ModelError, match=r"0\.\.6"):
            sequence.crop(bad)


def test_a_prefill_needs_no_logits(model: TargetModel) -> None:
    sequence = new_sequence(model)
    rows = sequence.extend([5, 7, 11], with_logits=False)
    assert rows.logits.shape == (0, VOCAB)
    require_close(sequence.extend([13]).logits, plain(model, [5, 7, 11, 13])[0][3:])


@pytest.mark.parametrize("ids", [[], [VOCAB], [-1], list(range(60)) + [1] * 5])
def test_tokens_the_model_cannot_take_are_refused(model: TargetModel, ids: list[int]) -> None:
    with pytest.raises(ModelError):
        new_sequence(model).extend(ids)


@pytest.mark.parametrize("layers", [(), (1, 1), (2, 1), (-2,), (3,), (0, 3)])
def test_the_final_layer_and_unordered_layers_are_refused(folder: Path, layers: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="target_layer_ids"):
        load(folder, layers)


def test_another_architecture_is_refused(folder: Path, tmp_path: Path) -> None:
    document = json.loads((folder / "config.json").read_text())
    document["architectures"] = ["LlamaForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(ModelError, match="Qwen3ForCausalLM"):
        load(tmp_path, LAYERS)
    assert load(folder, LAYERS).eos_token_ids == frozenset({3})
