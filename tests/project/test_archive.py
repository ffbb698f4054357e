"""The project's own receipts: every store below ``receipts/archive`` verifies, byte for byte, for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.store_verify import read_signers, verify_store

ARCHIVE = Path(__file__).resolve().parents[2] / "receipts" / "archive"
STORES = sorted(path.parent for path in ARCHIVE.glob("*/HEAD"))


def test_there_is_an_archive() -> None:
    """Red when the archive is lost: the README's status table names its receipts."""
    assert STORES


@pytest.mark.parametrize("store", STORES, ids=lambda path: str(path.name))
def test_every_archived_store_verifies(store: Path) -> None:
    """Red when an archived receipt, sample or list was touched, or a reader no longer knows an old version."""
    signers = ARCHIVE / "signers" / f"{store.name}.toml"
    verdict = verify_store(store, read_signers(signers if signers.exists() else None))
    assert verdict.is_whole, [str(finding) for finding in verdict.report.findings]
    assert verdict.report.is_integrity_only != signers.exists()


def test_every_list_of_signers_belongs_to_a_store() -> None:
    """Red when a renamed store would be verified without the signatures that it has."""
    assert {path.stem for path in (ARCHIVE / "signers").glob("*.toml")} <= {store.name for store in STORES}
