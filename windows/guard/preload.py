"""First code of the zipapp: load the guard's modules compiled, because compiling them is most of a short call.

The compiled modules of this archive (by digest) and this interpreter (by cache tag) are kept in the state folder, which
is private to its owner and already decides what is started as that owner; a missing, torn or foreign cache is ignored
and written again. The archive stays the only source: nothing is cached under another digest's name.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

PACKAGE = "windows.guard"


def run() -> None:
    """Load the guard and run it."""
    path = cache_path(sys.argv)
    codes = read_cache(path) if path else None
    if codes is not None:
        sys.meta_path.insert(0, CompiledFinder(codes))
    from windows.guard import __main__ as program

    if codes is None:
        # at the end, when the state folder exists: the first call on a host creates it
        import atexit

        atexit.register(write_cache, sys.argv)
    program.run()


def cache_path(argv: list[str]) -> str | None:
    """Where the compiled modules belong; None unless the state folder exists and is ours alone."""
    if len(argv) < 3 or argv[1] != "--state":
        return None
    try:
        info = os.lstat(argv[2])
        with open(argv[0], "rb") as handle:
            digest = hashlib.sha256(handle.read()).hexdigest()
    except OSError:
        return None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        return None
    return os.path.join(argv[2], f"code-{digest[:32]}-{sys.implementation.cache_tag}")


def read_cache(path: str) -> dict[str, CodeType] | None:
    """Module name to code; None when the file is missing, torn or not ours."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as handle:
            if os.fstat(descriptor).st_uid != os.geteuid():
                return None
            data = handle.read()
        if hashlib.sha256(data[32:]).digest() != data[:32]:
            return None
        codes: dict[str, CodeType] = marshal.loads(data[32:])
    except (OSError, ValueError, EOFError, TypeError):
        return None
    return codes


def write_cache(argv: list[str]) -> None:
    """Keep every loaded module of the guard compiled; a failure costs only the next call's time."""
    path = cache_path(argv)
    if path is None:
        return
    names = [name for name in sys.modules if name.startswith(PACKAGE + ".")]
    codes = {name: sys.modules[name].__loader__.get_code(name) for name in names}  # type: ignore[union-attr]
    data = marshal.dumps(codes)
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(hashlib.sha256(data).digest() + data)
        os.rename(temporary, path)
    except OSError:
        return


class CompiledFinder:
    """Finder and loader of the compiled modules."""

    def __init__(self, codes: dict[str, CodeType]) -> None:
        self.codes = codes

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """A spec for a cached module, None for every other."""
        if name not in self.codes:
            return None
        make_spec: Any = type(__spec__)
        return make_spec(name, self, origin="compiled")

    def create_module(self, spec: Any) -> None:
        """Default module creation."""

    def exec_module(self, module: Any) -> None:
        """Run the module's code in it."""
        exec(self.codes[module.__name__], module.__dict__)
