#!/usr/bin/env python
"""Verifies stores of 10k, 30k, 100k and 300k receipts: time, memory, growth, one append. Prints one JSON document.

It keeps no state: a run takes some minutes and needs 2 GiB of disk below the temporary folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.receipts import measure


def main() -> int:
    """Print every figure; 1 when one misses its goal."""
    rows = measure(full=True)
    sys.stdout.write(json.dumps(rows, indent=1) + "\n")
    return int(any(row["met"] is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
