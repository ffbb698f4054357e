"""The commands an operator types, against a small real site: one host, one real service, the real guard."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from coordinator.rehearsal_site import free_ports
from coordinator.store import Store
from receipts.reader import read_receipt
from tests.coordinator.conftest import SmallSite
from tests.services.conftest import wait_until

pytestmark = pytest.mark.services


class Operator:
    """Types commands for one site."""

    def __init__(self, site: SmallSite) -> None:
        self.site = site
        self.store = site.root / "receipts"

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "coordinator", *words]

    def run(self, *words: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.argv(*words), capture_output=True, text=True, timeout=timeout_s, check=False)

    def files(self, *, plan: bool = False, store: bool = True) -> list[str]:
        words = ["--site", str(self.site.root / "site.toml")]
        words += ["--plan", str(self.site.root / "plan.toml")] if plan else []
        return words + (["--store", str(self.store)] if store else [])

    def status(self) -> dict[str, Any]:
        done = self.run("hold", "status", *self.files(store=False), "--json")
        host: dict[str, Any] = json.loads(done.stdout)["hosts"]["here"]
        return host

    def kinds(self) -> list[str]:
        return [read_receipt(entry.content).predicate.kind for entry in Store(self.store).entries()]

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.site.port}/", timeout=5) as reply:
                return bool(reply.read())
        except OSError:
            return False

    def sign(self) -> list[str]:
        """A key whose owner the site allows, and a signed preflight; the options of a campaign that uses them."""
        key, signers, site = (self.site.root / name for name in ("alice.pem", "signers.toml", "site.toml"))
        signers.write_text("version = 1\n\n" + self.run("keys", "new", "alice", "--out", str(key)).stdout)
        site.write_text(tomlkit.dumps({**tomlkit.parse(site.read_text()), "signers": str(signers)}))
        self.run("doctor", *self.files(), "--key", str(key))
        return ["--key", str(key), "--state", str(self.site.root / "marks")]


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    site = SmallSite(tmp_path, free_ports(1)[0])
    with site.running():
        yield Operator(site)


def test_a_first_hold_leaves_a_budget_and_production(operator: Operator) -> None:
    """Red when `campaign` cannot run a first hold on a site, or its budget receipt does not pass."""
    done = operator.run("campaign", *operator.files(plan=True), *operator.sign(), "--json")
    assert done.returncode == 0, done.stderr
    assert operator.answers()
    kinds = [kind for kind in operator.kinds() if kind != "admission"]
    assert kinds == ["host-facts", "source-identity", "host-facts", "hold", "budget"]
    assert operator.run("receipts", "verify", str(operator.store)).returncode == 0
    predicates = [read_receipt(entry.content).predicate for entry in Store(operator.store).entries()]
    (budget,) = [predicate for predicate in predicates if predicate.kind == "budget"]
    assert budget.verdict.outcome.value == "PASS", budget.verdict.reasons


def test_hold_open_holds_until_ctrl_c_and_is_seen_from_elsewhere(operator: Operator) -> None:
    """Red when the hold ends without restore, or `status` and `abort` need the opener's journal."""
    signed = operator.sign()
    words = ["hold", "open", "--reason", "look at the fans", *operator.files(plan=True)]
    process = subprocess.Popen(operator.argv(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until("held", lambda: operator.status()["state"] == "held" or process.poll() is not None, 60)
        assert not operator.answers()
        status = operator.status()
        assert status["hold"]["reason"] == "look at the fans"
        assert status["stopped"] == ["web"]
        refused = operator.run("campaign", *operator.files(plan=True), *signed)
        assert refused.returncode == 11, refused.stderr
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert operator.answers()
    assert operator.status()["state"] == "free"


def test_abort_from_elsewhere_ends_exactly_that_hold_and_its_owner_notices(operator: Operator) -> None:
    """Red when the former owner goes on touching the host, or the abort leaves no receipt."""
    words = ["hold", "open", "--reason", "test", *operator.files(plan=True)]
    process = subprocess.Popen(operator.argv(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until("held", lambda: operator.status()["state"] == "held" or process.poll() is not None, 60)
        hold = operator.status()["hold"]["hold_id"]
        done = operator.run("hold", "abort", "--hold", hold, "--reason", "not now", *operator.files())
        assert done.returncode == 0, done.stderr
        assert operator.answers()
        _, err = process.communicate(timeout=60)
        assert process.returncode in (40, 50), err
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert "recovery" in operator.kinds()
    assert operator.status()["state"] == "free"


def test_doctor_is_read_only_and_says_what_is_wrong(operator: Operator) -> None:
    done = operator.run("doctor", *operator.files(), "--json")
    document = json.loads(done.stdout)
    checks = {check["name"]: check for check in document["checks"]["here"]}
    assert checks["hold"]["ok"] is True
    assert checks["disk"]["ok"] is True
    assert operator.answers()
    assert operator.kinds() == ["host-facts"]


def test_init_writes_files_that_are_refused_until_they_are_filled_in(tmp_path: Path) -> None:
    """Red when an unfinished file could open a hold, or an existing one is overwritten without asking."""
    argv = [sys.executable, "-m", "coordinator", "init", str(tmp_path)]
    assert subprocess.run(argv, capture_output=True, timeout=60, check=False).returncode == 0
    before = (tmp_path / "site.toml").read_text()
    again = subprocess.run(argv, input="n\n", capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == 2
    assert (tmp_path / "site.toml").read_text() == before
    plan = [*argv[:3], "plan", "--site", str(tmp_path / "site.toml"), "--plan", str(tmp_path / "plan.toml")]
    refused = subprocess.run(plan, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert "unit" in refused.stderr
    (tmp_path / "site.toml").write_text(before.replace('unit = "REPLACE-ME"', 'unit = "target.service"'))
    shown = subprocess.run(plan, capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "first-hold" in shown.stdout
