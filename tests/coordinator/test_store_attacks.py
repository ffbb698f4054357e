"""Attacks on a store and on the commands' arguments: each has its documented exit code; no traceback, no loss."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from coordinator.cli import run
from coordinator.store import Store
from coordinator.store_verify import verify_store
from receipts.chain import link_draft
from receipts.errors import Code
from receipts.fields import ChainLink, Kind
from receipts.raw import MAX_SAMPLE_BYTES
from receipts.reader import read_receipt
from tests.receipts.receipt_kit import draft, entry_name, raw_sample

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    raw, folder = tmp_path / "raw", tmp_path / "store"
    raw.write_bytes(b"7\n")
    store = Store(folder)
    store.append(draft(Kind.SOURCE_IDENTITY))
    store.append(draft(Kind.HOST_FACTS, samples=(raw_sample("a.jsonl", b"7\n"),)), samples={"a.jsonl": raw})
    return folder


def codes(store: Path) -> set[Code]:
    return {finding.code for finding in verify_store(store).report.findings}


@pytest.mark.parametrize("sequence", [2**53 - 1, 10**12, 10**8])
def test_a_receipt_that_claims_a_place_far_away_costs_no_memory(store: Path, sequence: int) -> None:
    """Red when the verifier keeps a slot for every place that a hostile receipt skips."""
    head = Store(store).head()
    receipt = link_draft(
        read_receipt(draft(Kind.ATTEMPT)), ChainLink(log=head.log, sequence=sequence, previous=head.head)
    )
    (store / "receipts" / entry_name(receipt)).write_bytes(receipt.content)
    assert {Code.CHAIN_GAP, Code.SUMS_MISMATCH, Code.HEAD_MISMATCH} & codes(store) >= {Code.CHAIN_GAP}


@pytest.mark.parametrize("kind", ["huge", "fifo", "folder"])
def test_a_raw_file_that_cannot_be_read_is_a_finding(store: Path, kind: str) -> None:
    """Red when one odd raw file ends the walk, or is read into memory whatever its size."""
    sample = next((store / "samples").iterdir())
    sample.unlink()
    if kind == "huge":
        sample.touch()
        os.truncate(sample, MAX_SAMPLE_BYTES + 1)
    elif kind == "fifo":
        os.mkfifo(sample)
    else:
        sample.mkdir()
    assert codes(store) >= {Code.TOO_LARGE if kind == "huge" else Code.NOT_A_FILE}
    assert verify_store(store).report.num_receipts == 2


@pytest.mark.parametrize("content", [b"[" * 10**6, b'{"a":' * 10**5 + b"1" + b"}" * 10**5, b'{"\\u0061":1,"a":1}',
                                     b"9" * 10**6, b'"' + b"\\" * 999_999], ids=range(5))  # fmt: skip
def test_a_file_in_place_of_a_receipt_or_an_envelope(store: Path, content: bytes) -> None:
    """Depth, duplicate keys after unescaping, a number of a million digits: refused, and the walk goes on."""
    last = sorted((store / "receipts").iterdir())[-1]
    last.with_name(f"{last.stem}.{'0' * 12}.dsse.json").write_bytes(content)
    first = sorted((store / "receipts").iterdir())[0]
    first.chmod(0o644)
    first.write_bytes(content)
    assert not verify_store(store).is_whole
    assert verify_store(store).report.num_receipts == 2


@pytest.mark.parametrize("name", ["\uffff.json", "\ufffe", "a\r\nb.json", "<b>&amp;.json", "\x1b[2J", "\udcff.json"])
def test_a_junit_report_is_xml_whatever_the_names_are(store: Path, tmp_path: Path, name: str) -> None:
    """Red when a name in the store can break the report that CI reads, or draw a second test case in it."""
    (store / "receipts" / os.fsencode(name).decode("utf-8", "surrogateescape")).write_bytes(b"{}")
    report = tmp_path / "report.xml"
    assert run(["receipts", "verify", str(store), "--state", str(tmp_path / "s"), "--junit", str(report)]) == 60
    suite = ElementTree.parse(report).getroot()
    assert [case.get("name") for case in suite.iter("testcase")][-1] == "log"
    assert len(list(suite.iter("testcase"))) == 3


@pytest.mark.parametrize(
    "argv",
    [
        ["admit", "live", "--now", "garbage"],
        ["admit", "live", "--plan", "garbage"],
        ["admit", "live", "--signers", "{bad}"],
        ["admit", "live", "--anchor", "{bad}"],
        ["admit", "live", "--key", "{bad}"],
        ["admit", "{bad}.toml"],
        ["verify", "--signers", "{bad}"],
        ["verify", "--anchor", "{bad}"],
        ["verify", "--junit", "{bad}/x.xml"],
        ["report", "{bad}/x.html"],
        ["merge", "{store}", "--signers", "{bad}"],
    ],
    ids=" ".join,
)
def test_a_wrong_argument_is_a_usage_error_and_names_its_file(
    store: Path, tmp_path: Path, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when a person's typing error reads as a damaged store (60), or as an error of ours (1)."""
    bad = tmp_path / "bad"
    for path in (bad, bad.with_suffix(".toml")):
        path.write_bytes(b"\xff\xfe" + b"a = [" * 10**4)
    before = sorted(path.name for path in (store / "receipts").iterdir())
    words = [word.format(bad=bad, store=store) for word in argv]
    if words[0] == "verify":
        words = ["receipts", "verify", str(store), *words[1:], "--state", str(tmp_path / "state")]
    elif words[0] == "admit":
        words += ["--store", str(store), "--state", str(tmp_path / "state")]
    else:
        words = ["receipts", *words, "--store", str(store)]
    assert run(words) == 2
    said = capsys.readouterr().err
    assert "internal error" not in said
    assert "garbage" in said or str(bad) in said
    assert sorted(path.name for path in (store / "receipts").iterdir()) == before


