"""Puts onto a host what a hold runs there, by digest and before the hold: the guard, ``remote_dspark``, the models.

A staged thing lives at a path that carries its digest, is written whole or not at all, and is never changed: an upgrade
in the middle of a hold is a new path beside the old one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from coordinator.errors import CoordinatorError
from coordinator.host import Host, Outcome
from coordinator.identity import package_root, tree_files
from windows.guard_archive import build_archive, zip_bytes

_GUARD_NAME = re.compile(r"guard-([0-9a-f]{64})\.pyz")

_UNPACK = """
import hashlib, io, os, shutil, sys, zipfile
data = sys.stdin.buffer.read()
target, expected = sys.argv[1], sys.argv[2]
found = hashlib.sha256(data).hexdigest()
if found != expected:
    sys.exit("digest mismatch: expected %s, found %s" % (expected, found))
if not os.path.exists(target):
    part = "%s.%d.part" % (target, os.getpid())
    os.makedirs(part)
    zipfile.ZipFile(io.BytesIO(data)).extractall(part)
    try:
        os.rename(part, target)
    except OSError:
        # Somebody staged the same bytes meanwhile: same digest, same content.
        shutil.rmtree(part)
print("staged")
"""


@dataclass(frozen=True)
class Staged:
    """Where something was put on a host, and the digest of the archive it came from."""

    path: str
    sha256: str


def stage_guard(host: Host, state_dir: str, *, any_version: bool = False) -> Staged:
    """Write the guard's zipapp to its digest path below the state folder.

    Args:
        host: Where to.
        state_dir: The guard's state folder there.
        any_version: When the disk takes no upload, use a guard that is there: every version can end a hold.

    Raises:
        CoordinatorError: It cannot be written, and no other may stand in, or none is whole.
    """
    data = build_archive()
    digest = sha256(data).hexdigest()
    path = f"{state_dir}/bin/guard-{digest}.pyz"
    # The guard refuses a state folder that others can read or write, so it is born private.
    host.run(["/bin/mkdir", "-p", "-m", "700", state_dir], timeout_s=20)
    if digest.encode() in host.run(["sha256sum", "--", path], timeout_s=20).stdout.split():
        # Recovering a host whose disk is full must not begin with an upload.
        return Staged(path, digest)
    try:
        found = host.put(data, path, mode=0o555)
    except CoordinatorError:
        present = _newest_whole_guard(host, f"{state_dir}/bin") if any_version else None
        if present is None:
            raise
        return present
    if found != digest:
        raise CoordinatorError("the guard arrived damaged", where=host.name, expected=digest, found=found)
    return Staged(path, digest)


def _newest_whole_guard(host: Host, folder: str) -> Staged | None:
    """The youngest guard in the host's own private folder whose content is what its name says."""
    listed = host.run(["ls", "-t", "--", folder], timeout_s=20).stdout.decode("utf-8", "replace").splitlines()
    for name in listed:
        match = _GUARD_NAME.fullmatch(name)
        if match is None:
            continue
        path = f"{folder}/{name}"
        if match[1].encode() in host.run(["sha256sum", "--", path], timeout_s=20).stdout.split():
            return Staged(path, match[1])
    return None


def stage_package(host: Host, python: str, work_dir: str) -> Staged:
    """Unpack ``remote_dspark`` below the work folder; its parent is what PYTHONPATH names."""
    root = package_root("remote_dspark")
    return stage_tree(host, python, f"{work_dir}/packages", root, tree_files(root), prefix="remote_dspark")


def stage_tree(host: Host, python: str, folder: str, root: Path, files: list[Path], *, prefix: str = "") -> Staged:
    """Unpack ``files`` (below ``root``) into ``folder/<digest>``; the same files give the same digest anywhere."""
    data = zip_bytes({str(Path(prefix) / path.relative_to(root)): path.read_bytes() for path in files})
    digest = sha256(data).hexdigest()
    target = f"{folder}/{digest[:32]}"
    result = host.run([python, "-I", "-c", _UNPACK, target, digest], stdin=data, timeout_s=120)
    if result.outcome is not Outcome.EXITED or result.code != 0:
        raise CoordinatorError(
            f"cannot stage {prefix or root.name}",
            where=host.name,
            expected="staged",
            found=f"{result.outcome.value} {result.code}: {result.stderr[-300:].decode('utf-8', 'replace')}",
        )
    return Staged(target, digest)
