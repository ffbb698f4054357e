"""The window plan: what a campaign runs, in which order, with which bounds, and how it will be judged.

Rules: everything that could be chosen after seeing a result (margin, metric, exclusions, order, minimum counts) is
written here, before; both arms share one set of services and differ only in the declared switch; every bound is an
integer number of seconds. Not here: compiling a plan against a site (``windows.compiled``).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from remote_dspark.contract import DraftMode
from windows.commands import ArmService, Bound, Measurement, Program
from windows.design import require_consecutive, require_design
from windows.document import Name, Sha256, Strict, Text, parse_document, shaped
from windows.errors import FieldsError
from windows.models import Model, RelativePath
from windows.template import KNOWN_PLACEHOLDERS, require_known

PLAN_SCHEMA: Final = "coordinator/plan/v1"

ArmLabel = Annotated[str, shaped(r"[AB][1-9][0-9]?", "an arm label: A or B and the number of its pair")]
DecimalText = Annotated[str, shaped(r"(0|[1-9][0-9]{0,3})(\.[0-9]{1,6})?", "a decimal number in quotes")]


class StepKind(StrEnum):
    """Every kind of step of a hold, in the order of a hold."""

    PREFLIGHT = "preflight"
    LEASE = "lease"
    SNAPSHOT = "snapshot"
    ARM_DEAD_MAN = "arm-dead-man"
    STOP = "stop"
    PAIR_QUALIFY = "pair-qualify"
    BOOT = "boot"
    IDENTITY = "identity"
    WARM_UP = "warm-up"
    GREEDY_CHECK = "greedy-check"
    BASELINE = "baseline"
    HEADLINE = "headline"
    PROFILED = "profiled"
    FINAL = "final"
    EVIDENCE = "evidence"
    TEARDOWN = "teardown"
    MEASURE = "measure"
    RESTORE = "restore"
    CLOSE = "close"


OPENING_STEPS: Final = (StepKind.PREFLIGHT, StepKind.LEASE, StepKind.SNAPSHOT, StepKind.ARM_DEAD_MAN, StepKind.STOP)
ARM_STEPS: Final = (
    StepKind.BOOT,
    StepKind.IDENTITY,
    StepKind.WARM_UP,
    StepKind.GREEDY_CHECK,
    StepKind.BASELINE,
    StepKind.HEADLINE,
    StepKind.PROFILED,
    StepKind.FINAL,
    StepKind.EVIDENCE,
    StepKind.TEARDOWN,
)
RESTORING_STEPS: Final = (StepKind.RESTORE, StepKind.CLOSE)
"""Both live in the restore reserve; they have no bound of their own."""


class Purpose(StrEnum):
    """What a plan is for."""

    CAMPAIGN = "campaign"
    FIRST_HOLD = "first-hold"
    """Stop and restore only, on plan-declared bounds; it produces the first budget receipt (DECISIONS 12)."""
    MEASUREMENT = "measurement"
    """Programs that qualify or measure the devices themselves, in one hold and without arms (docs/adr/0012)."""


class PrimaryMetric(StrEnum):
    """What the verdict is about. One per plan; all the others are reported, never judged."""

    TOKENS_PER_SECOND = "tokens-per-second"
    ROUNDS_PER_SECOND = "rounds-per-second"
    TOKENS_PER_ROUND = "tokens-per-round"
    FIRST_TOKEN_P50 = "first-token-p50-ns"  # noqa: S105, a latency and no credential
    INTER_TOKEN_P50 = "inter-token-p50-ns"  # noqa: S105, same

    @property
    def is_higher_better(self) -> bool:
        """Direction of the metric: latencies are better when lower."""
        return self not in (PrimaryMetric.FIRST_TOKEN_P50, PrimaryMetric.INTER_TOKEN_P50)


class ExclusionRule(StrEnum):
    """Findings that exclude a block (listed, with its pair) instead of making the comparison INVALID."""

    FOREIGN_REQUESTS = "foreign-requests"
    PREFIX_HITS = "prefix-hits"
    CLOCK_OFFSET = "clock-offset"
    DEVICE_CLOCKS = "device-clocks"
    THROTTLED = "throttled"


class Arm(Strict):
    """One side of the comparison: a draft mode, and the values of the switch.

    Attributes:
        mode: OFF or ON, filled as ``{mode}``.
        settings: Further placeholders; both arms declare the same names.
    """

    mode: DraftMode
    settings: dict[Annotated[str, shaped(r"[a-z][a-z0-9_]*", "a placeholder name")], Text] = Field(default_factory=dict)

    @field_validator("settings")
    @classmethod
    def _settings_are_new_names(cls, settings: dict[str, str]) -> dict[str, str]:
        for name in settings:
            if name in KNOWN_PLACEHOLDERS:
                raise ValueError(f"expected a new name, {name!r} is a placeholder already")
        return settings


class Arms(Strict):
    """A is the untouched path, B the candidate. Both OFF is an A/A plan, which measures the noise floor."""

    A: Arm
    B: Arm

    @model_validator(mode="after")
    def _one_switch(self) -> Self:
        if self.A.mode is not DraftMode.OFF:
            raise ValueError(f"expected arms.A.mode = {DraftMode.OFF.value!r}: A is the untouched path")
        if set(self.A.settings) != set(self.B.settings):
            raise ValueError("expected the same setting names in both arms: they differ by the switch only")
        return self

    @property
    def is_aa(self) -> bool:
        """Whether both arms are the same, so that the difference is noise."""
        return self.A == self.B


class Load(Strict):
    """The closed-loop load of an arm.

    Attributes:
        manifest: Path of the prompt manifest, relative to the plan file.
        manifest_sha256: Digest both arms must report.
        concurrency: Requests in flight.
        requests: Measured requests per snapshot interval.
        warm_up_requests: Discarded requests before the baseline.
        seeds: Request seeds, used in turn.
        program: Runs the load against the arm's services and writes the arm's observation.
    """

    manifest: RelativePath
    manifest_sha256: Sha256
    concurrency: Annotated[int, Field(ge=1, le=64)]
    requests: Annotated[int, Field(ge=1, le=1_000_000)]
    warm_up_requests: Annotated[int, Field(ge=0, le=100_000)]
    max_tokens: Annotated[int, Field(ge=1, le=1 << 20)]
    temperature: DecimalText = "1"
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, le=(1 << 53) - 1)], ...], Field(min_length=1)]
    program: Program


class ComparisonPlan(Strict):
    """How the arms will be judged, written before the first hold.

    Attributes:
        primary_metric: What the outcome is about.
        margin_ppm: Differences inside it do not matter; on the ratio B/A, as parts per million of 1.
        min_rounds: Fewer measured rounds in a block make it INVALID.
        min_pairs: Fewer usable pairs give INCONCLUSIVE.
        confidence_ppm: Level of the interval.
        exclude_on: Findings that exclude a block instead of invalidating everything.
        max_clock_delta_ppm: Largest tolerated difference of device clocks between the arms of a pair.
        aa_floor_ppm: Noise floor of an earlier A/A run on these hosts, or None.
        aa_floor_receipt: The receipt it comes from.
    """

    primary_metric: PrimaryMetric = PrimaryMetric.TOKENS_PER_SECOND
    margin_ppm: Annotated[int, Field(ge=1, le=500_000)]
    min_rounds: Annotated[int, Field(ge=1)]
    min_pairs: Annotated[int, Field(ge=1, le=99)] = 2
    confidence_ppm: Literal[900_000, 950_000, 990_000] = 950_000
    exclude_on: tuple[ExclusionRule, ...] = ()
    max_clock_delta_ppm: Annotated[int, Field(ge=0, le=1_000_000)] = 10_000
    aa_floor_ppm: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    aa_floor_receipt: Sha256 | None = None

    @model_validator(mode="after")
    def _floor_has_a_source(self) -> Self:
        if (self.aa_floor_ppm is None) != (self.aa_floor_receipt is None):
            raise FieldsError(("aa_floor_ppm", "aa_floor_receipt"), "both: a floor without a source is a guess")
        return self


class RequiredEvidence(Strict):
    """A receipt that admission asks for before any host is contacted.

    Attributes:
        kind: Receipt kind.
        classes: Accepted evidence classes, strongest first.
        max_age_s: Older ones do not count; None for any age.
        same_sources: Whether it must name the sources of this plan.
    """

    kind: Literal[
        "source-identity", "host-facts", "pair-qualification", "worker-measurement", "budget", "verifier-preparation"
    ]
    classes: Annotated[tuple[Literal["MEASURED", "REHEARSED", "EMULATED"], ...], Field(min_length=1)] = ("MEASURED",)
    max_age_s: Annotated[int, Field(ge=1)] | None = None
    same_sources: bool = True


class WindowPlan(Strict):
    """The whole plan file.

    Attributes:
        bound_s: From the first lease to production proven back.
        restore_reserve_s: Reserved first, at the end of the bound, for restore, proof and close.
        orphan_after_s: Silence after which the hosts restore by themselves (DECISIONS 29).
        provisional_s: Lease length until every host has confirmed (DECISIONS 33).
        holds: Hold number (as text, TOML keys are) to the order of its arms.
        services: What every arm boots; the same for A and B.
        models: What its programs read, staged by digest before the hold.
        step_bounds_s: Step kind to its bound, for every kind the plan uses.
    """

    schema_id: Annotated[Literal["coordinator/plan/v1"], Field(alias="schema")]
    name: Name
    purpose: Purpose = Purpose.CAMPAIGN
    bound_s: Annotated[int, Field(ge=10, le=86_400)] = 5400
    restore_reserve_s: Bound
    orphan_after_s: Bound
    provisional_s: Annotated[int, Field(ge=5, le=600)] = 60
    holds: dict[Annotated[str, shaped(r"[1-9][0-9]?", "the number of a hold, from 1")], tuple[ArmLabel, ...]]
    arms: Arms | None = None
    services: tuple[ArmService, ...] = ()
    pair_qualify: Program | None = None
    load: Load | None = None
    comparison: ComparisonPlan | None = None
    measurements: tuple[Measurement, ...] = ()
    models: tuple[Model, ...] = ()
    step_bounds_s: dict[StepKind, Bound]
    required_evidence: tuple[RequiredEvidence, ...] = ()

    @field_validator("step_bounds_s")
    @classmethod
    def _restore_is_the_reserve(cls, bounds: dict[StepKind, int]) -> dict[StepKind, int]:
        for kind in RESTORING_STEPS:
            if kind in bounds:
                raise ValueError(f"expected no bound for {kind.value!r}: restore_reserve_s covers it")
        return bounds

    @field_validator("holds")
    @classmethod
    def _order_is_a_design(cls, holds: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        require_design([holds[key] for key in require_consecutive(holds)])
        return holds

    @model_validator(mode="after")
    def _parts_fit_the_purpose(self) -> Self:
        parts = {
            "arms": self.arms,
            "services": self.services or None,
            "pair_qualify": self.pair_qualify,
            "load": self.load,
            "comparison": self.comparison,
        }
        has_arms = any(self.holds.values())
        if has_arms != (self.purpose is Purpose.CAMPAIGN):
            raise FieldsError(("purpose", "holds"), "arms in the holds of a campaign, and in those of no other plan")
        if bool(self.measurements) != (self.purpose is Purpose.MEASUREMENT):
            raise FieldsError(("purpose", "measurements"), "measurements in a measurement plan, and in no other")
        for name, part in parts.items():
            if (part is None) == has_arms:
                wanted = "a" if has_arms else "no"
                raise FieldsError(("purpose", name), f"{wanted} {name!r} in a {self.purpose.value} plan")
        return self

    @model_validator(mode="after")
    def _bounds_cover_the_steps(self) -> Self:
        missing = [kind.value for kind in self.step_kinds() if kind not in self.step_bounds_s]
        if missing:
            names = [f"step_bounds_s.{kind}" for kind in missing]
            raise FieldsError(names, f"step_bounds_s for {', '.join(missing)}: every step has a bound")
        if self.restore_reserve_s >= self.bound_s:
            raise FieldsError(("restore_reserve_s", "bound_s"), f"restore_reserve_s below bound_s ({self.bound_s})")
        return self

    @model_validator(mode="after")
    def _leases_outlive_their_step(self) -> Self:
        """A host that no beat reaches while the others are leased must not take us for dead, or drop its lease."""
        lease_s = self.step_bounds_s[StepKind.LEASE]
        for name in ("orphan_after_s", "provisional_s"):
            if getattr(self, name) < lease_s:
                raise FieldsError((name, "step_bounds_s.lease"), f"{name} of at least the lease's bound ({lease_s} s)")
        return self

    @model_validator(mode="after")
    def _measurements_fit(self) -> Self:
        names = [measurement.name for measurement in self.measurements]
        if len(set(names)) != len(names):
            raise FieldsError(("measurements",), f"distinct names, found {', '.join(names)}")
        for measurement in self.measurements:
            require_known(measurement.texts(), self.model_placeholders())
            if measurement.timeout_s > self.step_bounds_s[StepKind.MEASURE]:
                fields = (f"measurements.{measurement.name}.timeout_s", "step_bounds_s.measure")
                raise FieldsError(fields, "a timeout_s of at most the bound of 'measure'")
        return self

    @model_validator(mode="after")
    def _placeholders_are_known(self) -> Self:
        if self.arms is not None and self.load is not None and self.pair_qualify is not None:
            names = [service.name for service in self.services]
            if len(set(names)) != len(names):
                raise FieldsError(("services",), f"distinct names, found {', '.join(names)}")
            models = self.model_placeholders()
            for service in self.services:
                require_known(service.texts(), {*self.arms.A.settings, *models})
            require_known(self.load.program.texts(), {*self.arms.A.settings, *models})
            require_known(self.pair_qualify.texts(), models)
        return self

    @model_validator(mode="after")
    def _models_fit(self) -> Self:
        names = self.model_placeholders()
        if len(set(names)) != len(names):
            raise FieldsError(("models",), f"distinct names, found {', '.join(model.name for model in self.models)}")
        if self.models and self.purpose is Purpose.FIRST_HOLD:
            raise FieldsError(("purpose", "models"), "no 'models' in a first-hold plan: it runs no program")
        if self.arms is not None and (taken := set(names) & set(self.arms.A.settings)):
            raise FieldsError(("models", "arms"), f"other names for settings than a model's: {', '.join(taken)}")
        return self

    def step_kinds(self) -> tuple[StepKind, ...]:
        """Kinds of step this plan uses that need a bound, in order."""
        arm = (StepKind.PAIR_QUALIFY, *ARM_STEPS) if any(self.holds.values()) else ()
        return (*OPENING_STEPS, *arm, *((StepKind.MEASURE,) if self.measurements else ()))

    def model_placeholders(self) -> tuple[str, ...]:
        """Placeholders that stand for the folders of its models."""
        return tuple(model.placeholder for model in self.models)

    def hold_numbers(self) -> tuple[int, ...]:
        """Numbers of the holds, from 1."""
        return tuple(int(key) for key in require_consecutive(self.holds))

    def arm_order(self, hold: int) -> tuple[str, ...]:
        """Labels of the arms of a hold, in the order they run."""
        return self.holds[str(hold)]

    def to_document(self) -> dict[str, Any]:
        """The whole file as plain values, defaults filled in."""
        return self.model_dump(mode="json", by_alias=True)


def parse_plan(document: Mapping[str, Any], what: str = "plan file") -> WindowPlan:
    """Parses a window plan, e.g. what ``tomllib`` returned.

    Raises:
        DocumentError: Names every refused field.
    """
    return parse_document(WindowPlan, document, what)
