"""The project's own receipts: every store below ``receipts/archive`` verifies, byte for byte, for ever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def measured_workers(store: Path) -> dict[str, dict[str, Any]]:
    """Bodies' only observations of a store's worker measurements, by topology."""
    found = {}
    for path in sorted((store / "receipts").glob("*-worker-measurement-????????????.json")):
        body = json.loads(path.read_text(encoding="utf-8"))["predicate"]["body"]
        [found[body["topology"]]] = body["observations"]
    return found


def test_the_archived_pair_proposed_what_the_archived_solo_worker_did() -> None:
    """Red when the pair was compared with another record than the solo receipt's, or over too few positions."""
    store = ARCHIVE / "pair-worker-2xh200"
    workers = measured_workers(store)
    [solo], [pair] = (
        [sample for sample in workers[topology]["samples"] if sample["name"] == "identity.jsonl"]
        for topology in ("solo", "pair")
    )
    assert solo["sha256"] == pair["sha256"]
    lines = [json.loads(line) for line in (store / "samples" / solo["sha256"]).read_text().splitlines()]
    assert sum(line["positions"] for line in lines) == workers["pair"]["values"]["identity.positions"] >= 10_000
    assert {line["kind"] for line in lines} == {0, 1, 2}
    assert {line["batch"] for line in lines} == {1, 2, 3, 4}
    [same] = [check for check in workers["pair"]["checks"] if check["name"] == "identity.same"]
    assert (same["expected"], same["found"]) == (solo["sha256"], solo["sha256"])
    labels = workers["pair"]["labels"]
    assert labels["topology"] == "physical"
    assert labels["rank.0.uuid"] != labels["rank.1.uuid"]
