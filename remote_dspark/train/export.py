"""Write a trained pair as one folder: ``target/``, ``drafter/``, licence note, prompts, manifest with digests."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from remote_dspark.drafter.model import DSparkDrafter
from remote_dspark.train.recipe import Recipe

NUM_PROMPTS: Final = 64
PROMPT_TOKENS: Final = 48
LICENCE_NOTE: Final = """\
The weights in this folder were trained on the source files of Python's standard library
(Copyright (c) 2001 Python Software Foundation; All Rights Reserved), and prompts.jsonl quotes excerpts of
held-out files of it, under the Python Software Foundation License Version 2:
https://docs.python.org/3/license.html
recipe.json names the interpreter version and the digest of the file list. The weights themselves, the tokenizer
and the recipe are under this repository's Apache-2.0 licence.
"""


def write_pair(
    out: Path,
    corpus: Path,
    target: nn.Module,
    drafter: DSparkDrafter,
    recipe: Recipe,
    *,
    manifest: dict[str, Any],
) -> dict[str, Any]:
    """Write the pair in BF16 and return the completed manifest (``recipe.json``)."""
    for folder in (out / "target", out / "drafter"):
        folder.mkdir(parents=True, exist_ok=True)
    # the pair's own, and a copy where transformers looks for it
    for folder in (out, out / "target"):
        shutil.copy(corpus / "tokenizer.json", folder / "tokenizer.json")
    _write_target(out / "target", target, recipe)
    weights = {name: tensor.to(torch.bfloat16).cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    save_file(weights, out / "drafter" / "model.safetensors", metadata={"format": "pt"})
    _write_json(out / "drafter" / "config.json", recipe.drafter_config())
    (out / "LICENSE-TEXT").write_text(LICENCE_NOTE)
    for shard in out.rglob("*.safetensors"):
        # the writers create them readable by their owner alone
        shard.chmod(0o644)
    write_prompts(corpus, out / "prompts.jsonl")
    manifest = manifest | {"corpus": json.loads((corpus / "manifest.json").read_text())} | describe_files(out)
    _write_json(out / "recipe.json", manifest)
    return manifest


def describe_files(out: Path) -> dict[str, Any]:
    """Digest of every file of a pair folder but the manifest itself, and their size together."""
    files = sorted(path for path in out.rglob("*") if path.is_file() and path.name != "recipe.json")
    return {
        "files": {path.relative_to(out).as_posix(): _sha256(path) for path in files},
        "size_bytes": sum(path.stat().st_size for path in files),
    }


def write_prompts(corpus: Path, path: Path) -> None:
    """Evenly spaced excerpts of the held-out text, as JSON Lines ``{"id": n, "prompt": text}``."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    tokens = np.load(corpus / "heldout.npy")
    starts = np.linspace(0, tokens.size - PROMPT_TOKENS - 1, NUM_PROMPTS).astype(np.int64)
    lines = []
    for number, start in enumerate(starts):
        excerpt = tokens[start : start + PROMPT_TOKENS].tolist()
        text = tokenizer.decode([token for token in excerpt if token > 1])
        lines.append(json.dumps({"id": number, "prompt": text}, sort_keys=True))
    path.write_text("\n".join(lines) + "\n")


def _write_target(folder: Path, target: Any, recipe: Recipe) -> None:
    """``save_pretrained`` names; the head is tied to the embedding, so it is not stored twice."""
    target.to(torch.bfloat16).save_pretrained(folder)
    document = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": recipe.max_positions,
    }
    _write_json(folder / "tokenizer_config.json", document)


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
