"""The receipts, keys and admit commands as a person, a CI job and an auditor use them: exit codes and output."""

from __future__ import annotations

import json
import shutil
import stat
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "receipts"))

from receipt_kit import EXAMPLES, draft, held, parent, signer

from coordinator.cli import run
from coordinator.store import Store
from coordinator.store_marks import Marks
from receipts.fields import Kind, Subject


class Shell:
    """Runs commands in this process and keeps what they print."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.store = folder / "store"
        self.state = folder / "state"
        self._capsys = capsys

    def __call__(self, *argv: str) -> tuple[int, str]:
        code = run(list(argv))
        return code, self._capsys.readouterr().out

    def json(self, *argv: str) -> tuple[int, Any]:
        code, out = self(*argv, "--json")
        return code, json.loads(out)

    def verify(self, *argv: str) -> tuple[int, Any]:
        return self.json("receipts", "verify", str(self.store), "--state", str(self.state), *argv)


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    """A store of a source identity, a hold on top of it and a failed attempt."""
    made = Shell(tmp_path, capsys)
    store = Store(made.store)
    sources = store.append(draft(Kind.SOURCE_IDENTITY))
    store.append(draft(Kind.HOLD, parents=(parent(Kind.SOURCE_IDENTITY, sources, "sources"),)))
    store.append(draft(Kind.ATTEMPT))
    return made


def first_receipt(store: Path) -> Path:
    return min(path for path in (store / "receipts").iterdir())


# -- verify ------------------------------------------------------------------------------------------------------------


def test_verify_says_integrity_only_without_signers(shell: Shell) -> None:
    code, out = shell("receipts", "verify", str(shell.store), "--state", str(shell.state))
    assert code == 0
    assert "INTEGRITY ONLY" in out
    assert shell.verify()[1]["integrity_only"] is True


@pytest.mark.parametrize("damage", ["edit", "remove", "sums", "head", "empty"])
def test_verify_exits_60_for_a_damaged_store(shell: Shell, damage: str) -> None:
    """Red when a finding does not reach the exit code."""
    victim = first_receipt(shell.store)
    if damage == "edit":
        victim.chmod(0o644)
        victim.write_bytes(victim.read_bytes().replace(b"3.11", b"3.12"))
    elif damage == "remove":
        victim.unlink()
    elif damage == "sums":
        (shell.store / "SHA256SUMS").write_bytes(b"no digests\n")
    elif damage == "head":
        (shell.store / "HEAD").write_bytes(b"{}")
    else:
        shutil.rmtree(shell.store)
        shell.store.mkdir()
    code, document = shell.verify()
    assert code == 60
    assert document["result"] != "PASS"
    assert document["findings"]


def test_a_store_put_back_to_an_older_state_is_refused_by_who_remembers(shell: Shell, tmp_path: Path) -> None:
    """Red when the mark is not kept, or a store that fails moves it."""
    old = tmp_path / "old"
    shutil.copytree(shell.store, old)
    Store(shell.store).append(draft(Kind.HOST_FACTS))
    assert shell.verify()[0] == 0
    shutil.rmtree(shell.store)
    old.rename(shell.store)
    code, document = shell.verify()
    assert code == 60
    assert [finding["code"] for finding in document["findings"]] == ["rollback"]
    assert Marks(shell.state).get(document["log"]).count == 4  # type: ignore[union-attr]
    other = shell.json("receipts", "verify", str(shell.store), "--state", str(tmp_path / "elsewhere"))
    assert other[0] == 0


def test_an_anchor_kept_elsewhere(shell: Shell, tmp_path: Path) -> None:
    anchor = tmp_path / "HEAD-in-a-commit"
    shutil.copy(shell.store / "HEAD", anchor)
    Store(shell.store).append(draft(Kind.HOST_FACTS))
    assert shell.verify("--anchor", str(anchor))[0] == 0
    rewritten = tmp_path / "rewritten"
    Store(rewritten).append(draft(Kind.HOST_FACTS))
    code, document = shell.json("receipts", "verify", str(rewritten), "--anchor", str(anchor), "--state", str(tmp_path))
    assert code == 60
    assert document["findings"][0]["code"] == "foreign-receipt"


def test_since_looks_only_at_what_is_new(shell: Shell, tmp_path: Path) -> None:
    """By receipt id or by a HEAD file; nothing new is fine, a rewritten past is not."""
    head = Store(shell.store).head()
    assert head.head is not None
    kept = tmp_path / "HEAD-kept"
    shutil.copy(shell.store / "HEAD", kept)
    code, document = shell.verify("--since", head.head)
    assert (code, document["num_receipts"], document["result"]) == (0, 0, "PASS")
    Store(shell.store).append(draft(Kind.HOLD, parents=(parent(Kind.ATTEMPT, head.head, "before"),)))
    for since in (head.head[:10], str(kept)):
        code, document = shell.verify("--since", since)
        assert (code, document["num_receipts"]) == (0, 1)
    kept.write_bytes(kept.read_bytes().replace(head.head.encode(), b"0" * 64))
    assert shell.verify("--since", str(kept))[0] == 60
    assert run(["receipts", "verify", str(shell.store), "--since", "no-such-file"]) == 2


def test_junit_has_a_case_per_receipt_and_is_xml_whatever_is_in_it(shell: Shell, tmp_path: Path) -> None:
    """Red when hostile names break the XML or a finding has no failure."""
    report = tmp_path / "junit.xml"
    assert shell.verify("--junit", str(report))[0] == 0
    suite = ElementTree.parse(report).getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("4", "0", "0")
    (shell.store / "receipts" / "]]><x>\x1b&\"'.json").write_bytes(b"{}")
    first_receipt(shell.store).chmod(0o644)
    assert shell.verify("--junit", str(report))[0] == 60
    suite = ElementTree.parse(report).getroot()
    assert int(suite.get("failures", "0")) >= 1
    assert "\x1b" not in report.read_text()


# -- list, show, diff, graph -------------------------------------------------------------------------------------------


def test_list_filters_and_shows_what_cannot_be_read(shell: Shell) -> None:
    code, rows = shell.json("receipts", "list", str(shell.store))
    assert (code, [row["kind"] for row in rows]) == (0, ["source-identity", "hold", "attempt"])
    for argv, expected in (
        (["--kind", "hold"], 1), (["--verdict", "FAIL"], 1), (["--evidence", "REHEARSED"], 0), (["--hold", "1"], 3),
        (["--arm", "A1"], 0), (["--host", "alpha"], 1), (["--plan", "00000000"], 0),
    ):  # fmt: skip
        assert len(shell.json("receipts", "list", str(shell.store), *argv)[1]) == expected, argv
    assert run(["receipts", "list", str(shell.store), "--kind", "holds"]) == 2
    (shell.store / "receipts" / "00000003-hold-000000000000.json").write_bytes(b"{")
    code, rows = shell.json("receipts", "list", str(shell.store))
    assert code == 60
    assert rows[-1]["unreadable"]


def test_show_says_what_ran_on_what_from_what_and_what_is_not_claimed(shell: Shell) -> None:
    wanted = Store(shell.store).find(first_id(shell, "hold"))[1]
    receipt_id = first_id(shell, "hold")
    code, out = shell("receipts", "show", receipt_id[:8], "--store", str(shell.store))
    assert code == 0
    for needle in (
        receipt_id,
        "anything else",
        "coordinator campaign",
        "machine-alpha",
        "GPU-alpha-0",
        "restore_proof",
    ):
        assert needle in out
    code, document = shell.json("receipts", "show", receipt_id, "--store", str(shell.store))
    assert json.dumps(document["statement"], sort_keys=True, separators=(",", ":")).encode() == wanted
    assert run(["receipts", "show", "ffffffff", "--store", str(shell.store)]) == 2


def first_id(shell: Shell, kind: str) -> str:
    rows = shell.json("receipts", "list", str(shell.store), "--kind", kind)[1]
    return str(rows[0]["id"])


def test_diff_names_source_environment_and_numbers(shell: Shell) -> None:
    other = Store(shell.store).append(
        draft(Kind.HOLD, elapsed_ns=10**10, environment={"LANG": "de_DE"},
              tool={"name": "coordinator", "version": "0.2.0", "source_sha256": "1" * 64})
    )  # fmt: skip
    argv = ("receipts", "diff", first_id(shell, "hold"), other, "--store", str(shell.store))
    code, document = shell.json(*argv)
    assert code == 0
    assert ["tool.version", "0.1.0", "0.2.0", ""] in document["differences"]["source"]
    assert ["environment.LANG", "C.UTF-8", "de_DE", ""] in document["differences"]["environment"]
    assert ["elapsed_ns", "5000000000", "10000000000", "+100.00%"] in document["differences"]["numbers"]
    assert shell(*argv)[0] == 0


def test_graph_draws_parents_below_their_children(shell: Shell) -> None:
    code, out = shell("receipts", "graph", str(shell.store))
    assert code == 0
    lines = out.splitlines()
    place = next(number for number, line in enumerate(lines) if "  hold" in line)
    assert "└─ sources:" in lines[place + 1]
    assert "source-identity" in lines[place + 1]
    document = shell.json("receipts", "graph", str(shell.store), "--of", first_id(shell, "hold"))[1]
    assert len(document["edges"]) == 1
    assert run(["receipts", "graph", str(shell.store), "--of", "ff"]) == 2


def test_hostile_strings_are_shown_inert(shell: Shell) -> None:
    """Red when a receipt's text reaches the terminal as it is."""
    hostile = Subject(name="\x1b]0;owned\x07\u202e", sha256="1" * 64)
    body = EXAMPLES[Kind.HOLD].model_copy(update={"hosts": (held(),)})
    made = Store(shell.store).append(draft(Kind.HOLD, body, scope=hostile.name, argv=(hostile.name,)))
    for argv in (("show", made, "--store", str(shell.store)), ("list", str(shell.store)),
                 ("diff", made, first_id(shell, "hold"), "--store", str(shell.store)),
                 ("graph", str(shell.store))):  # fmt: skip
        out = shell("receipts", *argv)[1]
        assert not set(out) & {"\x1b", "\x07", "\u202e"}, argv