ADMIT = """
import resource, signal, sys
from coordinator.cli import run
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
sys.exit(run(["admit", "live", "--store", sys.argv[2], "--state", sys.argv[3]]))
"""


@pytest.mark.parametrize("room", [0, 100, 2000, 1 << 20])
def test_a_full_disk_at_every_stage_of_an_append_loses_nothing(store: Path, tmp_path: Path, room: int) -> None:
    """Red when a write that is cut off leaves a store that does not verify, or an exit code that is nobody's."""
    before = Store(store).head().count
    argv = [sys.executable, "-c", ADMIT, str(room), str(store), str(tmp_path / "state")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == (10 if room == 1 << 20 else 2), done.stderr
    assert "internal error" not in done.stderr
    assert verify_store(store).is_whole
    Store(store).append(draft(Kind.ATTEMPT))
    assert verify_store(store).is_whole
    assert Store(store).head().count >= before + 1


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_store_on_a_read_only_mount(store: Path, tmp_path: Path) -> None:
    """Reading commands work as ever; a gate that cannot record its decision does not admit."""
    script = (
        f"mount --bind {store} {store} && mount -o remount,ro,bind {store} || exit 99\n"
        "for words in 'receipts verify' 'receipts list' 'receipts graph'; do\n"
        f"  {sys.executable} -m coordinator $words {store} > /dev/null || exit 98\ndone\n"
        f"{sys.executable} -m coordinator admit live --store {store} --state {tmp_path}/state --json\n"
    )
    argv = ["unshare", "--mount", "sh", "-c", script]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, env=dict(os.environ))
    if done.returncode == 99:
        pytest.skip("this container may not mount")
    assert done.returncode == 2, done.stderr
    assert "Read-only file system" in done.stderr
    assert done.stdout == ""


ONE_RULE = """
version = 1
name = "one"
description = "one rule"
[[stage]]
name = "final"
anchor = "source-identity"
signature = "optional"
high_water = false
witness = false
[[stage.require]]
name = "sources"
kind = "source-identity"
evidence = ["MEASURED"]
"""

CASES = {
    ("verify", 0): "sound verify {store}",
    ("verify", 60): "damaged verify {store}",
    ("verify", 2): "sound verify {store} --signers {other}",
    ("admit", 0): "sound admit {policy}",
    ("admit", 10): "sound admit live",
    ("admit", 60): "damaged admit {policy}",
    ("admit", 2): "sound admit {policy} --now noon",
    ("merge", 0): "sound merge {other}",
    ("merge", 60): "damaged merge {other}",
    ("merge", 2): "sound merge {store}",
    ("list", 60): "damaged list {store}",
    ("report", 60): "damaged report {store}.html",
}
"""Row of the table in docs/receipts.md to the state of the store and the command that end so."""


@pytest.mark.parametrize("row", CASES, ids=lambda row: f"{row[0]}-{row[1]}")
def test_the_table_of_exit_codes_is_what_the_commands_return(row: tuple[str, int], store: Path, tmp_path: Path) -> None:
    """Red when a command ends with another code than docs/receipts.md promises."""
    other, policy = tmp_path / "other", tmp_path / "one.toml"
    Store(other).append(draft(Kind.ATTEMPT))
    policy.write_text(ONE_RULE)
    state, command, *words = CASES[row].format(store=store, other=other, policy=policy).split()
    if state == "damaged":
        (store / "receipts" / "notes.txt").write_bytes(b"x")
    given = [] if command in ("verify", "list") else ["--store", str(store)]
    kept = ["--state", str(tmp_path / "state")] if command in ("verify", "admit") else []
    words = [command, *words, *given, *kept]
    assert run(words if command == "admit" else ["receipts", *words]) == row[1]


def test_the_table_of_exit_codes_has_exactly_these_rows() -> None:
    page = (ROOT / "docs" / "receipts.md").read_text(encoding="utf-8")
    cells = [[cell.strip(" `") for cell in line.split("|")[1:3]] for line in page.splitlines()]
    assert {(row[0], int(row[1])) for row in cells if len(row) == 2 and row[1].isdigit()} == CASES.keys()


def test_every_code_of_a_refusal_is_explained() -> None:
    """Red when a code is added that docs/receipts.md does not say anything about."""
    page = (ROOT / "docs" / "receipts.md").read_text(encoding="utf-8")
    assert [code.value for code in Code if f"`{code.value}`" not in page] == []
