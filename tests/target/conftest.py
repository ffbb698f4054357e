"""Real services for the tests of the target server; started once per file and mode."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from target_services import ServerPair

from remote_dspark.contract import DraftMode


@pytest.fixture(scope="session", params=[DraftMode.OFF, DraftMode.ON], ids=["off", "on"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPair]:
    servers = ServerPair(request.param.value, tmp_path_factory.mktemp(f"pair-{request.param.name.lower()}"))
    try:
        yield servers.start()
    finally:
        servers.stop()
