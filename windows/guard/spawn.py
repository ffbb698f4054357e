"""Starting programs that outlive the call: own session, no inherited locks, no second shell.

The started process writes its own ownership record *before* it becomes the program, so that no crash of the caller can
leave a process nobody owns. Start-up failures come back through a pipe that exec closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys

from windows.guard import clock, files, proc
from windows.guard.errors import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ")
"""The only variables an owned program or service takes over from the guard's own environment."""


def base_environment() -> dict[str, str]:
    """The allow-listed part of the guard's environment."""
    result = {name: os.environ[name] for name in INHERITED if name in os.environ}
    result.setdefault("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    return result


def find_program(name: str, path: str) -> str | None:
    """Where exec would find ``name`` on the search path ``path``; None when nowhere."""
    candidates = [name] if "/" in name else [os.path.join(folder or ".", name) for folder in path.split(":")]
    return next((c for c in candidates if os.path.isfile(c) and os.access(c, os.X_OK)), None)


def start_detached(
    argv: list[str],
    environment: dict[str, str],
    cwd: str,
    record_path: str | None,
    cookie: str,
    outputs: tuple[int, int] | None = None,
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Start ``argv`` as the leader of its own session, as nobody's child; returns its ownership record.

    Args:
        argv: Program and arguments; the program is searched on ``environment``'s PATH.
        environment: The whole environment of the program; the cookie is added.
        cwd: Working folder.
        record_path: Where the record is written before exec, or None.
        cookie: Nonce that marks the program's tree.
        outputs: Descriptors for stdout and stderr; /dev/null when None.
        extra: More fields for the record.

    Raises:
        Refusal: ``START_FAILED``.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        # the middle process only makes the program an orphan, so that init, not we, reaps it
        if os.fork() == 0:
            _become(argv, environment, cwd, record_path, cookie, outputs, extra or {}, writer)
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    return _read_record(reader, argv, cwd)


def start_child(
    argv: list[str],
    environment: dict[str, str],
    cwd: str,
    record_path: str,
    cookie: str,
    outputs: tuple[int, int],
) -> dict[str, Any]:
    """As ``start_detached``, but the program stays the caller's child, so that the caller learns how it ended."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        _become(argv, environment, cwd, record_path, cookie, outputs, {}, writer)
    os.close(writer)
    return _read_record(reader, argv, cwd)


def become(
    argv: list[str],
    environment: dict[str, str],
    cwd: str,
    record_path: str,
    outputs: tuple[int, int],
    extra: dict[str, Any],
    report: str,
) -> None:
    """Turn the calling process into the program; failures are written to the file ``report``. Never returns."""
    writer = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    _become(argv, environment, cwd, record_path, os.urandom(16).hex(), outputs, extra, writer)


def _read_record(reader: int, argv: list[str], cwd: str) -> dict[str, Any]:
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    record_line, _, failure = answer.partition(b"\n")
    if failure or not record_line:
        raise Refusal(
            "START_FAILED",
            f"{argv[0]} could not be started",
            f"{argv[0]} executable from {cwd}",
            failure.decode("utf-8", "replace")[:300] or "the new process died before exec",
            "run it by hand as the same user",
        )
    record: dict[str, Any] = json.loads(record_line)
    return record


def _become(
    argv: list[str],
    environment: dict[str, str],
    cwd: str,
    record_path: str | None,
    cookie: str,
    outputs: tuple[int, int] | None,
    extra: dict[str, Any],
    writer: int,
) -> None:
    """In the new process: own session, record, descriptors, exec. Never returns."""
    try:
        with contextlib.suppress(PermissionError):  # a service manager's child leads a session already
            os.setsid()
        record = own_record(cookie)
        record.update(extra)
        if record_path is not None:
            files.write_json(record_path, record)
        os.write(writer, json.dumps(record).encode("ascii") + b"\n")
        null = os.open(os.devnull, os.O_RDWR)
        out, err = outputs or (null, null)
        os.dup2(null, 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.chdir(cwd)
        # Python ignores these two, and an ignored signal is inherited through exec
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.umask(0o022)
        os.execvpe(argv[0], argv, dict(environment, **{proc.COOKIE: cookie}))
    except BaseException as error:  # noqa: BLE001 - nothing may return into the caller's code
        os.write(writer, f"{type(error).__name__}: {error}".encode("utf-8", "replace"))
    finally:
        os._exit(127)


def own_record(cookie: str) -> dict[str, Any]:
    """The ownership record of the calling process."""
    me = proc.read_process(os.getpid())
    return {
        "boot_id": clock.boot_id(),
        "pid": os.getpid(),
        "start_ticks": me.start_ticks if me else -1,
        "pgid": os.getpgid(0),
        "cookie": cookie,
        "started_utc": clock.utc_now(),
        "started_boottime_ns": clock.boottime_ns(),
    }


def program_path() -> str:
    """The file this guard runs from: the zipapp."""
    return os.path.abspath(sys.argv[0])


def internal_argv(state_dir: str, role: str, ident: str) -> list[str]:
    """The command line of one of the guard's own background programs."""
    return [sys.executable, "-I", "-S", program_path(), "--state", state_dir, "--internal", role, ident]
