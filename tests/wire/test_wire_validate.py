"""Every invariant of q has its own refusal, and the fast path decides exactly as a slow reference does.

Red when a check is dropped, weakened, or named differently.
"""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_kit import VOCAB, make_limits, make_reply, make_step, random_tickets

from remote_dspark.contract import TICKET_TOTAL
from remote_dspark.wire import codec, payload
from remote_dspark.wire.errors import LocalProtocolError, RemoteProtocolError
from remote_dspark.wire.header import HEADER_BYTES, seal
from remote_dspark.wire.kinds import FrameType, RowKind
from remote_dspark.wire.messages import Reply
from remote_dspark.wire.reply import build_dense_reply, padded_support, reply_row, tickets_to_q
from remote_dspark.wire.shards import join_shards, split_reply
from remote_dspark.wire.validate import require_rows

LIMITS = make_limits()
STEP = make_step(num=2, depth=2)


def code_of(reply: Reply, limits=LIMITS) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        require_rows(reply, limits)
    return caught.value.code


def good(*, ragged: bool = True) -> Reply:
    return make_reply(STEP, LIMITS, seed=3, ragged=ragged)


def changed(reply: Reply, name: str, index, value) -> Reply:
    array = getattr(reply, name).copy()
    array[index] = value
    return reply._replace(**{name: array})


def dense_reply() -> Reply:
    rng = np.random.default_rng(4)
    q = np.zeros((4, 320), np.float32)
    q[:, :VOCAB] = tickets_to_q(np.stack([random_tickets(rng, VOCAB) for _ in range(4)]))
    return build_dense_reply(STEP, LIMITS.whole_vocab, np.array([[0, 299], [5, 6]], np.int32), q)


@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize(
    ("name", "index", "value", "code"),
    [
        ("q", 0, np.nan, "non_finite_q"),
        ("q", 0, np.inf, "non_finite_q"),
        ("q", 0, -np.inf, "non_finite_q"),
        ("q", 0, -(2.0**-24), "negative_q"),
        ("q", 0, -0.0, "negative_q"),
        ("q", 0, 0.0, "zero_entry"),
        ("q", 0, 1e-10, "non_dyadic_q"),
        ("q", 0, 2.0**-25, "non_dyadic_q"),
        ("q", 0, np.float32(1e-45), "non_dyadic_q"),
        ("q", 0, 1.5, "wrong_mass"),
        ("q", 0, 2.0**-24, "wrong_mass"),
        ("ids", 0, -1, "id_out_of_range"),
        ("ids", -1, VOCAB, "id_out_of_range"),
        ("ids", -1, 2**31 - 1, "id_out_of_range"),
        ("tokens", (0, 0), -1, "token_out_of_range"),
        ("tokens", (1, 1), VOCAB, "token_out_of_range"),
        ("kinds", (0, 1), 0, "unknown_row_kind"),
        ("kinds", (0, 1), 4, "unknown_row_kind"),
        ("kinds", (0, 1), RowKind.GREEDY, "wrong_row_kind"),
        ("counts", (0, 0), 0, "missing_q"),
        ("counts", (0, 0), 33, "support_too_large"),
    ],
)
def test_each_damage_has_its_name(name, index, value, code, ragged):
    require_rows(good(ragged=ragged), LIMITS)
    assert code_of(changed(good(ragged=ragged), name, index, value)) == code


@pytest.mark.parametrize("ragged", [True, False])
def test_order_and_duplicates(ragged):
    reply = good(ragged=ragged)
    start = int(reply.counts[0, 0])
    assert reply.counts[0, 1] >= 2
    swapped = reply.ids.copy()
    swapped[[start, start + 1]] = swapped[[start + 1, start]]
    assert code_of(reply._replace(ids=swapped)) == "unsorted_support"
    twice = reply.ids.copy()
    twice[start + 1] = twice[start]
    assert code_of(reply._replace(ids=twice)) == "duplicate_id"


def test_a_row_may_start_below_the_previous_rows_end():
    reply = good()
    starts = np.cumsum(reply.counts.reshape(-1))[:-1]
    assert (reply.ids[starts] < reply.ids[starts - 1]).any()
    require_rows(reply, LIMITS)


@pytest.mark.parametrize("ragged", [True, False])
def test_a_token_without_q_is_refused(ragged):
    reply = good(ragged=ragged)
    own = set(reply.ids[: reply.counts[0, 0]].tolist())
    stranger = next(v for v in range(VOCAB) if v not in own)
    assert code_of(changed(reply, "tokens", (0, 0), stranger)) == "zero_q_token"


def test_missing_or_extra_entries():
    reply = good()
    assert code_of(reply._replace(q=reply.q[:-1])) == "missing_q"
    assert code_of(reply._replace(ids=reply.ids[:-1], q=reply.q[:-1])) == "missing_q"
    assert code_of(reply._replace(dense=np.zeros((1, 320), np.float32))) == "missing_q"


