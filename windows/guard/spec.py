"""What arguments must look like. Pure: values in, checked values or ``BAD_REQUEST`` out.

Unknown keys are refused, never ignored: a misspelt ``drain_s`` must not silently become the default.
"""

from __future__ import annotations

import re

from windows.guard.errors import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Json = dict[str, Any]

KINDS = ("process", "systemd-system", "systemd-user", "docker")
SIGNALS = ("TERM", "INT", "QUIT", "HUP", "USR1", "USR2", "KILL")
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}\Z")
UNIT = re.compile(r"[A-Za-z0-9@:_.\\-]{1,200}\.(service|timer|path|socket|target)\Z")
CONTAINER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}\Z")
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")
DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9:._-]{0,79}\Z")
HOLD_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")

SERVICE_DEFAULTS: dict[str, Any] = {
    "env": {},
    "secret_env": {},
    "stop_signal": "TERM",
    "drain_s": 30,
    "stop_s": 90,
    "start_s": 600,
    "ports": [],
    "watch_s": 2,
    "expected": "running",
    "supervisors": [],
    "stop_order": 0,
    "probe": None,
    "unit": None,
    "container": None,
    "start": None,
    "cwd": None,
    "log": None,
}
PROBE_DEFAULTS: dict[str, Any] = {
    "method": "GET",
    "body": None,
    "timeout_s": 10,
    "expect_status": 200,
    "expect_contains": None,
}


def bad(where: str, expected: str, found: Any) -> Refusal:
    """A ``BAD_REQUEST`` that names the field."""
    return Refusal(
        "BAD_REQUEST", f"{where} is wrong", expected, repr(found)[:120], "correct the field in the site file or plan"
    )


def take(args: Json, shape: dict[str, str]) -> Json:
    """Check ``args`` against ``{key: type}``; types: str int num dict list bool, ``?`` at the end allows null.

    Raises:
        Refusal: ``BAD_REQUEST``.
    """
    if set(args) != set(shape):
        raise bad("args", "exactly " + ", ".join(sorted(shape)), sorted(args))
    kinds: dict[str, tuple[type, ...]] = {
        "str": (str,),
        "int": (int,),
        "num": (int, float),
        "dict": (dict,),
        "list": (list,),
        "bool": (bool,),
    }
    for key, wanted in shape.items():
        value = args[key]
        if value is None and wanted.endswith("?"):
            continue
        allowed = kinds[wanted.rstrip("?")]
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise bad(f"args.{key}", wanted, value)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not 0 <= value <= 1 << 53:
            raise bad(f"args.{key}", "a number from 0 to 2^53", value)
    return args


def check_argv(where: str, value: Any) -> list[str]:
    """A non-empty list of strings without NUL, program first."""
    fine = isinstance(value, list) and value and all(isinstance(part, str) and "\0" not in part for part in value)
    if not fine or not value[0]:
        raise bad(where, "a list of strings, program first", value)
    return list(value)


def check_environment(where: str, value: Any, reserved: tuple[str, ...] = ()) -> dict[str, str]:
    """An object of environment variables; ``reserved`` names are the guard's own."""
    if not isinstance(value, dict):
        raise bad(where, "an object of strings", value)
    for name, text in value.items():
        if not ENV_NAME.match(name) or name in reserved or not isinstance(text, str) or "\0" in text:
            raise bad(
                f"{where}.{name}"[:80], "a variable name that is not the guard's own, and a string", type(text).__name__
            )
    return dict(value)


def check_acquire(args: Json) -> Json:
    """Arguments of ``acquire``, services completed with their defaults."""
    take(
        args,
        {
            "hold_id": "str",
            "owner": "str",
            "reason": "str",
            "plan_sha256": "str",
            "devices": "list",
            "provisional_s": "num",
            "deadline_s": "num",
            "restore_reserve_s": "num",
            "orphan_after_s": "num",
            "services": "list",
            "notify": "list?",
        },
    )
    if not HOLD_ID.match(args["hold_id"]):
        raise bad("args.hold_id", HOLD_ID.pattern, args["hold_id"])
    if not args["owner"] or len(args["owner"]) > 200 or len(args["reason"]) > 1000:
        raise bad("args.owner/reason", "an owner (at most 200 characters), a reason (at most 1000)", args["owner"])
    if not args["restore_reserve_s"] < args["deadline_s"] or args["orphan_after_s"] <= 0:
        raise bad("args.deadline_s", "restore_reserve_s < deadline_s, orphan_after_s > 0", args["deadline_s"])
    devices = args["devices"]
    if len(set(map(str, devices))) != len(devices) or not all(isinstance(d, str) and DEVICE.match(d) for d in devices):
        raise bad("args.devices", "distinct GPU UUIDs or device names", devices)
    services = [check_service(service) for service in args["services"]]
    if len({service["name"] for service in services}) != len(services):
        raise bad("args.services", "distinct names", [service["name"] for service in services])
    notify = None if args["notify"] is None else check_argv("args.notify", args["notify"])
    return dict(args, services=services, notify=notify)


