"""Whether rows of a reply are distributions: every invariant of q, checked on whole arrays.

Rules: nothing is repaired or renormalised; the first violated invariant of the list in `require_rows` names the
refusal. A vectorised pass decides; only when it fails is the offending row looked at to say which and why.
Counts are exact integers throughout: float32 q is judged by its bits and as ``q * 2**24``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from remote_dspark.contract import TICKET_TOTAL
from remote_dspark.wire import refusals
from remote_dspark.wire.kinds import RowKind
from remote_dspark.wire.limits import Limits
from remote_dspark.wire.messages import Float32Array, Int32Array, KindArray, Reply, Shard

ONE_BITS: Final = 0x3F800000
"""Bits of 1.0f: as unsigned integers, every larger pattern is above one, negative (zero too), infinite or NaN."""

INF_BITS: Final = 0x7F800000
SIGN_BIT: Final = 0x80000000
_SCALE: Final = np.float32(TICKET_TOTAL)
_ONE: Final = np.uint32(1)
_ONE_BITS: Final = np.uint32(ONE_BITS)
_SPARSE: Final = int(RowKind.SPARSE)
_GREEDY: Final = int(RowKind.GREEDY)

Int64Array = npt.NDArray[np.int64]


def require_rows(reply: Reply, limits: Limits) -> Int64Array:
    """Checks every row; returns int64[B * D] tickets per row (0 for GREEDY), for the row headers.

    Raises:
        RemoteProtocolError: the subclass that names the violated invariant; its message names the row.
    """
    kinds, counts = reply.kinds.reshape(-1), reply.counts.reshape(-1)
    _require_shard(reply.shard, limits)
    if _is_plainly_valid(reply, kinds, counts, limits):
        return _full_masses(kinds.size)
    return _require_each(reply, kinds, counts, limits)


@lru_cache(maxsize=128)
def _full_masses(num_rows: int) -> Int64Array:
    """int64[num_rows] of ``TICKET_TOTAL``, shared and therefore read-only."""
    masses = np.full(num_rows, TICKET_TOTAL, dtype=np.int64)
    masses.flags.writeable = False
    return masses


def row_masses(reply: Reply, kinds: list[int]) -> Int64Array | list[int]:
    """Tickets of each row as its header states them, without judging them; ``kinds`` is the flat list of kinds."""
    if reply.shard.num == 1:
        return [0 if kind == _GREEDY else TICKET_TOTAL for kind in kinds]
    counts, flat = reply.counts.reshape(-1), reply.kinds.reshape(-1)
    masses = np.zeros(len(kinds), dtype=np.int64)
    occupied = np.flatnonzero(counts)
    if occupied.size:
        tickets = (reply.q * _SCALE).astype(np.int64)
        masses[occupied] = np.add.reduceat(tickets, _starts(counts)[occupied])
    if reply.dense.size:
        masses[flat == RowKind.DENSE] = (reply.dense * _SCALE).astype(np.int64).sum(axis=1)
    return masses


def _is_plainly_valid(reply: Reply, kinds: KindArray, counts: Int32Array, limits: Limits) -> bool:
    """The common reply (unsharded, every row sparse and equally wide) judged in one go.

    True only if every invariant holds; False means that the row by row path must decide and name the reason.
    """
    # Lists beat arrays for a handful of rows; the entries are judged as arrays.
    num_rows, widths = kinds.size, counts.tolist()
    width = widths[0]
    if reply.shard.num != 1 or not 0 < width <= limits.max_support or reply.ids.size != num_rows * width:
        return False
    if reply.dense.size or reply.q.size != reply.ids.size:
        return False
    if widths.count(width) != num_rows or kinds.tolist().count(_SPARSE) != num_rows:
        return False
    ids = reply.ids.reshape(num_rows, width)
    if min(ids[:, 0].tolist()) < 0 or max(ids[:, -1].tolist()) >= limits.vocab_size:
        return False
    # Compared as one line, which takes half as long as rows do; from one row to the next either order is fine.
    ascending = reply.ids[1:] > reply.ids[:-1]
    between = np.count_nonzero(ascending[width - 1 :: width])
    if np.count_nonzero(ascending) - between != num_rows * (width - 1):
        return False
    # Zero wraps to the largest pattern, so one comparison refuses zero, negative, above one, infinite and NaN.
    if np.count_nonzero((reply.q.view(np.uint32) - _ONE) < _ONE_BITS) != reply.q.size:
        return False
    scaled = reply.q * _SCALE
    tickets = scaled.astype(np.int32)
    if tickets.astype(np.float32).tobytes() != scaled.tobytes():
        return False
    # float64 holds every such sum exactly.
    sums = tickets.astype(np.float64).reshape(num_rows, width) @ _ones(width)
    if sums.tolist().count(TICKET_TOTAL) != num_rows:
        return False
    # Ids are distinct within a row, so a row holds its token at most once.
    return bool(np.count_nonzero(ids == reply.tokens.reshape(num_rows, 1)) == num_rows)


@lru_cache(maxsize=64)
def _ones(width: int) -> npt.NDArray[np.float64]:
    return np.ones(width, dtype=np.float64)


def _require_each(reply: Reply, kinds: KindArray, counts: Int32Array, limits: Limits) -> Int64Array:
    """The general case, and the one that names a refusal."""
    tokens, shard, is_sharded = reply.tokens.reshape(-1), reply.shard, reply.shard.num > 1
    _require_kinds(kinds, limits)
    if int(tokens.min()) < 0 or int(tokens.max()) >= limits.vocab_size:
        row = int(np.flatnonzero((tokens < 0) | (tokens >= limits.vocab_size))[0])
        raise refusals.TokenOutOfRangeError(_at(row, f"token in [0, {limits.vocab_size})", int(tokens[row])))
    sparse = kinds == RowKind.SPARSE
    _require_counts(sparse, counts, reply, limits)
    masses = np.zeros(kinds.size, dtype=np.int64)
    if reply.ids.size:
        _require_ids(reply.ids, counts, shard)
        tickets = _require_tickets(reply.q, counts)
        occupied = np.flatnonzero(counts)
        masses[occupied] = np.add.reduceat(tickets, _starts(counts)[occupied], dtype=np.int64)
    _require_token_support(reply.ids, counts, tokens, sparse, shard)
    for index, row in enumerate(np.flatnonzero(kinds == RowKind.DENSE).tolist()):
        masses[row] = _require_dense_row(reply.dense[index], int(tokens[row]), shard, row)
    _require_masses(masses, kinds, is_sharded=is_sharded)
    return masses


def _require_shard(shard: Shard, limits: Limits) -> None:
    if shard is limits.whole_vocab or shard == limits.whole_vocab:
        return
    sharded = shard.num == len(limits.shard_starts) and 0 <= shard.index < shard.num
    if not (sharded and shard == limits.shard(shard.index)):
        raise refusals.WrongShardError(
            f"expected {limits.whole_vocab} or one of the {len(limits.shard_starts)} negotiated shards, found {shard}"
        )


def _require_kinds(kinds: KindArray, limits: Limits) -> None:
    if int(kinds.min()) < RowKind.SPARSE or int(kinds.max()) > RowKind.GREEDY:
        row = int(np.flatnonzero((kinds < RowKind.SPARSE) | (kinds > RowKind.GREEDY))[0])
        raise refusals.UnknownRowKindError(_at(row, "kind 1..3", int(kinds[row])))
    if not limits.allow_dense and bool((kinds == RowKind.DENSE).any()):
        row = int(np.flatnonzero(kinds == RowKind.DENSE)[0])
        raise refusals.WrongRowKindError(_at(row, "SPARSE or GREEDY (dense was not negotiated)", "DENSE"))


def _require_counts(sparse: npt.NDArray[np.bool_], counts: Int32Array, reply: Reply, limits: Limits) -> None:
    if int(counts.max()) > limits.max_support:
        row = int(counts.argmax())
        raise refusals.SupportTooLargeError(_at(row, f"at most {limits.max_support} entries", int(counts[row])))
    wrong = np.where(sparse, counts < (0 if reply.shard.num > 1 else 1), counts != 0)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        if sparse[row]:
            raise refusals.MissingQError(_at(row, "at least one entry in a sampled row", int(counts[row])))
        raise refusals.WrongRowKindError(_at(row, "no sparse entries in a DENSE or GREEDY row", int(counts[row])))
    total, dense = int(counts.sum()), int(np.count_nonzero(reply.kinds == RowKind.DENSE))
    if total != reply.ids.size or total != reply.q.size:
        raise refusals.MissingQError(f"rows claim {total} entries, found {reply.ids.size} ids, {reply.q.size} values")
    if dense != reply.dense.shape[0] or (dense and reply.dense.shape[1] != limits.dense_width):
        raise refusals.MissingQError(
            f"{dense} dense rows of width {limits.dense_width} are due, found an array of shape {reply.dense.shape}"
        )


def _require_ids(ids: Int32Array, counts: Int32Array, shard: Shard) -> None:
    if int(ids.min()) < shard.start or int(ids.max()) >= shard.end:
        entry = int(np.flatnonzero((ids < shard.start) | (ids >= shard.end))[0])
        raise refusals.IdOutOfRangeError(
            _at(_row_of(entry, counts), f"ids in [{shard.start}, {shard.end})", int(ids[entry]))
        )
    ascending = ids[1:] > ids[:-1]
    # A row's first entry is compared with nothing.
    firsts = _starts(counts)
    ascending[firsts[(firsts > 0) & (firsts < ids.size)] - 1] = True
    if not ascending.all():
        entry = int(np.flatnonzero(~ascending)[0]) + 1
        row = _row_of(entry, counts)
        start = int(firsts[row])
        own = ids[start : start + int(counts[row])]
        if np.unique(own).size != own.size:
            raise refusals.DuplicateIdError(_at(row, "every id once", int(ids[entry])))
        raise refusals.UnsortedSupportError(_at(row, "strictly ascending ids", int(ids[entry])))


def _require_tickets(q: Float32Array, counts: Int32Array) -> Int32Array:
    """Tickets int32[N] of sparse values."""
    bits = q.view(np.uint32)
    if int(bits.max()) > ONE_BITS:
        _refuse_value(bits, counts)
    if int(bits.min()) == 0:
        row = _row_of(int(bits.argmin()), counts)
        raise refusals.ZeroEntryError(_at(row, "entries above zero", 0))
    scaled = q * _SCALE
    tickets = scaled.astype(np.int32)
    if not (tickets == scaled.astype(np.float64)).all():
        entry = int(np.flatnonzero(tickets != scaled.astype(np.float64))[0])
        raise refusals.NonDyadicQError(_at(_row_of(entry, counts), "a multiple of 2**-24", float(q[entry])))
    return tickets


def _require_token_support(
    ids: Int32Array, counts: Int32Array, tokens: Int32Array, sparse: npt.NDArray[np.bool_], shard: Shard
) -> None:
    """The proposed token is among its row's entries (all are above zero), where this shard owns it."""
    hits = ids == np.repeat(tokens, counts)
    owned = sparse & (tokens >= shard.start) & (tokens < shard.end)
    if np.count_nonzero(hits) != np.count_nonzero(owned):
        per_row = np.bincount(np.repeat(np.arange(counts.size), counts)[hits], minlength=counts.size)
        row = int(np.flatnonzero(owned & (per_row == 0))[0])
        raise refusals.ZeroQTokenError(_at(row, "q above zero at the proposed token", f"none for {int(tokens[row])}"))


