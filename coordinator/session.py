"""A host inside a command: connection, guard, staged programs, facts.

``open_sessions`` contacts every host in parallel and stages what will run there; nothing of production is touched.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from coordinator.clock import Clock
from coordinator.errors import CoordinatorError
from coordinator.guard_client import GuardClient, GuardRefusal, Json, as_coordinator_error
from coordinator.host import Host
from coordinator.local import LocalHost
from coordinator.render import Reporter
from coordinator.staging import Staged, require_interpreter, stage_guard, stage_package
from coordinator.staging_models import stage_model
from windows.compiled import CompiledPlan
from windows.site import Host as HostSpec
from windows.site import Site

T = TypeVar("T")


@dataclass
class HostSession:
    """One host of the site, connected.

    Attributes:
        spec: Its entry in the site file.
        host: The connection.
        guard: Client of its guard; carries the claim while we hold it.
        guard_sha256: Digest of the guard's zipapp.
        package: Where ``remote_dspark`` is staged; empty path until `stage_programs`.
        models: Placeholder of a model to its folder on this host, for the models of the plan that belong here.
        facts: What the guard reported at the start.
    """

    spec: HostSpec
    host: Host
    guard: GuardClient
    guard_sha256: str
    package: Staged = field(default_factory=lambda: Staged("", ""))
    models: dict[str, str] = field(default_factory=dict)
    facts: Json = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The site file's name of the host."""
        return self.spec.name


def new_operation_id() -> str:
    """A fresh operation id: 128 random bits."""
    return "op-" + secrets.token_hex(16)


def connect(spec: HostSpec, clock: Clock) -> Host:
    """A connection by the transport that the site file names; nothing is sent yet for SSH."""
    if spec.transport == "local":
        return LocalHost(spec.name, clock)
    # Only a site with SSH hosts pays for paramiko.
    from coordinator.ssh import SshHost, SshTarget

    assert spec.address is not None
    assert spec.user is not None
    assert spec.host_key is not None
    assert spec.identity_file is not None
    target = SshTarget(
        name=spec.name,
        address=spec.address,
        port=spec.port,
        user=spec.user,
        key_type=spec.host_key.type,
        key_base64=spec.host_key.base64,
        identity_file=Path(spec.identity_file),
    )
    return SshHost(target, clock=clock)


def open_session(spec: HostSpec, clock: Clock, *, any_guard: bool = False) -> HostSession:
    """Connect, stage the guard by digest (or take one that is there, see `stage_guard`), ask for the facts."""
    host = connect(spec, clock)
    try:
        staged = stage_guard(host, spec.state_dir, any_version=any_guard)
        guard = GuardClient(
            host,
            python=spec.python,
            archive=staged.path,
            state_dir=spec.state_dir,
            operation_ids=new_operation_id,
            clock=clock,
        )
        session = HostSession(spec, host, guard, staged.sha256)
        session.facts = guard.call("facts")
    except BaseException:
        host.close()
        raise
    return session


@contextmanager
def open_sessions(site: Site, clock: Clock) -> Iterator[list[HostSession]]:
    """Sessions to all hosts of the site, in the site's order; closed at the end."""
    sessions: list[HostSession] = []
    try:
        sessions = in_parallel(site.hosts, lambda spec: open_session(spec, clock))
        yield sessions
    finally:
        for session in sessions:
            session.host.close()


@contextmanager
def open_reachable(site: Site, clock: Clock) -> Iterator[tuple[list[HostSession], dict[str, CoordinatorError]]]:
    """Sessions to the hosts that answer, and why the others do not: a dead host must not keep the living from recovery.

    Raises:
        CoordinatorError: No host answers at all.
    """
    lost: dict[str, CoordinatorError] = {}

    def attempt(spec: HostSpec) -> HostSession | None:
        try:
            return open_session(spec, clock, any_guard=True)
        except GuardRefusal as refusal:
            lost[spec.name] = as_coordinator_error(refusal)
        except CoordinatorError as error:
            lost[spec.name] = error
        return None

    sessions = [session for session in in_parallel(site.hosts, attempt) if session is not None]
    try:
        if not sessions:
            raise max(lost.values(), key=_severity)
        yield sessions, lost
    finally:
        for session in sessions:
            session.host.close()


def stage_programs(
    sessions: Sequence[HostSession], compiled: CompiledPlan, plan_folder: Path, reporter: Reporter, clock: Clock
) -> None:
    """Stage ``remote_dspark`` and the plan's models by digest on all hosts, before any lease.

    With programs in the plan, prove first that the host's interpreter runs them.

    Raises:
        AdmissionRefused: A host's interpreter cannot run what the plan starts, or a model cannot be staged.
        HostUnreachable: A model does not get through.
    """
    plan = compiled.plan
    runs_programs = plan.arms is not None or bool(plan.measurements)

    def one(session: HostSession) -> None:
        spec = session.spec
        session.package = stage_package(session.host, spec.python, spec.work_dir)
        if runs_programs:
            require_interpreter(session.host, spec.python, session.package.path)
        for model in plan.models:
            if model.role in spec.roles:
                session.models[model.placeholder] = stage_model(
                    session.host,
                    spec.python,
                    spec.work_dir,
                    model,
                    plan_folder=plan_folder,
                    reserve_bytes=compiled.site.disk_reserve_bytes,
                    clock=clock,
                    say=lambda text: reporter.step(text, host=spec.name),
                )

    in_parallel(sessions, one)


def in_parallel(items: Sequence[T] | tuple[T, ...], action: Callable[[T], R]) -> list[R]:
    """Run ``action`` for every item at once; raise the first error after all have ended.

    Raises:
        CoordinatorError: A guard refused (translated) or a host failed; the others' outcomes are not lost, each action
            journals its own.
    """
    if len(items) == 1:
        return [_translated(action, items[0])]
    with ThreadPoolExecutor(max_workers=max(len(items), 1)) as pool:
        futures = [pool.submit(_translated, action, item) for item in items]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    if errors:
        raise max(errors, key=_severity)
    return [future.result() for future in futures]


R = TypeVar("R")


def _translated(action: Callable[[T], R], item: T) -> R:
    try:
        return action(item)
    except GuardRefusal as refusal:
        raise as_coordinator_error(refusal) from refusal


def _severity(error: BaseException) -> int:
    return error.exit_code if isinstance(error, CoordinatorError) else 1000
