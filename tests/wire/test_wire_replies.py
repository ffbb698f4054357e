"""Replies, completions, the watchdog and refusals by ERROR, on both ends of a session.

Red when a proposal survives what must discard it, or an occupant pays for another.
"""

from __future__ import annotations

import numpy as np
import pytest
from wire_kit import make_reply, make_state
from wire_pair import PROMPT, SESSION, Pair, refused

from remote_dspark.wire.codec import encode
from remote_dspark.wire.errors import LocalProtocolError, RemoteProtocolError, Scope
from remote_dspark.wire.kinds import FrameType, Status
from remote_dspark.wire.messages import (
    Cancel,
    Commit,
    Complete,
    Error,
    Open,
    Reset,
)
from remote_dspark.wire.reply import greedy_reply
from remote_dspark.wire.table import (
    BatchState,
    ConnectionState,
    SlotState,
)

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
    wrong = reply._replace(requests=(reply.requests[0]._replace(**change),))
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
            reply = make_reply(step._replace(depth=2), pair.server.limits)
        elif code == "wrong_row_kind":
            reply = greedy_reply(step, pair.server.limits.whole_vocab, np.zeros((1, 3), np.int32))
        elif code == "support_too_large":
            wide = step._replace(requests=(step.requests[0]._replace(support_policy=32),))
            reply = make_reply(wide, pair.server.limits, ragged=False)
        else:
            reply = reply._replace(q=np.full_like(reply.q, 1e-3))
        rejected(pair, step, encode(reply, pair.server.limits), code)


def test_sampled_rows_at_temperature_zero():
    pair = Pair().opened(ppm=0)
    step = pair.step(draft_temperature_ppm=0)
    pair.up(step)
    hot = step._replace(requests=(step.requests[0]._replace(draft_temperature_ppm=700_000),))
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
