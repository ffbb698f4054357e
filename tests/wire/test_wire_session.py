"""The session machine: total tables, both ends in step, and every refusal of a misplaced frame.

Red when a cell is missing, when a refused frame moves anything, or when the two ends' tables can disagree.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from wire_kit import make_hello, make_reply, make_state

from remote_dspark.contract import DraftMode
from remote_dspark.wire.codec import encode
from remote_dspark.wire.errors import LocalProtocolError, RemoteProtocolError, Scope
from remote_dspark.wire.kinds import FrameType, Role, Status
from remote_dspark.wire.messages import (
    Cancel,
    Commit,
    Complete,
    Drain,
    Error,
    Open,
    Ping,
    Reset,
    Step,
    StepRequest,
)
from remote_dspark.wire.prefix import prefix_digest
from remote_dspark.wire.reply import greedy_reply
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

SESSION = 99
PROMPT = [3, 1, 4, 1]


class Pair:
    """Both ends, joined by hand."""

    def __init__(self, **changes):
        hello = make_hello(**changes)
        self.client = Session(Role.CLIENT, hello)
        self.server = Session(Role.SERVER, replace(hello, role=Role.SERVER, session=SESSION))
        self.server.receive(self.client.send(hello))
        self.client.receive(self.server.send(self.server.agreed))
        self.batch = 0

    def up(self, message):
        return self.server.receive(self.client.send(message))

    def down(self, message):
        return self.client.receive(self.server.send(message))

    def opened(self, slot=0, generation=1, prompt=PROMPT, ppm=700_000):
        self.up(Open(SESSION, slot, generation, 5, ppm, 32, 3))
        self.down(Complete(SESSION, FrameType.OPEN, slot=slot, generation=generation))
        self.state(slot, generation, 0, prompt[:-1])
        return self

    def state(self, slot, generation, position, ids):
        for start in range(0, len(ids), 4):
            chunk = ids[start : start + 4]
            self.up(make_state(SESSION, slot, generation, position + start, chunk))
            self.down(
                Complete(
                    SESSION, FrameType.STATE, slot=slot, generation=generation, position=position + start, credits=1
                )
            )

    def step(self, slots=(0,), batch_slot=0, **changes):
        self.batch += 1
        ppm = changes.pop("draft_temperature_ppm", 700_000)
        request = StepRequest(0, 1, 0, len(PROMPT) - 1, PROMPT[-1], prefix_digest(PROMPT), ppm, 32)
        requests = tuple(request._replace(slot=slot, **changes) for slot in slots)
        return Step(SESSION, batch_slot, self.batch, 3, requests)

    def reply(self, step, **changes):
        return replace(make_reply(step, self.server.limits, seed=step.batch), **changes)

    def complete(self, step, **changes):
        batch, first = self.server.batches[step.batch_slot], step.requests[0]
        base = Complete(
            SESSION,
            FrameType.STEP,
            Status.OK,
            step.batch_slot,
            step.batch,
            first.slot,
            first.generation,
            first.round,
            first.anchor_position,
            first.context_version,
            batch.reply_size_bytes,
            batch.reply_digest,
        )
        return replace(base, **changes)

    def proposed(self, **changes):
        step = self.step(**changes)
        self.up(step)
        self.down(self.reply(step))
        self.down(self.complete(step))
        return step

    def states(self):
        return [
            (
                [(s.state, s.generation, s.next_round, s.position, s.prefix) for s in end.slots],
                [b.state for b in end.batches],
                end.credits,
            )
            for end in (self.client, self.server)
        ]


def refused(pair, message, code):
    """Refused at home before sending; and, sent by a peer without a conscience, refused there."""
    before = pair.states()
    with pytest.raises(LocalProtocolError) as caught:
        pair.client.send(message)
    assert caught.value.code == code
    assert pair.states() == before
    return raw(pair, message, code)


def raw(pair, message, code):
    before = pair.server.counters[code]
    with pytest.raises(RemoteProtocolError) as caught:
        pair.server.receive(encode(message, pair.client.limits))
    assert caught.value.code == code
    assert pair.server.counters[code] == before + 1
    return caught.value


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
    ("wrong_policy", lambda p: replace(p.step(), depth=2)),
    ("round_gap", lambda p: p.step(round=1)),
    ("state_gap", lambda p: p.step(anchor_position=4)),
    ("state_gap", lambda p: make_state(SESSION, 0, 1, 4, [1])),
    ("token_out_of_range", lambda p: p.step(anchor_token=300)),
    ("wrong_prefix", lambda p: p.step(anchor_token=2)),
    ("wrong_prefix", lambda p: p.step(prefix_digest=bytes(32))),
    ("duplicate_slot", lambda p: p.step(slots=(0, 0))),
    ("exhausted_counter", lambda p: replace(p.step(), batch=2**64 - 1)),
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
    refused(pair, replace(pair.step(slots=(1,)), batch=1), "stale_batch")
    pair = Pair().opened().opened(1)
    pair.proposed()
    pair.up(replace(pair.step(slots=(1,), batch_slot=1), batch=1))


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


# -- replies ----------------------------------------------------------------------------------------------------------


def rejected(pair, step, frame, code):
    """The client refuses it; the whole proposal is gone and its generations are invalid at once."""
    with pytest.raises(RemoteProtocolError) as caught:
        pair.client.receive(frame)
    assert caught.value.code == code
    assert caught.value.scope is Scope.PROPOSAL
    assert pair.client.counters[code] == 1
    for request in step.requests:
        assert pair.client.slots[request.slot].state is SlotState.INVALID
    assert pair.client.batches[step.batch_slot].state is BatchState.DEAD
    return caught.value


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"slot": 1}, "wrong_reply_identity"),
        ({"generation": 2}, "wrong_reply_identity"),
        ({"round": 1}, "wrong_reply_identity"),
        ({"anchor_position": 4}, "wrong_reply_identity"),
        ({"context_version": 1}, "wrong_reply_identity"),
    ],
)
def test_replies_with_another_identity(change, code):
    pair = Pair().opened()
    step = pair.step()
    pair.up(step)
    reply = pair.reply(step)
    wrong = replace(reply, requests=(reply.requests[0]._replace(**change),))
    with pytest.raises(LocalProtocolError):
        pair.server.send(wrong)
    rejected(pair, step, encode(wrong, pair.server.limits), code)


def test_replies_of_another_shape_kind_or_support():
    for code in ("wrong_reply_shape", "wrong_row_kind", "support_too_large", "non_dyadic_q"):
        pair = Pair()
        pair.up(Open(SESSION, 0, 1, 5, 700_000, 16, 3))
        pair.state(0, 1, 0, PROMPT[:-1])
        step = pair.step(support_policy=16)
        pair.up(step)
        reply = pair.reply(step)
        if code == "wrong_reply_shape":
            reply = make_reply(replace(step, depth=2), pair.server.limits)
        elif code == "wrong_row_kind":
            reply = greedy_reply(step, pair.server.limits.whole_vocab, np.zeros((1, 3), np.int32))
        elif code == "support_too_large":
            wide = replace(step, requests=(step.requests[0]._replace(support_policy=32),))
            reply = make_reply(wide, pair.server.limits, ragged=False)
        else:
            reply = replace(reply, q=np.full_like(reply.q, 1e-3))
        rejected(pair, step, encode(reply, pair.server.limits), code)


def test_sampled_rows_at_temperature_zero():
    pair = Pair().opened(ppm=0)
    step = pair.step(draft_temperature_ppm=0)
    pair.up(step)
    hot = replace(step, requests=(step.requests[0]._replace(draft_temperature_ppm=700_000),))
    rejected(pair, step, encode(pair.reply(hot), pair.server.limits), "wrong_row_kind")


@pytest.mark.parametrize(
    "change",
    [
        {"slot": 1},
        {"generation": 2},
        {"round": 1},
        {"position": 1},
        {"context_version": 1},
        {"reply_size_bytes": 1},
        {"reply_digest": bytes(16)},
    ],
)
def test_completions_that_do_not_match(change):
    pair = Pair().opened()
    step = pair.step()
    pair.up(step)
    pair.down(pair.reply(step))
    rejected(pair, step, encode(pair.complete(step, **change), pair.server.limits), "wrong_completion")


def test_a_completion_without_its_reply_is_missing_q():
    pair = Pair().opened()
    step = pair.step()
    pair.up(step)
    rejected(pair, step, encode(pair.complete(step, reply_digest=bytes(16)), pair.server.limits), "wrong_completion")


def test_a_failed_completion_discards_everything_on_both_ends():
    pair = Pair().opened().opened(1)
    step = pair.step(slots=(0, 1))
    pair.up(step)
    pair.down(pair.complete(step, status=Status.FAILED, reply_digest=bytes(16)))
    for end in (pair.client, pair.server):
        assert [end.slots[i].state for i in (0, 1)] == [SlotState.INVALID] * 2
        assert end.batches[0].state is BatchState.FAILED
    for slot in (0, 1):
        pair.up(Reset(SESSION, slot, 1, 2, 3))
    assert pair.states()[0] == pair.states()[1]
    assert pair.client.batches[0].state is BatchState.FREE


def test_a_second_reply_is_dropped_and_nothing_else():
    pair = Pair().opened()
    step = pair.step()
    pair.up(step)
    frame = pair.server.send(pair.reply(step))
    pair.client.receive(frame)
    pair.down(pair.complete(step))
    with pytest.raises(RemoteProtocolError) as caught:
        pair.client.receive(frame)
    assert caught.value.code == "duplicate_reply"
    assert caught.value.scope is Scope.FRAME
    assert pair.client.slots[0].state is SlotState.PROPOSED


# -- the watchdog -----------------------------------------------------------------------------------------------------


def test_the_watchdog_invalidates_before_the_buffer_can_be_reused():
    pair = Pair().opened().opened(1)
    step = pair.step()
    pair.up(step)
    pair.client.expire(0)
    assert pair.client.slots[0].state is SlotState.INVALID
    assert pair.client.counters["step_timeout"] == 1
    with pytest.raises(LocalProtocolError) as caught:
        pair.client.send(pair.step(slots=(1,)))
    assert caught.value.code == "batch_slot_busy"
    # The late reply comes, is dropped by name, and even the reset slot does not take it.
    reset = pair.client.send(Reset(SESSION, 0, 1, 2, 3))
    late = pair.server.send(pair.reply(step)), pair.server.send(pair.complete(step))
    pair.server.receive(reset)
    with pytest.raises(RemoteProtocolError) as caught:
        pair.client.receive(late[0])
    assert caught.value.code == "stale_reply"
    assert pair.client.batches[0].state is BatchState.DEAD
    pair.client.receive(late[1])
    assert pair.client.batches[0].state is BatchState.FREE
    pair.down(Complete(SESSION, FrameType.RESET, slot=0, generation=2))
    pair.proposed(generation=2)


def test_a_cancelled_member_does_not_cost_the_others_their_proposal():
    pair = Pair().opened().opened(1)
    step = pair.step(slots=(0, 1))
    pair.up(step)
    cancel = pair.client.send(Cancel(SESSION, 0, 1))
    pair.down(pair.reply(step))
    pair.down(pair.complete(step))
    pair.server.receive(cancel)
    assert pair.client.slots[0].state is SlotState.FREE
    assert pair.client.slots[1].state is SlotState.PROPOSED
    pair.up(Commit(SESSION, 1, 1, 0, 0, 9, False, 4))
    assert pair.states()[0] == pair.states()[1]


def test_two_batches_in_flight():
    pair = Pair().opened().opened(1)
    first, second = pair.step(slots=(0,), batch_slot=0), pair.step(slots=(1,), batch_slot=1)
    pair.up(first)
    pair.up(second)
    pair.down(pair.reply(first))
    pair.down(pair.complete(first))
    pair.down(pair.reply(second))
    pair.down(pair.complete(second))
    assert [b.state for b in pair.client.batches] == [BatchState.READY] * 2


# -- refusals by ERROR ------------------------------------------------------------------------------------------------


def test_a_refused_open_leaves_the_slot_free():
    pair = Pair()
    pair.up(Open(SESSION, 0, 1, 5, 0, 32, 3))
    pair.down(Error(SESSION, "no_free_slot", "", FrameType.OPEN, slot=0, generation=1))
    assert [end.slots[0].state for end in (pair.client, pair.server)] == [SlotState.FREE] * 2
    refused(pair, Open(SESSION, 0, 1, 5, 0, 32, 3), "stale_generation")


def test_a_refused_step_or_state_invalidates_its_generation_only():
    pair = Pair().opened().opened(1)
    step = pair.step()
    pair.up(step)
    pair.down(Error(SESSION, "out_of_memory", "", FrameType.STEP, 0, step.batch))
    pair.up(make_state(SESSION, 1, 1, 3, [5]))
    pair.down(Error(SESSION, "out_of_memory", "", FrameType.STATE, slot=1, generation=1))
    assert pair.client.credits == pair.server.credits == 3
    for end in (pair.client, pair.server):
        assert [end.slots[i].state for i in (0, 1)] == [SlotState.INVALID] * 2
    refused(pair, make_state(SESSION, 0, 1, 3, [5]), "generation_invalid")
    pair.up(Reset(SESSION, 0, 1, 2, 3))
    assert pair.client.batches[0].state is BatchState.FREE


def test_an_error_about_a_past_generation_touches_nobody():
    pair = Pair().opened()
    pair.up(Reset(SESSION, 0, 1, 2, 3))
    pair.down(Error(SESSION, "late", "", FrameType.STATE, slot=0, generation=1))
    assert pair.client.slots[0].state is SlotState.OPEN


def test_a_fatal_error_ends_the_connection():
    pair = Pair().opened()
    with pytest.raises(RemoteProtocolError) as caught:
        pair.client.receive(pair.server.send(Error(SESSION, "going_down", is_fatal=True)))
    assert caught.value.code == "peer_error"
    assert "going_down" in str(caught.value)
    for end in (pair.client, pair.server):
        assert end.state is ConnectionState.CLOSED