def _require_dense_row(row_q: Float32Array, token: int, shard: Shard, row: int) -> int:
    """Total tickets of one dense row; five passes over memory that fits a core's cache."""
    bits = row_q.view(np.uint32)
    if int(bits.max()) > ONE_BITS:
        _refuse_value(bits, None, row)
    scaled = row_q * _SCALE
    tickets = scaled.astype(np.int32)
    if not np.array_equal(tickets.astype(np.float32), scaled):
        column = int(np.flatnonzero(tickets.astype(np.float32) != scaled)[0])
        raise refusals.NonDyadicQError(_at(row, "multiples of 2**-24", f"{float(row_q[column])} in column {column}"))
    if bits[shard.end :].any() or bits[: shard.start].any():
        raise refusals.NonzeroTailError(_at(row, f"+0.0 outside columns [{shard.start}, {shard.end})", "another value"))
    if shard.start <= token < shard.end and not tickets[token]:
        raise refusals.ZeroQTokenError(_at(row, "q above zero at the proposed token", f"0 for {token}"))
    # Exact and fast: the sum modulo 2**32, and a float sum to tell the multiples of 2**32 apart.
    modular = int(np.add.reduce(tickets.view(np.uint32), dtype=np.uint32))
    return modular if float(row_q.sum()) < 2.0 else int(tickets.sum(dtype=np.int64))


