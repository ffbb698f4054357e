"""Random and mutated frames: accepted, or the protocol error, never another; and no buffer beyond the limits.

Red when a decoder raises anything else, believes a length, or disagrees with the stream reader.
"""

from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from wire_fuzz import cases, judge, largest_frame
from wire_kit import make_hello, make_limits, make_reply, make_state, make_step
from wire_vectors import load_vectors
from xxhash import xxh3_64_intdigest

from remote_dspark.wire import layout
from remote_dspark.wire.codec import FrameReader, decode, encode
from remote_dspark.wire.errors import LocalProtocolError, RemoteProtocolError
from remote_dspark.wire.header import seal
from remote_dspark.wire.kinds import FrameType, Role, Status
from remote_dspark.wire.messages import Cancel, Commit, Complete, Open, Reset, Step, StepRequest
from remote_dspark.wire.prefix import EMPTY_PREFIX, extend_prefix, prefix_digest
from remote_dspark.wire.session import Session
from remote_dspark.wire.table import BatchState, SlotState

NUM_CASES = 30_000


def test_fuzz_frames():
    seen = {}
    pristine = {data for _, _, data in load_vectors()}
    for kind, limits, frame in itertools.islice(cases(20_240), NUM_CASES):
        outcome = judge(limits, frame)
        seen[outcome] = seen.get(outcome, 0) + 1
        if kind.startswith(("random", "header", "mutated")) and outcome == "accepted":
            assert bytes(frame) in pristine, kind
    # The generator reaches deep refusals, not only the digest.
    assert len(seen) > 25, sorted(seen)


def test_no_allocation_beyond_the_limits():
    """A header that claims 4 GiB costs nothing, with and without a valid check value."""
    limits = make_limits()
    for frame_type in FrameType:
        head = bytearray(32)
        layout.HEADER.codec.pack_into(head, 0, layout.MAGIC, 2, frame_type, 0, 0xFFFFFFF0, 0, b"")
        check = xxh3_64_intdigest(head[:12]) & 0xFFFFFFFF
        layout.HEADER.codec.pack_into(head, 0, layout.MAGIC, 2, frame_type, 0, 0xFFFFFFF0, check, b"")
        tracemalloc.start()
        with pytest.raises(RemoteProtocolError) as caught:
            list(FrameReader(limits).feed(head))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert caught.value.code in ("frame_too_large", "bad_size")
        assert peak < 64 << 10


def test_fuzzing_never_allocates_more_than_the_largest_frame():
    tracemalloc.start()
    worst = 0
    for _, limits, frame in itertools.islice(cases(7), 2000):
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        judge(limits, frame)
        _, peak = tracemalloc.get_traced_memory()
        worst = max(worst, peak - before - 4 * largest_frame(limits))
    tracemalloc.stop()
    # A few copies of the largest frame, and the interpreter's own small change.
    assert worst < 64 << 10


def test_counts_inside_a_payload_are_bounded_by_its_length():
    """Entry and row counts that a sealed frame merely claims are compared with its size before any view is taken."""
    limits = make_limits()
    frame = encode(make_reply(make_step(), limits), limits)
    for field in ("num_entries", "num_dense", "dense_width", "num_requests", "depth"):
        offset = next(o for o, _, _, name in layout.REPLY.rows() if name == field)
        damaged = bytearray(frame)
        damaged[32 + offset] ^= 0x55
        with pytest.raises(RemoteProtocolError) as caught:
            decode(seal(damaged, FrameType.REPLY), limits)
        assert caught.value.code in ("bad_size", "bad_field")


SESSION = 5


