"""``coordinator hold`` and ``coordinator lease``: one window by hand, and who holds what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

hold_app = typer.Typer(
    no_args_is_help=True, help="One HOLD window by hand: open, status, close, recover, abort, clear."
)
lease_app = typer.Typer(no_args_is_help=True, help="Who holds what; break a lease with a reason.")

SiteOption = Annotated[Path, typer.Option("--site", help="Site file: hosts, pinned keys, production services.")]
PlanOption = Annotated[Path, typer.Option("--plan", help="Plan file: arms, bounds, margin, load.")]
StoreOption = Annotated[Path, typer.Option("--store", help="Folder of the receipt store.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
HoldOption = Annotated[str | None, typer.Option("--hold", help="Hold id; the one the hosts name when left out.")]
KeyOption = Annotated[Path | None, typer.Option("--key", help="Sign the receipts of this command with this key.")]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why; it is kept in a receipt.")]

_SITE, _PLAN, _STORE = Path("site.toml"), Path("plan.toml"), Path("receipts-store")


@hold_app.command("open")
def hold_open(
    reason: ReasonOption,
    number: Annotated[int, typer.Option("--number", min=1, help="Which hold of the plan.")] = 1,
    site: SiteOption = _SITE,
    plan: PlanOption = _PLAN,
    store: StoreOption = _STORE,
    key: KeyOption = None,
    json: JsonOption = False,
) -> None:
    """Lease, snapshot, arm the dead-man, stop production; stay until Ctrl-C or the deadline; then put it back."""
    from coordinator import campaign_command
    from coordinator.gate_admission import AdmitRequest

    request = AdmitRequest(policy="", store=store, key=key)
    raise typer.Exit(campaign_command.open_hold(site, plan, request, number=number, reason=reason, json=json))


@hold_app.command("status")
def hold_status(site: SiteOption = _SITE, store: StoreOption = _STORE, json: JsonOption = False) -> None:
    """Who, since when, until when, epoch, heartbeat age, what is stopped, debt, and the next safe command."""
    from coordinator import hold_commands

    raise typer.Exit(hold_commands.show_status(site, store, json=json))


@hold_app.command("witness")
def hold_witness(site: SiteOption = _SITE, store: StoreOption = _STORE, json: JsonOption = False) -> None:
    """Ask every guard which chain head it keeps and verify the store against it. Changes nothing; exits 0 or 60."""
    from coordinator.witness_command import compare_witnesses

    raise typer.Exit(compare_witnesses(site, store, json=json))


@hold_app.command("close")
def hold_close(
    hold: HoldOption = None,
    site: SiteOption = _SITE,
    store: StoreOption = _STORE,
    key: KeyOption = None,
    json: JsonOption = False,
) -> None:
    """Restore to the recorded state, prove it with a real request, release."""
    from coordinator import hold_commands

    raise typer.Exit(
        hold_commands.end_hold(site, store, verb="recover", hold_id=hold, reason="closed by hand", key=key, json=json)
    )


@hold_app.command("recover")
def hold_recover(
    hold: HoldOption = None,
    site: SiteOption = _SITE,
    store: StoreOption = _STORE,
    key: KeyOption = None,
    json: JsonOption = False,
) -> None:
    """Close exactly one hold whose coordinator is gone; works from any machine, with or without its journal."""
    from coordinator import hold_commands

    raise typer.Exit(
        hold_commands.end_hold(site, store, verb="recover", hold_id=hold, reason="recovered", key=key, json=json)
    )


@hold_app.command("abort")
def hold_abort(
    reason: ReasonOption,
    hold: HoldOption = None,
    site: SiteOption = _SITE,
    store: StoreOption = _STORE,
    key: KeyOption = None,
    json: JsonOption = False,
) -> None:
    """End owned runs now, restore, prove, release."""
    from coordinator import hold_commands

    raise typer.Exit(hold_commands.end_hold(site, store, verb="abort", hold_id=hold, reason=reason, key=key, json=json))


@hold_app.command("clear")
def hold_clear(
    reason: ReasonOption,
    hold: HoldOption = None,
    site: SiteOption = _SITE,
    store: StoreOption = _STORE,
    key: KeyOption = None,
    json: JsonOption = False,
) -> None:
    """A person looked: end the restore debt without proof. Starts nothing, leaves a receipt."""
    from coordinator import hold_commands

    raise typer.Exit(hold_commands.end_hold(site, store, verb="clear", hold_id=hold, reason=reason, key=key, json=json))


@lease_app.command("show")
def lease_show(site: SiteOption = _SITE, store: StoreOption = _STORE, json: JsonOption = False) -> None:
    """The lease of every host, as its guard has it."""
    from coordinator import hold_commands

    raise typer.Exit(hold_commands.show_status(site, store, json=json))


@lease_app.command("break")
def lease_break(
    reason: ReasonOption,
    hold: HoldOption = None,
    site: SiteOption = _SITE,
    store: StoreOption = _STORE,
    key: KeyOption = None,
    json: JsonOption = False,
) -> None:
    """Take a lease away from its holder. Restore debt stays: recover, abort or clear must follow."""
    from coordinator import hold_commands

    raise typer.Exit(hold_commands.end_hold(site, store, verb="break", hold_id=hold, reason=reason, key=key, json=json))