def _require_masses(masses: Int64Array, kinds: KindArray, *, is_sharded: bool) -> None:
    sampled = kinds != RowKind.GREEDY
    wrong = sampled & ((masses > TICKET_TOTAL) if is_sharded else (masses != TICKET_TOTAL))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise refusals.WrongMassError(_at(row, f"{TICKET_TOTAL} tickets", int(masses[row])))


def _refuse_value(bits: npt.NDArray[np.uint32], counts: Int32Array | None, dense_row: int = 0) -> None:
    """Names what a value above 1.0 (in bits) is."""
    entry = int(np.flatnonzero(bits > ONE_BITS)[0])
    row = dense_row if counts is None else _row_of(entry, counts)
    pattern = int(bits[entry])
    if (pattern & ~SIGN_BIT) >= INF_BITS:
        raise refusals.NonFiniteQError(_at(row, "finite values", f"bits {pattern:#010x}"))
    if pattern & SIGN_BIT:
        raise refusals.NegativeQError(_at(row, "values above zero", f"bits {pattern:#010x}"))
    raise refusals.WrongMassError(_at(row, "values of at most 1", f"bits {pattern:#010x}"))


def _starts(counts: Int32Array) -> Int64Array:
    return np.cumsum(counts, dtype=np.int64) - counts


def _row_of(entry: int, counts: Int32Array) -> int:
    return int(np.searchsorted(np.cumsum(counts), entry, side="right"))


def _at(row: int, expected: str, found: object) -> str:
    return f"row {row}: expected {expected}, found {found}; the whole proposal is discarded"
