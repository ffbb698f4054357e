"""``hold status``, ``recover``, ``abort``, ``clear``, ``lease show`` and ``break``: what works from any machine.

They need no journal: they ask the guards, which are the authority. Each of them that changes a host leaves a receipt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coordinator.clock import Clock, SystemClock
from coordinator.config import read_site
from coordinator.errors import CoordinatorError, NotRestored, UsageError
from coordinator.evidence import PASS, EvidenceWriter, verdict
from coordinator.guard_client import GuardRefusal, Json, as_coordinator_error
from coordinator.identity import source_digests
from coordinator.keys import signer_from
from coordinator.production import program, seconds
from coordinator.render import Reporter, print_json
from coordinator.session import HostSession, in_parallel, open_reachable
from coordinator.store import Signer, Store
from receipts import bodies
from receipts.errors import ReceiptError
from receipts.fields import Exit, ExitKind, Kind, Outcome, Position, Row
from windows.exit_codes import ExitCode, combine
from windows.site import Site

_WITH_RECEIPT_OF_RECOVERY = ("recover", "abort")


def show_status(site_path: Path, store: Path, *, json: bool, clock: Clock | None = None) -> int:
    """Print what every guard says about its host, and commands that name ``store``; exit code of the worst finding."""
    clock = clock or SystemClock()
    site, _ = read_site(site_path)
    statuses: dict[str, Json] = {}
    with open_reachable(site, clock) as (sessions, lost):
        for session, status in zip(sessions, in_parallel(sessions, lambda s: s.guard.call("status")), strict=True):
            statuses[session.name] = status
    if json:
        unreachable = {name: error.message for name, error in lost.items()}
        print_json({"site": site.name, "hosts": statuses, "unreachable": unreachable})
    else:
        reporter = Reporter(clock.utc)
        rows = status_rows(statuses, site_path, store)
        rows += [(name, "unreachable", error.message) for name, error in lost.items()]
        reporter.table(f"site {site.name}", ("host", "what", "value"), rows)
    owing = any(status["in_debt"] and not status["hold"] for status in statuses.values())
    found = [ExitCode.NOT_RESTORED if owing else ExitCode.DONE, *(error.exit_code for error in lost.values())]
    return int(combine(found))


def status_rows(statuses: dict[str, Json], site: Path, store: Path) -> list[tuple[str, str, str]]:
    """One line a fact, in the order a person asks: who, since, until, what is stopped, what to do."""
    rows: list[tuple[str, str, str]] = []
    for host, status in statuses.items():
        hold = status.get("hold")
        facts: list[tuple[str, Any]] = [("state", status["state"])]
        if hold:
            facts += [
                ("who", f"{hold['owner']} ({hold['reason']})"),
                ("hold", f"{hold['hold_id']} epoch {hold['epoch']}"),
                ("since", hold["since_utc"]),
                ("until", f"{hold['until_utc']} ({seconds(hold['remaining_s'])} left)"),
                (
                    "heartbeat",
                    f"{seconds(hold['heartbeat_age_s'])} ago; the host acts in {seconds(hold['fires_in_s'])}",
                ),
            ]
            if hold.get("dead_man_alive") is False:
                facts.append(("dead-man", "NOT RUNNING: without systemd on the host, nobody restores if we do not"))
        facts.append(("stopped", ", ".join(status.get("stopped", ())) or "nothing"))
        if status["in_debt"]:
            debt = status.get("debt") or {}
            facts.append(("debt", f"since {debt.get('since_utc')}: {', '.join(debt.get('services', ()))}"))
        facts.append(("next", next_command(str(status["state"]), bool(status["in_debt"]), site, store)))
        rows += [(host if index == 0 else "", name, str(value)) for index, (name, value) in enumerate(facts)]
    return rows


def next_command(state: str, in_debt: bool, site: Path, store: Path) -> str:
    """What a person does now: a whole command, as docs/operations.md has it. The guard names its own verbs instead."""
    command, options = f"{program()} hold", f"--site '{site}' --store '{store}'"
    if state == "free":
        return f"{command} recover {options}" if in_debt else "nothing to do"
    if state == "degraded":
        return f"look at the service, then {command} recover {options}"
    if state in ("restored", "void"):
        return f"{command} recover {options}"
    if state == "restoring":
        return "wait, then ask again"
    if in_debt:
        return f"wait for its owner or for the host; or end it now: {command} recover {options}"
    return f"wait; or end it now: {command} abort {options} --reason '...'"


def end_hold(
    site_path: Path,
    store_path: Path,
    *,
    verb: str,
    hold_id: str | None,
    reason: str,
    json: bool,
    key: Path | None = None,
    clock: Clock | None = None,
) -> int:
    """Recover, abort, clear or break exactly one hold on every host of the site that knows it.

    Hosts that do not answer are left to their own dead-man, and the exit code says that they were not asked.
    """
    clock = clock or SystemClock()
    site, _ = read_site(site_path)
    reporter = Reporter(clock.utc, quiet=json)
    writer = _writer(store_path, site, clock, signer_from(key))
    started = writer.now()
    with open_reachable(site, clock) as (sessions, lost):
        statuses = in_parallel(sessions, lambda session: session.guard.call("status"))
        hold = hold_id or the_only_hold(dict(zip((s.name for s in sessions), statuses, strict=True)), verb)
        knowing = [s for s, status in zip(sessions, statuses, strict=True) if hold in known_holds(status)]
        if not knowing:
            raise UsageError(f"no host knows hold {hold}", next_step=f"`coordinator hold status --site {site_path}`")
        reporter.step(
            f"{verb} hold {hold} on {', '.join(s.name for s in knowing)}: restores production to its recorded state"
        )
        outcomes = in_parallel(knowing, lambda session: _end_one(session, verb, hold, reason))
        code = combine([outcome[1] for outcome in outcomes] + [error.exit_code for error in lost.values()])
        documents = {session.name: outcome[0] for session, outcome in zip(knowing, outcomes, strict=True)}
        documents |= {name: _not_asked(error) for name, error in lost.items()}
        try:
            _receipt(writer, verb, hold, reason, knowing, documents, code, started)
        except ReceiptError as error:
            # What became of production is what the person needs now; the same command writes the receipt later.
            reporter.error(
                [
                    f"no receipt was written: {error}",
                    f"  where: {store_path}",
                    "  next: the same command again with --store and a folder that you can write",
                ]
            )
    if json:
        print_json({"hold_id": hold, "verb": verb, "exit_code": int(code), "hosts": documents})
    else:
        rows = [
            (
                name,
                str(doc.get("outcome", doc.get("state", ""))),
                "yes" if doc.get("proven") else "no",
                str(doc.get("by", "")),
            )
            for name, doc in documents.items()
        ]
        reporter.table(f"{verb} {hold}", ("host", "outcome", "production proven", "by"), rows)
    return int(code)


def _end_one(session: HostSession, verb: str, hold: str, reason: str) -> tuple[Json, ExitCode]:
    args: Json = {"hold_id": hold, "epoch": None} if verb == "recover" else {"hold_id": hold, "reason": reason}
    try:
        outcome = session.guard.call(verb, args, with_claim=False, timeout_s=900)
    except GuardRefusal as refusal:
        error = as_coordinator_error(refusal)
        return {
            **refusal.details,
            "proven": False,
            "refused": refusal.code,
            "message": refusal.message,
        }, error.exit_code
    except CoordinatorError as error:
        return _not_asked(error), error.exit_code
    proven = verb in ("clear", "break") or outcome.get("proven") is True
    return outcome, ExitCode.DONE if proven else NotRestored.exit_code


def _not_asked(error: CoordinatorError) -> Json:
    return {"proven": False, "refused": type(error).__name__, "message": error.message}


def known_holds(status: Json) -> set[str]:
    """Ids of the holds that a host can still say something about."""
    found = [status.get("hold") or {}, status.get("debt") or {}, status.get("last_outcome") or {}]
    return {str(entry["hold_id"]) for entry in found if entry.get("hold_id")}


def the_only_hold(statuses: dict[str, Json], verb: str) -> str:
    """The one hold the hosts name: an open one or a debt first, else the last that ended.

    Raises:
        UsageError: None, or several; a person must say which.
    """
    for keys in (("hold", "debt"), ("last_outcome",)):
        found = {str(entry["hold_id"]) for status in statuses.values() for key in keys if (entry := status.get(key))}
        if len(found) == 1:
            return found.pop()
        if found:
            raise UsageError(
                f"several holds could be meant by `{verb}`",
                found=", ".join(sorted(found)),
                next_step="name one with --hold",
            )
    raise UsageError(f"no hold to {verb}: every host is free", next_step="nothing to do")


def _writer(store_path: Path, site: Site, clock: Clock, signer: Signer | None) -> EvidenceWriter:
    is_rehearsal = site.name == "rehearsal"
    source = source_digests()["coordinator"]
    return EvidenceWriter(Store(store_path), source, clock, site.name, is_rehearsal, signer=signer)


def _receipt(
    writer: EvidenceWriter,
    verb: str,
    hold: str,
    reason: str,
    sessions: list[HostSession],
    documents: dict[str, Json],
    code: ExitCode,
    started: Any,
) -> None:
    restored = code is ExitCode.DONE
    result = PASS if restored else verdict(Outcome.FAIL, f"exit {int(code)}: {code.meaning}")
    position = Position(window=None, hold_id=hold)
    shared: dict[str, Any] = {
        "started": started,
        "also": result,
        "evidence": writer.procedure_evidence(),
        "sessions": sessions,
        "position": position,
        "exit": Exit(kind=ExitKind.EXITED, code=int(code)),
    }
    if verb in _WITH_RECEIPT_OF_RECOVERY:
        body = bodies.RecoveryBody(
            hold_id=hold,
            final_state="CLOSED" if restored else "DEGRADED",
            journal_found=False,
            hosts=tuple(_held_host(name, document) for name, document in documents.items()),
            operations=tuple(
                bodies.GuardOperation(
                    operation_id=f"{verb}-{name}",
                    host=name,
                    outcome=str(document.get("outcome") or document.get("refused") or ""),
                )
                for name, document in documents.items()
            ),
            reason=reason,
        )
        writer.write(
            Kind.RECOVERY,
            body,
            scope=f"how hold {hold} ended, as the guards of its hosts recorded it",
            not_claimed=("anything measured in that hold", "that a root user of a host told the truth"),
            **shared,
        )
        return
    writer.write(
        Kind.ATTEMPT,
        bodies.AttemptBody(
            command=verb,
            stage="hold",
            exit_code=int(code),
            error_code="none" if restored else "refused",
            message=f"{verb} {hold}",
            reason=reason,
        ),
        scope=f"that a person ended the claim of hold {hold} by `{verb}`, and why",
        not_claimed=("that production is in its recorded state",),
        **shared,
    )


_RESTORED_BY = {
    "close": "close",
    "recover": "recover",
    "abort": "abort",
    "dead-man": "dead-man",
    "boot": "boot",
    "person": "person",
}


def _held_host(name: str, document: Json) -> bodies.HeldHost:
    rows = tuple(guard_row(row) for row in document.get("rows", ()))
    by = _RESTORED_BY.get(str(document.get("by", "")).split(":")[0], "none")
    return bodies.HeldHost.model_validate(
        {
            "host": name,
            "epoch": int(document.get("epoch") or 0),
            "restore_proof": [row.model_dump() for row in rows],
            "debt": not document.get("proven", False),
            "restored_by": by,
        }
    )


def guard_row(row: Json) -> Row:
    """A guard's row as a receipt's row; ``service.field`` names it."""
    field = f"{row['service']}.{row['field']}"
    return Row(field=field.replace(" ", "_"), expected=str(row["expected"]), found=str(row["found"]), ok=row["ok"])
