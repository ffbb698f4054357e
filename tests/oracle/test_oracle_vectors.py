"""The stored vectors are what the oracle computes, and what the documents promise."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from remote_dspark.contract import TICKET_TOTAL
from remote_dspark.oracle.philox import philox4x32
from remote_dspark.oracle.sample_row import sample_row
from remote_dspark.oracle.verify import DraftRow, verify_round

FOLDER = Path(__file__).parents[1] / "vectors" / "oracle"


def stored(name):
    return json.loads((FOLDER / name).read_text())


def test_the_script_makes_exactly_the_stored_files():
    """Red if the oracle changes its meaning without new vectors, or a file was edited by hand."""
    spec = importlib.util.spec_from_file_location("make_vectors", FOLDER / "make_vectors.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.make()
    assert {path.name for path in FOLDER.glob("*.json")} == set(made)
    for name, content in made.items():
        assert (FOLDER / name).read_bytes() == content, name


def test_stored_known_answers():
    """Red if the stored answers are recomputed instead of copied and drift with the code."""
    for case in stored("philox.json")["known_answers"]:
        assert list(philox4x32(tuple(case["counter"]), tuple(case["key"]))) == case["words"]


def test_stored_rows_are_readable_without_the_script():
    """Red if the encoding of logits loses a bit: rows are recomputed from the file alone."""
    errors = set()
    for case in stored("rows.json"):
        logits = np.array(case["logit_bits"], dtype=np.uint32).view(np.float32)
        tau = float(np.array([case["tau_bits"]], dtype=np.uint32).view(np.float32)[0])
        row = sample_row(logits, tau, case["k"], case["semantics"], tuple(case["key"]), case["round"], case["position"])
        assert (row.ids.tolist(), row.tickets.tolist(), row.token, row.error) == (
            case["row"]["ids"],
            case["row"]["tickets"],
            case["row"]["token"],
            case["row"]["error"],
        )
        errors.add(case["row"]["error"])
        assert sum(case["row"]["tickets"]) in (0, TICKET_TOTAL)
    assert errors == {None, "nan", "positive-infinity", "zero-mass"}


def test_stored_rounds_are_readable_without_the_script():
    """Red if a round depends on anything that is not in the vector."""
    kinds = set()
    for case in stored("rounds.json"):
        rows = [DraftRow(np.array(row["ids"]), np.array(row["tickets"])) for row in case["draft_rows"]]
        targets = [np.array(row) for row in case["target_weights"]]
        outcome = verify_round(
            targets, rows, case["proposed"], tuple(case["key"]), case["round"], case["first_position"]
        )
        assert list(outcome.tokens) == case["tokens"]
        assert str(outcome.final_draw) == case["final_draw"]
        kinds.add((outcome.final_kind.value, outcome.num_accepted))
    # both endings and several lengths, or the vectors prove little
    assert {kind for kind, _ in kinds} == {"bonus", "correction"}
    assert len(kinds) >= 4


@pytest.mark.parametrize("name", ["philox.json", "tickets.json", "rows.json", "rounds.json"])
def test_vectors_hold_no_floats(name):
    """Red if a value is stored in a way that another reader may round."""

    def refuse(text):
        raise AssertionError(f"{name} holds the float {text}")

    json.loads((FOLDER / name).read_text(), parse_float=refuse, parse_constant=refuse)
