"""A checkpoint is served whole and as published, or refused by name before a tensor is read."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from remote_dspark.drafter.checkpoint import load_drafter
from remote_dspark.drafter.errors import (
    CheckpointError,
    ConfigFieldError,
    MissingTensorError,
    TensorFormatError,
    TruncatedFileError,
    UnexpectedTensorError,
    UnsupportedHeadError,
    VocabularyError,
)

pytestmark = pytest.mark.models


def test_weights_arrive_unchanged_and_markov_tables_stay_bf16(checkpoint):
    # red when a tensor is transposed, skipped or cast through another dtype
    folder = checkpoint()
    stored, loaded = load_file(folder / "model.safetensors"), load_drafter(folder).state_dict()
    assert stored.keys() == loaded.keys()
    for name, tensor in stored.items():
        assert torch.equal(tensor.float(), loaded[name].float()), name
        assert loaded[name].dtype == (torch.bfloat16 if name.startswith("markov_head") else torch.float32), name


def test_every_file_is_hashed(checkpoint):
    # red when a shard or the config is left out of the identity
    folder = checkpoint()
    identity = load_drafter(folder).identity
    for name in ("config.json", "model.safetensors"):
        assert identity.files[name] == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert load_drafter(folder).identity.sha256 != identity.sha256


def test_sharded_checkpoint_equals_the_single_file(checkpoint):
    # red when the index is ignored or only one shard is read
    folder = checkpoint()
    whole = load_drafter(folder).state_dict()
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    shards = {"model-00001.safetensors": names[::2], "model-00002.safetensors": names[1::2]}
    for shard, members in shards.items():
        save_file({name: weights[name] for name in members}, folder / shard)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {name: shard for shard, members in shards.items() for name in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model = load_drafter(folder)
    assert all(torch.equal(whole[name], tensor) for name, tensor in model.state_dict().items())
    assert set(model.identity.files) == {"config.json", *shards}


def test_index_cannot_name_a_file_outside_the_folder(checkpoint):
    # red when shard names are joined unchecked
    folder = checkpoint()
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"fc.weight": "../model.safetensors"}}')
    with pytest.raises(CheckpointError, match="plain safetensors file names"):
        load_drafter(folder)


@pytest.mark.parametrize("name", ["markov_head.markov_w1.weight", "layers.1.self_attn.k_norm.weight", "fc.weight"])
def test_missing_tensor_is_named(checkpoint, name):
    # red when load_state_dict is called with strict=False
    with pytest.raises(MissingTensorError, match=name):
        load_drafter(checkpoint(edit=lambda weights: weights.pop(name)))


def test_surplus_tensor_is_named(checkpoint):
    # red when unknown tensors are ignored: a gated head would be served as a vanilla one
    gate = torch.zeros(32, 56, dtype=torch.bfloat16)
    with pytest.raises(UnexpectedTensorError, match="gate_proj"):
        load_drafter(checkpoint(edit=lambda weights: weights.update({"markov_head.gate_proj.weight": gate})))


def test_wrong_shape_and_dtype_are_named(checkpoint):
    # red when shapes are trusted, or an FP32 table is rounded silently
    def transpose(weights):
        weights["fc.weight"] = weights["fc.weight"].T.contiguous()

    def widen(weights):
        weights["markov_head.markov_w2.weight"] = weights["markov_head.markov_w2.weight"].float()

    with pytest.raises(TensorFormatError, match=r"fc.weight.*\[24, 72\], found \[72, 24\]"):
        load_drafter(checkpoint(edit=transpose))
    with pytest.raises(TensorFormatError, match=r"markov_w2.*BF16, found F32"):
        load_drafter(checkpoint(edit=widen))


@pytest.mark.parametrize("keep", [0, 4, 8, 40, -1])
def test_truncated_or_extended_shard_is_refused(checkpoint, keep):
    # red when the file length is not compared with the header
    path = checkpoint() / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:keep] if keep >= 0 else data + b"\0")
    with pytest.raises(TruncatedFileError):
        load_drafter(path.parent)


def test_absurd_header_length_is_refused_before_allocation(checkpoint):
    # red when the header length is believed
    path = checkpoint() / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 62) + path.read_bytes()[8:])
    with pytest.raises(TruncatedFileError):
        load_drafter(path.parent)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"markov_head_type": "gated"}, UnsupportedHeadError, "known, not computed"),
        ({"markov_head_type": "rnn"}, UnsupportedHeadError, "known, not computed"),
        ({"markov_head_type": "transformer"}, UnsupportedHeadError, "unknown"),
        ({"draft_vocab_size": 64}, VocabularyError, "reduced"),
        ({"target_layer_ids": [1, 1]}, ConfigFieldError, "strictly increasing"),
        ({"target_layer_ids": [1, 4]}, ConfigFieldError, "strictly increasing"),
        ({"target_layer_ids": []}, ConfigFieldError, "strictly increasing"),
        ({"mask_token_id": 101}, ConfigFieldError, "mask_token_id"),
        ({"block_size": 1}, ConfigFieldError, "block_size"),
        ({"architectures": ["Gemma4DSparkModel"]}, ConfigFieldError, "architectures"),
        ({"attention_bias": True}, ConfigFieldError, "attention_bias"),
        ({"layer_types": ["sliding_attention"] * 2}, ConfigFieldError, "layer_types"),
        ({"num_key_value_heads": 3}, ConfigFieldError, "divisor"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ConfigFieldError, "rope"),
        ({"tie_word_embeddings": True}, ConfigFieldError, "tie_word_embeddings"),
        ({"vocab_size": True}, ConfigFieldError, "vocab_size"),
    ],
)
def test_config_refusals(checkpoint, changes, error, message):
    # red when a field that changes the arithmetic is ignored
    folder = checkpoint()
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=message):
        load_drafter(folder)


def test_another_vocabulary_is_refused(checkpoint):
    # red when the caller's expectation is not compared
    with pytest.raises(VocabularyError, match=r"expected the target's vocabulary of 100 ids"):
        load_drafter(checkpoint(), expected_vocab_size=100)


@pytest.mark.parametrize("text", ["", "[]", '{"vocab_size"'])
def test_broken_config_file_is_named(checkpoint, text):
    folder = checkpoint()
    (folder / "config.json").write_text(text)
    with pytest.raises(TruncatedFileError, match=r"config\.json"):
        load_drafter(folder)


def test_a_folder_without_files_is_named(tmp_path: Path):
    with pytest.raises(TruncatedFileError, match=r"config\.json"):
        load_drafter(tmp_path)