def test_mass_off_by_one_ticket_in_both_directions():
    for ragged in (True, False):
        reply = good(ragged=ragged)
        entry = int(np.argmax(reply.q))
        for step in (2.0**-24, -(2.0**-24)):
            assert code_of(changed(reply, "q", entry, reply.q[entry] + np.float32(step))) == "wrong_mass"


def test_masses_that_float_sums_cannot_tell_apart():
    """2**24 + 1 rounds to 2**24 in FP32: integer sums must decide."""
    reply = make_reply(make_step(num=1, depth=1), LIMITS, seed=0, ragged=False)
    tickets = np.full(32, TICKET_TOTAL // 32)
    for extra in (1, -1):
        wrong = tickets.copy()
        wrong[0] += extra
        assert code_of(reply._replace(q=tickets_to_q(wrong))) == "wrong_mass"
    full = np.full(32, TICKET_TOTAL)
    assert code_of(reply._replace(q=tickets_to_q(full))) == "wrong_mass"


@pytest.mark.parametrize(
    ("index", "value", "code"),
    [
        ((0, 7), np.nan, "non_finite_q"),
        ((0, 7), -0.0, "negative_q"),
        ((0, 7), 1e-9, "non_dyadic_q"),
        ((3, 7), 2.0, "wrong_mass"),
        ((0, 7), 0.0, "wrong_mass"),
        ((0, 0), 0.0, "zero_q_token"),
        ((0, 319), 2.0**-24, "nonzero_tail"),
        ((2, 300), 2.0**-24, "nonzero_tail"),
        ((2, 300), -0.0, "negative_q"),
    ],
)
def test_dense_rows(index, value, code):
    reply = dense_reply()
    require_rows(reply, LIMITS)
    assert code_of(changed(reply, "dense", index, value)) == code


def test_dense_total_that_wraps_is_refused():
    """A sum of 2**32 + 2**24 tickets is 2**24 modulo 2**32."""
    q = np.zeros((4, 320), np.float32)
    q[:, 43:300] = 1.0
    assert int(q.sum()) * TICKET_TOTAL % 2**32 == 4 * TICKET_TOTAL
    tokens = np.full((2, 2), 50, np.int32)
    assert code_of(dense_reply()._replace(dense=q, tokens=tokens)) == "wrong_mass"


def test_dense_needs_negotiation_and_its_width():
    assert code_of(dense_reply(), make_limits(allow_dense=False)) == "wrong_row_kind"
    assert code_of(dense_reply(), make_limits(dense_width=300)) == "missing_q"


def reference_accepts(reply: Reply) -> bool:
    """The seed's invariants, one value at a time, in exact rationals."""
    at = 0
    for token, kind, n in zip(
        reply.tokens.reshape(-1).tolist(),
        reply.kinds.reshape(-1).tolist(),
        reply.counts.reshape(-1).tolist(),
        strict=True,
    ):
        ids, q = reply.ids[at : at + n].tolist(), reply.q[at : at + n].tolist()
        at += n
        if kind != RowKind.SPARSE or not 1 <= n <= 32 or len(ids) != n or len(q) != n:
            return False
        if any(not np.isfinite(v) or v <= 0 for v in q) or any(not 0 <= i < VOCAB for i in ids):
            return False
        tickets = [Fraction(v) * TICKET_TOTAL for v in q]
        if any(t.denominator != 1 for t in tickets) or sum(tickets) != TICKET_TOTAL:
            return False
        if any(a >= b for a, b in itertools.pairwise(ids)) or token not in ids:
            return False
    return at == reply.ids.size == reply.q.size


SPECIAL_BITS = [0, 1, 0x80000000, 0x33800000, 0x3F800000, 0x3F800001, 0x7F800000, 0x7FC00000, 0xBF800000, 0x33000000]


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    ragged=st.booleans(),
    where=st.integers(0, 10**6),
    what=st.sampled_from(["none", "q_bits", "q_special", "id", "token", "move_ticket", "swap", "count"]),
    amount=st.integers(-3, 3),
    bits=st.integers(0, 31),
)
def test_lockstep_with_the_reference(seed, ragged, where, what, amount, bits):
    """Values and refusals: both accept, or both refuse."""
    reply = make_reply(STEP, LIMITS, seed=seed, ragged=ragged)
    entry, row = where % reply.q.size, where % 4
    if what == "q_bits":
        raw = reply.q.view(np.uint32).copy()
        raw[entry] ^= np.uint32(1 << bits)
        reply = reply._replace(q=raw.view(np.float32))
    elif what == "q_special":
        raw = reply.q.view(np.uint32).copy()
        raw[entry] = SPECIAL_BITS[bits % len(SPECIAL_BITS)]
        reply = reply._replace(q=raw.view(np.float32))
    elif what == "id":
        reply = changed(reply, "ids", entry, reply.ids[entry] + amount)
    elif what == "token":
        reply = changed(reply, "tokens", divmod(row, 2), reply.tokens.reshape(-1)[row] + amount)
    elif what == "move_ticket":
        q = reply.q.copy()
        q[entry] -= np.float32(2.0**-24)
        q[(entry + amount) % q.size] += np.float32(2.0**-24)
        reply = reply._replace(q=q)
    elif what == "swap":
        ids = reply.ids.copy()
        ids[[entry, (entry + amount) % ids.size]] = ids[[(entry + amount) % ids.size, entry]]
        reply = reply._replace(ids=ids)
    elif what == "count":
        reply = changed(reply, "counts", divmod(row, 2), reply.counts.reshape(-1)[row] + amount)
    try:
        require_rows(reply, LIMITS)
        accepted = True
    except RemoteProtocolError:
        accepted = False
    assert accepted == reference_accepts(reply)