# -- keys and signatures -----------------------------------------------------------------------------------------------


def test_new_key_sign_and_verify(shell: Shell, tmp_path: Path) -> None:
    """A key is 0600 and never replaced; its printed entry makes its signatures count."""
    key, signers = tmp_path / "keys" / "operator.pem", tmp_path / "signers.toml"
    code, entry = shell("keys", "new", "alice", "--out", str(key), "--role", "auditor")
    assert code == 0
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    before = key.read_bytes()
    assert run(["keys", "new", "alice", "--out", str(key)]) == 2
    assert key.read_bytes() == before
    signers.write_text("version = 1\n\n" + entry)
    code, listed = shell.json("keys", "list", "--signers", str(signers))
    assert (listed["signers"][0]["name"], listed["signers"][0]["role"]) == ("alice", "auditor")
    receipt = first_id(shell, "hold")
    argv = ["receipts", "countersign", receipt, "--key", str(key), "--store", str(shell.store)]
    assert run(argv) == 0
    assert run(argv) == 2
    shell("keys", "list", "--signers", str(signers))
    code, document = shell.verify("--signers", str(signers))
    assert (code, document["num_signed"], document["integrity_only"]) == (0, 1, False)


@pytest.mark.parametrize("argv", [["new", "a b", "--out", "k"], ["new", "x", "--out", "k", "--role", "root"]])
def test_a_key_that_nobody_could_list_is_not_made(
    shell: Shell, argv: list[str], monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["keys", *argv]) == 2
    assert not (tmp_path / "k").exists()


