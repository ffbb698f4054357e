"""Durable files and locks.

Every record is written whole: temporary file, fsync, rename, fsync of the folder. Locks are flock on files that are
never removed while in use; the kernel drops them with the process. A file system on which flock or fsync may not mean
what they say is refused by ``require_local``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat

from windows.guard import clock
from windows.guard.errors import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

LOCAL_FILESYSTEMS = frozenset(["ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay", "tmpfs"])
"""Where flock excludes between processes and fsync reaches the disk. Network and FUSE file systems are not here."""

VOLATILE_FILESYSTEMS = frozenset(["tmpfs", "ramfs"])


def read_json(path: str) -> dict[str, Any] | None:
    """The JSON object in ``path``; None when there is no such file."""
    try:
        with open(path, "rb") as handle:
            document = json.loads(handle.read())
    except FileNotFoundError:
        return None
    if not isinstance(document, dict):
        raise Refusal("STATE_DIR", "a record is not an object", "a JSON object", path, "look at the file by hand")
    return document


def write_json(path: str, document: dict[str, Any], sync: bool = True) -> None:
    """Replace ``path`` by ``document``, whole or not at all, mode 0600."""
    write_bytes(path, json.dumps(document, sort_keys=True).encode("ascii"), sync=sync)


def write_bytes(path: str, data: bytes, mode: int = 0o600, sync: bool = True) -> None:
    """Replace ``path`` by ``data``, whole or not at all."""
    temporary = f"{path}.{os.getpid()}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        _write_all(descriptor, data)
        if sync:
            os.fsync(descriptor)
        os.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(descriptor)
    if sync:
        sync_folder(os.path.dirname(path))


def overwrite_slot(path: str, document: dict[str, Any], size: int) -> None:
    """Write ``document`` in place into the preallocated file ``path``; needs no free space.

    Trailing blanks are legal JSON, so a slot is read like any other record.
    """
    data = json.dumps(document, sort_keys=True).encode("ascii")
    if len(data) > size:
        data = json.dumps({key: document[key] for key in document if key not in ("rows", "probes")}).encode("ascii")
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, data.ljust(size), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def preallocate(path: str, size: int) -> None:
    """Make ``path`` a file of ``size`` blanks whose blocks exist.

    Raises:
        Refusal: ``NO_SPACE``.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            _write_all(descriptor, b" " * size)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise Refusal(
            "NO_SPACE",
            "the state folder's disk is full",
            f"{size} bytes for {path}",
            "no space left",
            "free space on the host, then open the hold again",
        ) from error


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_folder(path: str) -> None:
    """Sync a folder to disk, so that names in it survive power loss."""
    descriptor = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: str, sync: bool = True) -> bool:
    """Remove ``path`` if it is there; True when it was."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    if sync:
        sync_folder(os.path.dirname(path))
    return True


def try_lock(path: str) -> int | None:
    """Take an exclusive flock on ``path`` now; the descriptor, or None when another holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def is_locked(path: str) -> bool:
    """True when some process holds the flock on ``path``."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def locked(path: str, timeout_s: float) -> Iterator[int]:
    """Hold the flock on ``path``; waits at most ``timeout_s``.

    Raises:
        TimeoutError: Another process kept it.
    """
    descriptor = try_lock(path)
    end = clock.boottime_ns() + int(timeout_s * 1e9)
    while descriptor is None:
        if clock.boottime_ns() >= end:
            raise TimeoutError(f"{path} stayed locked for {timeout_s:.1f} s")
        clock.pause(0.05)
        descriptor = try_lock(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def filesystem_of(path: str) -> str:
    """Type of the file system that holds ``path`` (from mountinfo; the longest mount point wins)."""
    target = os.path.realpath(path)
    best, kind = "", "unknown"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as handle:
        for line in handle:
            left, _, right = line.partition(" - ")
            point = left.split(" ")[4].replace("\\040", " ")
            inside = target == point or target.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, right.split(" ")[0]
    return kind


def require_private(path: str) -> None:
    """Create ``path`` (0700) or check that it is a real folder, ours, and closed to others.

    Raises:
        Refusal: ``STATE_DIR``.
    """
    os.makedirs(path, mode=0o700, exist_ok=True)
    info = os.lstat(path)
    problem = ""
    if not stat.S_ISDIR(info.st_mode):
        problem = "not a folder"
    elif info.st_uid != os.geteuid():
        problem = f"owned by uid {info.st_uid}"
    elif info.st_mode & 0o077:
        problem = f"mode {stat.S_IMODE(info.st_mode):04o}"
    if problem:
        raise Refusal(
            "STATE_DIR",
            "the state folder is not private",
            f"a folder of uid {os.geteuid()}, mode 0700",
            f"{path}: {problem}",
            f"chmod 700 {path}",
        )


def require_local(path: str) -> str:
    """Refuse file systems whose flock cannot be trusted; proves exclusion by trying it. Returns the type.

    Raises:
        Refusal: ``BAD_FILESYSTEM``.
    """
    kind = filesystem_of(path)
    fix = "give --state a folder on a local disk of this host"
    if kind not in LOCAL_FILESYSTEMS:
        raise Refusal(
            "BAD_FILESYSTEM", "flock cannot be trusted here", "a local file system", f"{path} is on {kind}", fix
        )
    probe = os.path.join(path, "flock-probe")
    with locked(probe, 5.0):
        second = try_lock(probe)
        if second is not None:
            os.close(second)
            raise Refusal("BAD_FILESYSTEM", "flock does not exclude here", "one holder", f"two on {kind}", fix)
    return kind
