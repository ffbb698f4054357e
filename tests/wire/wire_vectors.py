"""The golden frames with the limits they decode under."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

from remote_dspark.wire.limits import Limits

VECTORS = Path(__file__).parents[1] / "vectors" / "wire"


@cache
def vector_script() -> Any:
    """``tests/vectors/wire/make_vectors.py`` as a module."""
    spec = importlib.util.spec_from_file_location("make_wire_vectors", VECTORS / "make_vectors.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def load_vectors() -> list[tuple[str, Limits | None, bytes]]:
    """(name, limits, bytes) of each golden frame."""
    manifest = json.loads((VECTORS / "manifest.json").read_text())
    limits = vector_script().LIMITS
    return [(n, limits.get(entry["limits"]), (VECTORS / n).read_bytes()) for n, entry in sorted(manifest.items())]
