"""What every part of the project agrees on: constants, semantic ids, names and the observation record.

Covered: the numbers of the sampling arithmetic, the RNG key and counter layout, the capability names of HELLO, the
metric names of the two servers, how an owned program learns which hold it runs in, and the shape of an observation
file. Not covered: how anything is computed (``oracle``, ``kernels``) or sent (``wire``).

Rules of this file: standard library only, no effects, nothing here depends on another module. A change of a value
here changes what receipts mean, so it needs a new semantic id and an ADR.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Final

# -- exact sampling (DECISIONS 1-4) ------------------------------------------------------------------------------

TICKET_BITS: Final = 24
"""Draft probabilities are counts of 2**24: every such value, and every partial sum, is exact in FP32."""

TICKET_TOTAL: Final = 1 << TICKET_BITS

WEIGHT_BITS: Final = 38
"""A weight is floor(exp((logit - max) / tau) * 2**38): 24 significant bits for tokens down to 2**-14 of the top."""

WEIGHT_ONE: Final = 1 << WEIGHT_BITS

Q_STANDARD: Final = "dyadic24-standard-v1"
"""Floor, then one ticket each by largest remainder, ties to the lowest global token id."""

Q_FLOOR_FIRST: Final = "dyadic24-floor-first-v1"
"""Floor, then the whole remainder to the candidate of rank 1 (highest value, ties to the lowest global token id)."""

Q_SEMANTICS: Final = (Q_STANDARD, Q_FLOOR_FIRST)

TARGET_SEMANTICS: Final = "target-fixed38-v1"
VERIFIER_STANDARD: Final = "standard-minpq-residual-v1"
RNG_ABI: Final = "philox4x32-10-v1"

SUPPORT_K: Final = 32
"""Entries of a sampled row. 16 and 64 exist for development and are refused by a production configuration."""

DEVELOPMENT_SUPPORT_K: Final = (16, 64)
MAX_PRODUCTION_REQUESTS: Final = 4
MAX_TEST_REQUESTS: Final = 8
PRODUCTION_DEPTHS: Final = (4, 5)
DRAFT_TEMPERATURE: Final = "0.7"
"""tau of sampled drafts; a decimal string because it is hashed into plans and receipts."""


class Domain(IntEnum):
    """What a draw is for. Two domains never share a counter, so no noise is used twice."""

    PROPOSAL = 1
    ACCEPTANCE = 2
    CORRECTION = 3
    BONUS = 4


RNG_KEY_TAG: Final = b"dspark-rng-key-v1"
"""Domain tag of the key: first 8 bytes of SHA-256(tag || seed as u64 LE || generation as u64 LE), as two u32 LE.

The counter is (round mod 2**32, absolute position, domain, draw): four u32. The round's high half is never dropped:
exhaustion of 2**32 rounds within one generation refuses.
"""

# -- HELLO capabilities ------------------------------------------------------------------------------------------


class DraftMode(StrEnum):
    """The one switch. OFF is the untouched greedy path with the v1-style reply; ON ships token and exact q."""

    OFF = "greedy-v1"
    ON = "sampled-top32-v2"


# -- an owned program inside a hold (DECISIONS 13) ----------------------------------------------------------------

ENV_HOLD_ID: Final = "DSPARK_HOLD_ID"
ENV_HOLD_EPOCH: Final = "DSPARK_HOLD_EPOCH"
ENV_GUARD: Final = "DSPARK_GUARD"
"""Absolute path of the guard zipapp (a digest path) that started this program."""

ENV_GUARD_STATE: Final = "DSPARK_GUARD_STATE"
ENV_OUTPUT_DIR: Final = "DSPARK_OUTPUT_DIR"
"""The only folder an owned program writes to; fetched by digest before teardown."""

# -- metric names (Prometheus text) --------------------------------------------------------------------------------


class Metric(StrEnum):
    """Counters of the target server. All are monotonic; the gate compares growth over a baseline, never totals."""

    ROUNDS = "dspark_rounds_total"
    SAMPLED_ROUNDS = "dspark_sampled_rounds_total"
    GREEDY_ROUNDS = "dspark_greedy_rounds_total"
    FAILED_ROUNDS = "dspark_failed_rounds_total"
    TARGET_ONLY_ROUNDS = "dspark_target_only_rounds_total"
    DRAFT_TOKENS = "dspark_draft_tokens_total"
    ACCEPTED_TOKENS = "dspark_accepted_tokens_total"
    ACCEPTED_AT_POSITION = "dspark_accepted_at_position_total"
    """Label ``position`` 0..depth-1: rounds whose draft token at that position was accepted."""
    PROPOSED_AT_POSITION = "dspark_proposed_at_position_total"
    """Label ``position``: rounds that reached that position, i.e. all earlier draft tokens were accepted."""
    EMITTED_TOKENS = "dspark_emitted_tokens_total"
    ZERO_RESIDUAL = "dspark_zero_residual_total"
    REPLIES_REJECTED = "dspark_replies_rejected_total"
    """Label ``reason``: the wire error's code."""
    REQUESTS = "dspark_requests_total"
    PREFIX_CACHE_HITS = "dspark_prefix_cache_hits_total"


