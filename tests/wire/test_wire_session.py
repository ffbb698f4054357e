"""The session machine: total tables, both ends in step, and every refusal of a misplaced frame.

Red when a cell is missing, when a refused frame moves anything, or when the two ends' tables can disagree.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from wire_kit import make_hello, make_state
from wire_pair import PROMPT, SESSION, Pair, refused

from remote_dspark.contract import DraftMode
from remote_dspark.wire.codec import encode
from remote_dspark.wire.errors import LocalProtocolError, RemoteProtocolError
from remote_dspark.wire.kinds import FrameType, Role
from remote_dspark.wire.messages import (
    Cancel,
    Commit,
    Complete,
    Drain,
    Open,
    Ping,
    Reset,
)
from remote_dspark.wire.prefix import prefix_digest
from remote_dspark.wire.session import Session
from remote_dspark.wire.table import (
    BATCH,
    CONNECTION,
    SLOT,
    BatchEvent,
    BatchState,
    ConnectionState,
    SlotEvent,
    SlotState,
)

# -- tables -----------------------------------------------------------------------------------------------------------


def test_the_tables_are_total():
    for key in itertools.product(ConnectionState, Role, FrameType):
        cell = CONNECTION[key]
        assert isinstance(cell, ConnectionState) or issubclass(cell, RemoteProtocolError)
    for table, states, events in ((SLOT, SlotState, SlotEvent), (BATCH, BatchState, BatchEvent)):
        assert set(table) == set(states)
        for state in states:
            assert set(table[state]) == set(events)
            for cell in table[state].values():
                assert isinstance(cell, states) or issubclass(cell, RemoteProtocolError)


def test_who_may_send_what():
    allowed = {key for key, cell in CONNECTION.items() if isinstance(cell, ConnectionState)}
    ready = ConnectionState.READY
    client = {f.name for f in FrameType if (ready, Role.CLIENT, f) in allowed}
    server = {f.name for f in FrameType if (ready, Role.SERVER, f) in allowed}
    assert client == {"OPEN", "STATE", "STEP", "COMMIT", "RESET", "CANCEL", "PING", "DRAIN", "ERROR"}
    assert server == {"REPLY", "COMPLETE", "PING", "DRAIN", "ERROR"}
    assert not any((ConnectionState.CLOSED, role, f) in allowed for role in Role for f in FrameType)


def test_an_invalid_generation_comes_back_only_by_reset_or_cancel():
    leaving = {event for event, cell in SLOT[SlotState.INVALID].items() if cell in (SlotState.OPEN, SlotState.FREE)}
    assert leaving == {SlotEvent.RESET, SlotEvent.CANCEL}


def test_a_batch_slot_is_never_reused_before_its_answer():
    for state in BatchState:
        reusable = BATCH[state][BatchEvent.STEP] is BatchState.STEPPING
        assert reusable == (state is BatchState.FREE)
    for state in (BatchState.STEPPING, BatchState.REPLIED, BatchState.DEAD):
        for event in (BatchEvent.LEFT, BatchEvent.EXPIRE, BatchEvent.REJECT):
            assert BATCH[state][event] is BatchState.DEAD


# -- HELLO ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"draft_mode": DraftMode.OFF},
        {"vocab_size": 301},
        {"dense_width": 304},
        {"id_map_sha256": b"x" * 32},
        {"draft_sha256": b"x" * 32},
        {"target_sha256": b"x" * 32},
        {"draft_adapted": True},
        {"state_row_bytes": 32},
        {"q_semantics": "dyadic24-standard-v1"},
        {"verifier": "other"},
        {"target_semantics": "other"},
        {"rng_abi": "other"},
        {"precision": "other"},
        {"shard_starts": (0, 150)},
    ],
)
def test_identities_must_be_equal(change):
    server = Session(Role.SERVER, make_hello(role=Role.SERVER, session=SESSION))
    client = Session(Role.CLIENT, make_hello(**change))
    with pytest.raises(RemoteProtocolError) as caught:
        server.receive(client.send(client.hello))
    assert caught.value.code == "identity_mismatch"
    assert caught.value.field == next(iter(change))
    assert server.state is ConnectionState.CLOSED


def test_the_smaller_limit_holds_on_both_ends():
    offer = make_hello(max_slots=3, max_requests=4, max_depth=2, max_support=16, state_credits=2, allow_dense=False)
    client = Session(Role.CLIENT, offer)
    server = Session(Role.SERVER, make_hello(role=Role.SERVER, session=SESSION, max_requests=2))
    server.receive(client.send(offer))
    client.receive(server.send(server.agreed))
    assert client.limits == server.limits
    limits = client.limits
    assert (limits.max_slots, limits.max_requests, limits.max_depth, limits.max_support) == (3, 2, 2, 16)
    assert (limits.state_credits, limits.allow_dense) == (2, False)


def test_a_server_may_not_widen_what_was_offered():
    offer = make_hello(max_depth=2)
    client = Session(Role.CLIENT, offer)
    server = Session(Role.SERVER, make_hello(role=Role.SERVER, session=SESSION))
    server.receive(client.send(offer))
    forged = replace(server.agreed, max_depth=5)
    with pytest.raises(RemoteProtocolError) as caught:
        client.receive(encode(forged, None))
    assert caught.value.code == "bad_hello"


def test_reply_buffers_are_checked_before_anything_is_sent():
    offer = make_hello(max_reply_bytes=1000)
    server = Session(Role.SERVER, make_hello(role=Role.SERVER, session=SESSION))
    client = Session(Role.CLIENT, offer)
    with pytest.raises(RemoteProtocolError) as caught:
        server.receive(client.send(offer))
    assert caught.value.code == "buffer_too_small"


def test_nothing_before_hello_and_no_second_hello():
    client = Session(Role.CLIENT, make_hello())
    with pytest.raises(LocalProtocolError) as caught:
        client.send(Ping(0, 1))
    assert caught.value.code == "hello_required"
    pair = Pair()
    with pytest.raises(LocalProtocolError):
        pair.client.send(make_hello())


# -- slots and rounds -------------------------------------------------------------------------------------------------


def test_a_whole_round_keeps_both_ends_equal():
    pair = Pair().opened()
    pair.proposed()
    pair.up(Commit(SESSION, 0, 1, 0, 2, 9, False, len(PROMPT) - 1 + 3))
    client, server = pair.states()
    assert client == server
    assert pair.client.slots[0].next_round == 1
    assert pair.client.batches[0].state is BatchState.FREE


CASES = [
    ("slot_out_of_range", lambda p: Cancel(SESSION, 8, 1)),
    ("slot_not_open", lambda p: Cancel(SESSION, 1, 1)),
    ("slot_in_use", lambda p: Open(SESSION, 0, 2, 5, 700_000, 32, 3)),
    ("stale_generation", lambda p: Cancel(SESSION, 0, 2)),
    ("stale_generation", lambda p: p.step(generation=0)),
    ("wrong_policy", lambda p: Open(SESSION, 1, 1, 5, 0, 33, 3)),
    ("wrong_policy", lambda p: Open(SESSION, 1, 1, 5, 0, 32, 6)),
    ("wrong_policy", lambda p: Open(SESSION, 1, 1, 5, 0, 0, 3)),
    ("wrong_policy", lambda p: p.step(draft_temperature_ppm=0)),
    ("wrong_policy", lambda p: p.step(support_policy=16)),
    ("wrong_policy", lambda p: p.step()._replace(depth=2)),
    ("round_gap", lambda p: p.step(round=1)),
    ("state_gap", lambda p: p.step(anchor_position=4)),
    ("state_gap", lambda p: make_state(SESSION, 0, 1, 4, [1])),
    ("token_out_of_range", lambda p: p.step(anchor_token=300)),
    ("wrong_prefix", lambda p: p.step(anchor_token=2)),
    ("wrong_prefix", lambda p: p.step(prefix_digest=bytes(32))),
    ("duplicate_slot", lambda p: p.step(slots=(0, 0))),
    ("exhausted_counter", lambda p: p.step()._replace(batch=2**64 - 1)),
    ("commit_without_proposal", lambda p: Commit(SESSION, 0, 1, 0, 0, 1, False, 4)),
    ("reset_position", lambda p: Reset(SESSION, 0, 1, 2, 1)),
    ("stale_generation", lambda p: Reset(SESSION, 0, 1, 1, 0)),
    ("exhausted_counter", lambda p: Reset(SESSION, 0, 1, 2**64 - 1, 0)),
    ("exhausted_counter", lambda p: Open(SESSION, 1, 2**64 - 1, 5, 0, 32, 3)),
    ("wrong_session", lambda p: Ping(SESSION + 1, 1)),
]


@pytest.mark.parametrize(("code", "make"), CASES, ids=[f"{i}-{code}" for i, (code, _) in enumerate(CASES)])
def test_frames_out_of_place(code, make):
    pair = Pair().opened()
    refused(pair, make(pair), code)


def test_rounds_positions_and_batches_never_wrap():
    pair = Pair().opened()
    for end in (pair.client, pair.server):
        end.slots[0].next_round = 2**32
    refused(pair, pair.step(round=2**32), "exhausted_counter")
    pair = Pair().opened()
    for end in (pair.client, pair.server):
        end.slots[0].position = 2**32 - 2
    refused(pair, pair.step(anchor_position=2**32 - 2), "exhausted_counter")


def test_stale_batches():
    pair = Pair().opened().opened(1)
    pair.proposed()
    pair.up(Commit(SESSION, 0, 1, 0, 0, 9, False, 4))
    refused(pair, pair.step(slots=(1,))._replace(batch=1), "stale_batch")
    pair = Pair().opened().opened(1)
    pair.proposed()
    pair.up(pair.step(slots=(1,), batch_slot=1)._replace(batch=1))


def test_context_versions_do_not_go_back():
    pair = Pair().opened()
    pair.proposed(context_version=5)
    pair.up(Commit(SESSION, 0, 1, 0, 0, 9, False, 4))
    pair.state(0, 1, 3, [1])
    step = pair.step(round=1, anchor_position=4, anchor_token=9, prefix_digest=prefix_digest([*PROMPT, 9]))
    refused(pair, step, "wrong_context")


def test_the_anchor_is_the_committed_token():
    pair = Pair().opened()
    pair.proposed()
    pair.up(Commit(SESSION, 0, 1, 0, 0, 9, False, 4))
    step = pair.step(round=1)
    refused(pair, step, "state_gap")
    pair = Pair().opened()
    pair.proposed()
    pair.up(Commit(SESSION, 0, 1, 0, 0, 9, False, 4))
    pair.state(0, 1, 3, [1])
    step = pair.step(round=1, anchor_position=4, anchor_token=8, prefix_digest=prefix_digest([*PROMPT, 8]))
    refused(pair, step, "wrong_prefix")


def test_while_a_step_is_in_flight():
    cases = [
        (lambda p: p.step(batch_slot=1), "duplicate_round"),
        (lambda p: make_state(SESSION, 0, 1, 3, [1]), "round_in_flight"),
        (lambda p: Commit(SESSION, 0, 1, 0, 0, 1, False, 4), "round_in_flight"),
        (lambda p: Open(SESSION, 0, 2, 5, 700_000, 32, 3), "slot_in_use"),
    ]
    for make, code in cases:
        pair = Pair().opened()
        pair.up(pair.step())
        refused(pair, make(pair), code)
    pair = Pair().opened().opened(1)
    pair.up(pair.step())
    refused(pair, pair.step(slots=(1,)), "batch_slot_busy")


def test_while_a_proposal_awaits_its_commit():
    cases = [
        (lambda p: p.step(batch_slot=1), "uncommitted_round"),
        (lambda p: make_state(SESSION, 0, 1, 3, [1]), "uncommitted_round"),
        (lambda p: Commit(SESSION, 0, 1, 0, 4, 1, True, 8), "wrong_commit"),
        (lambda p: Commit(SESSION, 0, 1, 0, 3, 1, False, 7), "wrong_commit"),
        (lambda p: Commit(SESSION, 0, 1, 0, 2, 1, True, 6), "wrong_commit"),
        (lambda p: Commit(SESSION, 0, 1, 0, 2, 1, False, 7), "wrong_commit"),
        (lambda p: Commit(SESSION, 0, 1, 0, 2, 300, False, 6), "wrong_commit"),
        (lambda p: Commit(SESSION, 0, 1, 1, 2, 1, False, 6), "stale_round"),
    ]
    for make, code in cases:
        pair = Pair().opened()
        pair.proposed()
        refused(pair, make(pair), code)


def test_a_round_is_never_repeated():
    pair = Pair().opened()
    pair.proposed()
    pair.up(Commit(SESSION, 0, 1, 0, 0, 9, False, 4))
    refused(pair, pair.step(), "stale_round")


def test_credits():
    pair = Pair().opened(prompt=[3, 1, 4, 1])
    for position in range(3, 6):
        pair.up(make_state(SESSION, 0, 1, position, [5]))
    refused(pair, make_state(SESSION, 0, 1, 6, [5]), "credit_exceeded")
    pair = Pair().opened()
    pair.up(make_state(SESSION, 0, 1, 3, [5]))
    with pytest.raises(LocalProtocolError) as caught:
        pair.server.send(Complete(SESSION, FrameType.STATE, slot=0, generation=1, credits=2))
    assert caught.value.code == "credit_exceeded"


def test_acknowledgements_of_nothing():
    pair = Pair().opened()
    for frame_type in (FrameType.OPEN, FrameType.STATE, FrameType.RESET, FrameType.CANCEL):
        pair = Pair().opened()
        with pytest.raises(RemoteProtocolError) as caught:
            pair.client.receive(encode(Complete(SESSION, frame_type, slot=0, generation=1), pair.client.limits))
        assert caught.value.code == "unexpected_frame"


def test_draining_takes_no_new_requests_but_finishes_old_ones():
    pair = Pair().opened()
    pair.down(Drain(SESSION, "soon"))
    refused(pair, Open(SESSION, 1, 1, 5, 0, 32, 3), "draining")
    pair = Pair().opened()
    pair.up(Drain(SESSION))
    pair.proposed()
    pair.up(Commit(SESSION, 0, 1, 0, 0, 9, False, 4))
    pair.up(Cancel(SESSION, 0, 1))


def test_off_sessions_draft_greedily():
    pair = Pair(draft_mode=DraftMode.OFF)
    refused(pair, Open(SESSION, 0, 1, 5, 700_000, 32, 3), "wrong_policy")
    pair = Pair(draft_mode=DraftMode.OFF).opened(ppm=0)
    step = pair.step(draft_temperature_ppm=0)
    pair.up(step)
    frame = pair.server.send(pair.reply(step))
    assert bytes(frame[:4]) == b"DSV1"
    reply = pair.client.receive(frame)
    assert reply.ids.size == 0
    pair.down(pair.complete(step))
    assert pair.client.slots[0].state is SlotState.PROPOSED
