"""Words: facts that programs of one launch tell each other, as Triton device functions.

A word has 52 bits of payload and above them the 12 bits of the call's turn. It is stored and read whole, so a reader
sees from the word itself whether it is of this call, and no other store needs to be ordered with it. Rules: every word
is stored in every call, so none is older than one call; who waits is resident together with whom it waits for, and
waits for a bounded number of looks.
"""

from __future__ import annotations

import triton
import triton.language as tl

MISSING_FLAG = tl.constexpr(128)
PAYLOAD_BITS = tl.constexpr(52)
NUM_TURNS = tl.constexpr(4095)
"""Turns are 0..4094; 4095 marks a word that no call has stored."""


@triton.jit
def next_turn(turn):
    """The turn after this one."""
    return tl.where(turn + 1 == NUM_TURNS, 0, turn + 1)


@triton.jit
def payload_of(words):
    """Words without their turn."""
    return words & 0xFFFFFFFFFFFFF


@triton.jit
def publish(word_ptr, turn, payload):
    """Stores one word."""
    tl.atomic_xchg(word_ptr, (turn.to(tl.int64) << PAYLOAD_BITS) | payload, sem="relaxed")


@triton.jit
def look(words_ptr, entries, present):
    """Words as they are now, 0 where not present."""
    return tl.load(words_ptr + entries, mask=present, other=0, volatile=True)


@triton.jit
def _num_late(words, present, turn):
    """How many of the words present are not of this turn."""
    return tl.sum((present & (((words >> PAYLOAD_BITS) & 4095) != turn)).to(tl.int32), axis=0)


@triton.jit
def wait_for(words, words_ptr, entries, present, turn, LOOKS: tl.constexpr):
    """Looks until all words present are of this turn.

    Takes:
        words: What a first look found.

    Returns:
        Payloads, 0 where not present, and `MISSING_FLAG` if some word never came.
    """
    late = _num_late(words, present, turn)
    looks = 1
    while (late > 0) & (looks < LOOKS):
        words = look(words_ptr, entries, present)
        late = _num_late(words, present, turn)
        looks += 1
    return payload_of(words), tl.where(late > 0, MISSING_FLAG, 0)
