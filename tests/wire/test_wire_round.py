"""Whole rounds between a real client and a real server. Red when any frame, its order or its answer breaks."""

from __future__ import annotations

import numpy as np
import pytest
from wire_kit import live_server, make_hello, make_reply, make_state

from remote_dspark.contract import DraftMode
from remote_dspark.wire.client import DrafterClient
from remote_dspark.wire.messages import Cancel, Commit, Open, Reset, Step, StepRequest
from remote_dspark.wire.prefix import prefix_digest


def open_slot(client: DrafterClient, slot: int, generation: int, prompt: list[int], ppm: int = 700_000) -> None:
    client.open(Open(client.session, slot, generation, 11, ppm, 32, 3))
    client.state(make_state(client.session, slot, generation, 0, prompt[:-1]))


def step_for(client: DrafterClient, tokens: dict[int, list[int]], generation: int = 1, round_: int = 0, **changes):
    ppm = changes.pop("ppm", 700_000)
    requests = tuple(
        StepRequest(slot, generation, round_, len(ids) - 1, ids[-1], prefix_digest(ids), ppm, 32)
        for slot, ids in tokens.items()
    )
    return Step(client.session, changes.pop("batch_slot", 0), client.next_batch(), 3, requests)


@pytest.mark.parametrize("mode", list(DraftMode))
@pytest.mark.parametrize("address", ["127.0.0.1:0", "unix"])
def test_rounds_end_to_end(mode, address, tmp_path):
    hello = make_hello(draft_mode=mode)
    ppm = 0 if mode is DraftMode.OFF else 700_000
    where = f"unix:{tmp_path}/wire.sock" if address == "unix" else address
    with live_server(hello=hello, address=where) as live:
        with DrafterClient.connect(live.server.address, hello) as client:
            tokens = {slot: [slot, 5, 6, 7, 8, 9, 10, 11, 12] for slot in (0, 3)}
            for slot, prompt in tokens.items():
                open_slot(client, slot, 1, prompt, ppm)
            for round_ in range(4):
                step = step_for(client, tokens, round_=round_, ppm=ppm)
                reply = client.step(step)
                expected = make_reply(step, live.handler.limits if ppm else client.limits, seed=step.batch)
                assert np.array_equal(reply.tokens, expected.tokens)
                assert np.array_equal(reply.ids, expected.ids)
                assert np.array_equal(reply.q, expected.q)
                commits, states = [], []
                for index, (slot, ids) in enumerate(tokens.items()):
                    accepted = (index + round_) % 4
                    anchor = len(ids) - 1
                    fresh = [*reply.tokens[index, :accepted].tolist(), 42]
                    position, is_bonus = anchor + accepted + 1, accepted == 3
                    commits.append(Commit(client.session, slot, 1, round_, accepted, 42, is_bonus, position))
                    states.append(make_state(client.session, slot, 1, anchor, [ids[-1], *fresh[:-1]]))
                    ids.extend(fresh)
                client.commit(commits)
                for state in states:
                    client.state(state)
            client.reset(Reset(client.session, 0, 1, 2, len(tokens[0]) - 1))
            reply = client.step(step_for(client, {0: tokens[0]}, generation=2, ppm=ppm))
            assert reply.requests[0].generation == 2
            client.cancel(Cancel(client.session, 0, 2))
            assert client.ping() > 0
            names = [name for name, _ in live.handler.log]
            assert (names.count("step"), names.count("commit"), names[-1]) == (5, 8, "cancel")
            session = client.session
        live.until(lambda: live.handler.log[-1] == ("disconnect", session))
        assert not live.handler.seats
