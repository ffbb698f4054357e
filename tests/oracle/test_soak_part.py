"""A part of the long proof on every run, and the machinery that makes it resumable."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "soak_oracle.py"


@pytest.fixture(scope="module")
def soak():
    spec = importlib.util.spec_from_file_location("soak_oracle", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by name while it is being executed
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_part_of_the_proof(soak, tmp_path):
    """Red if the vectorised allocation or Philox differ from the scalar form in any value or fault."""
    goals = soak.Goals(narrow=3000, full=4, words=10_000)
    state, is_done = soak.soak(tmp_path / "state.json", 1, goals, float("inf"), lambda: 0.0)
    assert is_done
    assert state.differences == []
    # 3000 / 50 poisoned rows, in both semantics
    assert state.faults_seen == 120


def test_interrupted_equals_uninterrupted(soak, tmp_path):
    """Red if a resumed run skips or repeats rows."""
    goals = soak.Goals(narrow=1200, full=0, words=0)
    whole, _ = soak.soak(tmp_path / "whole.json", 2, goals, float("inf"), lambda: 0.0)
    runs = 0
    while True:
        parts, is_done = soak.soak(tmp_path / "parts.json", 2, goals, 0.0, lambda: 0.0)
        runs += 1
        if is_done:
            break
    assert runs == 3
    assert parts == whole
    assert (tmp_path / "parts.json").read_text() == (tmp_path / "whole.json").read_text()


def test_a_difference_is_found(soak, monkeypatch):
    """Red if the comparison cannot fail: rows and rank-1 indices that do not belong together."""
    rows = [np.array([1, 1 << 38], dtype=np.int64)]
    assert soak.compare_rows(rows, [1], "x") == ([], 0)
    differences, faults = soak.compare_rows(rows, [0], "x")
    assert (differences, faults) == ([], 2)
    exact = soak.allocate
    monkeypatch.setattr(soak, "allocate", lambda weights, semantics, first: exact(weights, semantics, first) + 1)
    assert len(soak.compare_rows(rows, [1], "x")[0]) == 2


def test_another_seed_is_refused(soak, tmp_path):
    """Red if progress of one seed counts for another."""
    path = tmp_path / "state.json"
    path.write_text(json.dumps({"seed": 1}))
    with pytest.raises(SystemExit):
        soak.load(path, 2)


@pytest.mark.parametrize(("goal", "code"), [("500", 0), ("1000", 3)])
def test_exit_codes(soak, tmp_path, capsys, goal, code):
    """Red if an unfinished proof exits 0."""
    arguments = [
        "--state",
        str(tmp_path / "s.json"),
        "--narrow",
        goal,
        "--full",
        "0",
        "--words",
        "0",
        "--time-box-s",
        "0",
    ]
    assert soak.main(arguments) == code
    assert json.loads(capsys.readouterr().out)["done"] is (code == 0)
