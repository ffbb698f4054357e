"""The report's sections: from verified receipts to tables and drawings. Pure: nothing here opens a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from coordinator.report_html import digest, figure, paragraph, section, table, text, verdict
from coordinator.report_plots import Interval, Span, distributions, forest, timelines
from receipts import bodies
from receipts.errors import ReceiptError
from receipts.findings import LogReport, Verified
from receipts.raw import parse_samples

_CLOCK_WORDS = ("clock", "mhz", "temp", "throttle", "power")


@dataclass(frozen=True)
class Facts:
    """What the report is about.

    Attributes:
        report: The verification of the whole log.
        verified: Every readable receipt with its findings and its effective verdict.
        sample: Bytes of a raw file by digest.
    """

    report: LogReport
    verified: Sequence[Verified]
    sample: Callable[[str], bytes | None]

    def of(self, body: type) -> Iterator[Verified]:
        """Receipts with this kind of body."""
        return (item for item in self.verified if isinstance(item.receipt.predicate.body, body))


def summary(facts: Facts, store: str, written_utc: str) -> str:
    """Whether it holds, who vouches for it, and what was found."""
    report = facts.report
    word = report.outcome.value
    who = (
        "INTEGRITY ONLY: nobody was named who may sign; this says that nothing was changed, not who wrote it."
        if report.is_integrity_only
        else f"{report.num_signed} of {report.num_receipts} receipts carry a signature of an allowed signer."
    )
    head = report.head
    rows = [
        (text("store"), text(store)),
        (text("log"), digest(head.log if head else "none")),
        (text("head"), digest(head.head if head else "none")),
        (text("receipts"), text(report.num_receipts)),
        (text("heads kept by guards and others"), text(f"{report.num_witnesses} compared")),
        (text("page written"), text(written_utc)),
    ]
    found = [(verdict(f.outcome.value), text(f.code.value), text(f.where), text(f.message)) for f in report.findings]
    parts = [
        f"<p>Verification: {verdict(word)}</p>",
        paragraph(who),
        table("what this page is about", ("what", "value"), rows),
    ]
    if found:
        parts.append(table("findings", ("outcome", "code", "where", "message"), found))
    return section("summary", "Does it hold?", *parts)


def comparisons(facts: Facts) -> str:
    """Paired deltas with intervals, per metric."""
    parts = []
    for item in facts.of(bodies.ComparisonBody):
        body: bodies.ComparisonBody = item.receipt.predicate.body
        parts.append(
            f"<h3>{text(body.order)}: {verdict(body.outcome)} ({text(item.receipt.predicate.evidence.value)})</h3>"
        )
        parts += [paragraph(reason) for reason in body.reasons]
        parts.append(figure(forest([_interval(metric) for metric in body.metrics]), _FOREST))
        rows = [
            (text(m.metric), text(m.unit), text(m.better), text(_pairs(m)),
             text(m.ratio or "none"), text(f"{m.interval_low} to {m.interval_high}" if m.interval_low else "none"),
             text(f"{m.margin_ppm / 1e4:g} %"), verdict(m.outcome))
            for m in body.metrics
        ]  # fmt: skip
        columns = ("metric", "unit", "better", "pairs, ON against OFF", "ratio", "interval", "margin", "outcome")
        parts.append(table("metrics", columns, rows))
        excluded = [(text(e.arm), text(e.block), text(e.reason)) for e in body.excluded]
        parts.append(table("excluded blocks", ("arm", "block", "reason"), excluded))
        parts.append(f"<p>receipt {digest(item.receipt.id)}</p>")
    return section("comparison", "Comparison", *(parts or [paragraph("There is no comparison in this store.")]))


def _pairs(metric: bodies.MetricComparison) -> str:
    return ", ".join(f"{pair.pair} {pair.delta_ppm / 1e4:+.2f} %" for pair in metric.paired)


_FOREST = (
    "Circles: each pair. Square and line: ratio over all pairs with its interval; an arrow: it leaves the drawing. "
    "Grey band: the margin that was declared before. Dashed: no change."
)


def _interval(metric: bodies.MetricComparison) -> Interval:
    def ppm(value: str | None) -> int | None:
        return None if value is None else round((float(value) - 1) * 1e6)

    return Interval(
        label=f"{metric.metric}: {metric.outcome}"[:60],
        points_ppm=[pair.delta_ppm for pair in metric.paired],
        ratio_ppm=ppm(metric.ratio),
        low_ppm=ppm(metric.interval_low),
        high_ppm=ppm(metric.interval_high),
        margin_ppm=metric.margin_ppm,
    )


def holds(facts: Facts) -> str:
    """When each hold was in which state, and whether production came back."""
    drawn, rows = [], []
    for item in facts.of(bodies.HoldBody):
        body: bodies.HoldBody = item.receipt.predicate.body
        changes = [change for change in body.timeline if change.host is None]
        spans = [Span(a.state, a.monotonic_ns, b.monotonic_ns) for a, b in pairwise(changes)]
        name = f"hold {item.receipt.predicate.position.hold_number} {body.hold_id}"
        if spans:
            drawn.append((name[:26], spans))
        for host in body.hosts:
            proven = sum(row.ok is True for row in host.restore_proof)
            rows.append(
                (text(body.hold_id), text(host.host), text(host.epoch), verdict(body.final_state),
                 text(f"{proven} of {len(host.restore_proof)} rows"), text("yes" if host.debt else "none"),
                 text(host.restored_by), verdict(item.verdict.outcome.value))
            )  # fmt: skip
    parts = [figure(timelines(drawn), "States of each hold since it was opened, from its receipt.")] if drawn else []
    columns = ("hold", "host", "epoch", "ended", "restore proven", "debt", "restored by", "verdict")
    return section("holds", "HOLD windows", *parts, table("hosts of the holds", columns, rows))


def arms(facts: Facts) -> str:
    """Every arm with its numbers, and the distribution of every raw file of plain integers."""
    listed = list(facts.of(bodies.ArmBody))
    parts = []
    names = sorted({s.name for item in listed for s in item.receipt.predicate.samples})
    for name in names:
        rows = [(label, values) for item in listed for label, values in _column(facts, item, name)]
        if rows:
            parts.append(f"<h3>{text(name)}</h3>")
            parts.append(figure(distributions(rows, "ms"), "Whiskers p5 to p95, box p25 to p75, bar: median."))
    keys = sorted({key for item in listed for key in item.receipt.predicate.body.values})
    columns = ("value", *(_label(item) for item in listed))
    table_rows = [
        (text(key), *(text(item.receipt.predicate.body.values.get(key, "absent")) for item in listed)) for key in keys
    ]
    parts.append(table("numbers of the arms, in the unit that the name ends in", columns, table_rows))
    gates = [
        (text(_label(item)), text(row.field), text(row.expected), text(row.found), verdict(_word(row.ok)))
        for item in listed for row in item.receipt.predicate.body.gates if row.ok is not True
    ]  # fmt: skip
    parts.append(table("gates of arms that did not hold", ("arm", "gate", "expected", "found", "holds"), gates))
    return section("arms", "Arms", *parts)


def _column(facts: Facts, item: Verified, name: str) -> Iterator[tuple[str, list[int]]]:
    sample = next((s for s in item.receipt.predicate.samples if s.name == name and s.unit == "ns"), None)
    content = facts.sample(sample.sha256) if sample is not None else None
    if content is None:
        return
    try:
        values = parse_samples(content).get("", [])
    except ReceiptError:
        return
    if values:
        yield f"{_label(item)} (n = {len(values)})", [round(value / 1000) / 1000 for value in values]  # type: ignore[misc]


def _label(item: Verified) -> str:
    predicate = item.receipt.predicate
    return f"{predicate.position.arm} {predicate.body.mode}"


def clocks(facts: Facts) -> str:
    """What receipts say about GPU clocks, power and temperatures."""
    rows = []
    for item in facts.verified:
        predicate = item.receipt.predicate
        where = f"{predicate.kind} {predicate.position.arm or ''}".strip()
        for host in predicate.hosts:
            for gpu in host.gpus:
                rows += [
                    (text(where), text(f"{host.name} {gpu.uuid}"), text(name), text(f"{mhz} MHz"))
                    for name, mhz in gpu.clocks_mhz.items()
                ]
        values = getattr(predicate.body, "values", None) or {}
        rows += [
            (text(where), text(""), text(name), text(value))
            for name, value in values.items() if any(word in name.lower() for word in _CLOCK_WORDS)
        ]  # fmt: skip
    note = [] if rows else [paragraph("No receipt names a GPU clock or temperature: nothing here ran on a GPU.")]
    columns = ("receipt", "device", "reading", "value")
    return section("clocks", "Clocks and temperatures", *note, *([table("readings", columns, rows)] if rows else []))


def gates(facts: Facts) -> str:
    """Every admission with its whole table, what did not hold first."""
    parts = []
    for item in facts.of(bodies.AdmissionBody):
        body: bodies.AdmissionBody = item.receipt.predicate.body
        parts.append(f"<h3>policy {text(body.policy)}: {verdict(body.result)}</h3>")
        parts.append(f"<p>policy file {digest(body.policy_sha256)}, evaluated {text(body.now_utc)}, "
                     f"over the log up to {digest(body.head)}</p>")  # fmt: skip
        rows = [
            (text(row.field), text(row.expected), text(row.found), verdict(_word(row.ok)))
            for row in sorted(body.rows, key=lambda row: row.ok is True)
        ]
        parts.append(table(f"{len(rows)} rules", ("rule", "expected", "found", "holds"), rows))
    return section("gates", "Gates", *(parts or [paragraph("No gate was evaluated in this store.")]))


def receipts(facts: Facts) -> str:
    """All receipts with whole digests."""
    rows = []
    for item in facts.verified:
        predicate = item.receipt.predicate
        position = predicate.position
        place = " ".join(str(part) for part in (position.window, position.arm) if part)
        rows.append(
            (text(predicate.chain.sequence), text(predicate.kind), text(place), verdict(item.verdict.outcome.value),
             text(predicate.evidence.value), text(predicate.ended_utc), digest(item.receipt.id))
        )  # fmt: skip
    columns = ("no", "kind", "where", "verdict", "evidence", "ended", "sha256")
    note = "A verdict here is the recomputed one. Each digest is what sha256sum prints for the file."
    return section("receipts", "Receipts", paragraph(note, "note"), table("all receipts, oldest first", columns, rows))


def limits(facts: Facts) -> str:
    """What no receipt of this store claims."""
    said: dict[str, int] = {}
    for item in facts.verified:
        for claim in item.receipt.predicate.not_claimed:
            said[claim] = said.get(claim, 0) + 1
    rows = [(text(claim), text(count)) for claim, count in sorted(said.items())]
    note = "No receipt attests a host: its root user can lie about it. What the receipts themselves do not claim:"
    return section("limits", "Not claimed", paragraph(note), table("not claimed", ("what", "receipts"), rows))


def _word(ok: bool | None) -> str:
    return "not evaluated" if ok is None else "yes" if ok else "NO"