class ServerState(StrEnum):
    """What ``/health`` says. Only READY is HTTP 200; progress is judged by the round counter, not by the port."""

    BOOTING = "booting"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    WEDGED = "wedged"
    POISONED = "poisoned"


# -- observations: what programs on hosts write -------------------------------------------------------------------

OBSERVATION_SCHEMA: Final = "remote-dspark/observation/v1"


class ObservationKind(StrEnum):
    """The programs of ``remote_dspark.qualify``. They observe; they never decide and never write receipts."""

    PAIR = "pair"
    WHOLE_WORKER = "whole-worker"
    FROZEN_REPLAY = "frozen-replay"
    ARM = "arm"


class ComputeKind(StrEnum):
    """Where the numbers were computed. Only CUDA can become MEASURED evidence, and the coordinator decides that."""

    CUDA = "cuda"
    CPU = "cpu"
    INTERPRETED = "interpreted"


@dataclass(frozen=True)
class Check:
    """One comparison a program made: what it expected, what it found.

    ``ok`` is None when the check did not run; that is UNKNOWN to every gate, never a pass. ``expected`` and ``found``
    are short strings (at most 200 characters), data for a person.
    """

    name: str
    expected: str
    found: str
    ok: bool | None


@dataclass(frozen=True)
class SampleFile:
    """A raw sample file beside the observation: JSON Lines of integers or of flat integer objects.

    Attributes:
        name: File name within the output folder, ``[a-z0-9._-]+``.
        unit: Unit of each value: ``ns``, ``bytes``, ``tokens``, ``count``; ``mixed`` for objects.
        sha256: Hex digest of the file's bytes.
        num_samples: Number of lines.
        size_bytes: Length of the file.
    """

    name: str
    unit: str
    sha256: str
    num_samples: int
    size_bytes: int


@dataclass(frozen=True)
class Observation:
    """The one file a qualification program writes: ``observation.json`` in its output folder.

    All numbers are integers in base units (ns, bytes, ppm, counts). Times are UTC with ``Z``.

    Attributes:
        kind: Which program.
        program: Module name, e.g. ``remote_dspark.qualify.pair``.
        argv: Arguments as run, secrets excluded at the source.
        source_sha256: Tree digest of the ``remote_dspark`` package that ran (`source_digest`).
        compute: Where it was computed.
        device: Facts of the device: name, uuid, pci, driver, clocks; empty for a CPU.
        started_utc: RFC 3339 with ``Z``.
        elapsed_ns: Monotonic duration.
        hold_id: The hold the guard proved, or None outside one.
        hold_epoch: The fence epoch the guard proved, or None.
        checks: Every comparison; an empty tuple is UNKNOWN.
        values: Flat integers: summaries, settings, counters (dotted names).
        labels: Flat short strings: identities, digests of models and manifests.
        samples: Raw files.
    """

    kind: ObservationKind
    program: str
    argv: tuple[str, ...]
    source_sha256: str
    compute: ComputeKind
    device: dict[str, str]
    started_utc: str
    elapsed_ns: int
    hold_id: str | None
    hold_epoch: int | None
    checks: tuple[Check, ...] = ()
    values: dict[str, int] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    samples: tuple[SampleFile, ...] = ()
    schema: str = OBSERVATION_SCHEMA

    def to_document(self) -> dict[str, Any]:
        """The JSON document: plain dicts, lists, strings, integers, booleans and None."""
        return {
            "schema": self.schema,
            "kind": self.kind.value,
            "program": self.program,
            "argv": list(self.argv),
            "source_sha256": self.source_sha256,
            "compute": self.compute.value,
            "device": dict(self.device),
            "started_utc": self.started_utc,
            "elapsed_ns": self.elapsed_ns,
            "hold_id": self.hold_id,
            "hold_epoch": self.hold_epoch,
            "checks": [{"name": c.name, "expected": c.expected, "found": c.found, "ok": c.ok} for c in self.checks],
            "values": dict(self.values),
            "labels": dict(self.labels),
            "samples": [
                {
                    "name": s.name,
                    "unit": s.unit,
                    "sha256": s.sha256,
                    "num_samples": s.num_samples,
                    "size_bytes": s.size_bytes,
                }
                for s in self.samples
            ],
        }
