"""A live run signed as it is written: keys, preflight, first hold, admission, on a real host, from the command line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from coordinator.cli import run
from tests.coordinator.conftest import SmallSite

POLICIES = Path(__file__).resolve().parents[2] / "policies"


@dataclass
class Bench:
    """Files of one operator: site, plan, store, key; and the commands that take them."""

    site: Path
    plan: Path
    folder: Path
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *argv: str) -> tuple[int, Any, str]:
        self.capsys.readouterr()
        code = run([*argv, "--json"])
        said = self.capsys.readouterr()
        return code, json.loads(said.out) if said.out.strip() else None, said.err

    def on_site(self, *argv: str, key: str | None = "operator.pem") -> tuple[int, Any, str]:
        signed = ("--key", str(self.folder / key)) if key else ()
        return self(*argv, "--site", str(self.site), "--store", str(self.folder / "store"), *signed)

    def campaign(self, *argv: str, key: str | None = "operator.pem") -> tuple[int, Any, str]:
        state = ("--state", str(self.folder / "marks"))
        return self.on_site("campaign", "--plan", str(self.plan), *state, *argv, key=key)

    def edit_site(self, **changes: Any) -> None:
        document = tomlkit.parse(self.site.read_text())
        self.site.write_text(tomlkit.dumps({**document, **changes}))

    def receipts(self) -> list[Any]:
        found = self("receipts", "list", str(self.folder / "store"))[1]
        assert isinstance(found, list)
        return found


@pytest.fixture
def bench(small_site: SmallSite, capsys: pytest.CaptureFixture[str]) -> Iterator[Bench]:
    """Production runs; the site pins the shipped policies and an operator's key."""
    with small_site.running():
        made = Bench(small_site.root / "site.toml", small_site.root / "plan.toml", small_site.root, capsys)
        key = small_site.root / "operator.pem"
        assert run(["keys", "new", "alice", "--out", str(key)]) == 0
        signers = small_site.root / "signers.toml"
        signers.write_text("version = 1\n\n" + capsys.readouterr().out)
        pins = {name: hashlib.sha256((POLICIES / f"{name}.toml").read_bytes()).hexdigest()
                for name in ("first-hold", "live")}  # fmt: skip
        made.edit_site(signers=str(signers), policy_pins=pins)
        yield made


def test_a_first_hold_signed_from_preflight_to_admission(bench: Bench) -> None:
    """Red when a receipt of a live run is unsigned, or the shipped policy cannot admit what the commands leave."""
    assert bench.on_site("doctor")[0] in (0, 10)
    code, document, said = bench.campaign()
    assert code == 0, said
    (admission,) = document["admissions"]
    assert (admission["policy"], admission["stage"], admission["result"]) == ("first-hold", "final", "ADMITTED")
    assert "policy.pin" in {row["field"] for row in admission["rows"]}
    kinds = [row["kind"] for row in bench.receipts()]
    assert kinds.count("admission") == 2
    assert document["receipts"]["num_signed"] == len(kinds)
    code, verified, _ = bench("receipts", "verify", str(bench.folder / "store"), "--signers",
                              str(bench.folder / "signers.toml"), "--state", str(bench.folder / "marks"))  # fmt: skip
    assert (code, verified["num_signed"], verified["integrity_only"]) == (0, len(kinds), False)


def test_a_run_that_could_never_be_admitted_is_refused_before_any_host(bench: Bench) -> None:
    """Red when two holds are spent on receipts that the policy refuses for their missing signature."""
    code, _, said = bench.campaign(key=None)
    assert code == 10
    assert "admits signed receipts only" in said
    assert "coordinator keys new" in said
    run(["keys", "new", "mallory", "--out", str(bench.folder / "mallory.pem")])
    code, _, said = bench.campaign(key="mallory.pem")
    assert (code, "a signer in the allowed-signers file" in said) == (10, True)
    code, _, said = bench.campaign(key="no-such.pem")
    assert (code, "no-such.pem" in said) == (2, True)
    assert not (bench.folder / "store").exists()


def test_a_policy_that_the_site_does_not_pin_is_refused_by_campaign_and_admit(bench: Bench) -> None:
    """Red when an edited policy passes under its old name, or a renamed one beside the pins."""
    bench.on_site("doctor")
    edited = bench.folder / "edited.toml"
    text = (POLICIES / "first-hold.toml").read_text()
    for other in (text.replace("max_age_s = 86400", "max_age_s = 999999"), text.replace('"first-hold"', '"my-own"', 1)):
        assert other != text
        edited.write_text(other)
        code, _, said = bench.campaign("--policy", str(edited))
        assert code == 10
        assert "not the one that the site file pins" in said
        code, document, _ = bench.on_site("admit", str(edited), "--stage", "open", "--state", str(bench.folder / "m"))
        assert code == 10
        wrong = [row["field"] for row in document["rows"] if row["ok"] is not True]
        assert wrong == ["policy.pin"]


