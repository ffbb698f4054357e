"""Published version 1 stays verifiable for ever: a store of every kind, frozen as it was when the version came out.

These files are never made again. If a change of ours makes them fail, the change is wrong: a new field is a new version
beside the old one (docs/receipts.md says how).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from coordinator.store import Store
from receipts.fields import Kind
from receipts.findings import Options
from receipts.model import PREDICATES
from receipts.signing import parse_allowed_signers
from receipts.verify import LogVerifier

FIXTURES = Path(__file__).with_name("v1")
HEAD = "09b9d047b9f32f3aff077577b8773652071dc6124271d404777d5d679a9f7450"
"""Written here a second time, so that nobody can renew the fixtures without changing this line."""


def test_the_frozen_store_verifies_with_its_signatures() -> None:
    """Red when a model, the canonical form, the chain, a conclusion or the envelope format changed for version 1."""
    store = Store(FIXTURES)
    snapshot = store.snapshot()
    signers = parse_allowed_signers((FIXTURES / "signers.toml").read_bytes())
    options = Options(sums=snapshot.sums, head=snapshot.head, sample=store.read_sample, signers=signers,
                      require_signature=True)  # fmt: skip
    verifier = LogVerifier(options)
    kinds = [verified.receipt.predicate.kind for e in store.entries(snapshot) if (verified := verifier.add(e))]
    report = verifier.finish()
    assert report.findings == ()
    assert report.num_signed == len(Kind)
    assert kinds == [kind.value for kind in Kind]
    assert snapshot.head.head == HEAD


def test_every_published_kind_and_version_has_a_fixture() -> None:
    """Red when a version is added to the allow-list without its fixture, or one is taken away."""
    found = {
        (document["predicate"]["kind"], document["predicate"]["version"])
        for path in (FIXTURES / "receipts").glob("*.json")
        if "predicate" in (document := json.loads(path.read_bytes()))
    }
    assert found == {(str(kind), version) for kind, version in PREDICATES}


def test_the_list_names_the_bytes() -> None:
    for line in (FIXTURES / "SHA256SUMS").read_text().splitlines():
        digest, _, path = line.partition("  ")
        assert hashlib.sha256((FIXTURES / path).read_bytes()).hexdigest() == digest
