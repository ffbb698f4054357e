"""Read-only preflight of every host: what the guard reports, judged line by line, and how the hosts compare."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from coordinator.clock import Clock, SystemClock
from coordinator.config import read_plan, read_site
from coordinator.evidence import Clockings, EvidenceWriter
from coordinator.identity import source_digests
from coordinator.keys import signer_from
from coordinator.render import Reporter, print_json
from coordinator.session import HostSession, in_parallel, open_sessions
from coordinator.staging_models import look_for_model
from coordinator.store import Store
from receipts import bodies
from receipts.fields import Kind, Row
from windows.exit_codes import ExitCode
from windows.models import Model
from windows.site import Site

_PARITY = ("kernel", "os", "python", "systemd")
_GPU_PARITY = ("name", "driver", "vbios", "ecc", "mig", "compute_mode", "persistence")


def run_doctor(
    site_path: Path,
    store_path: Path,
    *,
    json: bool,
    plan_path: Path | None = None,
    key: Path | None = None,
    clock: Clock | None = None,
) -> int:
    """Check every host, print the table, write one host-facts receipt; with a plan, look for its models too."""
    clock = clock or SystemClock()
    models = read_plan(plan_path)[0].models if plan_path is not None else ()
    site, _ = read_site(site_path)
    reporter = Reporter(clock.utc, quiet=json)
    writer = EvidenceWriter(
        Store(store_path),
        source_digests()["coordinator"],
        clock,
        site.name,
        site.name == "rehearsal",
        signer=signer_from(key),
    )
    started = writer.now()
    with open_sessions(site, clock) as sessions:
        checks = {session.name: host_checks(site, session, clock) for session in sessions}
        found = in_parallel(sessions, lambda session: model_checks(site, session, models))
        for session, rows in zip(sessions, found, strict=True):
            checks[session.name] += rows
        parity = parity_rows(sessions)
        receipt = write_facts_receipt(writer, sessions, checks, parity, started)
    failed = [check for rows in checks.values() for check in rows if check.ok is not True]
    if json:
        document = {name: [check.model_dump() for check in rows] for name, rows in checks.items()}
        print_json({"receipt": receipt, "checks": document, "parity": [row.model_dump() for row in parity]})
    else:
        table = [
            (
                name,
                check.name,
                check.expected,
                check.found,
                mark(check.ok),
                HINTS.get(check.name, HINTS.get(check.name.split()[0], "")) if check.ok is not True else "",
            )
            for name, rows in checks.items()
            for check in rows
        ]
        reporter.table("preflight", ("host", "check", "expected", "found", "ok", "hint"), table)
        if len(sessions) > 1:
            reporter.table(
                "parity",
                ("field", "expected", "found", "ok"),
                [(r.field, r.expected, r.found, mark(r.ok)) for r in parity],
            )
    return int(ExitCode.ADMISSION_REFUSED if failed or any(row.ok is not True for row in parity) else ExitCode.DONE)


HINTS = {
    "hold": "`coordinator hold status`, then `hold recover` when its owner is gone",
    "debt": "`coordinator hold recover`; `hold clear` only after a person looked",
    "device": "correct the UUID in the site file, or find the missing GPU",
    "foreign process": "end it, or ask its owner: a hold never touches what the site file does not name",
    "disk": "free space below the state folder",
    "linger": "loginctl enable-linger for the user: without it the dead-man dies with the session",
    "clock offset": "repair time synchronisation; receipts order events by UTC for people",
    "model": "free space below work_dir: folders of models/ that no plan names can go",
    "shm leftovers": "no process has these files of /dev/shm open or mapped: remove what an ended program left",
    "RemoveIPC": "set RemoveIPC=no in logind.conf, or enable linger",
}


def mark(ok: bool | None) -> str:
    """yes, NO, or unknown."""
    return {True: "yes", False: "NO", None: "unknown"}[ok]


def host_checks(site: Site, session: HostSession, clock: Clock) -> list[bodies.Check]:
    """Every line of the preflight for one host."""
    facts = session.facts
    status = session.guard.call("status")
    hold = status.get("hold")
    rows = [
        _check("hold", "free", f"held by {hold['owner']} until {hold['until_utc']}" if hold else "free", hold is None),
        _check("debt", "none", "in debt" if status["in_debt"] else "none", not status["in_debt"]),
    ]
    uuids = {str(gpu["uuid"]) for gpu in facts.get("gpus", ())}
    for device in session.spec.devices:
        if device.startswith(("GPU-", "MIG-")):
            rows.append(_check("device", device, device if device in uuids else "not present", device in uuids))
    foreign = [
        f"{p['name']} (pid {p['pid']})" for p in facts.get("gpu_processes", ()) if p.get("uuid") in session.spec.devices
    ]
    rows.append(_check("foreign process", "only production", ", ".join(foreign) or "none", None if foreign else True))
    free = int(facts.get("disk_free_bytes") or 0)
    rows.append(
        _check("disk", f"at least {site.disk_reserve_bytes} bytes", f"{free} bytes", free >= site.disk_reserve_bytes)
    )
    needs_linger = facts.get("systemd") == "user"
    rows.append(
        _check(
            "linger",
            "enabled for an ordinary user",
            str(facts.get("linger")),
            bool(facts.get("linger")) or not needs_linger,
        )
    )
    rows.append(
        _check(
            "RemoveIPC",
            "no, or linger",
            str(facts.get("remove_ipc")),
            facts.get("remove_ipc") != "yes" or bool(facts.get("linger")),
        )
    )
    offset_ms = clock_offset_ms(str(facts.get("utc", "")), clock.utc())
    limit = site.clock_offset_limit_ms
    # The reading includes the round trip, so only a large one means anything.
    rows.append(
        _check(
            "clock offset", f"within {limit} ms plus the round trip", f"{offset_ms} ms", abs(offset_ms) <= limit + 5000
        )
    )
    leftovers = [str(item["name"]) for item in facts.get("shm_leftovers", ())]
    rows.append(
        _check("shm leftovers", "none without a user", ", ".join(leftovers[:5]) or "none", None if leftovers else True)
    )
    return rows


def model_checks(site: Site, session: HostSession, models: Sequence[Model]) -> list[bodies.Check]:
    """Which of a plan's models the host has, by digest; what is missing is no fault while there is room for it."""
    rows, needed = [], site.disk_reserve_bytes
    for model in models:
        if model.role in session.spec.roles:
            lacking = look_for_model(session.host, session.spec.python, session.spec.work_dir, model)
            needed += lacking.size_bytes
            there = f"{len(model.files) - len(lacking.files)} of {len(model.files)} files"
            found = f"{there}, {lacking.size_bytes} bytes to send, {lacking.free_bytes} free"
            is_fit = not lacking.files or lacking.free_bytes >= needed
            rows.append(_check(f"model {model.name}", f"{model.sha256}, or room for it", found, is_fit))
    return rows


