"""The shipped live policy over a signed store on disk, from the command line: it admits a sound campaign, no other one.

The campaign is the archived rehearsal, receipt by receipt, as it would read if its host had had two GPUs: shapes, raw
files, counters and parents are what the tool really wrote, so every verdict is computed again on the way.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from coordinator.cli import run
from coordinator.store import Store
from receipts.build import build_receipt
from receipts.fields import Kind, Subject
from tests.receipts.receipt_kit import gpu_host, signer, signers_toml

ROOT = Path(__file__).resolve().parents[2]
ARCHIVE = ROOT / "receipts" / "archive" / "rehearsal"


def on_gpus(predicate: dict[str, Any]) -> dict[str, Any]:
    """The same receipt as two GPUs would have left it an hour ago."""

    def utc(minutes: int) -> str:
        return (datetime.now(UTC) - timedelta(minutes=minutes)).strftime("%Y-%m-%dT%H:%M:%S.000Z")

    fields = {name: value for name, value in predicate.items() if name != "chain"}
    gpus = [gpu.model_dump() for gpu in gpu_host().gpus]
    fields["hosts"] = [host | {"gpus": gpus} for host in fields["hosts"]]
    for observation in fields["body"].get("observations", ()):
        observation["compute"] = "cuda"
        if predicate["kind"] == "pair-qualification":
            ranks = {f"rank.{number}.uuid": gpu["uuid"] for number, gpu in enumerate(gpus)}
            observation["labels"] |= {"topology": "physical"} | ranks
    return fields | {"started_utc": utc(60), "ended_utc": utc(59), "evidence": "MEASURED"}


def write_campaign(store: Store) -> None:
    """Every receipt of the archive but its admissions, linked anew and signed as it is written."""
    renamed: dict[str, str] = {}
    for path in sorted((ARCHIVE / "receipts").iterdir()):
        text = path.read_text()
        old_id = hashlib.sha256(text.encode()).hexdigest()
        for old, new in renamed.items():
            text = text.replace(old, new)
        statement = json.loads(text)
        predicate = statement["predicate"]
        if predicate["kind"] == "admission":
            continue
        files = {sample["name"]: ARCHIVE / "samples" / sample["sha256"] for sample in predicate["samples"]}
        subjects = [Subject(name=item["name"], sha256=item["digest"]["sha256"]) for item in statement["subject"]]
        made = build_receipt(Kind(predicate["kind"]), on_gpus(predicate), subjects)
        renamed[old_id] = store.append(made, samples=files, signer=signer())
        renamed[predicate["chain"]["log"]] = store.head().log


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("campaign")
    write_campaign(Store(folder / "store"))
    return folder / "store"


class Site:
    """One operator's files around a copy of the campaign, and the commands on it."""

    def __init__(self, folder: Path, written: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.path, self._capsys = folder, folder / "store", capsys
        shutil.copytree(written, self.path)
        self.signers, self.key = folder / "signers.toml", folder / "operator.pem"
        self.signers.write_bytes(signers_toml("operator", "auditor", "ci"))
        private = signer().private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        self.key.write_bytes(private)

    def __call__(self, *argv: str) -> tuple[int, Any]:
        self._capsys.readouterr()
        code = run([*argv, "--json"])
        return code, json.loads(self._capsys.readouterr().out)

    def admit(self, *argv: str, account: str = "state") -> tuple[int, set[str]]:
        """Exit code of the gate and the rules that did not hold."""
        where = ("--store", str(self.path), "--state", str(self.folder / account), "--key", str(self.key))
        code, document = self("admit", "live", *where, *argv)
        return code, {row["field"] for row in document["rows"] if row["ok"] is not True}

    def signed(self, *argv: str) -> tuple[int, set[str]]:
        return self.admit("--signers", str(self.signers), *argv)

    def file(self, place: int, suffix: str = "") -> Path:
        """The receipt at a place of the log, or its envelope."""
        return next((self.path / "receipts").glob(f"{place:08d}-*-????????????{suffix}.json"))

    def forget_line(self, path: Path) -> None:
        """Fit SHA256SUMS to a file that is gone."""
        lines = (self.path / "SHA256SUMS").read_text().splitlines(keepends=True)
        (self.path / "SHA256SUMS").write_text("".join(line for line in lines if path.name not in line))


@pytest.fixture
def site(tmp_path: Path, written: Path, capsys: pytest.CaptureFixture[str]) -> Site:
    return Site(tmp_path, written, capsys)


def test_live_admits_a_sound_signed_campaign_and_what_follows_verifies(site: Site) -> None:
    """Red when the shipped policy cannot be satisfied by what the tool writes, or an input is not listed."""
    assert site.signed() == (0, set())
    assert site.signed("--stage", "open") == (0, set())
    where = ("--signers", str(site.signers), "--state", str(site.folder / "state"))
    code, document = site("receipts", "verify", str(site.path), *where)
    assert (code, document["num_signed"]) == (0, document["num_receipts"])
    admission = site("receipts", "list", str(site.path), "--kind", "admission")[1][0]
    shown = site("receipts", "show", admission["id"], "--store", str(site.path))[1]
    body = shown["statement"]["predicate"]["body"]
    kinds = {item["kind"] for item in body["inputs"]}
    assert kinds == {"source-identity", "budget", "hold", "pair-qualification", "arm", "comparison"}
    rows = {row["field"]: row for row in body["rows"]}
    assert rows["log.signers"]["found"] == f"given: {hashlib.sha256(site.signers.read_bytes()).hexdigest()}"
    assert rows["log.witness"]["found"] != "0"


def unsigned(site: Site) -> None:
    envelope = site.file(7, ".????????????.dsse")
    site.forget_line(envelope)
    envelope.unlink()


def swapped_envelopes(site: Site) -> None:
    one, two = site.file(7, ".????????????.dsse"), site.file(8, ".????????????.dsse")
    ours, theirs = one.read_bytes(), two.read_bytes()
    for path, content in ((one, theirs), (two, ours)):
        path.chmod(0o644)
        path.write_bytes(content)
    sums = (site.path / "SHA256SUMS").read_text()
    a, b = (hashlib.sha256(content).hexdigest() for content in (ours, theirs))
    (site.path / "SHA256SUMS").write_text(sums.replace(a, "x" * 64).replace(b, a).replace("x" * 64, b))


def key_outside_its_validity(site: Site) -> None:
    site.signers.write_bytes(signers_toml("operator", extra="valid = [{ last_sequence = 8 }]\n"))


def key_of_another_log(site: Site) -> None:
    site.signers.write_bytes(signers_toml("operator", extra=f'valid = [{{ log = "{"0" * 32}" }}]\n'))


def wrong_role(site: Site) -> None:
    site.signers.write_bytes(signers_toml("operator").replace(b'role = "operator"', b'role = "auditor"'))


def stranger(site: Site) -> None:
    site.signers.write_bytes(signers_toml("somebody"))


def homoglyph(site: Site) -> None:
    """A name that looks like the operator's: names are no reason for trust, and this key signed nothing."""
    site.signers.write_bytes(signers_toml("somebody").replace(b'"somebody"', b'"operator"'))


def raw_file_gone(site: Site) -> None:
    sample = next((site.path / "samples").iterdir())
    site.forget_line(sample)
    sample.unlink()


def repeated(site: Site) -> None:
    statement = json.loads(site.file(15).read_text())
    subjects = [Subject(name=item["name"], sha256=item["digest"]["sha256"]) for item in statement["subject"]]
    made = build_receipt(Kind.COMPARISON, on_gpus(statement["predicate"]), subjects)
    Store(site.path).append(made, signer=signer())


def cut_off(site: Site) -> None:
    """Nobody accepted more yet; the holds inside remember more than is left."""
    for place in range(3, 16):
        for path in (site.path / "receipts").glob(f"{place:08d}-*"):
            site.forget_line(path)
            path.unlink()
    last = site.file(2).read_bytes()
    head = json.loads((site.path / "HEAD").read_text())
    changed = head | {"count": 3, "head": hashlib.sha256(last).hexdigest()}
    (site.path / "HEAD").write_text(json.dumps(changed))


@pytest.mark.parametrize(
    ("spoil", "code", "rules"),
    [
        (unsigned, 10, {"arm.A1.signer", "signatures"}),
        (swapped_envelopes, 60, {"log.whole", "arm.A1.verdict", "arm.B1.verdict"}),
        (key_outside_its_validity, 60, {"log.whole", "signatures"}),
        (key_of_another_log, 60, {"log.whole", "signatures"}),
        (wrong_role, 10, {"sources.signer", "comparison.signer"}),
        (stranger, 10, {"comparison.signer", "signatures"}),
        (homoglyph, 10, {"comparison.signer", "signatures"}),
        (raw_file_gone, 60, {"log.whole"}),
        (repeated, 10, {"attempts"}),
        (cut_off, 60, {"log.whole", "anchor"}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_forged_campaign_is_denied_for_its_reason(
    site: Site, spoil: Callable[[Site], None], code: int, rules: set[str]
) -> None:
    """Red when one of these passes the shipped policy as it is, or is denied for another reason only."""
    spoil(site)
    found, wrong = site.signed()
    assert found == code
    assert wrong >= rules


def test_without_signers_it_is_integrity_only_and_denied(site: Site) -> None:
    code, wrong = site.admit()
    assert code == 10
    assert {"log.signers", "signatures"} <= wrong


def test_a_store_put_back_after_it_was_admitted_is_denied_on_this_account(site: Site, written: Path) -> None:
    """The high-water mark, from the command line: the same bytes pass for whoever has never seen more."""
    assert site.signed()[0] == 0
    # The mark is of what was judged; the admission's own receipt moves it with the next one.
    assert site.signed()[0] == 0
    shutil.rmtree(site.path)
    shutil.copytree(written, site.path)
    assert site.signed() == (60, {"log.whole"})
    shutil.rmtree(site.path)
    shutil.copytree(written, site.path)
    assert site.admit("--signers", str(site.signers), account="newcomer") == (0, set())


def test_an_anchor_that_somebody_else_kept(site: Site, tmp_path: Path) -> None:
    """A head of this store passes; one of a longer, other history is a rollback, one of another log is foreign."""
    anchor = tmp_path / "anchor"
    shutil.copy(site.path / "HEAD", anchor)
    assert site.signed("--anchor", str(anchor)) == (0, set())
    head = json.loads(anchor.read_text())
    for changed in ({"head": "0" * 64}, {"log": "0" * 32}, {"count": 99}):
        anchor.write_text(json.dumps(head | changed))
        assert site.signed("--anchor", str(anchor)) == (60, {"log.whole"})
