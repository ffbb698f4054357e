"""Both ends of a session joined by hand, without sockets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from wire_kit import make_hello, make_reply, make_state

from remote_dspark.wire.codec import encode
from remote_dspark.wire.errors import LocalProtocolError, RemoteProtocolError
from remote_dspark.wire.kinds import FrameType, Role, Status
from remote_dspark.wire.messages import (
    Complete,
    Open,
    Step,
    StepRequest,
)
from remote_dspark.wire.prefix import prefix_digest
from remote_dspark.wire.session import Session

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
        return make_reply(step, self.server.limits, seed=step.batch)._replace(**changes)

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
        return base._replace(**changes)

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
