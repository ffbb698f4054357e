"""The command line: parse, one call, render, exit code. The only place with a broad ``except``.

Nothing heavy is imported here or in the sub-apps at module level: ``--help`` has to appear at once.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator import __version__, cli_hold, cli_receipts

app = typer.Typer(
    name="coordinator",
    help="Bounded HOLD windows on GPU hosts: qualify, measure, restore exactly, leave receipts that anyone can check.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: the boxes load rich, markdown and pygments, 0.15 s
    add_completion=False,
)
app.add_typer(cli_hold.hold_app, name="hold")
app.add_typer(cli_hold.lease_app, name="lease")
app.add_typer(cli_receipts.receipts_app, name="receipts")
app.add_typer(cli_receipts.keys_app, name="keys")
app.command("admit")(cli_receipts.admit)

SiteOption = Annotated[Path, typer.Option("--site", help="Site file: hosts, pinned keys, production services.")]
PlanOption = Annotated[Path, typer.Option("--plan", help="Plan file: arms, bounds, margin, load.")]
StoreOption = Annotated[Path, typer.Option("--store", help="Folder of the receipt store.")]
KeyOption = Annotated[Path | None, typer.Option("--key", help="Sign every receipt with this key as it is written.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"coordinator {__version__}")
        raise typer.Exit


@app.command()
def rehearse(
    directory: Annotated[Path, typer.Option("--dir", help="Where the rehearsal lives.")] = Path("build/rehearsal"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer requests: every step, little statistics.")] = False,
    state: Annotated[
        Path | None, typer.Option("--state", help="The guard's state folder; one per user if not given.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """The whole campaign on this machine, with real processes and locks; receipts say REHEARSED or EMULATED."""
    from coordinator.rehearse import run_rehearsal

    _finish(run_rehearsal(directory.absolute(), quick=quick, json=json, state_dir=state.absolute() if state else None))


@app.command()
def campaign(
    site: SiteOption = Path("site.toml"),
    plan: PlanOption = Path("plan.toml"),
    store: StoreOption = Path("receipts-store"),
    policy: Annotated[
        str, typer.Option("--policy", help="A shipped policy's name or a path; default: live, or first-hold for one.")
    ] = "",
    key: KeyOption = None,
    signers: Annotated[
        Path | None, typer.Option("--signers", help="Allowed-signers file; default: the site file's.")
    ] = None,
    anchor: Annotated[Path | None, typer.Option("--anchor", help="A HEAD file kept elsewhere; must be in it.")] = None,
    state: Annotated[
        Path | None, typer.Option("--state", help="Where accepted heads are kept; default: one per user.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """HOLD 1 (pair-qualify, A1, B1), HOLD 2 (pair-qualify, B2, A2), comparison, admission, on the site's hosts."""
    from coordinator.campaign_command import run_campaign_command
    from coordinator.gate_admission import AdmitRequest

    request = AdmitRequest(policy=policy, store=store, key=key, signers=signers, anchor=anchor, state=state)
    _finish(run_campaign_command(site, plan, request, json=json))


@app.command()
def plan(
    site: SiteOption = Path("site.toml"),
    plan_file: PlanOption = Path("plan.toml"),
    json: JsonOption = False,
) -> None:
    """Compile and show a plan offline: steps, bounds, budget, evidence needed, digest. Contacts no host."""
    from coordinator.show_plan import show_plan

    _finish(show_plan(site, plan_file, json=json))


@app.command()
def doctor(
    site: SiteOption = Path("site.toml"),
    store: StoreOption = Path("receipts-store"),
    plan_file: Annotated[Path | None, typer.Option("--plan", help="Look for the models of this plan too.")] = None,
    key: KeyOption = None,
    json: JsonOption = False,
) -> None:
    """Read-only preflight of every host, in parallel: a table and a host-facts receipt."""
    from coordinator.doctor import run_doctor

    _finish(run_doctor(site, store, plan_path=plan_file, key=key, json=json))


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(help="Where to write site.toml and plan.toml.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite without asking.")] = False,
) -> None:
    """Write a commented site.toml and plan.toml for this machine; asks before it overwrites."""
    from coordinator.init_files import write_examples

    _finish(write_examples(directory, force=force, confirm=lambda text: typer.confirm(text, err=True)))


def _finish(code: int) -> None:
    raise typer.Exit(int(code))


def run(argv: Sequence[str], application: Callable[..., Any] = app) -> int:
    """Run the application and return the exit code; every refusal is printed, none as a traceback.

    Args:
        argv: Arguments without the program's name.
        application: The Typer app, replaceable in tests.
    """
    if list(argv) == ["--version"]:
        # Typer would load pydantic to parse this one word (DECISIONS 18).
        typer.echo(f"coordinator {__version__}")
        return 0
    try:
        result = application(args=list(argv), prog_name="coordinator", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except KeyboardInterrupt:
        return 130
    except typer.Abort:
        # A question that nobody answers (end of input, Ctrl-C at the prompt): nothing was done.
        typer.echo("not answered; nothing was changed", err=True)
        return 2
    except BrokenPipeError:
        return 0
    except Exception as error:  # noqa: BLE001 - the one edge where everything becomes an exit code
        return _refused(error)


def _refused(error: Exception) -> int:
    from coordinator.errors import CoordinatorError
    from coordinator.render import Reporter
    from receipts.errors import Code, ReceiptError

    lines: list[str]
    if isinstance(error, CoordinatorError):
        lines, code = error.lines(), int(error.exit_code)
    elif hasattr(error, "exit_code") and hasattr(error, "format_message"):
        lines, code = [str(error.format_message())], int(error.exit_code)
    elif isinstance(error, ReceiptError):
        # A store that cannot be written is a wrong folder or a full disk; one that cannot be read is not evidence.
        lines, code = [str(error)], 2 if error.code is Code.NOT_WRITTEN else 60
    else:
        # Never with local variables: they may hold what must not be printed.
        lines = ["internal error, please report it:", *traceback.format_exception(error)[-3:]]
        code = 1
    Reporter(lambda: "").error(line.rstrip() for line in lines)
    return code
