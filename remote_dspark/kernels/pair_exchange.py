"""The peer exchange as Triton device functions: one message per epoch each way, released and acquired at system scope.

A message is a rank's packed candidates, its row flags, and the acknowledgement of the epoch before: token and hash of
the counts. Receiving the message of epoch e therefore proves that the peer has consumed epoch e - 1, so with two slots
no slot is written before its last content was consumed. A chain ends with one message without candidates.

Rules: only a final program waits; every wait is bounded; a value that a branch or loop depends on and that anyone else
may change comes from an atomic operation, because a plain scalar load is done by every thread for itself, and threads
that disagree would never meet at the next barrier. Every row is a channel with epochs of its own. K is a constexpr.
"""

from __future__ import annotations

import triton
import triton.language as tl

from remote_dspark.kernels.rounding import KEY_EXCLUDED
from remote_dspark.kernels.selection import HAS_ASSEMBLY

NUM_SLOTS = 2
BLOCK_WORDS = tl.constexpr(64)
"""int64 words of one request in one slot: 512 bytes, of which the candidates are the first 256."""

FLAGS_WORD = tl.constexpr(32)
ACK_WORD = tl.constexpr(33)
SIGNAL_WORD = tl.constexpr(34)

STATE_WORDS = tl.constexpr(8)
"""int64 words of a rank's own state per channel: a cache line that no other rank touches."""

EPOCH, NONCE, LIMIT, STOPPED, CLOCK, LONGEST = (tl.constexpr(word) for word in range(6))
"""Words of the state: last epoch, incarnation nonce, first epoch that does not exist, this channel's `PairError` flags,
scratch, longest wait that was timed. Only the channel's final program touches them, one launch after the other."""

# PairError flags, spelled out because device code cannot read an enum
PEER_TIMEOUT = tl.constexpr(1)
PEER_MISMATCH = tl.constexpr(2)
EPOCH_EXHAUSTED = tl.constexpr(4)
BAD_LOGITS = tl.constexpr(8)
PEER_FAULT = tl.constexpr(16)

PEER_FLAG = tl.constexpr(256)
"""`rows.RowError.PEER`."""

POLLS_PER_CHECK = tl.constexpr(16 if HAS_ASSEMBLY else 1)
"""Reads of the signal between two looks at the clock and at the fault word."""

ABSENT = tl.constexpr(-32640 << 32)
"""Packed entry that is never selected: `rounding.KEY_EXCLUDED`, id 0."""

assert ABSENT.value >> 32 == KEY_EXCLUDED.value


@triton.jit
def words_at(address):
    """A pointer to int64 from an address that was passed as an integer."""
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def read_clock(clock_ptr):
    """The global timer in ns, the same for every thread: read by one, passed through memory."""
    tl.store(clock_ptr, tl.extra.cuda.globaltimer())
    tl.debug_barrier()
    now = tl.load(clock_ptr, volatile=True)
    tl.debug_barrier()
    return now


@triton.jit
def await_signal(signal_ptr, wanted, fault_ptr, state, bound):
    """Waits until the signal is ``wanted``, the peer has reported a fault, or the bound has passed.

    Takes:
        signal_ptr: int64, written by the peer with release.
        wanted: int64, nonce << 32 | epoch.
        fault_ptr: int64, set by the peer when it stops.
        state: Pointer to the state of this channel.
        bound: int64, ns of the global timer; reads of the signal under the CPU interpreter.

    Returns:
        The signal and the fault word as last read: int64 scalars, the same for every thread.
    """
    seen = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")
    fault = seen * 0
    if seen != wanted:
        started = seen * 0
        waited = seen * 0
        polls = 0
        while (seen != wanted) & (fault == 0) & (waited < bound):
            seen = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")
            polls += 1
            # a look at the clock takes as long as a message: the first ones are not timed
            if polls % POLLS_PER_CHECK == 0:
                fault = tl.atomic_add(fault_ptr, 0, sem="acquire", scope="sys")
                if HAS_ASSEMBLY:
                    now = read_clock(state + CLOCK)
                    started = tl.where(started == 0, now, started)
                    waited = now - started
                else:
                    waited = started + polls
        if fault != 0:
            # a peer that stops after sending has released its message before its fault
            seen = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")
        if waited > 0:
            tl.store(state + LONGEST, tl.maximum(tl.load(state + LONGEST), waited))
    return seen, fault


@triton.jit
def read_state(state):
    """The next epoch, the nonce in place, whether that epoch exists, and whether this channel has stopped."""
    epoch = tl.load(state + EPOCH) + 1
    exhausted = epoch >= tl.load(state + LIMIT)
    return epoch, tl.load(state + NONCE) << 32, exhausted, tl.load(state + STOPPED) != 0


