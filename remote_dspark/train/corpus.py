"""Text of the tiny pair: the sources of Python's standard library (PSF licence), its tokenizer, its token files.

The text is taken from the running interpreter's own library, so its exact bytes depend on that interpreter; the
manifest names every file by digest and the Python version. Held-out files are chosen by the digest of their *name*,
so that the split survives other versions. Tokenizer training is single-threaded and has no random part.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from remote_dspark.train.recipe import Recipe

END_OF_TEXT: Final = "<|endoftext|>"
MASK: Final = "<|mask|>"
SPECIAL_TOKENS: Final = (END_OF_TEXT, MASK)
"""Ids 0 and 1. Text never encodes to them: a document that spells one out is skipped."""

HELD_OUT_ONE_IN: Final = 20
SKIPPED_FOLDERS: Final = frozenset({"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"})
"""Third-party code, and tables that are data rather than text."""

MAX_FILE_BYTES: Final = 200_000


def build_corpus(out: Path, recipe: Recipe) -> dict[str, Any]:
    """Write ``tokenizer.json``, ``train.npy``, ``heldout.npy`` (uint16 ids) and ``manifest.json`` to ``out``.

    Returns:
        The manifest.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    out.mkdir(parents=True, exist_ok=True)
    documents = list(library_documents(Path(sysconfig.get_paths()["stdlib"])))
    train = [text for name, text in documents if not is_held_out(name)]
    held_out = [text for name, text in documents if is_held_out(name)]
    tokenizer = train_tokenizer(train, recipe.vocab_size)
    tokenizer.save(str(out / "tokenizer.json"))
    for part, texts in (("train", train), ("heldout", held_out)):
        np.save(out / f"{part}.npy", encode_documents(tokenizer, texts))
    manifest = _manifest(out, documents)
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    return manifest


def library_documents(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (relative name, text) of every ASCII source file, in name order."""
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        raw = path.read_bytes() if not SKIPPED_FOLDERS.intersection(name.parts) else b""
        is_text = raw.isascii() and len(raw) <= MAX_FILE_BYTES and b"\0" not in raw
        if raw.strip() and is_text and not any(token.encode() in raw for token in SPECIAL_TOKENS):
            yield name.as_posix(), raw.decode("ascii")


def is_held_out(name: str) -> bool:
    """Whether a file belongs to the held-out part; depends on its name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


def train_tokenizer(texts: list[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer of exactly ``vocab_size`` ids; special tokens take the lowest."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"expected {vocab_size} ids, found {tokenizer.get_vocab_size()}; give it more text")
    return tokenizer


def encode_documents(tokenizer: Any, texts: list[str]) -> NDArray[np.uint16]:
    """All documents as one row of ids, each ended by id 0."""
    parts: list[NDArray[np.uint16]] = []
    for text in texts:
        parts.append(np.array([*tokenizer.encode(text).ids, 0], dtype=np.uint16))
    return np.concatenate(parts)


def _manifest(out: Path, documents: list[tuple[str, str]]) -> dict[str, Any]:
    lines = [f"{hashlib.sha256(text.encode()).hexdigest()}  {name}" for name, text in documents]
    artefacts = ("tokenizer.json", "train.npy", "heldout.npy")
    return {
        "source": "Python standard library sources, PSF licence",
        "python_version": platform.python_version(),
        "num_files": len(documents),
        "size_bytes": sum(len(text) for _, text in documents),
        "files_sha256": hashlib.sha256("\n".join(lines).encode()).hexdigest(),
        "num_held_out_files": sum(is_held_out(name) for name, _ in documents),
        "artefacts": {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in artefacts},
        "num_tokens": {part: int(np.load(out / f"{part}.npy").size) for part in ("train", "heldout")},
    }
