"""``coordinator receipts``, ``keys`` and ``admit``: offline, on a store folder. Parse, one call, exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

receipts_app = typer.Typer(no_args_is_help=True, help="Check, list, show, compare and report receipts. Offline.")
keys_app = typer.Typer(no_args_is_help=True, help="Signing keys and who is allowed to sign.")

_STORE = Path("receipts-store")
_SINCE = "Only what follows this head: a receipt id, or a HEAD file kept elsewhere."
_SIGNERS = "Allowed-signers file; without it: INTEGRITY ONLY."
_JOBS = "Processes that read receipts; default: one per core for a long log, else one."
_STATE = "Where the furthest accepted heads are kept; default: ~/.local/state/dspark-coordinator."

StoreArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the receipt store.")]
StoreOption = Annotated[Path, typer.Option("--store", help="Folder of the receipt store.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
SignersOption = Annotated[Path | None, typer.Option("--signers", help=_SIGNERS)]
StateOption = Annotated[Path | None, typer.Option("--state", help=_STATE)]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="Receipt id, or at least 6 digits of it.")]


@receipts_app.command("verify")
def verify(
    store: StoreArgument = _STORE,
    junit: Annotated[Path | None, typer.Option("--junit", help="Also write a JUnit report here.")] = None,
    json: JsonOption = False,
    since: Annotated[str | None, typer.Option("--since", help=_SINCE)] = None,
    signers: SignersOption = None,
    anchor: Annotated[Path | None, typer.Option("--anchor", help="A HEAD file kept elsewhere; must be in it.")] = None,
    state: StateOption = None,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, max=64, help=_JOBS)] = None,
) -> None:
    """Check every byte, link, parent, raw file, verdict and signature. Exits 0, or 60 when anything does not hold."""
    from coordinator.store_verify import run_verify

    code = run_verify(
        store, junit=junit, json=json, since=since, signers=signers, anchor=anchor, state=state, jobs=jobs
    )
    raise typer.Exit(code)


@receipts_app.command("list")
def list_receipts(
    store: StoreArgument = _STORE,
    kind: Annotated[str | None, typer.Option("--kind", help="Only this kind.")] = None,
    verdict: Annotated[str | None, typer.Option("--verdict", help="Only PASS, FAIL or UNKNOWN, as stated.")] = None,
    evidence: Annotated[str | None, typer.Option("--evidence", help="Only MEASURED, REHEARSED or EMULATED.")] = None,
    hold: Annotated[int | None, typer.Option("--hold", help="Only this hold number.")] = None,
    arm: Annotated[str | None, typer.Option("--arm", help="Only this arm.")] = None,
    plan: Annotated[str | None, typer.Option("--plan", help="Only this plan (first digits of its digest).")] = None,
    host: Annotated[str | None, typer.Option("--host", help="Only what ran on this host.")] = None,
    json: JsonOption = False,
) -> None:
    """One line per receipt, oldest first. Shows what receipts state; `verify` says whether it holds."""
    from coordinator.store_list import Filter, list_store

    wanted = Filter(kind=kind, verdict=verdict, evidence=evidence, hold=hold, arm=arm, plan=plan, host=host)
    raise typer.Exit(list_store(store, wanted, json=json))


@receipts_app.command("show")
def show(receipt: IdArgument, store: StoreOption = _STORE, json: JsonOption = False) -> None:
    """What ran, on what, from which source, what it found, and what is not claimed."""
    from coordinator.store_show import show_receipt

    raise typer.Exit(show_receipt(store, receipt, json=json))


@receipts_app.command("diff")
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="Receipt id.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Receipt id.")],
    store: StoreOption = _STORE,
    json: JsonOption = False,
) -> None:
    """What differs between two receipts: source, environment, hosts, numbers."""
    from coordinator.store_diff import diff_receipts

    raise typer.Exit(diff_receipts(store, first, second, json=json))


@receipts_app.command("graph")
def graph(
    store: StoreArgument = _STORE,
    root: Annotated[str | None, typer.Option("--of", help="Only what this receipt builds on.")] = None,
    json: JsonOption = False,
) -> None:
    """Receipts with what they build on, as a tree."""
    from coordinator.store_graph import print_graph

    raise typer.Exit(print_graph(store, root, json=json))


@receipts_app.command("report")
def report(
    out: Annotated[Path, typer.Argument(metavar="OUT.html", help="File to write.")],
    store: StoreOption = _STORE,
    signers: SignersOption = None,
    json: JsonOption = False,
) -> None:
    """Verify the store and write one self-contained HTML page about it."""
    from coordinator.report import write_report

    raise typer.Exit(write_report(store, out, signers=signers, json=json))


@receipts_app.command("merge")
def merge(
    other: Annotated[Path, typer.Argument(metavar="OTHER", help="Folder of the store to take in; it is left alone.")],
    store: StoreOption = _STORE,
    signers: SignersOption = None,
    key: Annotated[Path | None, typer.Option("--key", help="Sign the linking receipt with this key.")] = None,
    json: JsonOption = False,
) -> None:
    """Keep another store's log, byte for byte, below this one, and link it by a receipt. Exits 0, or 60."""
    from coordinator.store_merge import merge_command

    raise typer.Exit(merge_command(store, other, signers=signers, key=key, json=json))


