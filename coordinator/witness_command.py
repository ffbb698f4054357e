"""``coordinator hold witness``: asks every guard which head it keeps, and verifies the store against those.

A store's owner can rewrite the whole of it, receipts of holds included; what the guards keep on their hosts is out of
his reach there (DECISIONS 39). Changes nothing on any host.
"""

from __future__ import annotations

from pathlib import Path

from coordinator.clock import Clock, SystemClock
from coordinator.config import read_site
from coordinator.errors import CoordinatorError
from coordinator.hold_receipts import witness_block
from coordinator.render import Reporter, print_json
from coordinator.session import in_parallel, open_reachable
from coordinator.store import Store
from coordinator.store_verify import StoreVerdict, unreadable
from coordinator.store_walk import Trust, walk
from receipts.bodies import Witness
from receipts.errors import ReceiptError
from windows.exit_codes import ExitCode, combine
from windows.site import Site


def compare_witnesses(site_path: Path, store_path: Path, *, json: bool) -> int:
    """Print what each guard keeps and whether the store still has it.

    Returns:
        0 when every host answered, at least one keeps a head of this log, and the store verifies with it; 60 when the
        store does not or nobody keeps one; 20 to 22 when a host did not answer.
    """
    site, _ = read_site(site_path)
    store, clock = Store(store_path), SystemClock()
    try:
        log = store.head().log
        kept, lost = kept_heads(site, log, clock)
        verdict = StoreVerdict(walk(store, Trust(witnesses=list(kept.values()))))
    except ReceiptError as error:
        return unreadable(error, store_path, json=json)
    holds = verdict.is_whole and bool(kept)
    heads = {host: {"log": log, "count": w.sequence + 1, "head": w.head} for host, w in kept.items()}
    if json:
        missing = {name: error.message for name, error in lost.items()}
        print_json(
            verdict.to_document() | {"result": "PASS" if holds else "FAIL", "kept": heads, "unreachable": missing}
        )
    else:
        rows = [(host, f"{head['count']} receipts, head {head['head']}") for host, head in heads.items()]
        rows += [(spec.name, "keeps no head of this log") for spec in site.hosts if spec.name not in {*kept, *lost}]
        rows += [(name, error.message) for name, error in lost.items()]
        Reporter(clock.utc).table(f"heads of log {log}", ("host", "keeps"), rows)
        Reporter(clock.utc).table(f"receipts of {store_path}", ("what", "found"), verdict.rows())
    code = ExitCode.DONE if holds else ExitCode.RECEIPTS_INVALID
    return int(combine([code, *(error.exit_code for error in lost.values())]))


def kept_heads(site: Site, log: str, clock: Clock) -> tuple[dict[str, Witness], dict[str, CoordinatorError]]:
    """The newest head of one log that each reachable guard keeps, and why the other hosts did not say."""
    question = {"log": log, "head": None, "sequence": None}
    with open_reachable(site, clock) as (sessions, lost):
        said = in_parallel(sessions, lambda session: session.guard.call("witness", question, with_claim=False))
    found = {session.name: witness_block(session.name, answer) for session, answer in zip(sessions, said, strict=True)}
    return {name: witness for name, witness in found.items() if witness is not None}, lost
