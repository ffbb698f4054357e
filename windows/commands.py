"""Programs that a window plan runs: their words, their environment, where, and for how long.

Rules: words are templates (``windows.template``), secrets are paths of files on the host, every program has a bound.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from windows.document import AbsolutePath, EnvName, Name, Strict, Text
from windows.site import Port, Probe, Role, require_no_secret_option, require_no_secret_value

Topology = Literal["solo", "pair"]
Bound = Annotated[int, Field(ge=1, le=86_400)]


class Command(Strict):
    """A program of the plan.

    Attributes:
        role: It runs on every host of this role.
        argv: Words with placeholders (``windows.template``).
        cwd: Template as well; None is the host's work_dir.
        secret_env: Variable name to the path, on the host, of a file with the value.
        memory_limit_bytes: None is the guard's default.
    """

    role: Role
    argv: Annotated[tuple[Text, ...], Field(min_length=1)]
    cwd: Text | None = None
    env: dict[EnvName, Text] = Field(default_factory=dict)
    secret_env: dict[EnvName, AbsolutePath] = Field(default_factory=dict)
    memory_limit_bytes: Annotated[int, Field(ge=1 << 20)] | None = None

    @field_validator("argv")
    @classmethod
    def _argv_without_secrets(cls, argv: tuple[str, ...]) -> tuple[str, ...]:
        require_no_secret_option(argv)
        return argv

    @field_validator("env")
    @classmethod
    def _env_without_secrets(cls, env: dict[str, str]) -> dict[str, str]:
        require_no_secret_value(env)
        return env

    def texts(self) -> tuple[str, ...]:
        """Everything in which a placeholder may stand."""
        return (*self.argv, *self.env.values(), *((self.cwd,) if self.cwd else ()))


class ArmService(Command):
    """A service that an arm boots; both arms boot the same ones, in order.

    Attributes:
        name: Unique in the plan.
        ports: Ports it listens on, on each of its hosts.
        boot_order: Lower boots earlier; teardown goes the other way.
        stop_s: Bound of its stop at teardown.
        probe: Proves that it serves; its url and body are templates.
    """

    name: Name
    ports: tuple[Port, ...] = ()
    boot_order: Annotated[int, Field(ge=0, le=1000)] = 0
    stop_s: Annotated[int, Field(ge=1, le=600)] = 10
    probe: Probe | None = None

    def texts(self) -> tuple[str, ...]:
        """Everything in which a placeholder may stand."""
        return (*super().texts(), *((self.probe.url, self.probe.body) if self.probe else ()))


class Program(Command):
    """A program that runs once, to its end, and writes an observation."""

    timeout_s: Bound


class Measurement(Program):
    """A program of a measurement hold: its observation becomes a receipt of its own.

    Attributes:
        name: Unique in the plan.
        topology: ``solo`` (one device) or ``pair`` (two ranks); what a ``worker-measurement`` receipt says.
    """

    name: Name
    topology: Topology = "solo"
