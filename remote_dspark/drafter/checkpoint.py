"""Load a DSpark checkpoint folder: ``config.json`` and safetensors shards, nothing else, never a pickle.

Everything is checked against the config *before* a tensor is read: presence, shape, dtype, file length. Every file is
hashed; the digests travel with the model as its identity. Source of the names: DeepSpec ``save_pretrained`` folders.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file

from remote_dspark.drafter.config import DSparkConfig, read_config
from remote_dspark.drafter.errors import (
    CheckpointError,
    MissingTensorError,
    TensorFormatError,
    TruncatedFileError,
    UnexpectedTensorError,
)
from remote_dspark.drafter.model import CheckpointIdentity, DSparkDrafter

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
MAX_HEADER_BYTES: Final = 16 << 20


@dataclass(frozen=True)
class StoredTensor:
    """One header entry of a shard."""

    shard: str
    dtype: str
    shape: tuple[int, ...]


def expected_tensors(config: DSparkConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor a checkpoint of this config must hold."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in DSparkDrafter(config).state_dict().items()}


def load_drafter(
    path: Path | str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    expected_vocab_size: int | None = None,
) -> DSparkDrafter:
    """Load a drafter for inference.

    Args:
        path: Checkpoint folder.
        device: Where the weights go.
        dtype: Compute dtype of the backbone. The Markov tables stay BF16 whatever it is (DECISIONS 7).
        expected_vocab_size: The target's vocabulary; a different one is refused.

    Returns:
        The model in evaluation mode, without gradients, ``identity`` filled in.

    Raises:
        CheckpointError: One of its subclasses, before any tensor is served.
    """
    folder = Path(path)
    config = read_config(folder, expected_vocab_size=expected_vocab_size)
    shards = _shards(folder)
    stored = {name: entry for shard in shards for name, entry in read_header(folder / shard).items()}
    _require_tensors(config, stored, folder)
    with torch.device("meta"):
        model = DSparkDrafter(config)
    weights: dict[str, torch.Tensor] = {}
    for shard in shards:
        weights.update(load_file(folder / shard, device=str(device)))
    markov = {name for name in weights if name.startswith("markov_head.")}
    weights = {name: tensor if name in markov else tensor.to(dtype) for name, tensor in weights.items()}
    model.load_state_dict(weights, strict=True, assign=True)
    model.identity = checkpoint_identity(folder)
    return model.requires_grad_(False).eval()


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read one shard's header and prove that the file holds exactly the bytes it promises.

    Raises:
        TruncatedFileError: Too short, an impossible header, or data that is missing or left over.
    """
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            raw = file.read(header_bytes) if header_bytes <= MAX_HEADER_BYTES else b""
    except OSError as cause:
        raise TruncatedFileError(f"{path}: expected a readable shard, found {cause.strerror}") from cause
    if len(raw) != header_bytes or header_bytes < 2:
        raise TruncatedFileError(f"{path}: expected a header of {header_bytes} bytes, found a file of {size_bytes}")
    try:
        document: dict[str, Any] = json.loads(raw)
        document.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in document.values()), default=0)
        entries = {n: StoredTensor(path.name, e["dtype"], tuple(e["shape"])) for n, e in document.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as cause:
        raise TruncatedFileError(f"{path}: expected a safetensors header, found {cause!r}; copy it again") from cause
    if size_bytes != 8 + header_bytes + end:
        raise TruncatedFileError(f"{path}: expected {8 + header_bytes + end} bytes, found {size_bytes}; copy it again")
    return entries


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checkpoint_identity(folder: Path) -> CheckpointIdentity:
    """Digests of ``config.json`` and every safetensors shard of a model folder, of a drafter or of a target.

    Raises:
        CheckpointError: No configuration or no shard.
    """
    names = sorted(["config.json", *(path.name for path in folder.glob("*.safetensors"))])
    if len(names) < 2 or not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: expected config.json and at least one .safetensors file; check the path")
    files = {name: file_sha256(folder / name) for name in names}
    joined = "".join(f"{digest}  {name}\n" for name, digest in files.items())
    return CheckpointIdentity(files, hashlib.sha256(joined.encode()).hexdigest())


def _shards(folder: Path) -> list[str]:
    """Shard names in order: the single file, or what the index lists."""
    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    index = folder / INDEX_FILE
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
        raise CheckpointError(f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE}, found {cause!r}") from cause
    for name in names:
        # A name with a separator would read outside the checkpoint folder.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index}: expected plain safetensors file names, found {name!r}")
    return names


def _require_tensors(config: DSparkConfig, stored: dict[str, StoredTensor], folder: Path) -> None:
    expected = expected_tensors(config)
    missing = sorted(expected.keys() - stored.keys())
    if missing:
        raise MissingTensorError(f"{folder}: expected tensor {missing[0]!r}, found none ({len(missing)} missing)")
    surplus = sorted(stored.keys() - expected.keys())
    if surplus:
        raise UnexpectedTensorError(f"{folder}: expected {len(expected)} tensors, found {surplus[0]!r} beside them")
    for name, shape in expected.items():
        entry = stored[name]
        where = f"{folder}/{entry.shard}: tensor {name!r}"
        if entry.shape != shape:
            raise TensorFormatError(f"{where}: expected shape {list(shape)}, found {list(entry.shape)}")
        # Published confidence heads are kept in FP32; everything that feeds a token is BF16.
        allowed = ("BF16", "F32") if name.startswith("confidence_head.") else ("BF16",)
        if entry.dtype not in allowed:
            raise TensorFormatError(f"{where}: expected dtype {' or '.join(allowed)}, found {entry.dtype}")
