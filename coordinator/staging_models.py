"""Puts the plan's models onto hosts before the hold: what is there by digest stays, the rest is sent and checked there.

Rules: a file appears under its name only when its bytes have the plan's digest (temporary file, digest on the host,
rename); what a lost link left behind is continued, not sent again; a host that has everything needs no source here.
Nothing of production is touched, and nothing here runs inside a hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coordinator.clock import Clock
from coordinator.errors import AdmissionRefused, HostUnreachable
from coordinator.guard_client import Json, whole_reply
from coordinator.host import Host
from windows.models import Model, ModelFile

CHUNK_BYTES = 32 << 20
"""Sent with one command: what a lost link costs at most."""
_MAX_FAILURES = 6
_SLOWEST_BYTES_PER_S = 1e6
_SLOWEST_DIGEST_BYTES_PER_S = 1e8

# Both scripts answer in the guard's frame, so that a login shell that talks cannot be taken for them.
_ANSWER = """
import fcntl, hashlib, json, os, sys
def answer(**result):
    body = json.dumps({"ok": True, "result": result}).encode()
    head = "\\n@@guard1 %d %s\\n" % (len(body), hashlib.sha256(body).hexdigest())
    sys.stdout.buffer.write(head.encode() + body + b"\\n@@end\\n")
    sys.exit(0)
def digest(path):
    found = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(1 << 20):
            found.update(chunk)
    return found.hexdigest()
def size(path):
    return os.path.getsize(path) if os.path.isfile(path) else -1
def part(target, sha256):
    return "%s.%s.part" % (target, sha256[:16])
"""

_LOOK = (
    _ANSWER
    + """
folder, files = sys.argv[1], json.load(sys.stdin)
missing = {}
for file in files:
    target = os.path.join(folder, file["path"])
    if size(target) != file["size_bytes"] or digest(target) != file["sha256"]:
        missing[file["path"]] = max(size(part(target, file["sha256"])), 0)
while not os.path.isdir(folder):
    folder = os.path.dirname(folder)
disk = os.statvfs(folder)
answer(missing=missing, free_bytes=disk.f_bavail * disk.f_frsize)
"""
)

_RECEIVE = (
    _ANSWER
    + """
target, sha256, whole, offset = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
os.makedirs(os.path.dirname(target), exist_ok=True)
path = part(target, sha256)
if size(path) < 0 and size(target) == whole and digest(target) == sha256:
    answer(state="there")
descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    answer(state="busy")
if os.fstat(descriptor).st_size == offset:
    os.lseek(descriptor, offset, os.SEEK_SET)
    while chunk := sys.stdin.buffer.read(1 << 20):
        view = memoryview(chunk)
        while view:
            view = view[os.write(descriptor, view):]
    os.fsync(descriptor)
have = os.fstat(descriptor).st_size
if have < whole:
    answer(state="part", have=have)
found = digest(path) if have == whole else "%d bytes" % have
if found != sha256:
    os.unlink(path)
    answer(state="damaged", found=found)
