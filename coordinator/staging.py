"""Puts onto a host what a hold runs there, by digest and before the hold: the guard, ``remote_dspark``, the models.

A staged thing lives at a path that carries its digest, is written whole or not at all, and is never changed: an upgrade
in the middle of a hold is a new path beside the old one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from coordinator.errors import AdmissionRefused, CoordinatorError
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


NEEDED_MODULES = ("numpy", "xxhash", "torch")
"""What the programs of an arm import on every host; what only one of them needs, its own start says."""

_CHECK = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
if sys.version_info < (3, 11):
    sys.exit("Python %d.%d, expected 3.11 or newer" % sys.version_info[:2])
for name in sys.argv[2:]:
    try:
        module = importlib.import_module(name)
    except Exception as error:
        sys.exit("import %s: %s: %s" % (name, type(error).__name__, error))
    if name == "remote_dspark" and not module.__file__.startswith(sys.argv[1]):
        sys.exit("import remote_dspark: found %s, expected the staged one" % module.__file__)
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


def require_interpreter(host: Host, python: str, package: str) -> None:
    """The host's interpreter imports the staged package and what it needs, before anything is held.

    Raises:
        AdmissionRefused: It does not; names the module, or the version.
    """
    argv = [python, "-I", "-c", _CHECK, package, "remote_dspark", *NEEDED_MODULES]
    result = host.run(argv, timeout_s=180)
    if result.outcome is Outcome.EXITED and result.code == 0:
        return
    said = result.stderr[-400:].decode("utf-8", "replace").strip().splitlines()
    raise AdmissionRefused(
        f"{python} on {host.name} cannot run the plan's programs; nothing was touched",
        where=host.name,
        expected=f"Python 3.11 or newer with {', '.join(NEEDED_MODULES)}",
        found=said[-1] if said else f"{result.outcome.value} {result.code}",
        next_step="install it into that interpreter, or name another one as `python` in the site file",
    )


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
