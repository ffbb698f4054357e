"""The site file: which hosts there are, what production runs on them, and how to reach and restore it.

Rules: only what the site file names is ever touched; a secret is a path to a file that holds it, never a value; host
keys are pinned by type and key; a device is named by UUID or by a word, never by an index. Not here: what a window
does (``windows.plan``) and anything found out on a host.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from windows.document import AbsolutePath, EnvName, Name, Sha256, Strict, Text, parse_document, shaped
from windows.errors import FieldsError

SITE_SCHEMA: Final = "coordinator/site/v1"

Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[int, Field(ge=0, le=86_400)]
Device = Annotated[
    str, shaped(r"(GPU|MIG)-[0-9A-Fa-f-]{8,}|[a-z][a-z0-9-]{0,31}", "a GPU UUID, or a name such as cpu0", 64)
]
"""A GPU UUID as the driver prints it, or the name of a device that has none, e.g. ``cpu0``."""

UnitName = Annotated[
    str,
    shaped(
        r"[A-Za-z0-9:_.\\@-]{1,200}\.(service|socket|timer|target|path|scope)", "a unit's full name, e.g. a.service"
    ),
]
ContainerName = Annotated[str, shaped(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", "a container's name or id")]

_SECRET_NAME = re.compile(r"(SECRET|TOKEN|PASSW|API_?KEY|PRIVATE_?KEY|CREDENTIAL)(?!IZ)", re.IGNORECASE)
# TOKENIZERS_PARALLELISM and MAX_NUM_BATCHED_TOKENS are settings; HF_TOKEN is not.
_SECRET_NAME_EXCEPTIONS = re.compile(r"TOKENIZER|TOKENS(_|$)", re.IGNORECASE)
_SECRET_OPTION = re.compile(
    r"^--?[a-z0-9-]*(api-?key|auth-?token|access-?token|passw(or)?d|secret)(=|$)", re.IGNORECASE
)


class ServiceKind(StrEnum):
    """How production is run; each kind has its adapter in the guard."""

    PROCESS = "process"
    SYSTEMD_SYSTEM = "systemd-system"
    SYSTEMD_USER = "systemd-user"
    DOCKER = "docker"


class ServiceState(StrEnum):
    """The state the site file expects before a hold opens and that a restore brings back (DECISIONS 24)."""

    RUNNING = "running"
    STOPPED = "stopped"


class Role(StrEnum):
    """What a host serves."""

    TARGET = "target"
    DRAFTER = "drafter"


class HostKey(Strict):
    """The pinned key of a host: type and base64 body as in ``known_hosts``."""

    type: Literal["ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "ssh-rsa"]
    base64: Text

    @model_validator(mode="after")
    def _body_is_of_its_type(self) -> Self:
        try:
            blob = base64.b64decode(self.base64, validate=True)
        except (binascii.Error, ValueError) as cause:
            raise ValueError("expected base64 = the key's body as ssh-keyscan prints it") from cause
        # RFC 4253 6.6: the blob starts with the length-prefixed name of its own type.
        name = self.type.encode()
        if blob[: 4 + len(name)] != len(name).to_bytes(4, "big") + name:
            raise ValueError(f"expected a key body of type {self.type}, and this body says otherwise")
        return self


def require_no_secret_value(env: Mapping[str, str]) -> None:
    """Refuses a variable whose name says that its value is a secret (DECISIONS 19).

    Raises:
        ValueError: Names the variable; the value is not shown.
    """
    for name in env:
        if _SECRET_NAME.search(name) and not _SECRET_NAME_EXCEPTIONS.search(name):
            raise ValueError(f"expected {name} under secret_env, as the path of a file with the value")


def require_no_secret_option(argv: tuple[str, ...]) -> None:
    """Refuses an argument that carries a secret: argv is visible to every user of a host.

    Raises:
        ValueError: Names the option; its value is not shown.
    """
    for argument in argv:
        if _SECRET_OPTION.match(argument):
            option = argument.split("=", 1)[0]
            raise ValueError(f"expected no {option} in argv; hand the value over through secret_env")


class Probe(Strict):
    """A real request that proves a service serves."""

    url: Annotated[str, shaped(r"https?://[^\s@]+", "an http or https URL with no user name in it")]
    """No user information: a password in a URL ends in logs."""
    method: Literal["GET", "POST"] = "GET"
    body: Text = ""
    timeout_s: Annotated[int, Field(ge=1, le=3600)] = 30
    expect_status: Annotated[int, Field(ge=100, le=599)] = 200
    expect_contains: Text = ""


class Service(Strict):
    """One production service, as the guard takes it.

    Attributes:
        name: Unique on its host.
        kind: Which adapter stops and restores it.
        unit: For both systemd kinds.
        container: For docker.
        start: Command of a ``process`` service; the others know theirs.
        secret_env: Variable name to the path, on the host, of a file that holds its value.
        log: Where a ``process`` service's streams go.
        drain_s: Time between the stop signal and insisting.
        stop_s: Bound of the whole stop, proof included.
        start_s: Bound of the start, until the probe passes.
        watch_s: How long "gone" is watched for a ghost restart.
        expected: The state a hold may open on, and the one a restore brings back.
        supervisors: Units or services that would start it again; suspended first, resumed last.
        stop_order: Lower stops earlier; restore goes the other way.
    """

    name: Name
    kind: ServiceKind
    unit: UnitName | None = None
    container: ContainerName | None = None
    start: tuple[Text, ...] = ()
    cwd: AbsolutePath | None = None
    env: dict[EnvName, Text] = Field(default_factory=dict)
    secret_env: dict[EnvName, AbsolutePath] = Field(default_factory=dict)
    log: AbsolutePath | None = None
    stop_signal: Literal["SIGTERM", "SIGINT", "SIGQUIT"] = "SIGTERM"
    drain_s: Seconds = 30
    stop_s: Annotated[int, Field(ge=1, le=3600)] = 60
    start_s: Annotated[int, Field(ge=1, le=3600)] = 600
    ports: tuple[Port, ...] = ()
    watch_s: Seconds = 5
    expected: ServiceState = ServiceState.RUNNING
    supervisors: tuple[Annotated[str, shaped(r"[A-Za-z0-9:_.\\@-]{1,200}", "the name of a unit or service")], ...] = ()
    stop_order: Annotated[int, Field(ge=0, le=1000)] = 0
    probe: Probe | None = None

    @field_validator("env")
    @classmethod
    def _env_without_secrets(cls, env: dict[str, str]) -> dict[str, str]:
        require_no_secret_value(env)
        return env

    @field_validator("start")
    @classmethod
    def _start_without_secrets(cls, start: tuple[str, ...]) -> tuple[str, ...]:
        require_no_secret_option(start)
        return start

    @model_validator(mode="after")
    def _fields_fit_the_kind(self) -> Self:
        wanted = {
            ServiceKind.PROCESS: "start",
            ServiceKind.SYSTEMD_SYSTEM: "unit",
            ServiceKind.SYSTEMD_USER: "unit",
            ServiceKind.DOCKER: "container",
        }[self.kind]
        for field in ("start", "unit", "container"):
            given = bool(getattr(self, field))
            if given != (field == wanted):
                verb = "no" if given else "a"
                expectation = f"{verb} field {field!r} for kind {self.kind.value!r} (it takes {wanted!r})"
                raise FieldsError(("kind", field), expectation)
        if self.start and not self.start[0].startswith("/"):
            raise ValueError("expected start[0] to be an absolute path: a host's PATH is not part of the record")
        if self.expected is ServiceState.RUNNING and self.probe is None:
            proven = "a service expected to run is restored only when a request proves it"
            raise FieldsError(("expected", "probe"), f"a probe: {proven}")
        if self.stop_s < self.drain_s:
            expectation = f"stop_s >= drain_s ({self.drain_s}), because the drain is part of the stop"
            raise FieldsError(("stop_s", "drain_s"), expectation)
        return self

    def to_guard(self) -> dict[str, Any]:
        """The JSON object the guard takes: every field, absent ones as None; signals without their ``SIG``."""
        return {**self.model_dump(mode="json"), "stop_signal": self.stop_signal.removeprefix("SIG")}


class Host(Strict):
    """One machine.

    Attributes:
        address: Name or address for SSH; absent for the local transport.
        python: Interpreter for the guard and for the programs, absolute.
        state_dir: The guard's state: local disk, owned by the user.
        work_dir: Where the package, the models and the outputs are staged.
        devices: What a hold locks, by UUID or by name.
    """

    name: Name
    transport: Literal["local", "ssh"]
    address: Annotated[str, shaped(r"[A-Za-z0-9][A-Za-z0-9.:_-]{0,252}", "a host name or address")] | None = None
    port: Port = 22
    user: Annotated[str, shaped(r"[a-z_][a-z0-9_-]{0,31}", "a user name")] | None = None
    host_key: HostKey | None = None
    identity_file: AbsolutePath | None = None
    python: AbsolutePath
    state_dir: AbsolutePath
    work_dir: AbsolutePath
    roles: Annotated[tuple[Role, ...], Field(min_length=1)]
    devices: Annotated[tuple[Device, ...], Field(min_length=1)]
    services: tuple[Service, ...] = ()

    @model_validator(mode="after")
    def _transport_is_complete(self) -> Self:
        for field in ("address", "user", "host_key", "identity_file"):
            given = getattr(self, field) is not None
            if given and self.transport == "local":
                raise FieldsError(("transport", field), f"no {field!r} for transport 'local'")
            if not given and self.transport == "ssh":
                reason = "keys are pinned and no agent is asked"
                raise FieldsError(("transport", field), f"a {field!r} for transport 'ssh': {reason}")
        return self

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        require_unique([service.name for service in self.services], "service names")
        require_unique([str(port) for service in self.services for port in service.ports], "service ports")
        require_unique(self.devices, "devices")
        require_unique([role.value for role in self.roles], "roles")
        return self


class Site(Strict):
    """The whole site file.

    Attributes:
        signers: Path of the allowed-signers file, or None where receipts are unsigned (rehearsal).
        policy_pins: Policy name to the sha256 that ``admit`` insists on.
        notify: Command of the host for "dead-man fired" and DEGRADED; empty for none.
        before_stop: Drain and alert-silence commands, run on the control side before the first stop.
        after_restore: Their counterparts, run after the proof.
        hook_s: Bound of each such command.
        clock_offset_limit_ms: Largest tolerated offset between a host's clock and ours.
        memory_tolerance_bytes: How far memory may stay below its baseline after production stopped.
        disk_reserve_bytes: Free space a host must have beyond what the guard preallocates.
    """

    schema_id: Annotated[Literal["coordinator/site/v1"], Field(alias="schema")]
    name: Name
    hosts: Annotated[tuple[Host, ...], Field(min_length=1, max_length=64)]
    signers: AbsolutePath | None = None
    policy_pins: dict[Name, Sha256] = Field(default_factory=dict)
    notify: tuple[Text, ...] = ()
    before_stop: tuple[tuple[Text, ...], ...] = ()
    after_restore: tuple[tuple[Text, ...], ...] = ()
    hook_s: Annotated[int, Field(ge=1, le=600)] = 30
    clock_offset_limit_ms: Annotated[int, Field(ge=1, le=60_000)] = 1000
    memory_tolerance_bytes: Annotated[int, Field(ge=0)] = 1 << 30
    disk_reserve_bytes: Annotated[int, Field(ge=0)] = 1 << 28

    @field_validator("notify")
    @classmethod
    def _notify_without_secrets(cls, argv: tuple[str, ...]) -> tuple[str, ...]:
        require_no_secret_option(argv)
        return argv

    @field_validator("before_stop", "after_restore")
    @classmethod
    def _hooks_are_commands(cls, hooks: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
        for argv in hooks:
            if not argv:
                raise ValueError("expected every command to have at least one word")
            require_no_secret_option(argv)
        return hooks

    @model_validator(mode="after")
    def _hosts_are_distinct(self) -> Self:
        require_unique([host.name for host in self.hosts], "host names")
        # One machine under two names would take its own lease twice.
        require_unique(
            [f"{host.transport} {host.address} {host.port} {host.state_dir}" for host in self.hosts],
            "host addresses (transport, address, port, state_dir)",
        )
        require_unique(
            [device for host in self.hosts for device in host.devices if device.startswith(("GPU-", "MIG-"))],
            "GPU UUIDs",
        )
        return self

    def host(self, name: str) -> Host:
        """The host of that name.

        Raises:
            KeyError: No such host.
        """
        for host in self.hosts:
            if host.name == name:
                return host
        raise KeyError(name)

    def to_document(self) -> dict[str, Any]:
        """The whole file as plain values, defaults filled in; its canonical bytes give the site digest."""
        return self.model_dump(mode="json", by_alias=True)


def require_unique(names: list[str] | tuple[str, ...], what: str) -> None:
    """Refuses a repeated name.

    Raises:
        ValueError: Names the first repeated one.
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"expected distinct {what}, found {name!r} twice")
        seen.add(name)


def parse_site(document: Mapping[str, Any], what: str = "site file") -> Site:
    """Parses a site document, e.g. what ``tomllib`` returned.

    Raises:
        DocumentError: Names every refused field.
    """
    return parse_document(Site, document, what)