os.fchmod(descriptor, 0o444)
os.rename(path, target)
folder = os.open(os.path.dirname(target), os.O_RDONLY | os.O_DIRECTORY)
os.fsync(folder)
answer(state="there")
"""
)


@dataclass(frozen=True)
class Lacking:
    """What a host has not got of a model.

    Attributes:
        files: File to the bytes of it that an interrupted upload left there.
        free_bytes: Of the disk that the model lies on.
    """

    files: dict[ModelFile, int]
    free_bytes: int

    @property
    def size_bytes(self) -> int:
        """What is still to be sent."""
        return sum(file.size_bytes - min(have, file.size_bytes) for file, have in self.files.items())


def look_for_model(host: Host, python: str, work_dir: str, model: Model) -> Lacking:
    """Read every file of a model on a host and compare digests; changes nothing.

    Raises:
        AdmissionRefused: The host's interpreter could not look.
    """
    wanted = json.dumps([file.model_dump() for file in model.files]).encode()
    argv = [python, "-I", "-S", "-c", _LOOK, model.folder(work_dir)]
    result = host.run(argv, stdin=wanted, timeout_s=60 + model.size_bytes / _SLOWEST_DIGEST_BYTES_PER_S)
    reply = whole_reply(result.stdout)
    if reply is None:
        raise AdmissionRefused(
            f"cannot look for model {model.name}",
            where=f"{host.name}:{model.folder(work_dir)}",
            expected="an answer of the host's interpreter",
            found=f"{result.outcome.value} {result.code}: {result.stderr[-300:].decode('utf-8', 'replace')}",
            next_step="correct `python` and `work_dir` in the site file",
        )
    missing = reply["result"]["missing"]
    files = {file: int(missing[file.path]) for file in model.files if file.path in missing}
    return Lacking(files, int(reply["result"]["free_bytes"]))


def stage_model(
    host: Host,
    python: str,
    work_dir: str,
    model: Model,
    *,
    plan_folder: Path,
    reserve_bytes: int,
    clock: Clock,
    say: Callable[[str], None],
) -> str:
    """Make sure that a host has a model, whole; returns its folder there.

    Args:
        host: Where to.
        python: Interpreter there.
        work_dir: The host's work folder.
        model: What to stage.
        plan_folder: What the model's ``source`` is relative to.
        reserve_bytes: Must stay free on the host's disk.
        clock: For the pauses between attempts.
        say: Told what is being sent.

    Raises:
        AdmissionRefused: A source file is missing or is not what the plan says, or the host's disk is too small.
        HostUnreachable: The link does not last for any progress; the next attempt continues.
    """
    lacking = look_for_model(host, python, work_dir, model)
    folder = model.folder(work_dir)
    source = plan_folder / model.source
    _require_sources(model, source, lacking, host.name)
    if lacking.files and lacking.free_bytes - lacking.size_bytes < reserve_bytes:
        raise AdmissionRefused(
            f"model {model.name} does not fit on the disk",
            where=f"{host.name}:{folder}",
            expected=f"{lacking.size_bytes + reserve_bytes} bytes free",
            found=f"{lacking.free_bytes} bytes",
            next_step="free space below work_dir: folders of models/ that no plan names can go",
        )
    for file, have in lacking.files.items():
        say(f"model {model.name}: {file.path}, {file.size_bytes - have} of {file.size_bytes} bytes to send")
        _Upload(host, python, source / file.path, f"{folder}/{file.path}", file, clock).run(have)
    return folder


def _require_sources(model: Model, source: Path, lacking: Lacking, host: str) -> None:
    """Before anything is sent: what the host lacks is here, in its size; the digest is the host's to tell."""
    for file in lacking.files:
        path = source / file.path
        size = path.stat().st_size if path.is_file() else None
        if size != file.size_bytes:
            raise AdmissionRefused(
                f"{host} lacks a file of model {model.name}, and its source is not as the plan says",
                where=str(path),
                expected=f"{file.size_bytes} bytes",
                found="no such file" if size is None else f"{size} bytes",
                next_step="correct `source`, or the files of [[models]] in the plan",
            )


class _Upload:
    """One file to one host, in pieces; whatever was lost is asked for, never assumed."""

    def __init__(self, host: Host, python: str, source: Path, target: str, file: ModelFile, clock: Clock) -> None:
        self._host = host
        self._source = source
        self._target = target
        self._file = file
        self._clock = clock
        self._argv = [python, "-I", "-S", "-c", _RECEIVE, target, file.sha256, str(file.size_bytes)]

    def run(self, have: int) -> None:
        """Send from byte ``have`` on, until the host has the file under its name."""
        failures = 0
        with self._source.open("rb") as stream:
            while True:
                stream.seek(have)
                reply = self._call(have, stream.read(CHUNK_BYTES))
                state = reply.get("state")
                if state == "there":
                    return
                if state == "damaged":
                    raise self._damaged(str(reply["found"]))
                before, have = have, int(reply.get("have", have))
                failures = 0 if have > before else failures + 1
                if failures > _MAX_FAILURES:
                    raise self._stuck(reply, have)
                if failures:
                    self._clock.sleep(min(0.25 * 2**failures, 8.0))
                    have = self._continue_from(have)

    def _continue_from(self, have: int) -> int:
        """What the host has now: a piece whose answer was lost may have arrived."""
        return int(self._call(-1, b"").get("have", have))

    def _call(self, offset: int, data: bytes) -> Json:
        """One call; an empty answer when none arrived."""
        seconds = 60 + len(data) / _SLOWEST_BYTES_PER_S + self._file.size_bytes / _SLOWEST_DIGEST_BYTES_PER_S
        result = self._host.run([*self._argv, str(offset)], stdin=data, timeout_s=seconds)
        reply = whole_reply(result.stdout)
        if reply is None:
            return {"lost": f"{result.outcome.value} {result.stderr[-200:].decode('utf-8', 'replace')}".strip()}
        found: Json = reply["result"]
        return found

    def _damaged(self, found: str) -> AdmissionRefused:
        return AdmissionRefused(
            "a file of a model is not the one that the plan names; the host has thrown it away",
            where=f"{self._source} -> {self._host.name}:{self._target}",
            expected=self._file.sha256,
            found=found,
            next_step="`sha256sum` the source: correct it, or the plan; if it is right, look at the host's disk",
        )

    def _stuck(self, reply: Json, have: int) -> HostUnreachable:
        is_busy = reply.get("state") == "busy"
        reason = "another upload of this file goes on" if is_busy else reply.get("lost", "nothing arrives")
        return HostUnreachable(
            "a file of a model does not get through",
            where=f"{self._host.name}:{self._target}",
            expected=f"{self._file.size_bytes} bytes",
            found=f"{have} bytes; {reason}",
            next_step="the same command again: it continues there",
        )
