"""A drafting pair without GPUs: the same kernels, interpreted, one process per rank, inboxes in shared memory.

``python -m remote_dspark.drafter.pair_emulated`` is one rank: commands and answers are JSON lines, arrays in base64.
The parent is `emulated_pair`. It proves indexing, protocol and what a host does with errors, not memory ordering or
speed. The interpreter is chosen in the child before a kernel is imported; the parent imports none.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remote_dspark.drafter.compute import CachedRows
from remote_dspark.drafter.errors import DeviceFaultError
from remote_dspark.drafter.heads import DraftedRows
from remote_dspark.drafter.model import DSparkDrafter
from remote_dspark.drafter.pair import PairCompute, PairShape, RankStep
from remote_dspark.drafter.staging import Block
from remote_dspark.drafter.timings import StepTimings

BOUND: Final = 2_000_000
"""Reads of the signal that a rank waits for: minutes, since an interpreted position takes part of a second."""

QUIT_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True)
class EmulatedModel:
    """What each rank loads by itself: a checkpoint's folder, or a synthetic shape."""

    path: str = ""
    synthetic: str = ""


@dataclass(frozen=True)
class EmulatedShape(PairShape):
    """`pair_rank.RankShape` without its tiling; this module knows no kernels.

    Attributes:
        bound: Of a wait, in reads of the signal.
    """

    bound: int = BOUND


@dataclass
class _Counters:
    hits: int = 0
    misses: int = 0
    size_bytes: int = 0


def emulated_pair(source: EmulatedModel, config_width: int, shape: EmulatedShape) -> PairCompute:
    """Start both ranks and wait until each is ready.

    Args:
        source: What the ranks load.
        config_width: Elements of a state row.
        shape: Agreed.

    Raises:
        DeviceFaultError: A rank did not start.
    """
    folder = tempfile.TemporaryDirectory(prefix="dspark-pair-")
    nonce = 1 + secrets.randbelow((1 << 31) - 1)
    ranks = [EmulatedRank(source, shape, number, Path(folder.name), nonce) for number in (0, 1)]
    try:
        # a rank answers once it has loaded; nobody sends before both have their inboxes
        for rank in ranks:
            rank.receive()
    except DeviceFaultError:
        for rank in ranks:
            rank.close()
        raise
    # both processes have mapped the inboxes
    folder.cleanup()
    return PairCompute(ranks, fused_width=config_width, max_positions=shape.max_positions)


class EmulatedRank:
    """The parent's end of one rank; a `drafter.pair.DraftingRank`."""

    def __init__(self, source: EmulatedModel, shape: EmulatedShape, rank: int, folder: Path, nonce: int) -> None:
        self._rank = rank
        self._counters = _Counters()
        self._with_rows = False
        task = {"source": asdict(source), "shape": asdict(shape), "rank": rank, "folder": str(folder), "nonce": nonce}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "remote_dspark.drafter.pair_emulated"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.send(task)

    @property
    def pid(self) -> int:
        """Of the rank's process."""
        return self._process.pid

    @property
    def markov(self) -> CachedRows:
        """Counters of the cached rows, as of the last step."""
        return self._counters

    def write(self, seat: int, position: int, rows: NDArray[np.uint8]) -> None:
        """Send committed rows; answered before the next step."""
        self._ask({"write": {"seat": seat, "position": position, "rows": _encode(rows)}})

    def start(self, blocks: Sequence[Block], depth: int) -> None:
        """Send the blocks; the process drafts at once."""
        self.send({"step": {"blocks": [block._asdict() for block in blocks], "depth": depth}})

    def draft(self) -> None:
        """The process does so by itself."""

    def finish(self, *, with_rows: bool) -> RankStep:
        """Wait for the answer.

        Raises:
            DeviceFaultError: None comes, or the rank refused.
        """
        answer = self.receive()
        self._counters.__dict__.update(answer["markov"])
        rows = None
        if with_rows and not answer["errors"]:
            rows = DraftedRows(*(_decode(answer["rows"][name]) for name in ("tokens", "ids", "q", "counts")))
        outputs = base64.b64decode(answer["outputs"])
        return RankStep(str(answer["errors"]), outputs, rows, StepTimings(**answer["timings"]))

    def base_logits(self, blocks: Sequence[Block], depth: int) -> Tensor:
        """BF16 [B, depth, columns of this rank]."""
        answer = self._ask({"logits": {"blocks": [block._asdict() for block in blocks], "depth": depth}})
        return torch.from_numpy(_decode(answer["logits"])).view(torch.bfloat16)

    def quiesce(self) -> None:
        """Ask the process to end and wait; one that waits for its peer ends with its bound, or is killed."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            # one that has ended has left a command unread
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(QUIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Drop the process; its memory went with it."""
        self.quiesce()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def send(self, command: dict[str, Any]) -> None:
        """One line to the process.

        Raises:
            DeviceFaultError: It has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as cause:
            raise DeviceFaultError(f"rank {self._rank}: expected a running process, found {cause}") from cause

    def receive(self) -> dict[str, Any]:
        """One line from the process.

        Raises:
            DeviceFaultError: It has ended, or says why it could not.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"fault": "the end of its process; see stderr"}
        if "fault" in answer:
            raise DeviceFaultError(f"rank {self._rank}: expected an answer, found {answer['fault']}")
        return answer

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        self.send(command)
        return self.receive()