@receipts_app.command("countersign")
def countersign(
    receipt: IdArgument,
    key: Annotated[Path, typer.Option("--key", help="PEM private key (Ed25519).")],
    store: StoreOption = _STORE,
    json: JsonOption = False,
) -> None:
    """Add your signature beside a receipt that is in the store already."""
    from coordinator.keys import countersign_receipt

    raise typer.Exit(countersign_receipt(store, receipt, key, json=json))


@keys_app.command("new")
def keys_new(
    name: Annotated[str, typer.Argument(help="Who signs with it.")],
    out: Annotated[Path, typer.Option("--out", help="Where the private key goes; must not exist.")],
    role: Annotated[str, typer.Option("--role", help="operator, auditor or ci.")] = "operator",
    json: JsonOption = False,
) -> None:
    """Make an Ed25519 key (mode 0600) and print its entry for an allowed-signers file."""
    from coordinator.keys import new_key

    raise typer.Exit(new_key(name, role, out, json=json))


@keys_app.command("list")
def keys_list(
    signers: Annotated[Path, typer.Option("--signers", help="Allowed-signers file.")], json: JsonOption = False
) -> None:
    """Who may sign, in which role and which part of which log."""
    from coordinator.keys import list_keys

    raise typer.Exit(list_keys(signers, json=json))


def admit(
    policy: Annotated[str, typer.Argument(metavar="POLICY", help="A shipped policy's name, or a path to one.")],
    store: StoreOption = _STORE,
    site: Annotated[
        Path | None, typer.Option("--site", help="Site file: its pinned policies and its signers count.")
    ] = None,
    stage: Annotated[str, typer.Option("--stage", help="Which stage of the policy.")] = "final",
    plan: Annotated[str | None, typer.Option("--plan", help="Plan digest; default: the newest anchor's.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print every rule, not only those that failed.")] = False,
    signers: SignersOption = None,
    key: Annotated[Path | None, typer.Option("--key", help="Sign the admission receipt with this key.")] = None,
    anchor: Annotated[Path | None, typer.Option("--anchor", help="A HEAD file kept elsewhere; must be in it.")] = None,
    now: Annotated[str | None, typer.Option("--now", help="Evaluate at this time; never admits.")] = None,
    state: StateOption = None,
    json: JsonOption = False,
) -> None:
    """Evaluate a gate over a store and append the admission receipt. Exits 0, 10 refused, 60 store not whole."""
    from coordinator.gate_admission import AdmitRequest, run_admit

    request = AdmitRequest(
        policy=policy,
        store=store,
        stage=stage,
        plan=plan,
        signers=signers,
        key=key,
        anchor=anchor,
        now=now,
        state=state,
    )
    if site is not None:
        from coordinator.config import read_site

        request = request.on(read_site(site)[0])
    raise typer.Exit(run_admit(request, explain=explain, json=json))
