"""The shipped pair is what its manifest says, loads where it must, and accepts far above chance."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from remote_dspark.contract import DRAFT_TEMPERATURE
from remote_dspark.drafter.checkpoint import load_drafter
from remote_dspark.train import evaluate
from remote_dspark.train.export import describe_files
from remote_dspark.train.recipe import Recipe

pytestmark = pytest.mark.models

torch.set_num_threads(1)

PAIR = Path(__file__).resolve().parents[2] / "examples" / "tiny"
MAX_PAIR_BYTES = 10_000_000


@pytest.fixture(scope="module")
def pair():
    from transformers import Qwen3ForCausalLM

    target, report = Qwen3ForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    drafter = load_drafter(PAIR / "drafter", expected_vocab_size=target.config.vocab_size)
    return target.eval(), drafter


def test_manifest_binds_every_file_and_the_size_limit_holds():
    # red when a weight, the tokenizer or a prompt changes without the manifest, or the folder grows
    manifest = json.loads((PAIR / "recipe.json").read_text())
    assert describe_files(PAIR)["files"] == manifest["files"]
    assert sum(path.stat().st_size for path in PAIR.rglob("*") if path.is_file()) <= MAX_PAIR_BYTES
    for name in ("tokenizer.json", "target/tokenizer.json"):
        digest = hashlib.sha256((PAIR / name).read_bytes()).hexdigest()
        assert digest == manifest["corpus"]["artefacts"]["tokenizer.json"]


def test_the_recipe_in_the_code_is_the_one_that_made_the_pair():
    # red when a default changes without a new pair
    manifest = json.loads((PAIR / "recipe.json").read_text())
    assert json.loads(json.dumps(Recipe().to_document())) == manifest["recipe"]
    for part, config in (("drafter", Recipe().drafter_config()), ("target", Recipe().target_config())):
        shipped = json.loads((PAIR / part / "config.json").read_text())
        shipped |= shipped.get("rope_parameters", {})
        assert {name: shipped[name] for name in config} == config


def test_no_pickle_is_shipped():
    allowed = {".json", ".jsonl", ".safetensors", ""}
    assert {path.suffix for path in PAIR.rglob("*") if path.is_file()} <= allowed


def test_drafter_carries_the_targets_embedding_and_head(pair):
    # red when the pair is mixed from two runs
    target, drafter = pair
    assert torch.equal(target.get_input_embeddings().weight, drafter.embed_tokens.weight)
    assert torch.equal(target.get_output_embeddings().weight, drafter.lm_head.weight)
    assert drafter.config.num_target_layers == target.config.num_hidden_layers
    assert drafter.config.block_size >= 5
    assert drafter.config.markov_rank >= 16


def test_prompts_are_encodable_and_round_trip():
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(PAIR / "tokenizer.json"))
    assert tokenizer.token_to_id("<|endoftext|>") == 0
    assert tokenizer.get_vocab_size() == 2048
    for line in (PAIR / "prompts.jsonl").read_text().splitlines():
        text = json.loads(line)["prompt"]
        ids = tokenizer.encode(text).ids
        assert 1 < len(ids) < 200
        assert tokenizer.decode(ids) == text


@torch.no_grad()
def test_sampled_drafts_reach_two_tokens_per_round_and_beat_greedy_ones(pair):
    # red when weights are random (1.0), states are misaligned by one position (about 1.3), or q is not the drawn one
    target, drafter = pair
    prompts = evaluate.held_out_prompts(PAIR, None, 48, 40)
    assert len(prompts) >= 40
    tau = float(DRAFT_TEMPERATURE)
    on = evaluate.run(target, drafter, prompts, evaluate.Setting(5, tau), rounds=12, seed=3)
    off = evaluate.run(target, drafter, prompts, evaluate.Setting(5, 0.0), rounds=12, seed=3)
    assert on["tokens_per_round"] >= 2.0
    assert on["tokens_per_round"] > off["tokens_per_round"] + 0.15
    # acceptance must agree with the overlap it estimates, for every position: 4 sigma of a share over those rounds
    for accepted, overlap in zip(on["accepted_at"], on["overlap_at"], strict=True):
        assert abs(accepted - overlap) < 4 * 0.5 / (on["rounds"] * 0.05) ** 0.5
