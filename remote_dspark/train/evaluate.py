"""``python -m remote_dspark.train.evaluate``: tokens per round of a pair on held-out text, ON and OFF.

A batched speculative loop in floating point, for speed: the target's row is FP32 softmax at T=1, the draft row FP32
softmax of the top 32 corrected logits. It measures the pair, not the exact sampler: the tickets, draws and integer
comparisons of serving are tested elsewhere. Each round runs the target over the whole prefix: no cache can be wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from remote_dspark.contract import DRAFT_TEMPERATURE, SUPPORT_K
from remote_dspark.drafter.checkpoint import load_drafter
from remote_dspark.drafter.model import DSparkDrafter
from remote_dspark.train.draft import block_layout, target_states


@dataclass(frozen=True)
class Setting:
    """One way to draft: depth, and temperature 0 (one-hot argmax) or tau with the top-k support."""

    depth: int
    draft_temperature: float
    top_k: int = SUPPORT_K


def draft_rows(
    drafter: DSparkDrafter, hidden: Tensor, anchor_ids: Tensor, setting: Setting, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Walk the block: ids [B, depth] and dense draft rows [B, depth, V] for hidden rows [B, g, d]."""
    base = drafter.base_logits(hidden).float()
    previous, ids, rows = anchor_ids, [], []
    for position in range(setting.depth):
        logits = base[:, position] + drafter.markov_head(previous).float()
        if setting.draft_temperature == 0:
            previous = logits.argmax(-1)
            row = F.one_hot(previous, logits.shape[-1]).float()
        else:
            floor = logits.topk(setting.top_k, dim=-1).values[:, -1:]
            row = (logits.masked_fill(logits < floor, -torch.inf) / setting.draft_temperature).softmax(-1)
            previous = torch.multinomial(row, 1, generator=generator).squeeze(1)
        ids.append(previous)
        rows.append(row)
    return torch.stack(ids, 1), torch.stack(rows, 1)


@torch.no_grad()
def run(
    target: Any, drafter: DSparkDrafter, prompts: Tensor, setting: Setting, *, rounds: int, seed: int
) -> dict[str, Any]:
    """Speculate ``rounds`` rounds from ``prompts`` [B, n]; tokens per round and per-position figures.

    Returns:
        ``tokens_per_round``; ``accepted_at`` and ``overlap_at``: share accepted, and mean sum(min(p, q)), among the
        rounds that reached each position.
    """
    batch, start = prompts.shape
    depth, device = setting.depth, prompts.device
    generator = torch.Generator(device=device).manual_seed(seed)
    ids = torch.zeros(batch, start + (rounds + 1) * (depth + 1), dtype=torch.long, device=device)
    ids[:, :start] = prompts
    anchor = torch.full((batch, 1), start - 1, device=device)
    offsets = torch.arange(depth, device=device)
    totals = torch.zeros(3, depth, device=device)
    states, _ = target_states(target, prompts, drafter.config.target_layer_ids)
    for _ in range(rounds):
        # positions before every anchor were committed when these states were computed
        length = states.shape[1]
        positions, mask = block_layout(anchor, drafter.config.block_size, length)
        block = torch.full_like(positions, drafter.config.mask_token_id)
        block[:, :1] = ids.gather(1, anchor)
        everywhere = torch.arange(length, device=device).expand(batch, -1)
        hidden = drafter(block, positions, drafter.context_kv(states, everywhere), mask)
        drafts, q = draft_rows(drafter, hidden, block[:, 0], setting, generator)
        ids.scatter_(1, anchor + 1 + offsets, drafts)
        end = int(anchor.max()) + depth + 1
        states, final = target_states(target, ids[:, :end], drafter.config.target_layer_ids)
        at = (anchor + torch.arange(depth + 1, device=device)).unsqueeze(-1).expand(-1, -1, final.shape[-1])
        p = target.lm_head(final.gather(1, at)).float().softmax(-1)
        ratio = (p[:, :depth].gather(-1, drafts.unsqueeze(-1)) / q.gather(-1, drafts.unsqueeze(-1))).squeeze(-1)
        passed = torch.rand(ratio.shape, generator=generator, device=device) < ratio
        alive = torch.cat((torch.ones_like(passed[:, :1]), passed[:, :-1]), 1).cumprod(1).float()
        totals += torch.stack((alive, alive * passed, alive * torch.minimum(p[:, :depth], q).sum(-1))).sum(1)
        accepted = passed.long().cumprod(1).sum(1, keepdim=True)
        here = accepted.unsqueeze(-1).expand(-1, 1, p.shape[-1])
        q_here = F.pad(q, (0, 0, 0, 1)).gather(1, here).squeeze(1)
        residual = (p.gather(1, here).squeeze(1) - q_here).clamp_min(0)
        ids.scatter_(1, anchor + 1 + accepted, torch.multinomial(residual + 1e-30, 1, generator=generator))
        anchor = anchor + 1 + accepted
    reached, passed_total, overlap = totals.tolist()
    return {
        "tokens_per_round": 1 + sum(passed_total) / (batch * rounds),
        "accepted_at": [a / max(r, 1) for a, r in zip(passed_total, reached, strict=True)],
        "overlap_at": [o / max(r, 1) for o, r in zip(overlap, reached, strict=True)],
        "rounds": batch * rounds,
    }


def main(argv: list[str] | None = None) -> int:
    """Evaluate a pair folder on held-out tokens; one JSON document on stdout."""
    parser = argparse.ArgumentParser(prog="python -m remote_dspark.train.evaluate", description=__doc__)
    parser.add_argument("--pair", type=Path, required=True, help="folder with target/ and drafter/")
    parser.add_argument("--corpus", type=Path, help="held-out tokens; default: the pair's prompts.jsonl")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    from transformers import Qwen3ForCausalLM

    target = Qwen3ForCausalLM.from_pretrained(options.pair / "target", dtype=torch.float32).to(options.device).eval()
    drafter = load_drafter(options.pair / "drafter", options.device, expected_vocab_size=target.config.vocab_size)
    drafter.markov_head.float()
    prompts = held_out_prompts(options.pair, options.corpus, options.sequences, options.prompt_tokens)
    tau = float(DRAFT_TEMPERATURE)
    settings = {
        "ON": Setting(options.depth, tau),
        "OFF": Setting(options.depth, 0.0),
        "ON-tau1": Setting(options.depth, 1.0),
    }
    report = {
        name: run(target, drafter, prompts.to(options.device), setting, rounds=options.rounds, seed=options.seed)
        for name, setting in settings.items()
    }
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return 0


def held_out_prompts(pair: Path, corpus: Path | None, count: int, length: int) -> Tensor:
    """Prompts [count, length] int64 from held-out tokens, or from the pair's own excerpts."""
    if corpus is not None:
        tokens = np.load(corpus / "heldout.npy").astype(np.int64)
        starts = np.linspace(0, tokens.size - length - 1, count).astype(np.int64)
        return torch.from_numpy(tokens[starts[:, None] + np.arange(length)])
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(pair / "target" / "tokenizer.json"))
    lines = (pair / "prompts.jsonl").read_text().splitlines()
    rows = [tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines]
    rows = [row[:length] for row in rows if len(row) >= length][:count]
    return torch.tensor(rows)


if __name__ == "__main__":
    raise SystemExit(main())
