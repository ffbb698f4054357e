"""Frozen replay: a session that a real server recorded, sent again to a real worker.

Turns red when: a changed proposal passes for the recorded one, a token that was not drawn from its q is not counted, or
a trace that was cut or belongs to another mode is replayed.
"""

from __future__ import annotations

import io
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from target_services import ServerPair

from remote_dspark.contract import TICKET_TOTAL, DraftMode
from remote_dspark.observe import ObserveError
from remote_dspark.qualify.frozen_replay import read_trace, ticket_distance
from remote_dspark.wire.capture import CaptureWriter, read_capture, replay_capture
from remote_dspark.wire.codec import encode
from remote_dspark.wire.kinds import Role, RowKind
from remote_dspark.wire.limits import limits_of
from remote_dspark.wire.messages import Hello, Open
from remote_dspark.wire.reply import ReplyRow

pytestmark = [pytest.mark.models, pytest.mark.services]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerPair, Path]]:
    """A worker that still runs, and the trace of a server session that has ended."""
    folder = tmp_path_factory.mktemp("recorded")
    trace = folder / "trace.dsw"
    pair = ServerPair(DraftMode.ON.value, folder)
    try:
        pair.start_worker()
        pair.start_target(drafter=f'capture = "{trace}"')
        pair.await_state("ready")
        pair.complete(prompt="import sys\n", max_tokens=20, seed=4, ignore_eos=True)
        pair.complete(prompt="class A:\n", max_tokens=6, temperature=0)
        assert not trace.exists()
        assert pair.target is not None
        assert pair.target.stop() == 0
        yield pair, trace
    finally:
        pair.stop()


def run_replay(pair: ServerPair, trace: Path, output: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "remote_dspark.qualify.frozen_replay", "--trace", str(trace)]
    command += ["--address", pair.address, "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


def observation(folder: Path) -> dict[str, Any]:
    document = json.loads((folder / "observation.json").read_text())
    assert isinstance(document, dict)
    return document


def rewrite(source: Path, target: Path, **changes: object) -> None:
    """The same trace with other fields in every OPEN."""
    stream = io.BytesIO()
    writer = CaptureWriter(stream, itertools.count().__next__)
    limits = None
    for record, message in replay_capture(read_capture(source.read_bytes())):
        frame: bytes | bytearray = record.frame
        if isinstance(message, Hello) and message.role is Role.SERVER:
            limits = limits_of(message)
        if isinstance(message, Open):
            frame = encode(replace(message, **changes), limits)  # type: ignore[arg-type]
        writer(record.sender, frame)
    writer.close()
    target.write_bytes(stream.getvalue())


def test_a_worker_repeats_its_recorded_session_bit_for_bit(recorded: tuple[ServerPair, Path], tmp_path: Path) -> None:
    pair, trace = recorded
    code, errors = run_replay(pair, trace, tmp_path)
    assert code == 0, errors
    document = observation(tmp_path)
    assert [check["name"] for check in document["checks"] if check["ok"] is not True] == []
    values = document["values"]
    assert values["num_rows"] == 5 * values["num_rounds"] > 0
    distances = [int(line) for line in (tmp_path / "ticket_distance.jsonl").read_text().splitlines()]
    # Rows of the greedy request and of the warm-up carry no q.
    assert 0 < len(distances) < values["num_rows"]
    assert set(distances) == {0}


def test_another_seed_gives_other_tokens_from_the_same_first_q(
    recorded: tuple[ServerPair, Path], tmp_path: Path
) -> None:
    pair, trace = recorded
    rewrite(trace, tmp_path / "other.dsw", seed=5)
    code, errors = run_replay(pair, tmp_path / "other.dsw", tmp_path / "out")
    assert code == 0, errors
    document = observation(tmp_path / "out")
    found = {check["name"]: check["ok"] for check in document["checks"]}
    assert found["replay.same_tokens"] is False
    # Every token is still the draw from its own q, under the seed that was sent.
    assert found["replay.draws"] is True
    assert document["values"]["num_tokens_changed"] > 0


def test_what_is_no_whole_trace_is_refused(recorded: tuple[ServerPair, Path], tmp_path: Path) -> None:
    pair, trace = recorded
    data = trace.read_bytes()
    with pytest.raises(ObserveError, match="whole session"):
        read_trace(data[:-1])
    with pytest.raises(ObserveError, match="whole session"):
        read_trace(data[:200] + bytes([data[200] ^ 1]) + data[201:])
    (tmp_path / "cut.dsw").write_bytes(data[:-40])
    code, errors = run_replay(pair, tmp_path / "cut.dsw", tmp_path / "out")
    assert code == 2
    assert "whole session" in errors
    assert not (tmp_path / "out" / "observation.json").exists()


def test_ticket_distance_is_total_variation() -> None:
    def row(ids: list[int], tickets: list[int]) -> ReplyRow:
        return ReplyRow(RowKind.SPARSE, ids[0], np.array(ids, dtype=np.int32), np.array(tickets, dtype=np.int64))

    full = row([3], [TICKET_TOTAL])
    half = row([3, 7], [TICKET_TOTAL // 2, TICKET_TOTAL // 2])
    assert ticket_distance(full, full) == 0
    assert ticket_distance(full, half) == ticket_distance(half, full) == TICKET_TOTAL // 2
    assert ticket_distance(full, row([7], [TICKET_TOTAL])) == TICKET_TOTAL
