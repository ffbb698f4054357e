"""Client libraries on real sockets: threads, asyncio, draining, traces.

Red when callers disturb each other, a cancelled round stays usable, or a trace misses a frame.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import threading

import numpy as np
import pytest
from wire_dial import PROMPT, code_of, connected, make_step, open_slot
from wire_kit import live_server, make_hello, make_reply, make_state

from remote_dspark.wire.aio import AsyncDrafterClient
from remote_dspark.wire.capture import CaptureWriter, read_capture, replay_capture
from remote_dspark.wire.client import DrafterClient
from remote_dspark.wire.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from remote_dspark.wire.messages import Cancel, Commit, Open, Reset

# -- threads, asyncio, traces -----------------------------------------------------------------------------------------


def test_two_threads_with_one_batch_slot_each():
    rounds = 60
    failures = []
    with connected() as (live, client):

        def work(index):
            try:
                prompt = list(PROMPT)
                open_slot(client, index)
                for round_ in range(rounds):
                    step = make_step(client, (index,), 1, round_, index, prompt)
                    reply = client.step(step)
                    expected = make_reply(step, live.handler.limits, seed=step.batch)
                    assert np.array_equal(reply.q, expected.q)
                    client.commit([Commit(client.session, index, 1, round_, 0, 9, False, len(prompt))])
                    client.state(make_state(client.session, index, 1, len(prompt) - 1, prompt[-1:]))
                    prompt.append(9)
            except Exception as error:  # noqa: BLE001 - reported by the main thread
                failures.append(error)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not failures
        assert [name for name, _ in live.handler.log].count("step") == 2 * rounds


def test_a_long_prefill_lets_other_requests_through():
    with connected() as (live, client):
        open_slot(client, 1)
        client.open(Open(client.session, 0, 1, 5, 700_000, 32, 3))
        ids = [5] * 1600
        thread = threading.Thread(target=client.state, args=(make_state(client.session, 0, 1, 0, ids),))
        thread.start()
        live.until(lambda: len(live.handler.log) > 10)
        client.step(make_step(client, (1,)))
        thread.join(20)
        client.ping()
        names = [name for name, _ in live.handler.log]
        assert "state" in names[names.index("step") :]
        rows = np.concatenate(live.handler.rows[client.session, 0])
        assert np.array_equal(rows, make_state(client.session, 0, 1, 0, ids).rows)
        assert client.counters["credit_exceeded"] == 0


def test_the_asyncio_client():
    async def scenario(live):
        client = await AsyncDrafterClient.connect(live.server.address, make_hello(), timeout_s=5)
        session = client.session
        for slot in (0, 1):
            await client.open(Open(session, slot, 1, 5, 700_000, 32, 3))
            await client.state(make_state(session, slot, 1, 0, PROMPT[:-1]))
        steps = [make_step(client, (slot,), batch_slot=slot) for slot in (0, 1)]
        replies = await asyncio.gather(*(client.step(step) for step in steps))
        for step, reply in zip(steps, replies, strict=True):
            assert np.array_equal(reply.ids, make_reply(step, live.handler.limits, seed=step.batch).ids)
        await client.commit([Commit(session, slot, 1, 0, 0, 9, False, 4) for slot in (0, 1)])
        await client.state(make_state(session, 0, 1, 3, [1] * 40))
        await client.reset(Reset(session, 1, 1, 2, 3))
        live.handler.gate = asyncio.Event()
        step = make_step(client, (1,), generation=2)
        with pytest.raises(ProtocolError) as caught:
            await client.step(step, timeout_s=0.1)
        assert caught.value.code == "step_timeout"
        live.loop.call_soon_threadsafe(live.handler.gate.set)
        await client.cancel(Cancel(session, 1, 2))
        assert await client.ping() > 0
        await client.drain("done")
        client.close()
        with pytest.raises(ConnectionError):
            await client.ping()
        with pytest.raises(RemoteProtocolError):
            await AsyncDrafterClient.connect(live.server.address, make_hello(vocab_size=299))

    with live_server() as live:
        asyncio.run(scenario(live))
        live.until(lambda: live.server.num_connections == 0)


def test_cancelling_a_task_invalidates_its_round():
    async def scenario(live):
        client = await AsyncDrafterClient.connect(live.server.address, make_hello(), timeout_s=5)
        await client.open(Open(client.session, 0, 1, 5, 700_000, 32, 3))
        await client.state(make_state(client.session, 0, 1, 0, PROMPT[:-1]))
        task = asyncio.create_task(client.step(make_step(client)))
        while live.handler.log[-1][0] != "step":
            await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        live.loop.call_soon_threadsafe(live.handler.gate.set)
        with pytest.raises(LocalProtocolError) as caught:
            await client.step(make_step(client, batch_slot=1))
        assert caught.value.code == "generation_invalid"
        client.close()

    with live_server() as live:
        live.handler.gate = asyncio.Event()
        asyncio.run(scenario(live))


def test_a_draining_worker_takes_no_new_requests():
    with connected() as (live, client):
        open_slot(client)
        live.run(live.server.drain("maintenance"))
        client.ping()
        assert client.is_draining
        assert code_of(client.open, Open(client.session, 1, 1, 5, 700_000, 32, 3)) == "draining"
        client.step(make_step(client))
        with pytest.raises(OSError, match="refused"):
            DrafterClient.connect(live.server.address, make_hello())


def test_traces_hold_every_frame_and_replay():
    stream, ticks = io.BytesIO(), itertools.count(1000, 7)
    writer = CaptureWriter(stream, lambda: next(ticks))
    with connected(client={"tap": writer}) as (_, client):
        open_slot(client)
        reply = client.step(make_step(client))
    writer.close()
    data = stream.getvalue()
    records = read_capture(data)
    assert [r.elapsed_ns for r in records] == [7 * i for i in range(len(records))]
    replayed = [message for _, message in replay_capture(records)]
    names = [type(message).__name__ for message in replayed]
    assert names == ["Hello", "Hello", "Open", "Complete", "State", "Step", *names[6:]]
    assert sorted(names[6:]) == ["Complete", "Complete", "Reply"]
    (again,) = (message for message in replayed if type(message).__name__ == "Reply")
    assert np.array_equal(again.q, reply.q)
    for size in range(0, len(data), 7):
        with pytest.raises(RemoteProtocolError):
            read_capture(data[:size])
    for at in range(0, len(data), 5):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        with pytest.raises(RemoteProtocolError):
            read_capture(bytes(damaged))
