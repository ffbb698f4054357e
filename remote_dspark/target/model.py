"""The target model: prefill, verification forwards over a KV cache, and the hidden states a drafter needs.

One `TargetModel` holds the weights; one `Sequence` holds a request's cache. The rules of this file: a forward never
samples; what a rejection leaves in the cache is cropped exactly, so that the cache always holds committed tokens only;
logits leave as FP32 rows over real vocabulary columns; hidden states leave unfused, as bf16 rows, never of the final
layer (transformers stores a normalised state there). Batching several requests in one forward is not covered: each
request is its own forward. This file knows nothing of drafts, requests or HTTP.
"""

from __future__ import annotations

import inspect
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from remote_dspark.target.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

ARCHITECTURE: Final = "Qwen3ForCausalLM"
EMBEDDING_LAYER: Final = -1
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Rows:
    """What one forward returns.

    Attributes:
        logits: FP32 ``[n, V]``, row i is the distribution of the token after input i. Owned by the caller.
        states: bf16 bit patterns as uint16 ``[n, m*d]``: the hidden states of the n inputs, layer by layer.
    """

    logits: npt.NDArray[np.float32]
    states: npt.NDArray[np.uint16]


class Sequence:
    """One request's KV cache: ``length`` tokens whose keys and values are stored."""

    def __init__(self, model: TargetModel) -> None:
        from transformers.cache_utils import DynamicCache

        self._model = model
        self._cache: Any = DynamicCache(config=model.config)

    @property
    def length(self) -> int:
        """Number of tokens in the cache."""
        return int(self._cache.get_seq_length())

    def extend(self, token_ids: Ordered[int], *, with_logits: bool = True) -> Rows:
        """Run ``token_ids`` after the cached ones and keep their keys and values.

        Args:
            token_ids: n ids.
            with_logits: False for a prefill, whose n rows of V values nobody reads: logits are then ``[0, V]``.

        Raises:
            ModelError: No token, an id outside the vocabulary, or more tokens than the model's context.
        """
        self._model.require_tokens(token_ids, self.length)
        return self._model.forward(token_ids, self._cache, with_logits=with_logits)

    def crop(self, length: int) -> None:
        """Forget every token after the first ``length``.

        Raises:
            ModelError: ``length`` is negative or larger than what is cached.
        """
        found = self.length
        if not 0 <= length <= found:
            raise ModelError(f"crop: expected a length of 0..{found}, found {length}")
        # Negative counts mean "remove this many" in every version of transformers that we accept.
        if length < found:
            self._cache.crop(length - found)


class TargetModel:
    """A Qwen3 causal language model in inference mode.

    Args:
        folder: Checkpoint folder in the Hugging Face format.
        layer_ids: Layers whose outputs a drafter reads: strictly ascending, -1 is the embedding output.
        dtype: ``float32`` or ``bfloat16``.
        device: torch device name.

    Raises:
        ModelError: Wrong architecture, missing files, or layer ids that the model does not have.
    """

    def __init__(self, folder: Path, layer_ids: Ordered[int], *, dtype: str = "float32", device: str = "cpu") -> None:
        _require_architecture(folder)
        if dtype not in _DTYPES:
            raise ModelError(f"dtype: expected one of {sorted(_DTYPES)}, found {dtype!r}")
        # The module itself, not the package's lazy index: it saves half of the import time.
        from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM
        from transformers.utils.logging import disable_progress_bar

        # stderr is for people and logs; a bar redrawn there is for neither.
        disable_progress_bar()
        model = Qwen3ForCausalLM.from_pretrained(folder, dtype=_DTYPES[dtype], local_files_only=True)
        self._model = model.to(device).eval()
        self._device = device
        self.config = model.config
        self.vocab_size = int(model.config.vocab_size)
        self.hidden_size = int(model.config.hidden_size)
        self.max_length = int(model.config.max_position_embeddings)
        self.layer_ids = tuple(layer_ids)
        _require_layers(self.layer_ids, int(model.config.num_hidden_layers))
        # Renamed between releases of transformers; both spellings mean the same object.
        accepted = inspect.signature(model.model.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"

    @property
    def state_width(self) -> int:
        """Values per unfused hidden-state row: m * d."""
        return len(self.layer_ids) * self.hidden_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a completion."""
        found = self.config.eos_token_id
        if found is None:
            return frozenset()
        return frozenset([found] if isinstance(found, int) else found)

    def new_sequence(self) -> Sequence:
        """An empty cache for one request."""
        return Sequence(self)

    def require_tokens(self, token_ids: Ordered[int], cached: int) -> None:
        """Refuse ids the model does not have, and lengths beyond its context.

        Raises:
            ModelError: As said.
        """
        if len(token_ids) == 0:
            raise ModelError("forward: expected at least one token, found none")
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            bad = next(t for t in token_ids if not 0 <= t < self.vocab_size)
            raise ModelError(f"token ids: expected 0..{self.vocab_size - 1}, found {bad}")
        total = cached + len(token_ids)
        if total > self.max_length:
            raise ModelError(f"context: expected at most {self.max_length} tokens, found {total}; shorten the prompt")

    @torch.inference_mode()
    def forward(self, token_ids: Ordered[int], cache: Any, *, with_logits: bool = True) -> Rows:
        """One forward of n tokens; ``cache`` grows by n. See `Sequence.extend`."""
        inputs = torch.tensor([list(token_ids)], dtype=torch.int64, device=self._device)
        output = self._model.model(
            input_ids=inputs, use_cache=True, output_hidden_states=True, **{self._cache_argument: cache}
        )
        kept = output.last_hidden_state[0] if with_logits else output.last_hidden_state[0, :0]
        logits = self._model.lm_head(kept).float()
        # hidden_states[0] is the embedding output, hidden_states[l + 1] the output of layer l.
        picked = [output.hidden_states[layer + 1][0] for layer in self.layer_ids]
        states = torch.cat(picked, dim=-1).to(torch.bfloat16).contiguous()
        return Rows(logits.cpu().numpy(), states.view(torch.uint16).cpu().numpy())


def _require_architecture(folder: Path) -> None:
    path = folder / "config.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise ModelError(f"{path}: expected the target's configuration, found {cause}") from cause
    found = document.get("architectures")
    if found != [ARCHITECTURE]:
        raise ModelError(f"{path}: expected architectures [{ARCHITECTURE!r}], found {found!r}; no other is supported")


def _require_layers(layer_ids: tuple[int, ...], num_layers: int) -> None:
    ascending = all(a < b for a, b in itertools.pairwise(layer_ids))
    in_range = all(EMBEDDING_LAYER <= layer < num_layers - 1 for layer in layer_ids)
    if not layer_ids or not ascending or not in_range:
        raise ModelError(
            f"target_layer_ids: expected strictly ascending ids of -1..{num_layers - 2} "
            f"(the final layer is stored normalised), found {list(layer_ids)}"
        )