# -- admit -------------------------------------------------------------------------------------------------------------


def test_admit_refuses_with_10_and_leaves_a_receipt(shell: Shell) -> None:
    code, document = shell.json("admit", "live", "--store", str(shell.store), "--state", str(shell.state))
    assert (code, document["result"]) == (10, "DENIED")
    rows = shell.json("receipts", "list", str(shell.store), "--kind", "admission")[1]
    assert [row["id"] for row in rows] == [document["receipt"]]
    assert shell.verify()[0] == 0


def test_admit_explains_every_rule(shell: Shell) -> None:
    code, out = shell("admit", "live", "--store", str(shell.store), "--state", str(shell.state), "--explain")
    assert code == 10
    for rule in ("log.whole", "log.signers", "anchor", "same-source", "parents.sound", "signatures"):
        assert rule in out


def test_admit_can_admit_and_never_does_with_a_typed_clock(shell: Shell, tmp_path: Path) -> None:
    """Red when --now admits, or the smallest sound policy cannot be satisfied at all."""
    policy = tmp_path / "one-hold.toml"
    policy.write_text(
        'version = 1\nname = "one-hold"\ndescription = "a test"\n[[stage]]\nname = "final"\nanchor = "hold"\n'
        'signature = "optional"\nwitness = false\nhigh_water = false\n'
        '[[stage.require]]\nname = "hold"\nkind = "hold"\nevidence = ["MEASURED"]\n'
    )
    argv = ("admit", str(policy), "--store", str(shell.store), "--state", str(shell.state))
    assert shell.json(*argv)[0] == 0
    code, document = shell.json(*argv, "--now", "2040-01-01T00:00:00Z")
    assert code == 10
    assert "clock.own" in {row["field"] for row in document["rows"] if row["ok"] is not True}


def test_admit_over_a_damaged_store_exits_60(shell: Shell) -> None:
    first_receipt(shell.store).unlink()
    assert run(["admit", "live", "--store", str(shell.store), "--state", str(shell.state)]) == 60
    assert run(["admit", "live", "--store", str(shell.store / "nowhere")]) == 2
    assert run(["admit", "no-such-policy", "--store", str(shell.store), "--state", str(shell.state)]) == 2


def test_a_signed_admission(shell: Shell, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = tmp_path / "k.pem"
    key.write_bytes(signer().private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    run(["admit", "live", "--store", str(shell.store), "--state", str(shell.state), "--key", str(key)])
    assert list((shell.store / "receipts").glob(f"*-admission-*.{signer().keyid[:12]}.dsse.json"))