def test_an_unsigned_preflight_opens_nothing(bench: Bench) -> None:
    """Red when the opening stage of the policy is not evaluated, or its denial leaves no receipt."""
    bench.on_site("doctor", key=None)
    code, _, said = bench.campaign()
    assert code == 10
    assert "does not admit stage open; no host was contacted" in said
    assert [(row["kind"], row["verdict"]) for row in bench.receipts()][1:] == [("admission", "FAIL")]
    # Signing what was left unsigned is enough: the receipt itself was sound.
    facts = bench.receipts()[0]["id"]
    assert run(["receipts", "countersign", facts, "--store", str(bench.folder / "store"),
                "--key", str(bench.folder / "operator.pem")]) == 0  # fmt: skip
    assert bench.on_site("admit", "first-hold", "--stage", "open", "--state", str(bench.folder / "m"))[0] == 0


def test_the_guards_keep_a_head_that_a_rewritten_store_does_not_have(bench: Bench) -> None:
    """Red when the second witness is only ever read from the store that it is to vouch for."""
    bench.on_site("doctor")
    assert bench.on_site("hold", "witness", key=None)[0] == 60
    assert bench.campaign()[0] == 0
    code, document, _ = bench.on_site("hold", "witness", key=None)
    assert (code, document["result"]) == (0, "PASS")
    kept = document["kept"]["here"]
    assert 0 < kept["count"] <= document["count"]
    # The owner cuts the log before the hold and fits every list; alone, the store is whole.
    store = bench.folder / "store"
    names = sorted(path.name for path in (store / "receipts").glob("*-????????????.json"))
    for name in names[2:]:
        for path in (store / "receipts").glob(f"{name.removesuffix('.json')}*"):
            path.unlink()
    last = (store / "receipts" / names[1]).read_bytes()
    lines = (store / "SHA256SUMS").read_text().splitlines(keepends=True)
    (store / "SHA256SUMS").write_text("".join(line for line in lines if (store / line[66:].strip()).exists()))
    (store / "HEAD").write_text(json.dumps({"count": 2, "head": hashlib.sha256(last).hexdigest(), "log": kept["log"]}))
    assert bench("receipts", "verify", str(store), "--state", str(bench.folder / "nobody"))[0] == 0
    code, document, _ = bench.on_site("hold", "witness", key=None)
    assert (code, [finding["code"] for finding in document["findings"]]) == (60, ["rollback"])
    # And whoever accepted it before remembers, on this account.
    code, document, _ = bench("receipts", "verify", str(store), "--state", str(bench.folder / "marks"))
    assert (code, [finding["code"] for finding in document["findings"]]) == (60, ["rollback"])


def measurement_plan(bench: Bench, *programs: tuple[str, list[str]]) -> Path:
    """The first hold's plan with programs in it."""
    document = tomlkit.parse(bench.plan.read_text()).unwrap()
    document |= {"name": "measure", "purpose": "measurement"}
    document["step_bounds_s"]["measure"] = 60
    document["measurements"] = [
        {"name": name, "role": "drafter", "argv": ["{python}", *argv], "timeout_s": 60} for name, argv in programs
    ]
    path = bench.folder / "measure.toml"
    path.write_text(tomlkit.dumps(document))
    return path


def test_a_measurement_hold_leaves_a_receipt_of_each_program(bench: Bench) -> None:
    """Red when a program runs without the hold's proof, or what it observed becomes no receipt."""
    plan = measurement_plan(bench, ("pair", ["-m", "remote_dspark.qualify.pair", "--require-hold"]))
    assert bench.on_site("doctor")[0] in (0, 10)
    code, _, said = bench.campaign("--plan", str(plan))
    assert code == 10, "its own bounds need a first hold"
    assert "has no measured budget evidence" in said
    assert bench.campaign()[0] == 0
    code, document, said = bench.campaign("--plan", str(plan))
    assert code == 0, said
    assert document["admissions"][0]["result"] == "ADMITTED"
    (pair,) = [row for row in bench.receipts() if row["kind"] == "pair-qualification"]
    assert pair["evidence"] == "EMULATED"
    assert pair["verdict"] == "PASS"
    assert [row["kind"] for row in bench.receipts()].count("budget") == 2


def test_a_measurement_that_fails_ends_the_hold_and_runs_nothing_after_it(bench: Bench) -> None:
    """Red when a program that exits 3, or says nothing, counts as measured."""
    mark = bench.folder / "ran"
    plan = measurement_plan(
        bench, ("bad", ["-c", "raise SystemExit(3)"]), ("later", ["-c", f"open({str(mark)!r}, 'w')"])
    )
    assert bench.on_site("doctor")[0] in (0, 10)
    assert bench.campaign()[0] == 0
    code, _, said = bench.campaign("--plan", str(plan))
    assert code == 30, said
    assert "bad did not pass" in said
    assert not mark.exists()
    kinds = [row["kind"] for row in bench.receipts()]
    assert "worker-measurement" not in kinds
    assert bench.on_site("hold", "status", key=None)[0] == 0
