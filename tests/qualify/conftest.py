"""Real services for the qualification programs: one ON pair for the whole folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "target"))

from target_services import ServerPair

from remote_dspark.contract import DraftMode


@pytest.fixture(scope="session")
def on_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPair]:
    servers = ServerPair(DraftMode.ON.value, tmp_path_factory.mktemp("qualify-on"))
    try:
        yield servers.start()
    finally:
        servers.stop()
