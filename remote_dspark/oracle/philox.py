"""Philox4x32-10 and the project's key and counter layout.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4 (algorithm and
constants). Layout: DECISIONS 3 and `contract.RNG_KEY_TAG`; written out in docs/numerics.md.

The counter is (round, absolute position, domain, draw). The batch row is not part of it, so a request's noise does
not depend on its neighbours. Which counters may be used at all is the business of `keyring`.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from remote_dspark.contract import RNG_KEY_TAG, Domain
from remote_dspark.oracle.errors import CounterRangeError

NUM_ROUNDS = 10
"""Seven rounds pass the published test batteries; ten is the variant with published known answers."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

Key = tuple[int, int]
Counter = tuple[int, int, int, int]


def derive_key(seed: int, generation: int) -> Key:
    """The key of one generation of one request: two u32.

    Args:
        seed: The request's seed, 0 <= seed < 2**64; an unseeded request gets a random one that its trace records.
        generation: Occupancy number of the slot, 0 <= generation < 2**64.

    Returns:
        First 8 bytes of SHA-256(tag || seed u64 LE || generation u64 LE) as two little-endian u32.

    Raises:
        CounterRangeError: Seed or generation does not fit 64 bits.
    """
    for name, value in (("seed", seed), ("generation", generation)):
        if not 0 <= value < 1 << 64:
            raise CounterRangeError(f"{name} must be in [0, 2**64), found {value}; choose another {name}")
    digest = hashlib.sha256(RNG_KEY_TAG + seed.to_bytes(8, "little") + generation.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[0:4], "little"), int.from_bytes(digest[4:8], "little")


def philox4x32(counter: Counter, key: Key) -> Counter:
    """Ten rounds of Philox4x32 on Python integers.

    Args:
        counter: Four u32, word 0 first.
        key: Two u32.

    Returns:
        Four u32, word 0 first.

    Raises:
        CounterRangeError: A word does not fit 32 bits.
    """
    for word in (*counter, *key):
        if not 0 <= word <= _MASK:
            raise CounterRangeError(f"counter and key words must be in [0, 2**32), found {word} in {counter}, {key}")
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & _MASK, (product0 >> 32) ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def philox4x32_array(counters: npt.NDArray[np.uint32], keys: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """`philox4x32` over arrays; equal to it bit for bit.

    Args:
        counters: uint32 [..., 4].
        keys: uint32 [..., 2], leading dimensions broadcast against those of ``counters``.

    Returns:
        A new uint32 [..., 4].

    Raises:
        CounterRangeError: Another dtype or last dimension: a silent cast would drop the high half of a round.
    """
    if counters.dtype != np.uint32 or keys.dtype != np.uint32 or counters.shape[-1] != 4 or keys.shape[-1] != 2:
        raise CounterRangeError(
            f"expected uint32 [..., 4] and uint32 [..., 2], found {counters.dtype} {counters.shape} "
            f"and {keys.dtype} {keys.shape}"
        )
    mask, shift = np.uint64(_MASK), np.uint64(32)
    c0, c1, c2, c3 = (counters[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = (keys[..., i].astype(np.uint64) for i in range(2))
    for _ in range(NUM_ROUNDS):
        # a product of two u32 fits u64, so nothing is lost before the split
        product0 = c0 * np.uint64(_MULTIPLIERS[0])
        product1 = c2 * np.uint64(_MULTIPLIERS[1])
        c0, c1, c2, c3 = (product1 >> shift) ^ c1 ^ k0, product1 & mask, (product0 >> shift) ^ c3 ^ k1, product0 & mask
        k0, k1 = (k0 + np.uint64(_WEYL[0])) & mask, (k1 + np.uint64(_WEYL[1])) & mask
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def counter_of(round: int, position: int, domain: Domain, draw: int = 0) -> Counter:
    """The counter of one draw: (round, absolute position, domain, draw).

    Args:
        round: Round number within the generation, 0 <= round < 2**32.
        position: Absolute position in the sequence of the token that the draw decides, 0 <= position < 2**32.
        domain: What the draw is for.
        draw: Number of the draw at this place; 0 except for a future use of several.

    Raises:
        CounterRangeError: A field does not fit: the generation is exhausted and has to be reset; nothing wraps around.
    """
    for name, value in (("round", round), ("position", position), ("draw", draw)):
        if not 0 <= value <= _MASK:
            raise CounterRangeError(f"{name} must be in [0, 2**32), found {value}; reset the generation")
    return round, position, int(Domain(domain)), draw


def proposal_draw(key: Key, round: int, position: int, draw: int = 0) -> int:
    """The 24-bit draw of a proposal: ``word0 >> 8`` in domain PROPOSAL."""
    return philox4x32(counter_of(round, position, Domain.PROPOSAL, draw), key)[0] >> 8


def acceptance_draw(key: Key, round: int, position: int, draw: int = 0) -> int:
    """The 32-bit draw of an acceptance test: ``word0`` in domain ACCEPTANCE."""
    return philox4x32(counter_of(round, position, Domain.ACCEPTANCE, draw), key)[0]


def wide_draw(key: Key, round: int, position: int, domain: Domain, draw: int = 0) -> int:
    """The 64-bit draw of a correction or bonus token: ``word0 | word1 << 32``.

    Raises:
        CounterRangeError: The domain is one whose draw is narrower; a second width there would reuse its noise.
    """
    if domain not in (Domain.CORRECTION, Domain.BONUS):
        raise CounterRangeError(f"wide draws exist for CORRECTION and BONUS, found {Domain(domain).name}")
    words = philox4x32(counter_of(round, position, domain, draw), key)
    return words[0] | words[1] << 32
