"""Train the pair: target on text, text of the target's own, drafter on both, then write one folder.

Each stage takes its own seed and is bounded in time: when the machine is slow the learning-rate schedule shrinks to the
bound and the manifest says so. Not covered: several devices, resuming.
"""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remote_dspark.drafter.model import DSparkDrafter
from remote_dspark.train.draft import draft_loss, new_drafter
from remote_dspark.train.export import write_pair
from remote_dspark.train.recipe import Recipe

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stage:
    """What one stage did, for the manifest."""

    name: str
    steps: int
    planned_steps: int
    elapsed_s: float
    loss: float


def fit_pair(
    corpus: Path, out: Path, recipe: Recipe, device: str, *, target_seconds: float, draft_seconds: float
) -> dict[str, Any]:
    """Train both models and write them to ``out``.

    Args:
        corpus: Folder that ``build_corpus`` wrote.
        out: Destination; created.
        recipe: All settings.
        device: ``cuda`` or ``cpu``.
        target_seconds: Bound of the target's stage.
        draft_seconds: Bound of the drafter's stage.

    Returns:
        The manifest that is written as ``recipe.json``.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    # bf16 everywhere else; this only concerns FP32 products of the GPU
    torch.set_float32_matmul_precision("high")
    train = torch.from_numpy(np.load(corpus / "train.npy").astype(np.int64)).to(device)
    target, first = fit_target(train, recipe, device, target_seconds)
    own_text = write_own_text(target, train, recipe)
    drafter, second = fit_drafter(target, train, own_text, recipe, device=device, bound_s=draft_seconds)
    stages = [vars(stage) for stage in (first, second)]
    environment = {"device": _device_name(device), "torch": torch.__version__}
    manifest = {"recipe": recipe.to_document(), "stages": stages, "environment": environment}
    return write_pair(out, corpus, target, drafter, recipe, manifest=manifest)


def fit_target(tokens: Tensor, recipe: Recipe, device: str, bound_s: float) -> tuple[nn.Module, Stage]:
    """Train a Qwen3-shaped target on ``tokens`` [N] int64; returned in FP32 holding BF16-representable weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(recipe.seed)
    target = Qwen3ForCausalLM(Qwen3Config(**recipe.target_config())).to(device)
    generator = torch.Generator().manual_seed(recipe.seed)

    def loss(_: int) -> Tensor:
        ids = sample_windows(tokens, recipe.target_batch, recipe.max_positions + 1, generator)
        with autocast(device):
            logits = target(input_ids=ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    parameters = list(target.named_parameters())
    stage = run_stage(
        "target",
        loss,
        parameters,
        peak_lr=recipe.target_lr,
        steps=recipe.target_steps,
        bound_s=bound_s,
        recipe=recipe,
    )
    target.to(torch.bfloat16).float().eval().requires_grad_(False)
    return target, stage


@torch.no_grad()
def write_own_text(target: nn.Module, tokens: Tensor, recipe: Recipe) -> Tensor:
    """Sequences [n, max_positions] the target samples at T=1 after short openings of the training text."""
    from transformers.cache_utils import DynamicCache

    generator = torch.Generator().manual_seed(recipe.seed + 1)
    torch.manual_seed(recipe.seed + 1)
    # the argument was renamed between two releases of transformers
    argument = "cache" if "cache" in inspect.signature(target.forward).parameters else "past_key_values"
    rows = []
    started = time.monotonic()
    for begin in range(0, recipe.own_text_sequences, 4096):
        size = min(4096, recipe.own_text_sequences - begin)
        ids = sample_windows(tokens, size, 32, generator)
        parts, cache, step = [ids], {argument: DynamicCache()}, ids
        while sum(part.shape[1] for part in parts) < recipe.max_positions:
            with autocast(str(tokens.device)):
                out = target(input_ids=step, use_cache=True, logits_to_keep=1, **cache)
            step = torch.multinomial(out.logits[:, -1].float().softmax(-1), 1)
            parts.append(step)
        rows.append(torch.cat(parts, dim=1))
    log.info("own text: %d sequences in %.1f s", recipe.own_text_sequences, time.monotonic() - started)
    return torch.cat(rows)


def fit_drafter(
    target: nn.Module, tokens: Tensor, own_text: Tensor, recipe: Recipe, *, device: str, bound_s: float
) -> tuple[DSparkDrafter, Stage]:
    """Train the drafter against the frozen target, half on text and half on the target's own text."""
    torch.manual_seed(recipe.seed + 2)
    generator = torch.Generator().manual_seed(recipe.seed + 2)
    drafter = new_drafter(recipe, target).to(device)
    half = recipe.draft_batch // 2

    def loss(step: int) -> Tensor:
        text = sample_windows(tokens, recipe.draft_batch - half, recipe.max_positions, generator)
        own = own_text[torch.randint(len(own_text), (half,), generator=generator).to(own_text.device)]
        with autocast(device):
            total, parts = draft_loss(drafter, target, torch.cat((text, own)), recipe, generator)
        if step % 100 == 0:
            log.info("drafter overlap by position: %s", " ".join(f"{value:.3f}" for value in parts.tolist()))
        return total

    parameters = [(name, p) for name, p in drafter.named_parameters() if p.requires_grad]
    stage = run_stage(
        "drafter",
        loss,
        parameters,
        peak_lr=recipe.draft_lr,
        steps=recipe.draft_steps,
        bound_s=bound_s,
        recipe=recipe,
    )
    return drafter, stage


def run_stage(
    name: str,
    loss: Callable[[int], Tensor],
    parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    peak_lr: float,
    steps: int,
    bound_s: float,
    recipe: Recipe,
) -> Stage:
    """Warm-up and a cosine to a twentieth; ends after ``steps`` or ``bound_s`` seconds."""
    named = list(parameters)
    optimisers = make_optimisers(named, recipe)
    started, step, value = time.monotonic(), 0, torch.zeros(())
    while step < steps and (elapsed := time.monotonic() - started) < bound_s:
        progress = max(step / steps, elapsed / bound_s)
        rate = peak_lr * learning_rate_share(step, progress, recipe.warmup_steps)
        value = loss(step)
        for _, parameter in named:
            parameter.grad = None
        torch.autograd.backward(value)
        torch.nn.utils.clip_grad_norm_([p for _, p in named], 1.0)
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()
        if step % 100 == 0:
            log.info("%s step %d loss %.4f at %.1f s", name, step, value.item(), time.monotonic() - started)
        step += 1
    stage = Stage(name, step, steps, round(time.monotonic() - started, 1), round(value.item(), 4))
    log.info("%s", stage)
    return stage


def make_optimisers(named: list[tuple[str, nn.Parameter]], recipe: Recipe) -> list[torch.optim.Optimizer]:
    """One optimiser, or two: Muon takes the projections, AdamW the tables, norms and biases.

    Raises:
        ValueError: An unknown ``matrix_optimiser``.
    """
    if recipe.matrix_optimiser not in ("adamw", "muon"):
        raise ValueError(f"matrix_optimiser: expected adamw or muon, found {recipe.matrix_optimiser!r}")
    is_muon = recipe.matrix_optimiser == "muon"
    projections = [p for name, p in named if is_muon and p.ndim == 2 and ("_proj." in name or name == "fc.weight")]
    taken = {id(p) for p in projections}
    rest = [p for _, p in named if id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimisers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)]
    if projections:
        decay = recipe.weight_decay
        # this scaling lets both optimisers share one learning rate
        optimisers.append(torch.optim.Muon(projections, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
    return optimisers


def learning_rate_share(step: int, progress: float, warmup_steps: int) -> float:
    """Share of the peak rate: linear warm-up, then a cosine over ``progress`` in [0, 1] down to 5 %."""
    return min(1.0, (step + 1) / warmup_steps) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def sample_windows(tokens: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Random windows [count, length] of a token row; starts are drawn on the CPU, whatever the device."""
    starts = torch.randint(len(tokens) - length, (count, 1), generator=generator)
    return tokens[(starts + torch.arange(length)).to(tokens.device)]


def autocast(device: str) -> AbstractContextManager[Any]:
    """BF16 products on a GPU; a CPU trains in FP32."""
    kind = device.split(":", maxsplit=1)[0]
    return torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda")


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"
