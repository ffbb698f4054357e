"""Token ids to text, piece by piece: never half a character, never a part of a stop string.

The tokenizer is a ``tokenizer.json`` read by the tokenizers library; nothing else of a model's text handling is used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from remote_dspark.target.errors import ModelError

REPLACEMENT: Final = "\ufffd"
MAX_PARTIAL_BYTES: Final = 3
"""A UTF-8 character waits for at most three more bytes; longer runs of replacements are the model's own output."""


class Tokenizer:
    """Encodes prompts and decodes completions.

    Attributes:
        sha256: Digest of the file's bytes: the identity of the id map.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Backend

        try:
            data = path.read_bytes()
            self._backend: Any = Backend.from_buffer(data)
        # The library raises a bare Exception for anything it cannot parse.
        except Exception as cause:
            raise ModelError(f"{path}: expected a tokenizer.json, found {cause}") from cause
        self.sha256 = hashlib.sha256(data).hexdigest()

    @property
    def size(self) -> int:
        """Number of ids, added tokens included."""
        return int(self._backend.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt."""
        return [int(token) for token in self._backend.encode(text).ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids; special tokens have none."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))


class TextStream:
    """The text of one growing completion.

    Args:
        tokenizer: Decodes.
        stops: Strings that end the completion; they are not part of the text.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._text = ""
        self._num_sent = 0

    def push(self, token_id: int) -> bool:
        """Append one token; True when a stop string is now complete (the text ends before it)."""
        self._ids.append(token_id)
        if not self._stops:
            return False
        self._text = self._tokenizer.decode(self._ids)
        starts = [self._text.find(stop) for stop in self._stops]
        found = [start for start in starts if start >= 0]
        if found:
            self._text = self._text[: min(found)]
        return bool(found)

    def take(self, *, final: bool) -> str:
        """The text that can be sent now; at the end, all that is left."""
        if not self._stops:
            self._text = self._tokenizer.decode(self._ids)
        end = len(self._text)
        if not final:
            end -= max(_partial_character(self._text), self._partial_stop())
        delta = self._text[self._num_sent : end]
        self._num_sent = max(self._num_sent, end)
        return delta

    def _partial_stop(self) -> int:
        """Length of the longest tail that a stop string could still continue."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-size:]) for stop in self._stops):
                return size
        return 0


def _partial_character(text: str) -> int:
    kept = text.rstrip(REPLACEMENT)
    run = len(text) - len(kept)
    return run if run <= MAX_PARTIAL_BYTES else 0