def clock_offset_ms(theirs: str, ours: str) -> int:
    """Their wall clock minus ours, in milliseconds, round trip included."""
    difference = datetime.fromisoformat(theirs) - datetime.fromisoformat(ours)
    return int(difference.total_seconds() * 1000)


def parity_rows(sessions: Sequence[HostSession]) -> list[Row]:
    """What must be the same on hosts of one site, and is or is not."""
    if len(sessions) < 2:
        return []
    first, rows = sessions[0], []
    for other in sessions[1:]:
        for field in _PARITY:
            rows.append(_parity(f"{other.name}.{field}", first.facts.get(field), other.facts.get(field)))
        for mine, theirs in zip(first.facts.get("gpus", ()), other.facts.get("gpus", ()), strict=False):
            rows += [_parity(f"{other.name}.gpu.{field}", mine.get(field), theirs.get(field)) for field in _GPU_PARITY]
    return rows


def write_facts_receipt(
    writer: EvidenceWriter,
    sessions: Sequence[HostSession],
    checks: dict[str, list[bodies.Check]],
    parity: Sequence[Row],
    started: Clockings,
) -> str:
    """One host-facts receipt for all hosts."""
    flat = tuple(
        check.model_copy(update={"name": f"{name}: {check.name}"}) for name, rows in checks.items() for check in rows
    )
    values = {
        f"{s.name}.{key}": int(s.facts[key])
        for s in sessions
        for key in ("memory_total", "memory_available", "disk_free_bytes")
        if s.facts.get(key)
    }
    return writer.write(
        Kind.HOST_FACTS,
        bodies.HostFactsBody(checks=flat, parity=tuple(parity), values=values),
        started=started,
        scope="what the guards of the site's hosts reported at that time",
        not_claimed=("host attestation: a root user of a host can lie about that host",),
        evidence=writer.procedure_evidence(),
        sessions=sessions,
    )


def _check(name: str, expected: str, found: str, ok: bool | None) -> bodies.Check:
    return bodies.Check(name=name, expected=expected, found=found, ok=ok)


def _parity(field: str, expected: object, found: object) -> Row:
    return Row(field=field, expected=str(expected), found=str(found), ok=expected == found)
