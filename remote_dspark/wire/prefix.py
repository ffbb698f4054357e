"""The committed-prefix digest: a chain of SHA-256 over token ids.

``d(0) = SHA-256(tag)``, ``d(i + 1) = SHA-256(d(i) || id_i as int32 little-endian)``. One digest is all that is needed
to go on, so it does not depend on how the tokens were split into chunks. STEP names ``d(anchor_position + 1)``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from hashlib import sha256
from typing import Final

import numpy as np
import numpy.typing as npt

_pack_id: Final = struct.Struct("<i").pack
PREFIX_TAG: Final = b"dspark-prefix-v1"
EMPTY_PREFIX: Final = sha256(PREFIX_TAG).digest()


def extend_prefix(digest: bytes, token_ids: Iterable[int] | npt.NDArray[np.integer]) -> bytes:
    """Returns the digest after appending ``token_ids`` (each in int32) to the prefix that ``digest`` stands for.

    Raises:
        ValueError: an id outside int32.
    """
    ids = token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
    try:
        for token_id in ids:
            digest = sha256(digest + _pack_id(token_id)).digest()
    except struct.error as error:
        raise ValueError(f"prefix token ids must be integers within int32: {error}") from error
    return digest


def prefix_digest(token_ids: Iterable[int] | npt.NDArray[np.integer]) -> bytes:
    """Digest of a whole prefix, 32 bytes."""
    return extend_prefix(EMPTY_PREFIX, token_ids)
