"""The recipe's parts: the masked training pass equals serving, the loss sees what it should, corpora repeat."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from remote_dspark.drafter.checkpoint import load_drafter
from remote_dspark.train.corpus import build_corpus, encode_documents, is_held_out, library_documents, train_tokenizer
from remote_dspark.train.draft import block_layout, draft_loss, new_drafter, target_states
from remote_dspark.train.evaluate import held_out_prompts
from remote_dspark.train.fit import fit_pair, learning_rate_share, make_optimisers
from remote_dspark.train.recipe import Recipe

pytestmark = pytest.mark.models

torch.set_num_threads(1)

SMALL = replace(
    Recipe(),
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_target_layers=3,
    num_draft_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
    markov_rank=32,
    target_layer_ids=(-1, 1),
    target_steps=3,
    target_batch=2,
    draft_steps=3,
    draft_batch=4,
    anchors_per_sequence=6,
    own_text_sequences=3,
    warmup_steps=2,
)


@pytest.fixture
def target():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SMALL.target_config())).eval().requires_grad_(False)


def test_a_row_sees_its_context_and_its_own_block_only():
    # red when the anchor's own position is context, or blocks see each other
    anchors = torch.tensor([[2, 5], [1, 3]])
    positions, mask = block_layout(anchors, 3, 8)
    assert positions.tolist() == [[2, 3, 4, 5, 6, 7], [1, 2, 3, 3, 4, 5]]
    for b in range(2):
        for row in range(6):
            seen = {key for key in range(8 + 6) if mask[b, 0, row, key]}
            block = row // 3
            context = set(range(int(anchors[b, block])))
            assert seen == context | {8 + 3 * block + i for i in range(3)}


@torch.no_grad()
def test_training_pass_equals_serving_one_block_at_a_time(target):
    # red when training and serving disagree on positions, masks, fusion or rotation
    torch.manual_seed(1)
    drafter = new_drafter(SMALL, target)
    for parameter in drafter.parameters():
        parameter.mul_(8.0)
    ids = torch.randint(2, 300, (2, 40))
    states, _ = target_states(target, ids, SMALL.target_layer_ids)
    anchors = torch.tensor([[1, 17, 30], [4, 9, 31]])
    positions, mask = block_layout(anchors, SMALL.block_size, 40)
    block = torch.full_like(positions, 1)
    block[:, :: SMALL.block_size] = ids.gather(1, anchors)
    everywhere = torch.arange(40).expand(2, -1)
    together = drafter(block, positions, drafter.context_kv(states, everywhere), mask)
    for b in range(2):
        for n, anchor in enumerate(anchors[b].tolist()):
            context = drafter.context_kv(states[b : b + 1, :anchor], everywhere[:1, :anchor])
            alone = drafter.draft_hidden(int(ids[b, anchor]), anchor, context)
            rows = together[b, n * SMALL.block_size : (n + 1) * SMALL.block_size]
            assert torch.allclose(alone, rows, atol=1e-4)


def test_target_states_are_layer_outputs_before_the_final_norm(target):
    # red when layer ids are off by one
    ids = torch.randint(2, 300, (1, 12))
    seen = {}
    for number, layer in enumerate(target.model.layers):
        layer.register_forward_hook(lambda _, __, out, number=number: seen.update({number: out}))
    states, final = target_states(target, ids, (-1, 0, 1))
    assert torch.equal(states[..., :32], target.model.embed_tokens(ids))
    assert torch.equal(states[..., 32:64], seen[0])
    assert torch.equal(states[..., 64:], seen[1])
    assert torch.equal(target.lm_head(final), target(input_ids=ids).logits)


def test_loss_trains_all_but_the_frozen_tables_and_the_confidence_head_alone(target):
    # red when the confidence loss reaches the backbone, or embedding and head are trained apart from the target
    recipe = replace(SMALL, ce_weight=0.0, l1_weight=0.0)
    drafter = new_drafter(recipe, target)
    ids = torch.randint(2, 300, (2, 40))
    loss, overlap = draft_loss(drafter, target, ids, recipe, torch.Generator().manual_seed(0))
    loss.backward()
    reached = {n for n, p in drafter.named_parameters() if p.grad is not None and bool(p.grad.abs().sum() > 0)}
    assert reached == {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert overlap.shape == (7,)
    drafter.zero_grad(set_to_none=True)
    draft_loss(drafter, target, ids, SMALL, torch.Generator().manual_seed(0))[0].backward()
    without = {n for n, p in drafter.named_parameters() if p.grad is None or not bool(p.grad.abs().sum() > 0)}
    assert without == {"embed_tokens.weight", "lm_head.weight"}


def test_corpus_repeats_and_splits_by_name(tmp_path):
    # red when order, tokenizer training or the split depends on anything but names and bytes
    for number in range(60):
        body = f"def function_{number}(x):\n    return x + {number}\n" * 20
        (tmp_path / f"m{number}.py").write_text(body)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("x = 1\n")
    (tmp_path / "accent.py").write_text("x = 'é'\n")
    documents = list(library_documents(tmp_path))
    assert len(documents) == 60
    assert 0 < sum(is_held_out(name) for name, _ in documents) < 20
    texts = [text for _, text in documents]
    first, second = train_tokenizer(texts, 270), train_tokenizer(texts, 270)
    assert first.to_str() == second.to_str()
    ids = encode_documents(first, texts[:2])
    assert ids.dtype == np.uint16
    assert (ids == 0).sum() == 2
    assert first.decode([int(i) for i in ids if i]) == texts[0] + texts[1]


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_a_pair_is_trained_written_and_loadable(tmp_path, monkeypatch, optimiser):
    # red when a stage, a file or a name is missing; too few steps to learn anything
    library = tmp_path / "library"
    library.mkdir()
    for number in range(60):
        body = "".join(f"def name_{number}_{i}(value):\n    return value * {i}\n" for i in range(30))
        (library / f"m{number}.py").write_text(body)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(library)})
    manifest = build_corpus(tmp_path / "corpus", SMALL)
    assert manifest["num_files"] == 60
    out = tmp_path / "pair"
    recipe = replace(SMALL, matrix_optimiser=optimiser)
    written = fit_pair(tmp_path / "corpus", out, recipe, "cpu", target_seconds=60, draft_seconds=60)
    assert [stage["steps"] for stage in written["stages"]] == [3, 3]
    drafter = load_drafter(out / "drafter", expected_vocab_size=300)
    assert drafter.config.target_layer_ids == (-1, 1)
    assert held_out_prompts(out, tmp_path / "corpus", 3, 8).shape == (3, 8)
    assert (out / "LICENSE-TEXT").read_text()


def test_every_trained_parameter_has_exactly_one_optimiser(target):
    # red when a parameter is left out, or Muon is given a table
    named = [(n, p) for n, p in new_drafter(SMALL, target).named_parameters() if p.requires_grad]
    for optimiser, count in (("adamw", 1), ("muon", 2)):
        made = make_optimisers(named, replace(SMALL, matrix_optimiser=optimiser))
        assert len(made) == count
        held = [id(p) for each in made for group in each.param_groups for p in group["params"]]
        assert sorted(held) == sorted(id(p) for _, p in named)
    tables = {id(p) for n, p in named if "markov" in n}
    assert not tables & {id(p) for group in made[1].param_groups for p in group["params"]}
    with pytest.raises(ValueError, match="adamw or muon"):
        make_optimisers(named, replace(SMALL, matrix_optimiser="sgd"))


def test_learning_rate_warms_up_and_falls_to_a_twentieth():
    shares = [learning_rate_share(step, step / 100, 10) for step in range(101)]
    assert shares[0] == pytest.approx(0.1, rel=0.01)
    assert max(shares) > 0.9
    assert shares[-1] == pytest.approx(0.05)
    assert shares[20:] == sorted(shares[20:], reverse=True)
