"""docs/hold.md is what the tables say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_not_behind_the_code() -> None:
    result = subprocess.run(
        [sys.executable, "scripts/render_hold_table.py", "--check"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, "run: python scripts/render_hold_table.py"
