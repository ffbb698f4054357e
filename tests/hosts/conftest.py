"""Fixtures of the hosts lane: a lab for each test process, its hosts reused between tests."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.estate import OP
from tests.hosts.lab import Lab, why_not
from tests.hosts.part import BOX_VARIABLE, VARIABLE, Ledger, box_s, choose, place, resolve
from tests.hosts.trio import Trio

HERE = Path(__file__).parent
FAILED = pytest.StashKey[bool]()
PART = pytest.StashKey[str]()
BEGUN = pytest.StashKey[float]()
LEDGER = pytest.StashKey[Ledger]()


MATRIX = "test_faults_"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every test here is of the hosts lane; where hosts cannot be booted the lane is reported as not run.

    Of the fault matrix one part is kept, except when cases are named on the command line.
    """
    reason = why_not()
    here = [item for item in items if HERE in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.hosts)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"NOT RUN: booting hosts {reason}"))
    cases = [item for item in here if item.path.name.startswith(MATRIX)]
    config.stash[LEDGER] = Ledger(config.rootpath)
    if cases and not any("::" in argument for argument in config.args):
        _keep_a_part(config, items, cases)


def _keep_a_part(config: pytest.Config, items: list[pytest.Item], cases: list[pytest.Item]) -> None:
    today = datetime.now(UTC).date()
    part = resolve(os.environ.get(VARIABLE), len(cases), today)
    chosen = choose([item.name for item in cases], part, config.stash[LEDGER].passed())
    left_out = {item for item in cases if item.name not in chosen}
    kept = [item for item in cases if item not in left_out]
    # By file first: those of one file need the same hosts.
    kept.sort(key=lambda item: (place(item.path.name, today), place(item.name, today)))
    items[:] = [*kept, *(item for item in items if item not in cases)]
    config.hook.pytest_deselected(items=list(left_out))
    config.stash[BEGUN] = time.monotonic()
    config.stash[PART] = f"fault matrix: part {part}, {len(chosen)} of {len(cases)} cases; {VARIABLE}=all runs them all"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The time box of the part that runs by default."""
    is_boxed = PART in item.config.stash and VARIABLE not in os.environ and item.path.name.startswith(MATRIX)
    if is_boxed and time.monotonic() - item.config.stash[BEGUN] > box_s(os.environ.get(BOX_VARIABLE)):
        pytest.skip("NOT RUN: the time of the part is over")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells the process that prints the summary."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None and PART in session.config.stash:
        output["hosts_part"] = session.config.stash[PART]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes what a worker told."""
    told = getattr(node, "workeroutput", {}).get("hosts_part")
    if told is not None:
        node.config.stash[PART] = told


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says which part ran, and how many of its cases did not."""
    if PART in config.stash:
        late = [one for one in terminalreporter.stats.get("skipped", ()) if "time of the part" in str(one.longrepr)]
        told = f"; {len(late)} of them NOT RUN: its time was over" if late else ""
        terminalreporter.write_line(config.stash[PART] + told)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    with Lab() as booted:
        yield booted


def finish_trio(hosts: Trio, request: pytest.FixtureRequest) -> Iterator[Trio]:
    """Lends hosts to one test."""
    yield hosts
    hosts.tainted |= request.node.stash.get(FAILED, False)
    hosts.close()


@pytest.fixture
def trio(lab: Lab, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Trio]:
    """Three hosts with production on them; a failed test leaves no host behind for the next one."""
    yield from finish_trio(Trio(lab, tmp_path), request)


@pytest.fixture
def bare(lab: Lab, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Trio]:
    """The same without a service manager on the hosts: production is a process of the guard's."""
    yield from finish_trio(Trio(lab, tmp_path, is_bare=True), request)


@pytest.fixture
def users(lab: Lab, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Trio]:
    """The same as an ordinary user's production: units of the user's own manager, and nobody logs in as root."""
    if not Path(OP.python).exists():
        pytest.skip(f"NOT RUN: an ordinary user needs {OP.python}")
    yield from finish_trio(Trio(lab, tmp_path, owner=OP), request)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tells the fixture whether its test failed, and the ledger what became of the case."""
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    if item.path.name.startswith(MATRIX) and not report.skipped and (report.when == "call" or report.failed):
        item.config.stash[LEDGER].add(item.name, report.outcome, report.duration)
    return report