class BothEnds(RuleBasedStateMachine):
    """Random legal and illegal moves of both ends over an ordered, delayed pipe in each direction.

    Invariants: no move breaks either end with anything but the protocol error; what the client sends, the worker
    never refuses with a fatal error; a batch slot in use is never handed to a second STEP.
    """

    @initialize()
    def connect(self):
        hello = make_hello(max_slots=3, allow_dense=False)
        self.client = Session(Role.CLIENT, hello)
        self.server = Session(Role.SERVER, replace(hello, role=Role.SERVER, session=SESSION))
        self.server.receive(self.client.send(hello))
        self.client.receive(self.server.send(self.server.agreed))
        self.up, self.down, self.todo = [], [], []
        self.batch, self.generation = 0, 0
        self.tokens = {slot: [] for slot in range(3)}

    def say(self, message):
        try:
            self.up.append(self.client.send(message))
        except LocalProtocolError:
            return False
        return True

    @rule(slot=st.integers(0, 3))
    def open_slot(self, slot):
        self.generation += 1
        if self.say(Open(SESSION, slot, self.generation, 1, 700_000, 32, 2)):
            self.tokens[slot] = []

    @rule(slot=st.integers(0, 2), ids=st.lists(st.integers(0, 299), min_size=1, max_size=4), slip=st.booleans())
    def states(self, slot, ids, slip):
        at = self.client.slots[slot]
        if self.say(make_state(SESSION, slot, max(at.generation, 0), at.position + (slip and not ids[0] % 4), ids)):
            self.tokens[slot].extend(ids)

    @rule(slots=st.sets(st.integers(0, 2), min_size=1), batch_slot=st.integers(0, 1), anchor=st.integers(0, 299))
    def step(self, slots, batch_slot, anchor):
        self.batch += 1
        requests = []
        for slot in sorted(slots):
            at = self.client.slots[slot]
            token = at.committed[1] if at.committed and at.committed[0] == at.position else anchor
            digest = prefix_digest([*self.tokens[slot], token])
            requests.append(
                StepRequest(slot, max(at.generation, 0), at.next_round, at.position, token, digest, 700_000, 32)
            )
        free = self.client.batches[batch_slot].state is BatchState.FREE
        accepted = self.say(Step(SESSION, batch_slot, self.batch, 2, tuple(requests)))
        assert free or not accepted

    @rule(slot=st.integers(0, 2), accepted=st.integers(0, 3), token=st.integers(0, 299))
    def commit(self, slot, accepted, token):
        at = self.client.slots[slot]
        position = at.anchor_position + accepted + 1
        self.say(Commit(SESSION, slot, max(at.generation, 0), at.next_round, accepted, token, accepted == 2, position))

    @rule(slot=st.integers(0, 2), keep=st.booleans(), stale=st.booleans())
    def reset(self, slot, keep, stale):
        self.generation += 1
        at = self.client.slots[slot]
        generation = max(at.generation, 0) + stale
        if self.say(Reset(SESSION, slot, generation, self.generation, at.position if keep else 0)) and not keep:
            self.tokens[slot] = []

    @rule(slot=st.integers(0, 2))
    def cancel(self, slot):
        self.say(Cancel(SESSION, slot, max(self.client.slots[slot].generation, 0)))

    @rule(batch_slot=st.integers(0, 1))
    def watchdog(self, batch_slot):
        if self.client.batches[batch_slot].state in (BatchState.STEPPING, BatchState.REPLIED):
            self.client.expire(batch_slot)
            states = {self.client.slots[index].state for index, _ in self.client.batches[batch_slot].members}
            assert states <= {SlotState.INVALID}

    @rule()
    def worker_reads(self):
        if self.up:
            self.todo.append(self.server.receive(self.up.pop(0)))
            self.answer(self.todo.pop(0))

    def answer(self, message):
        if isinstance(message, Step):
            reply = make_reply(message, self.server.limits, seed=message.batch)
            self.down.append(self.server.send(reply))
            batch, first = self.server.batches[message.batch_slot], message.requests[0]
            self.down.append(
                self.server.send(
                    Complete(
                        SESSION, FrameType.STEP, Status.OK, message.batch_slot, message.batch, first.slot,
                        first.generation, first.round, first.anchor_position, 0, batch.reply_size_bytes,
                        batch.reply_digest,
                    )
                )
            )  # fmt: skip
            return
        kinds = {Open: FrameType.OPEN, Cancel: FrameType.CANCEL, Reset: FrameType.RESET}
        if type(message) in kinds:
            generation = message.new_generation if isinstance(message, Reset) else message.generation
            self.down.append(
                self.server.send(Complete(SESSION, kinds[type(message)], slot=message.slot, generation=generation))
            )
        elif not isinstance(message, Commit):
            self.down.append(
                self.server.send(
                    Complete(SESSION, FrameType.STATE, slot=message.slot, generation=message.generation, credits=1)
                )
            )

    @rule()
    def client_reads(self):
        if self.down:
            try:
                self.client.receive(self.down.pop(0))
            except RemoteProtocolError as error:
                if error.code != "stale_reply":
                    raise

    @rule()
    def settle(self):
        while self.up or self.down:
            self.worker_reads()
            self.client_reads()
        for mine, theirs in zip(self.client.slots, self.server.slots, strict=True):
            assert (mine.generation, mine.position, mine.prefix) == (theirs.generation, theirs.position, theirs.prefix)
            assert mine.state is theirs.state or mine.state is SlotState.INVALID
        assert self.client.credits == self.server.credits == 3

    @invariant()
    def buffers_in_use_have_members_or_an_answer_due(self):
        if not hasattr(self, "client"):
            return
        for batch in self.client.batches:
            if batch.state in (BatchState.READY, BatchState.FAILED):
                assert batch.members


BothEnds.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestBothEnds = BothEnds.TestCase


def test_prefix_digests_do_not_depend_on_chunks():
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 129_280, 500)
    whole, digest, at = prefix_digest(ids), EMPTY_PREFIX, 0
    while at < 500:
        size = int(rng.integers(1, 60))
        digest = extend_prefix(digest, ids[at : at + size])
        at += size
    assert digest == whole
    assert prefix_digest([1, 2]) != prefix_digest([2, 1])
    with pytest.raises(ValueError, match="int32"):
        prefix_digest([2**31])