# -- headers of rows, and the local side ------------------------------------------------------------------------------


def resealed(frame: bytearray, offset: int, data: bytes) -> bytearray:
    """A frame whose payload was changed by somebody who can compute digests."""
    damaged = bytearray(frame)
    damaged[offset : offset + len(data)] = data
    return seal(damaged, FrameType.REPLY)


def test_row_headers_are_checked_against_their_rows():
    frame = codec.encode(good(), LIMITS)
    row_at = HEADER_BYTES + 48 + 2 * 40
    for offset, code in ((0, "bad_row_checksum"), (12, "wrong_mass")):
        with pytest.raises(RemoteProtocolError) as caught:
            codec.decode(resealed(frame, row_at + offset, b"\x01\x02\x03"), LIMITS)
        assert caught.value.code == code
        assert caught.value.batch_slot == 0


def test_packing_refuses_what_cannot_be_sent():
    with pytest.raises(LocalProtocolError) as caught:
        codec.encode(good()._replace(q=good().q[:-1]), LIMITS)
    assert caught.value.code == "missing_q"
    with pytest.raises(RemoteProtocolError):
        payload.pack_reply(make_reply(make_step(num=5, depth=1), LIMITS), LIMITS)


# -- shards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("starts", [(0,), (0, 150), (0, 1, 299), (0, 40, 80, 120, 160, 200, 240, 280)])
@pytest.mark.parametrize("dense", [False, True])
def test_sharded_replies_join_to_the_unsharded_one(starts, dense):
    limits = make_limits(shard_starts=starts)
    whole = dense_reply() if dense else good()
    parts = [codec.decode(codec.encode(part, limits), limits) for part in split_reply(whole, limits)]
    joined = join_shards(parts, limits)
    for name in ("tokens", "kinds", "counts", "ids", "q"):
        assert np.array_equal(getattr(joined, name), getattr(whole, name)), name
    assert np.array_equal(joined.dense.view(np.uint32), whole.dense.view(np.uint32))


def test_shards_that_do_not_belong_together_are_refused():
    limits = make_limits(shard_starts=(0, 150))
    one, two = split_reply(good(), limits)
    other = split_reply(make_reply(STEP._replace(batch=2), LIMITS, seed=3), limits)[1]
    wrong_token = changed(two, "tokens", (0, 0), 1)
    cases = [([one], "wrong_shard"), ([two, one], "wrong_shard"), ([one, other], "wrong_reply_identity")]
    for parts, code in [*cases, ([one, wrong_token], "wrong_reply_identity")]:
        with pytest.raises(RemoteProtocolError) as caught:
            join_shards(parts, limits)
        assert caught.value.code == code
    halved = two._replace(q=two.q * np.float32(0.5))
    with pytest.raises(RemoteProtocolError):
        join_shards([one, halved], limits)


def test_a_shard_is_refused_outside_its_range():
    limits = make_limits(shard_starts=(0, 150))
    one, _ = split_reply(good(), limits)
    assert code_of(changed(one, "ids", -1, 150), limits) == "id_out_of_range"
    assert code_of(one, LIMITS) == "wrong_shard"


# -- reading rows -----------------------------------------------------------------------------------------------------


def test_rows_and_padded_buffers_hold_the_same_tickets():
    reply = good()
    ids, tickets, counts = padded_support(reply, 32)
    for b in range(2):
        for d in range(2):
            row, n = reply_row(reply, b, d), int(counts[b, d])
            assert row.token == reply.tokens[b, d]
            assert row.tickets.sum() == TICKET_TOTAL
            assert np.array_equal(ids[b, d, :n], row.ids)
            assert np.array_equal(tickets[b, d, :n], row.tickets)
            assert (ids[b, d, n:] == -1).all()
    assert reply_row(dense_reply(), 1, 0).tickets.sum() == TICKET_TOTAL
