"""What one arm left behind: its observation, its raw samples and what the coordinator saw of its hosts.

Rules: everything here was read from files that were bound by digest before; nothing is summarised by the program
that measured. The names of values and labels that the gates look at are the constants of this file; the program
``remote_dspark.qualify.arm`` writes them.

Counters are readings, not differences: ``baseline.<metric>``, ``headline.<metric>``, ``profiled.<metric>`` and
``final.<metric>``, a labelled one with ``.<label>`` behind it. The headline's growth is ``headline - baseline``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from remote_dspark.contract import OBSERVATION_SCHEMA, DraftMode, Metric, ObservationKind
from windows.errors import MeasureError

BASELINE: Final = "baseline"
HEADLINE: Final = "headline"
PROFILED: Final = "profiled"
FINAL: Final = "final"
POINTS: Final = (BASELINE, HEADLINE, PROFILED, FINAL)
"""The four points at which counters are read, in time order."""

LABEL_MANIFEST: Final = "manifest_sha256"
LABEL_GREEDY: Final = "greedy_sha256"
"""Digest over the token ids of the greedy check: equal in every arm, whatever the drafts were."""
LABEL_MODE: Final = "mode"
LABEL_PHASE: Final = "requests.phase."
"""``requests.phase.<n>`` names the phase that the raw samples number ``n``."""
ELAPSED: Final = "headline.elapsed_ns"
REQUESTS_FILE: Final = "requests.jsonl"
INTER_TOKEN_FILE: Final = "inter_token.jsonl"  # noqa: S105, a file name

LABEL = re.compile(r"^(?P<arm>[AB])(?P<pair>[1-9][0-9]?)$")

_REQUEST_KEYS: Final = frozenset({"phase", "index", "start_ns", "first_token_ns", "end_ns", "num_tokens", "num_rounds"})


@dataclass(frozen=True)
class RequestSample:
    """One request of the load, in monotonic ns of the host that sent it."""

    phase: str
    index: int
    start_ns: int
    first_token_ns: int
    end_ns: int
    num_tokens: int
    num_rounds: int

    @property
    def elapsed_ns(self) -> int:
        """From sending to the last token."""
        return self.end_ns - self.start_ns


def phase_names(labels: Mapping[str, Any]) -> dict[int, str]:
    """Number of a phase in the raw samples to its name, from the labels of the observation."""
    numbers = {name.removeprefix(LABEL_PHASE): text for name, text in labels.items() if name.startswith(LABEL_PHASE)}
    return {int(number): str(text) for number, text in numbers.items() if number.isascii() and number.isdecimal()}


def parse_requests(data: bytes, phases: Mapping[int, str]) -> tuple[RequestSample, ...]:
    """Parses ``requests.jsonl``.

    Args:
        data: The file.
        phases: Number of a phase to its name, as `phase_names` gives it.

    Raises:
        MeasureError: A line is not the flat integer object it should be, its phase has no name, or its times run
            backwards.
    """
    samples = []
    for number, line in enumerate(data.splitlines(), start=1):
        where = f"{REQUESTS_FILE} line {number}"
        document = _load(line, where)
        if not isinstance(document, dict) or set(document) != _REQUEST_KEYS:
            raise MeasureError(f"{where}: expected an object with {', '.join(sorted(_REQUEST_KEYS))}")
        if any(type(value) is not int or value < 0 for value in document.values()):
            raise MeasureError(f"{where}: expected integers >= 0")
        phase = document.pop("phase")
        if phase not in phases:
            raise MeasureError(f"{where}: phase {phase} has no name, expected one of {sorted(phases)}")
        sample = RequestSample(phase=phases[phase], **document)
        if not sample.start_ns <= sample.first_token_ns <= sample.end_ns:
            raise MeasureError(
                f"{where}: times run backwards: start {sample.start_ns}, first token {sample.first_token_ns}, "
                f"end {sample.end_ns}"
            )
        samples.append(sample)
    return tuple(samples)


def parse_integers(data: bytes, name: str = INTER_TOKEN_FILE) -> tuple[int, ...]:
    """Parses a file with one integer >= 0 per line.

    Raises:
        MeasureError: A line is something else.
    """
    values = []
    for number, line in enumerate(data.splitlines(), start=1):
        value = _load(line, f"{name} line {number}")
        if type(value) is not int or value < 0:
            raise MeasureError(f"{name} line {number}: expected an integer >= 0")
        values.append(value)
    return tuple(values)


def _load(line: bytes, where: str) -> Any:
    """One JSON value; a repeated key is refused, because two readers would see two values."""
    try:
        return json.loads(line, object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError) as cause:
        raise MeasureError(f"{where}: not JSON: {cause}") from cause


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a key appears twice")
    return document


@dataclass(frozen=True)
class ArmFacts:
    """What the coordinator saw of the hosts during the arm. An empty table is UNKNOWN to its gate.

    Attributes:
        boot_ids: Host to its boot ids before and after the arm.
        clock_offset_ns: Host to its clock minus ours.
        clock_offset_limit_ns: Largest tolerated.
        sm_clock_mhz: Device to its SM clock before and after, CUDA only.
        throttled: Device to whether a throttle reason other than idle was seen, CUDA only.
    """

    boot_ids: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    clock_offset_ns: Mapping[str, int] = field(default_factory=dict)
    clock_offset_limit_ns: int = 0
    sm_clock_mhz: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    throttled: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class ArmBlock:
    """One arm: one boot of its services, the unit of replication (DECISIONS 15).

    Attributes:
        label: ``A1`` … ``B9``.
        hold: Number of the hold it ran in.
        observation: Document of the arm's observation.
        requests: Parsed ``requests.jsonl``.
        inter_token_ns: Parsed ``inter_token.jsonl``.
        receipt: Digest of the arm's receipt; all zeros where there is none yet.
    """

    label: str
    hold: int
    observation: Mapping[str, Any]
    requests: tuple[RequestSample, ...]
    inter_token_ns: tuple[int, ...]
    facts: ArmFacts = field(default_factory=ArmFacts)
    receipt: str = "0" * 64

    @classmethod
    def from_files(
        cls,
        label: str,
        hold: int,
        observation: Mapping[str, Any],
        files: Mapping[str, bytes],
        facts: ArmFacts | None = None,
        receipt: str = "0" * 64,
    ) -> Self:
        """Builds a block from fetched files.

        Args:
            label: ``A1`` … ``B9``.
            hold: Number of the hold it ran in.
            observation: The parsed observation document.
            files: File name to content, digests checked by the caller.
            facts: What the coordinator saw of the hosts.
            receipt: Digest of the arm's receipt.

        Raises:
            MeasureError: A file is missing or malformed, or the document is no arm observation.
        """
        if LABEL.match(label) is None:
            raise MeasureError(f"arm label {label!r}: expected A or B and the number of its pair")
        kind = (observation.get("schema"), observation.get("kind"))
        if kind != (OBSERVATION_SCHEMA, ObservationKind.ARM.value):
            raise MeasureError(f"arm {label}: found {kind}, expected {(OBSERVATION_SCHEMA, ObservationKind.ARM.value)}")
        for name in (REQUESTS_FILE, INTER_TOKEN_FILE):
            if name not in files:
                raise MeasureError(f"arm {label}: raw file {name} is missing; without it nothing can be recomputed")
        return cls(
            label,
            hold,
            observation,
            parse_requests(files[REQUESTS_FILE], phase_names(observation["labels"])),
            parse_integers(files[INTER_TOKEN_FILE]),
            facts or ArmFacts(),
            receipt,
        )

    @property
    def arm(self) -> str:
        """``A`` or ``B``."""
        return self.label[0]

    @property
    def pair(self) -> int:
        """Number of the pair."""
        return int(self.label[1:])

    @property
    def is_on(self) -> bool | None:
        """Whether the program says that it ran with sampled drafts; None when it does not say."""
        mode = self.label_text(LABEL_MODE)
        return None if mode is None else mode == DraftMode.ON.value

    def label_text(self, name: str) -> str | None:
        """A label of the observation."""
        value = self.observation["labels"].get(name)
        return value if isinstance(value, str) else None

    def reading(self, point: str, metric: Metric, label: str | None = None) -> int | None:
        """A counter at one of the four points, or None when it was not read."""
        name = f"{point}.{metric.value}" + (f".{label}" if label is not None else "")
        value = self.observation["values"].get(name)
        return value if type(value) is int else None

    def growth(self, point: str, metric: Metric, label: str | None = None) -> int | None:
        """How much a counter grew from the baseline to a point, or None when a reading is missing."""
        before, after = self.reading(BASELINE, metric, label), self.reading(point, metric, label)
        return None if before is None or after is None else after - before

    def headline_requests(self) -> tuple[RequestSample, ...]:
        """The measured requests, in start order."""
        return tuple(sorted((r for r in self.requests if r.phase == HEADLINE), key=lambda r: (r.start_ns, r.index)))


def labels_in_order(orders: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """All labels of a design, hold after hold."""
    return tuple(label for order in orders for label in order)
