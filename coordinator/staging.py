"""Puts onto a host what a hold runs there, by digest and before the hold: the guard, ``remote_dspark``, the models.

A staged thing lives at a path that carries its digest, is written whole or not at all, and is never changed: an upgrade
in the middle of a hold is a new path beside the old one.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from coordinator.errors import CoordinatorError
from coordinator.host import Host, Outcome
from coordinator.identity import package_root, tree_files
from windows.guard_archive import build_archive, zip_bytes

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


def stage_guard(host: Host, state_dir: str) -> Staged:
    """Write the guard's zipapp to its digest path below the state folder."""
    data = build_archive()
    digest = sha256(data).hexdigest()
    path = f"{state_dir}/bin/guard-{digest}.pyz"
    # The guard refuses a state folder that others can read or write, so it is born private.
    host.run(["/bin/mkdir", "-p", "-m", "700", state_dir], timeout_s=20)
    if digest.encode() in host.run(["sha256sum", "--", path], timeout_s=20).stdout.split():
        # Recovering a host whose disk is full must not begin with an upload.
        return Staged(path, digest)
    found = host.put(data, path, mode=0o555)
    if found != digest:
        raise CoordinatorError("the guard arrived damaged", where=host.name, expected=digest, found=found)
    return Staged(path, digest)


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
