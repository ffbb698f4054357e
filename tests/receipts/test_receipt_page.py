"""``docs/receipts.md``: its commands, run word by word with public tools alone, on a real store and on damaged ones."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from coordinator.cli import run
from coordinator.store import Store
from receipts.fields import Kind
from tests.receipts.receipt_kit import arm, draft, parent, raw_sample, signer

ROOT = Path(__file__).resolve().parents[2]
RAW = b"".join(b"%d\n" % value for value in (5, 3, 11, 7, 900, 13, 2))


def commands() -> list[str]:
    page = (ROOT / "docs" / "receipts.md").read_text()
    return re.findall(r"^```bash\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def run_page(store: Path, public_key: Path, scratch: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "SIGNER": str(public_key), "TMPDIR": str(scratch), "LC_ALL": "C.UTF-8"}
    script = "set -e\n" + "\n".join(commands()) + "\necho every check ran\n"
    return subprocess.run(
        ["bash", "-c", script], cwd=store, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Three signed receipts, a parent, a raw file and a figure bound to it."""
    kept = Store(tmp_path / "store")
    raw = tmp_path / "rounds.jsonl"
    raw.write_bytes(RAW)
    first = kept.append(draft(Kind.SOURCE_IDENTITY), signer=signer())
    body = arm("greedy-v1", values={"raw.rounds.jsonl.p50": 7})
    made = draft(
        Kind.ARM, body, samples=[raw_sample("rounds.jsonl", RAW)], parents=[parent(Kind.SOURCE_IDENTITY, first)]
    )
    kept.append(made, samples={"rounds.jsonl": raw}, signer=signer())
    kept.append(draft(Kind.ATTEMPT), signer=signer())
    return kept


