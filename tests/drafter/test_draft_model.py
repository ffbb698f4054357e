"""The network equals a naive re-statement: loops and float64, written from the description alone."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from remote_dspark.drafter.checkpoint import load_drafter
from remote_dspark.drafter.context import ContextCache
from remote_dspark.drafter.errors import CapacityError, StateGapError

pytestmark = pytest.mark.models

SHAPES = [
    {},
    {"num_key_value_heads": 4, "target_layer_ids": [0], "block_size": 5},
    {"num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4, "rope_theta": 100.0},
]


def norm(x, weight, eps):
    return x / math.sqrt(sum(float(v) ** 2 for v in x) / len(x) + eps) * weight


def rotate(x, position, theta):
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = position / theta ** (2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def naive_block(folder, states, anchor):
    """Hidden rows [g, d] and base logits [g, V] in float64, one row, head and key at a time."""
    config = json.loads((folder / "config.json").read_text())
    w = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    parameters = config.get("rope_parameters") or config
    eps, theta, hd = config["rms_norm_eps"], parameters["rope_theta"], config["head_dim"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    fused = [norm(w["fc.weight"] @ row, w["hidden_norm.weight"], eps) for row in states.double()]
    ids = [anchor] + [config["mask_token_id"]] * (config["block_size"] - 1)
    x = [w["embed_tokens.weight"][token] for token in ids]
    start = len(states)
    for layer in range(config["num_hidden_layers"]):
        p = f"layers.{layer}."
        normed = [norm(row, w[p + "input_layernorm.weight"], eps) for row in x]
        keys, values = [], []
        for position, row in enumerate(fused + normed):
            k, v = w[p + "self_attn.k_proj.weight"] @ row, w[p + "self_attn.v_proj.weight"] @ row
            split = [k[h * hd : (h + 1) * hd] for h in range(kv)]
            keys.append([rotate(norm(part, w[p + "self_attn.k_norm.weight"], eps), position, theta) for part in split])
            values.append([v[h * hd : (h + 1) * hd] for h in range(kv)])
        for i, row in enumerate(normed):
            q = w[p + "self_attn.q_proj.weight"] @ row
            parts = []
            for h in range(heads):
                query = rotate(norm(q[h * hd : (h + 1) * hd], w[p + "self_attn.q_norm.weight"], eps), start + i, theta)
                g = h // (heads // kv)
                score = torch.tensor([float(query @ key[g]) / math.sqrt(hd) for key in keys]).double().softmax(0)
                parts.append(sum(s * value[g] for s, value in zip(score, values, strict=True)))
            x[i] = x[i] + w[p + "self_attn.o_proj.weight"] @ torch.cat(parts)
        for i, row in enumerate(x):
            y = norm(row, w[p + "post_attention_layernorm.weight"], eps)
            gate = w[p + "mlp.gate_proj.weight"] @ y
            up = w[p + "mlp.up_proj.weight"] @ y
            x[i] = row + w[p + "mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
    hidden = torch.stack([norm(row, w["norm.weight"], eps) for row in x])
    return hidden, hidden @ w["lm_head.weight"].T


def require_equal(folder, states, anchor):
    model = load_drafter(folder, dtype=torch.float64)
    positions = torch.arange(len(states)).unsqueeze(0)
    hidden = model.draft_hidden(anchor, len(states), model.context_kv(states.unsqueeze(0), positions))
    expected, logits = naive_block(folder, states, anchor)
    # angles and the softmax's input are FP32 in the model
    assert torch.allclose(hidden, expected, rtol=0, atol=2e-4 * float(expected.abs().max()))
    assert torch.allclose(model.base_logits(hidden).double(), logits, rtol=2**-7, atol=2e-3 * float(logits.abs().max()))


@pytest.mark.parametrize("shape", range(len(SHAPES)))
@pytest.mark.parametrize("length", [0, 1, 9])
def test_block_equals_naive_restatement(checkpoint, shape, length):
    # red when: causal attention inside the block, context including the anchor, input norm on context states,
    # interleaved instead of half-split rotation, k_norm after rotation, another head grouping
    folder = checkpoint(seed=shape, **SHAPES[shape])
    width = 24 * len(SHAPES[shape].get("target_layer_ids", [-1, 1, 3]))
    states = torch.randn(length, width, generator=torch.Generator().manual_seed(length)).to(torch.bfloat16)
    require_equal(folder, states, anchor=17)


def test_tiny_pair_equals_naive_restatement(tiny_drafter):
    states = torch.randn(3, 576, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    require_equal(tiny_drafter, states, anchor=300)


def as_bytes(states):
    return states.contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize("chunks", [[12], [1] * 12, [5, 1, 6], [11, 1]])
def test_incremental_context_equals_recomputation(checkpoint, chunks):
    # red when positions restart per chunk, or a chunk overwrites another
    model = load_drafter(checkpoint(), dtype=torch.float64)
    states = torch.randn(12, 72, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    whole = model.context_kv(states.unsqueeze(0), torch.arange(12).unsqueeze(0))
    cache, start = ContextCache(model, 96), 0
    for size in chunks:
        cache.append(start, as_bytes(states[start : start + size]))
        start += size
    for (key, value), (expected_key, expected_value) in zip(cache.view(), whole, strict=True):
        assert torch.allclose(key, expected_key, rtol=0, atol=1e-12)
        assert torch.allclose(value, expected_value, rtol=0, atol=1e-12)


def test_crop_forgets_and_the_next_occupant_sees_nothing_of_it(checkpoint):
    # red when view() returns more than length, or crop keeps a wrong end
    model = load_drafter(checkpoint(), dtype=torch.float64)
    generator = torch.Generator().manual_seed(4)
    old, new = (torch.randn(8, 72, generator=generator).to(torch.bfloat16) for _ in range(2))
    cache, fresh = ContextCache(model, 96), ContextCache(model, 96)
    cache.append(0, as_bytes(old))
    cache.crop(3)
    cache.append(3, as_bytes(new[3:]))
    fresh.append(0, as_bytes(torch.cat((old[:3], new[3:]))))
    for (key, value), (expected_key, expected_value) in zip(cache.view(), fresh.view(), strict=True):
        assert torch.allclose(key, expected_key, rtol=0, atol=1e-12)
        assert torch.allclose(value, expected_value, rtol=0, atol=1e-12)


def test_context_refuses_gaps_width_and_overflow(checkpoint):
    model = load_drafter(checkpoint())
    cache = ContextCache(model, 10)
    rows = as_bytes(torch.zeros(6, 72, dtype=torch.bfloat16))
    cache.append(0, rows)
    with pytest.raises(StateGapError, match="from position 6, found 7"):
        cache.append(7, rows)
    with pytest.raises(StateGapError, match="from position 6, found 5"):
        cache.append(5, rows)
    with pytest.raises(StateGapError, match="144 bytes"):
        cache.append(6, rows[:, :48])
    with pytest.raises(CapacityError, match="at most 10"):
        cache.append(6, rows)
    with pytest.raises(StateGapError, match=r"0\.\.6"):
        cache.crop(7)
    assert cache.length == 6