def check_service(value: Any) -> Json:
    """One service, completed with its defaults."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not NAME.match(value["name"]):
        raise bad("service.name", NAME.pattern, value.get("name") if isinstance(value, dict) else value)
    where = f"service {value['name']}"
    unknown = set(value) - set(SERVICE_DEFAULTS) - {"name", "kind"}
    if unknown or value.get("kind") not in KINDS:
        raise bad(
            f"{where}: kind or keys",
            f"kind one of {', '.join(KINDS)}; known keys",
            sorted(unknown) or value.get("kind"),
        )
    service = dict(SERVICE_DEFAULTS, **value)
    _check_bounds(where, service)
    _check_identity(where, service)
    service["probe"] = _check_probe(where, service["probe"])
    return service


def _check_bounds(where: str, service: Json) -> None:
    for key in ("drain_s", "stop_s", "start_s", "watch_s"):
        number = service[key]
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number <= 86400:
            raise bad(f"{where}.{key}", "seconds from 0 to 86400", number)
    if type(service["stop_order"]) is not int:
        raise bad(f"{where}.stop_order", "an integer", service["stop_order"])
    ports = service["ports"]
    if not isinstance(ports, list) or not all(type(port) is int and 0 < port < 65536 for port in ports):
        raise bad(f"{where}.ports", "a list of TCP ports", ports)
    if service["expected"] not in ("running", "stopped"):
        raise bad(f"{where}.expected", "running or stopped", service["expected"])
    if service["stop_signal"] not in SIGNALS:
        raise bad(f"{where}.stop_signal", ", ".join(SIGNALS), service["stop_signal"])
    supervisors = service["supervisors"]
    if not isinstance(supervisors, list) or not all(isinstance(unit, str) and UNIT.match(unit) for unit in supervisors):
        raise bad(f"{where}.supervisors", "a list of unit names", supervisors)


def _check_identity(where: str, service: Json) -> None:
    kind = service["kind"]
    if kind == "process":
        check_argv(f"{where}.start", service["start"])
        for key in ("cwd", "log"):
            if not isinstance(service[key], str) or not service[key].startswith("/") or "\0" in service[key]:
                raise bad(f"{where}.{key}", "an absolute path", service[key])
        check_environment(f"{where}.env", service["env"], ("DSPARK_OWNER",))
        check_environment(f"{where}.secret_env", service["secret_env"], ("DSPARK_OWNER",))
    elif kind == "docker":
        if not isinstance(service["container"], str) or not CONTAINER.match(service["container"]):
            raise bad(f"{where}.container", CONTAINER.pattern, service["container"])
    elif not isinstance(service["unit"], str) or not UNIT.match(service["unit"]):
        raise bad(f"{where}.unit", UNIT.pattern, service["unit"])


def _check_probe(where: str, value: Any) -> Json | None:
    if value is None:
        return None
    if (
        not isinstance(value, dict)
        or set(value) - set(PROBE_DEFAULTS) - {"url"}
        or not isinstance(value.get("url"), str)
    ):
        raise bad(f"{where}.probe", "url, method, body, timeout_s, expect_status, expect_contains", value)
    probe = dict(PROBE_DEFAULTS, **value)
    if not probe["url"].startswith(("http://", "https://")) or not isinstance(probe["timeout_s"], (int, float)):
        raise bad(f"{where}.probe.url", "http:// or https://, timeout_s a number", probe["url"])
    if probe["method"] not in ("GET", "POST", "HEAD") or not isinstance(probe["body"], (str, type(None))):
        raise bad(f"{where}.probe.method", "GET, POST or HEAD, body a string or null", probe["method"])
    return probe
