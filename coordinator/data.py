"""Where the files that ship with the package are: in a checkout beside it, in an installation inside it."""

from __future__ import annotations

from pathlib import Path

from coordinator.errors import UsageError

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent


def tiny_pair() -> Path:
    """Folder of the trained tiny pair: ``target``, ``drafter``, ``tokenizer.json``."""
    return _first(_CHECKOUT / "examples" / "tiny", _PACKAGE / "data" / "tiny")


def load_manifest() -> Path:
    """Prompts and seeds of the rehearsal's load."""
    return _first(_CHECKOUT / "examples" / "load" / "manifest.json", _PACKAGE / "data" / "load" / "manifest.json")


def policy_path(name: str) -> Path:
    """A shipped policy by name, or a path to another one.

    Raises:
        UsageError: Neither exists.
    """
    given = Path(name)
    if given.suffix == ".toml":
        return _first(given)
    folder = _first(_CHECKOUT / "policies", _PACKAGE / "data" / "policies")
    shipped = {path.stem: path for path in folder.glob("*.toml")}
    if name not in shipped:
        raise UsageError(
            "no policy of this name ships with this version",
            expected=f"one of {', '.join(sorted(shipped))}, or a path that ends in .toml",
            found=name,
        )
    return shipped[name]


def _first(*candidates: Path) -> Path:
    for candidate in candidates:
        if candidate.exists():
            return candidate
    raise UsageError("a file that should be there is missing", expected=" or ".join(map(str, candidates)))
