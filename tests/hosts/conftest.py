"""Fixtures of the hosts lane: a lab for each test process, its hosts reused between tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.lab import Lab, why_not

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here is of the hosts lane; where hosts cannot be booted the lane is reported as not run."""
    reason = why_not()
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.hosts)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"NOT RUN: booting hosts {reason}"))


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    with Lab() as booted:
        yield booted
