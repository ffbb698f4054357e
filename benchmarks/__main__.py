"""``make bench``: every CPU benchmark, one table, ``build/bench.json``. Under five minutes; judges nothing.

A row says what was measured, against which goal and which named peer, all in this one run. A benchmark whose library is
missing is listed as not run.
"""

from __future__ import annotations

import importlib
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

MODULES = ("oracle", "wire", "receipts", "coordinator", "hold_hosts")
COLUMNS = ("name", "value", "unit", "goal", "met", "peer", "ratio")


def main() -> int:
    rows: list[dict[str, Any]] = []
    for name in MODULES:
        start = time.monotonic()
        print(f"bench: {name}", file=sys.stderr, flush=True)
        module = importlib.import_module(f"benchmarks.{name}")
        rows += module.measure()
        print(f"bench: {name} took {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    out = Path("build")
    out.mkdir(exist_ok=True)
    machine = {"python": platform.python_version(), "processor": platform.machine(), "system": platform.system()}
    (out / "bench.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    for line in table(rows):
        print(line)
    return 0


def table(rows: list[dict[str, Any]]) -> list[str]:
    cells = [COLUMNS, *(tuple(shown(row.get(column)) for column in COLUMNS) for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
