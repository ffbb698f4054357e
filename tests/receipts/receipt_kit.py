"""Real receipts for tests: one valid example per kind, a log built in memory, and a whole live campaign.

Everything is deterministic: times, ids and keys are fixed, so that the poison corpus and the published fixtures can be
made again byte for byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from receipts import bodies
from receipts.build import build_receipt
from receipts.chain import Head, link_draft
from receipts.fields import Gpu, Host, Kind, Parent, Row, Sample, Subject, Verdict
from receipts.findings import Entry, LogReport, Options, Verified
from receipts.gates import Facts, Record, record
from receipts.reader import Receipt, read_receipt
from receipts.signing import AllowedSigners, Ed25519Signer, parse_allowed_signers
from receipts.verdict import combine, conclude
from receipts.verify import LogVerifier

LOG = "0123456789abcdef0123456789abcdef"
NOW = "2026-06-01T12:00:00.000Z"
SOURCE = hashlib.sha256(b"source tree").hexdigest()
PLAN = hashlib.sha256(b"plan").hexdigest()
SUBJECT = Subject(name="remote_dspark", sha256=SOURCE)


def digest(text: str) -> str:
    """Some sha256."""
    return hashlib.sha256(text.encode()).hexdigest()


def signer(name: str = "operator") -> Ed25519Signer:
    """A key that is the same in every run. Never use it for anything else."""
    return Ed25519Signer(Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"test key {name}".encode()).digest()))


def signers_toml(*names: str, extra: str = "") -> bytes:
    """An allowed-signers file with these names as operators (``ci`` and ``auditor`` in their own role)."""
    entries = []
    for name in names or ("operator",):
        pem = signer(name).private_key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        role = name if name in {"auditor", "ci"} else "operator"
        entries.append(f'[[signer]]\nname = "{name}"\nrole = "{role}"\npublic_key = """\n{pem.decode()}"""\n{extra}')
    return ("version = 1\n\n" + "\n".join(entries)).encode()


def allowed(*names: str) -> AllowedSigners:
    """Those signers, loaded."""
    return parse_allowed_signers(signers_toml(*names))


def gpu_host(name: str = "alpha", num_gpus: int = 2) -> Host:
    """A host with GPUs."""
    gpus = tuple(
        Gpu(uuid=f"GPU-{name}-{n}", pci=f"0000:0{n}:00.0", name="H200", driver="580.1") for n in range(num_gpus)
    )
    return Host(name=name, machine_id=f"machine-{name}", boot_id=f"boot-{name}", gpus=gpus)


def rows(*names: str, ok: bool | None = True) -> tuple[Row, ...]:
    """A table of rows that hold (or do not)."""
    return tuple(Row(field=name, expected="as planned", found="as planned", ok=ok) for name in names)


PHYSICAL: Mapping[str, str] = {
    "topology": "physical",
    "rank.0.uuid": "GPU-alpha-0",
    "rank.1.uuid": "GPU-alpha-1",
}
"""What the program of a physical pair says of its ranks, on `gpu_host`."""


def observation(
    host: str = "alpha", compute: str = "cuda", ok: bool | None = True, labels: Mapping[str, str] | None = None
) -> bodies.Observation:
    """An observation with one check."""
    return bodies.Observation(
        host=host, sha256=digest("observation"), format=bodies.OBSERVATION_FORMAT, kind="pair-qualification",
        program="pair", argv=("--seed", "1"), source_sha256=SOURCE, compute=compute, device={"name": "H200"},
        started_utc=NOW, elapsed_ns=5, hold_id="hold-1", hold_epoch=3,
        checks=(bodies.Check(name="ranks agree", expected="[]", found="[]", ok=ok),), values={"rounds": 4},
        labels=dict(labels or {}),
        samples=(),
    )  # fmt: skip


def held(host: str = "alpha", **changes: Any) -> bodies.HeldHost:
    """A host of a hold that was restored and proven."""
    fields: dict[str, Any] = {
        "host": host, "epoch": 3, "stop_proof": rows("stopped"), "restore_proof": rows("restored"), "debt": False,
        "restored_by": "close",
    }  # fmt: skip
    return bodies.HeldHost(**(fields | changes))


def comparison(blocks: Sequence[bodies.BlockValue] = (), **changes: Any) -> bodies.ComparisonBody:
    """ON 10 percent better than OFF."""
    metric = bodies.MetricComparison(
        metric="tokens-per-second", unit="micro", better="higher", blocks=tuple(blocks),
        paired=(bodies.PairedDelta(pair="A1-B1", delta_ppm=100000), bodies.PairedDelta(pair="A2-B2", delta_ppm=98000)),
        ratio="1.099", interval_low="1.08", interval_high="1.12", margin_ppm=20000, outcome="BETTER",
    )  # fmt: skip
    fields: dict[str, Any] = {
        "order": "A1 B1 | B2 A2", "num_pairs": 2, "metrics": (metric,), "mechanism": rows("A1.mechanism"),
        "outcome": "BETTER",
    }  # fmt: skip
    return bodies.ComparisonBody(**(fields | changes))


def arm(mode: str, **changes: Any) -> bodies.ArmBody:
    """An arm without failed rounds."""
    fields: dict[str, Any] = {
        "mode": mode, "baseline": {"rounds": 0}, "headline": {"rounds": 90}, "profiled": {"rounds": 120},
        "final": {"rounds": 120}, "values": {"tokens-per-second-micro": 54_000_000}, "gates": rows(f"{mode}.rounds"),
    }  # fmt: skip
    return bodies.ArmBody(**(fields | changes))


EXAMPLES: Mapping[Kind, Any] = {
    Kind.SOURCE_IDENTITY: bodies.SourceIdentityBody(
        trees=(
            bodies.SourceTree(
                name="coordinator", version="0.1.0", tree_sha256=SOURCE,
                files=(bodies.FileDigest(path="cli.py", sha256=digest("cli"), size_bytes=10),),
            ),
        ),
        models=(bodies.SourceTree(name="drafter", version="1", tree_sha256=digest("drafter")),),
        labels={"python": "3.11"},
    ),
    Kind.HOST_FACTS: bodies.HostFactsBody(
        checks=(bodies.Check(name="disk free", expected=">= 1 GiB", found="9 GiB", ok=True),),
        parity=rows("driver"), values={"disk_free_bytes": 9 << 30}, labels={"os": "Debian"},
    ),
    Kind.PAIR_QUALIFICATION: bodies.PairQualificationBody(
        observations=(observation(labels=PHYSICAL),), gates=rows("pair")
    ),
    Kind.WORKER_MEASUREMENT: bodies.WorkerMeasurementBody(topology="solo", observations=(observation(),)),
    Kind.BUDGET: bodies.BudgetBody(
        steps=(bodies.StepBudget(step="stop", bound_ns=60 * 10**9, measured_ns=3 * 10**9, basis="measured",
                                 source=digest("hold")),),
        restore_reserve_ns=180 * 10**9, total_ns=240 * 10**9, limit_ns=5400 * 10**9,
    ),
    Kind.VERIFIER_PREPARATION: bodies.VerifierPreparationBody(
        engine="vllm", engine_version="0.32.0", base_sha256=digest("base"), overlay_sha256=digest("overlay"),
        replacements=(bodies.Replacement(path="a.py", pattern_sha256=digest("p"), matches=1, before_sha256=digest("b"),
                                         after_sha256=digest("a")),),
        checks=(bodies.Check(name="imports", expected="yes", found="yes", ok=True),),
    ),
    Kind.HOLD: bodies.HoldBody(
        hold_id="hold-1", final_state="CLOSED", deadline_ns=5400 * 10**9, restore_reserve_ns=180 * 10**9,
        timeline=(bodies.StateChange(state="held", monotonic_ns=5), bodies.StateChange(state="closed", monotonic_ns=9)),
        hosts=(held(),),
    ),
    Kind.ARM: arm("greedy-v1"),
    Kind.COMPARISON: comparison(),
    Kind.ADMISSION: bodies.AdmissionBody(
        policy="live", policy_sha256=digest("policy"), now_utc=NOW, log=LOG, head_sequence=0, head=digest("head"),
        inputs=(), rows=rows("log.whole"), result="ADMITTED",
    ),
    Kind.RECOVERY: bodies.RecoveryBody(
        hold_id="hold-1", final_state="CLOSED", journal_found=False,
        guard_records=(bodies.FileDigest(path="restore.json", sha256=digest("record"), size_bytes=9),),
        operations=(bodies.GuardOperation(operation_id="restore-1", host="alpha", outcome="done", monotonic_ns=3),),
        hosts=(held(restored_by="dead-man"),), reason="the coordinator's machine died",
    ),
    Kind.ATTEMPT: bodies.AttemptBody(
        command="campaign", stage="admission", exit_code=10, error_code="AdmissionRefused", message="no budget",
        rows=rows("budget", ok=False),
    ),
}  # fmt: skip
"""A valid body of every kind."""

_ON_HOSTS = frozenset(
    {Kind.HOST_FACTS, Kind.PAIR_QUALIFICATION, Kind.WORKER_MEASUREMENT, Kind.BUDGET, Kind.HOLD, Kind.ARM, Kind.RECOVERY}
)


def predicate_fields(kind: Kind, body: Any | None = None, **changes: Any) -> dict[str, Any]:
    """The fields of a valid predicate of this kind, with changes."""
    chosen = EXAMPLES[kind] if body is None else body
    fields: dict[str, Any] = {
        "tool": {"name": "coordinator", "version": "0.1.0", "source_sha256": SOURCE},
        "plan_sha256": PLAN,
        "position": {"window": "campaign-1/hold-1", "hold_number": 1},
        "hosts": (gpu_host(),) if kind in _ON_HOSTS else (),
        "fences": ({"host": "alpha", "epoch": 3},) if kind in _ON_HOSTS else (),
        "argv": ("coordinator", "campaign"),
        "environment": {"LANG": "C.UTF-8"},
        "started_utc": "2026-06-01T11:00:00.000Z",
        "ended_utc": "2026-06-01T11:00:05.000Z",
        "elapsed_ns": 5 * 10**9,
        "exit": {"kind": "exited", "code": 0},
        "evidence": "MEASURED",
        "scope": "this step, once",
        "not_claimed": ("anything else",),
        "body": chosen,
    }
    return fields | changes


def draft(kind: Kind, body: Any | None = None, **changes: Any) -> bytes:
    """A valid draft, its verdict the one that its records lead to unless ``verdict`` is given."""
    fields = predicate_fields(kind, body, **changes)
    if "verdict" not in fields:
        told = conclude(kind, fields["body"])
        is_done = fields["exit"] == {"kind": "exited", "code": 0}
        fields["verdict"] = told if is_done else combine([told, Verdict(outcome="FAIL", reasons=("exit",))])
    return build_receipt(kind, fields, [SUBJECT])


@dataclass
class Log:
    """A log in memory: what a store would hold."""

    log: str = LOG
    signer: Ed25519Signer | None = None
    entries: list[Entry] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)
    samples: dict[str, bytes] = field(default_factory=dict)
    head: Head = field(init=False)

    def __post_init__(self) -> None:
        self.head = Head(self.log, 0, None)

    def add(self, kind: Kind, body: Any | None = None, **changes: Any) -> str:
        """Append one receipt; returns its id."""
        return self.append(draft(kind, body, **changes))

    def append(self, made: bytes) -> str:
        """Append a draft."""
        receipt = link_draft(read_receipt(made), self.head.next_link())
        self.head = self.head.follow(receipt.id, receipt.predicate.chain)
        self.receipts.append(receipt)
        envelopes = (self.signer.sign(receipt.content),) if self.signer else ()
        self.entries.append(Entry(name=entry_name(receipt), content=receipt.content, envelopes=envelopes))
        return receipt.id

    def sums(self) -> dict[str, str]:
        """What SHA256SUMS would say."""
        listed = {f"receipts/{entry.name}": hashlib.sha256(entry.content).hexdigest() for entry in self.entries}
        return listed | {f"samples/{sha256}": sha256 for sha256 in self.samples}

    def options(self, **changes: Any) -> Options:
        """Everything the store itself gives a verifier."""
        by_id = {receipt.id: receipt.content for receipt in self.receipts}
        options = Options(
            now_utc=NOW, sums=self.sums(), head=self.head, load=by_id.get, sample=self.samples.get
        )  # fmt: skip
        return replace(options, **changes)

    def verify(self, entries: Sequence[Entry] | None = None, **changes: Any) -> LogReport:
        """Verify the log, or other entries in its place."""
        return self.walk(entries, **changes)[0]

    def walk(self, entries: Sequence[Entry] | None = None, **changes: Any) -> tuple[LogReport, list[Verified]]:
        """Verify, and give every readable receipt with its findings."""
        verifier = LogVerifier(self.options(**changes))
        found = [verifier.add(entry) for entry in (self.entries if entries is None else entries)]
        return verifier.finish(), [item for item in found if item is not None]

    def facts(self, entries: Sequence[Entry] | None = None, **changes: Any) -> Facts:
        """What a gate gets, with a high-water mark and a witness as a live site has them."""
        given = {"had_high_water": True, **{k: changes.pop(k) for k in list(changes) if k in Facts.__annotations__}}
        report, verified = self.walk(entries, **changes)
        records: list[Record] = [record(item) for item in verified]
        defaults: dict[str, Any] = {"num_witnesses": report.num_witnesses}
        return Facts(report=report, records=records, now_utc=NOW, **(defaults | given))


def entry_name(receipt: Receipt) -> str:
    """The file name a store gives it."""
    return f"{receipt.predicate.chain.sequence:08d}-{receipt.predicate.kind}-{receipt.id[:12]}.json"


def every_kind() -> Log:
    """One receipt of every kind, in the order of ``Kind``."""
    log = Log()
    for kind in Kind:
        log.add(kind)
    return log


def parent(kind: Kind, sha256: str, role: str = "input") -> Parent:
    """A parent."""
    return Parent(kind=kind, sha256=sha256, role=role)


def raw_sample(name: str, content: bytes) -> Sample:
    """The sample entry of a raw file."""
    return Sample(
        name=name, sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content),
        num_samples=content.count(b"\n"), unit="ns",
    )  # fmt: skip
