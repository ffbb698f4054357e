"""Makes ``receipt_kit`` and the poison script importable for the tests of this folder, however pytest was started."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "poison")]