@triton.jit
def inbox_block(inbox, row, num_rows, epoch):
    """Pointer to the block of a row in the slot of an epoch."""
    return words_at(inbox) + ((epoch & 1).to(tl.int32) * num_rows + row) * BLOCK_WORDS


@triton.jit
def exchange(
    row,
    num_rows,
    entries,
    flags,
    carried,
    epoch,
    nonce,
    may_send,
    inbox,
    peer,
    state,
    bound,
    K: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Sends the message of an epoch and waits for the peer's.

    Takes:
        row: int32, which is also the channel.
        num_rows: Rows of the inbox.
        entries: int64 [K] to send; not sent without CANDIDATES.
        flags: int32 to send.
        carried: int64, token and hash of the epoch before, to send.
        epoch: From `read_state`, like nonce.
        may_send: Whether to take part at all.
        inbox: Address of this rank's inbox, int64 [2, B, 64] and one more block for the fault word.
        peer: Address of the peer's.
        state: Pointer to the state of this channel.
        bound: See `await_signal`.

    Returns:
        Whether the peer's message is there, and the fault word.
    """
    to_peer = inbox_block(peer, row, num_rows, epoch)
    if CANDIDATES:
        index = tl.arange(0, K)
        tl.store(to_peer + index, entries, mask=(index >= 0) & may_send)
    tl.store(to_peer + FLAGS_WORD, flags.to(tl.int64), mask=may_send)
    tl.store(to_peer + ACK_WORD, carried, mask=may_send)
    # the barrier orders the whole program's stores before the release of the one thread that signals
    tl.debug_barrier()
    wanted = nonce | epoch
    seen = epoch * 0
    fault = epoch * 0
    if may_send:
        tl.atomic_xchg(to_peer + SIGNAL_WORD, wanted, sem="release", scope="sys")
        signal = inbox_block(inbox, row, num_rows, epoch) + SIGNAL_WORD
        fault_ptr = words_at(inbox) + num_rows * 2 * BLOCK_WORDS
        seen, fault = await_signal(signal, wanted, fault_ptr, state, bound)
    # one thread has acquired; the barrier passes that on to the others
    tl.debug_barrier()
    return may_send & (seen == wanted), fault


@triton.jit
def received_word(inbox, row, here, num_rows, epoch, word):
    """A word of the peer's message, 0 where it is not here: read where the peer has written, in L2."""
    return tl.load(inbox_block(inbox, row, num_rows, epoch) + word, mask=here, other=0, cache_modifier=".cg")


@triton.jit
def close_message(
    row,
    num_rows,
    carried,
    acknowledged,
    epoch,
    here,
    fault,
    exhausted,
    stopped,
    peer,
    state,
    sticky_ptr,
    error_ptr,
):
    """Compares the acknowledgement with this rank's own result and makes any error sticky on both ranks.

    Takes:
        acknowledged: int64 from the peer; see `exchange` for the others.
        sticky_ptr: int32, `PairError` flags of this rank, for the host.
        error_ptr: int32 [B], `RowError` flags.

    Returns:
        Whether this channel goes on.
    """
    code = tl.where(exhausted, EPOCH_EXHAUSTED, tl.where(fault != 0, PEER_FAULT, PEER_TIMEOUT))
    code = tl.where(here, tl.where(acknowledged != carried, PEER_MISMATCH, 0), tl.where(stopped, 0, code))
    if here:
        tl.store(state + EPOCH, epoch)
    if code != 0:
        # after the store of the row's own flags: nothing of this row may be used
        tl.debug_barrier()
        tl.atomic_or(error_ptr + row, PEER_FLAG, sem="relaxed", scope="gpu")
        tl.store(state + STOPPED, code.to(tl.int64))
        tl.atomic_or(sticky_ptr, code, sem="relaxed", scope="gpu")
        tl.debug_barrier()
        fault_ptr = words_at(peer) + num_rows * 2 * BLOCK_WORDS
        tl.atomic_xchg(fault_ptr, code.to(tl.int64), sem="release", scope="sys")
    return here & (code == 0)


@triton.jit
def result_word(token, ids, tickets):
    """What is acknowledged, int64: token in the low half, hash of ids and counts in the high half."""
    mixed = (ids.to(tl.uint32) * 0x9E3779B1) ^ tickets.to(tl.uint32)
    mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D
    mixed = (mixed ^ (mixed >> 12)) * 0x297A2D39
    mixed = mixed ^ (mixed >> 15)
    # the sum of all words, in two parts that cannot overflow
    low = tl.sum((mixed & 0xFFFF).to(tl.int32), axis=0)
    high = tl.sum((mixed >> 16).to(tl.int32), axis=0)
    digest = (high.to(tl.int64) << 16) + low
    return (token.to(tl.int64) & 0xFFFFFFFF) | (digest << 32)