@pytest.fixture
def public_key(tmp_path: Path) -> Path:
    path = tmp_path / "signer.pem"
    path.write_bytes(signer().private_key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return path


def test_the_page_verifies_a_sound_store(store: Store, public_key: Path, tmp_path: Path) -> None:
    """Red when a command on the page is wrong, or the bytes are not what the page says."""
    assert len(commands()) == 9
    found = run_page(store.path, public_key, tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "every check ran" in found.stdout


def rewrite(path: Path, content: bytes, store: Path, *, fix_sums: bool) -> None:
    """Change a file as a careful attacker would: SHA256SUMS too, if asked."""
    old = hashlib.sha256(path.read_bytes()).hexdigest()
    path.chmod(0o644)
    path.write_bytes(content)
    if fix_sums:
        sums = store / "SHA256SUMS"
        sums.write_text(sums.read_text().replace(old, hashlib.sha256(content).hexdigest()))


def arm_file(store: Store) -> Path:
    return next((store.path / "receipts").glob("*-arm-????????????.json"))


def test_the_page_finds_an_edited_receipt(store: Store, public_key: Path, tmp_path: Path) -> None:
    path = arm_file(store)
    rewrite(path, path.read_bytes().replace(b"greedy-v1", b"greedy-v2"), store.path, fix_sums=False)
    assert run_page(store.path, public_key, tmp_path).returncode != 0


def test_the_page_finds_an_edit_with_the_sums_made_to_fit(store: Store, public_key: Path, tmp_path: Path) -> None:
    path = arm_file(store)
    rewrite(path, path.read_bytes().replace(b"greedy-v1", b"greedy-v2"), store.path, fix_sums=True)
    found = run_page(store.path, public_key, tmp_path)
    assert found.returncode != 0
    assert "name" in found.stdout


def test_the_page_finds_a_removed_receipt(store: Store, public_key: Path, tmp_path: Path) -> None:
    for path in (store.path / "receipts").glob("00000001-*"):
        sums = store.path / "SHA256SUMS"
        sums.write_text("".join(line for line in sums.read_text().splitlines(True) if path.name not in line))
        path.unlink()
    found = run_page(store.path, public_key, tmp_path)
    assert found.returncode != 0
    assert "chain broken" in found.stdout


def test_the_page_finds_another_signer(store: Store, public_key: Path, tmp_path: Path) -> None:
    other = signer("stranger").private_key.public_key()
    public_key.write_bytes(other.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    found = run_page(store.path, public_key, tmp_path)
    assert found.returncode != 0
    assert "not signed by this key" in found.stdout


def test_the_page_finds_a_stranger_s_signature_under_this_key_s_id(
    store: Store, public_key: Path, tmp_path: Path
) -> None:
    """Red when a key id is a reason for trust."""
    path = arm_file(store)
    forged = json.loads(signer("stranger").sign(path.read_bytes()))
    forged["signatures"][0]["keyid"] = signer().keyid
    envelope = path.with_name(f"{path.stem}.{signer().keyid[:12]}.dsse.json")
    rewrite(envelope, json.dumps(forged).encode(), store.path, fix_sums=True)
    found = run_page(store.path, public_key, tmp_path)
    assert found.returncode != 0
    assert "bad signature" in found.stdout


def test_the_page_finds_a_signature_that_was_taken_away(store: Store, public_key: Path, tmp_path: Path) -> None:
    """Red when only the envelopes that are there are looked at: without them the store would pass as signed."""
    for envelope in (store.path / "receipts").glob("00000001-*.dsse.json"):
        sums = store.path / "SHA256SUMS"
        sums.write_text("".join(line for line in sums.read_text().splitlines(True) if envelope.name not in line))
        envelope.unlink()
    found = run_page(store.path, public_key, tmp_path)
    assert found.returncode != 0
    assert "not signed by this key" in found.stdout


def test_the_page_accepts_a_second_signer_s_envelopes(store: Store, public_key: Path, tmp_path: Path) -> None:
    """Red when somebody else's signature beside a receipt counts as a bad one of this key."""
    store.countersign(store.head().head or "", signer("auditor"))
    found = run_page(store.path, public_key, tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_page_holds_a_merged_log_to_its_link(public_key: Path, tmp_path: Path) -> None:
    """Red when a log that was merged can go on, or be replaced, without the page finding it."""
    store, other, key = Store(tmp_path / "mine"), Store(tmp_path / "other"), tmp_path / "key.pem"
    for kept in (store, other):
        kept.append(draft(Kind.ATTEMPT), signer=signer())
    key.write_bytes(signer().private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    assert run(["receipts", "merge", str(other.path), "--store", str(store.path), "--key", str(key)]) == 0
    merged = Store(store.path / "logs" / other.head().log)
    for place in (store.path, merged.path):
        found = run_page(place, public_key, tmp_path)
        assert found.returncode == 0, found.stdout + found.stderr
    merged.append(draft(Kind.ATTEMPT), signer=signer())
    found = run_page(store.path, public_key, tmp_path)
    assert found.returncode != 0
    assert "linked as" in found.stdout


@pytest.mark.parametrize("name", ["notes.txt", "samples/" + "0" * 64, "receipts/.hidden.json"])
def test_the_page_finds_a_foreign_file(store: Store, public_key: Path, tmp_path: Path, name: str) -> None:
    (store.path / name).write_bytes(b"x")
    found = run_page(store.path, public_key, tmp_path)
    assert found.returncode != 0
    assert "no list names" in found.stdout


def test_the_page_finds_a_link(store: Store, public_key: Path, tmp_path: Path) -> None:
    (store.path / "samples" / "link").symlink_to("/etc/hostname")
    found = run_page(store.path, public_key, tmp_path)
    assert found.returncode != 0
    assert "a link lies" in found.stdout


def test_the_page_finds_white_space(store: Store, public_key: Path, tmp_path: Path) -> None:
    """The last receipt, renamed and re-listed, with HEAD made to fit: only its form gives it away."""
    path = next((store.path / "receipts").glob("00000002-attempt-????????????.json"))
    content = path.read_bytes().replace(b'":{', b'": {', 1)
    digest = hashlib.sha256(content).hexdigest()
    for envelope in (store.path / "receipts").glob("00000002-*.dsse.json"):
        sums = store.path / "SHA256SUMS"
        sums.write_text("".join(line for line in sums.read_text().splitlines(True) if envelope.name not in line))
        envelope.unlink()
    head = json.loads((store.path / "HEAD").read_text())
    rewrite(path, content, store.path, fix_sums=True)
    renamed = path.with_name(f"00000002-attempt-{digest[:12]}.json")
    path.rename(renamed)
    sums = store.path / "SHA256SUMS"
    sums.write_text(sums.read_text().replace(path.name, renamed.name))
    (store.path / "HEAD").write_text(json.dumps(head | {"head": digest}))
    found = run_page(store.path, public_key, tmp_path)
    assert found.returncode != 0
    assert "not canonical" in found.stdout


def test_the_hook_and_the_workflow_use_options_that_exist() -> None:
    """Red when an option of ``receipts verify`` is renamed under the examples."""
    workflow = (ROOT / "docs" / "examples" / "receipts-workflow.yml").read_text()
    source = (ROOT / "coordinator" / "cli_receipts.py").read_text()
    used = set(re.findall(r"^ +(--[a-z-]+) ", workflow, re.MULTILINE))
    assert {"--signers", "--anchor", "--state", "--junit"} <= used
    assert all(f'"{option}"' in source for option in used), used
    hook = (ROOT / ".pre-commit-hooks.yaml").read_text()
    assert "entry: coordinator receipts verify\n" in hook
    pattern = re.search(r"^  files: (.*)$", hook, re.MULTILINE)
    assert pattern is not None
    for name in ("evidence/receipts/00000001-arm-3fa9c2d4e5b6.json", "HEAD", "s/samples/" + "a" * 64):
        assert re.search(pattern[1], name), name
    assert not re.search(pattern[1], "README.md")
