"""A client and a worker on real sockets, and the messages that tests of them send."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from wire_kit import live_server, make_hello, make_state

from remote_dspark.wire.client import DrafterClient
from remote_dspark.wire.errors import ProtocolError
from remote_dspark.wire.messages import Open, Step, StepRequest
from remote_dspark.wire.prefix import prefix_digest

PROMPT = [3, 1, 4, 1]


def make_step(client, slots=(0,), generation=1, round_=0, batch_slot=0, prompt=PROMPT):
    prefix = prefix_digest(prompt)
    requests = tuple(
        StepRequest(slot, generation, round_, len(prompt) - 1, prompt[-1], prefix, 700_000, 32) for slot in slots
    )
    return Step(client.session, batch_slot, client.next_batch(), 3, requests)


def open_slot(client, slot=0, generation=1):
    client.open(Open(client.session, slot, generation, 5, 700_000, 32, 3))
    client.state(make_state(client.session, slot, generation, 0, PROMPT[:-1]))


@contextmanager
def connected(**options):
    client_options = options.pop("client", {})
    with (
        live_server(**options) as live,
        DrafterClient.connect(live.server.address, make_hello(), timeout_s=5, **client_options) as client,
    ):
        yield live, client


def code_of(call, *args, **options):
    with pytest.raises(ProtocolError) as caught:
        call(*args, **options)
    return caught.value.code