def _encode(array: NDArray[Any]) -> dict[str, Any]:
    return {
        "dtype": array.dtype.str,
        "shape": list(array.shape),
        "data": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii"),
    }


def _decode(document: dict[str, Any]) -> NDArray[Any]:
    data = np.frombuffer(base64.b64decode(document["data"]), dtype=np.dtype(document["dtype"]))
    return data.reshape(document["shape"]).copy()


def _block(document: dict[str, Any]) -> Block:
    return Block(**{**document, "key": tuple(document["key"])})


def main() -> int:
    """One rank: a task, then commands until the end of input."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    task = json.loads(sys.stdin.readline())
    from remote_dspark.drafter.pair_rank import RankCompute, RankShape

    shape, number = RankShape(**task["shape"]), int(task["rank"])
    boxes = [
        torch.from_file(f"{task['folder']}/inbox.{side}", shared=True, size=shape.inbox_words, dtype=torch.int64)
        for side in (0, 1)
    ]
    model = _load(EmulatedModel(**task["source"]))
    # a rank knows its peer's inboxes by address only: the mapping must stay
    rank = RankCompute(model, number, shape, boxes[number], boxes[1 - number].data_ptr(), int(task["nonce"]), boxes)
    rank.restart()
    _answer({"ready": number})
    for line in sys.stdin:
        try:
            _answer(_serve(rank, json.loads(line)))
        except (DeviceFaultError, LookupError) as cause:
            _answer({"fault": str(cause)})
    return 0


def _load(source: EmulatedModel) -> DSparkDrafter:
    if source.synthetic:
        from remote_dspark.drafter.synthetic import synthetic_drafter

        return synthetic_drafter(source.synthetic)
    from remote_dspark.drafter.checkpoint import load_drafter

    return load_drafter(Path(source.path), torch.device("cpu"), torch.bfloat16)


def _serve(rank: Any, command: dict[str, Any]) -> dict[str, Any]:
    if "write" in command:
        task = command["write"]
        rank.write(task["seat"], task["position"], _decode(task["rows"]))
        return {}
    if "logits" in command:
        task = command["logits"]
        logits = rank.base_logits([_block(block) for block in task["blocks"]], task["depth"])
        return {"logits": _encode(logits.contiguous().view(torch.int16).numpy())}
    task = command["step"]
    rank.start([_block(block) for block in task["blocks"]], task["depth"])
    rank.draft()
    step = rank.finish(with_rows=True)
    names = ("tokens", "ids", "q", "counts")
    return {
        "errors": step.errors,
        "outputs": base64.b64encode(step.outputs).decode("ascii"),
        "rows": {} if step.rows is None else {name: _encode(getattr(step.rows, name)) for name in names},
        "timings": asdict(step.timings),
        "markov": {name: getattr(rank.markov, name) for name in ("hits", "misses", "size_bytes")},
    }


def _answer(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
