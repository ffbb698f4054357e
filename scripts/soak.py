"""``make soak``: every long proof after another, seeded and resumable; each keeps its state below build/soak.

Run again after an interruption and each proof goes on where it was. ARGS="wire" runs one of them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROOFS = ("oracle", "wire", "receipts", "store", "worker")
TIME_BOX_ENDED = 3


def main(names: list[str]) -> int:
    folder = Path(__file__).resolve().parent
    worst = 0
    for name in names or PROOFS:
        print(f"soak: {name}", flush=True)
        code = subprocess.run([sys.executable, str(folder / f"soak_{name}.py")], check=False).returncode
        print(f"soak: {name} ended with {code}" + (" (time box; run again to go on)" if code == TIME_BOX_ENDED else ""))
        worst = max(worst, 0 if code == TIME_BOX_ENDED else code)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
