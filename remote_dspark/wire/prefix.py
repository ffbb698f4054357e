"""The committed-prefix digest: a chain of SHA-256 over token ids.

``d(0) = SHA-256(tag)``, ``d(i + 1) = SHA-256(d(i) || id_i as int32 little-endian)``. One digest is all that is needed
to go on, so it does not depend on how the tokens were split into chunks. STEP names ``d(anchor_position + 1)``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

PREFIX_TAG: Final = b"dspark-prefix-v1"
EMPTY_PREFIX: Final = hashlib.sha256(PREFIX_TAG).digest()


def extend_prefix(digest: bytes, token_ids: Iterable[int] | npt.NDArray[np.integer]) -> bytes:
    """Returns the digest after appending ``token_ids`` (each in int32) to the prefix that ``digest`` stands for."""
    ids = np.fromiter(token_ids, dtype=np.int64) if not isinstance(token_ids, np.ndarray) else token_ids
    if ids.size and (int(ids.min()) < -(2**31) or int(ids.max()) >= 2**31):
        raise ValueError(f"prefix token ids must fit int32, found {int(ids.min())}..{int(ids.max())}")
    raw = ids.astype("<i4").tobytes()
    sha256 = hashlib.sha256
    for start in range(0, len(raw), 4):
        digest = sha256(digest + raw[start : start + 4]).digest()
    return digest


def prefix_digest(token_ids: Iterable[int] | npt.NDArray[np.integer]) -> bytes:
    """Digest of a whole prefix, 32 bytes."""
    return extend_prefix(EMPTY_PREFIX, token_ids)
