"""The gates look for exactly the names that the program on the host writes."""

from __future__ import annotations

from remote_dspark.qualify import arm as program
from windows import arm, gates


def test_the_four_points_are_those_of_the_program() -> None:
    assert arm.POINTS == program.SNAPSHOTS
    assert arm.HEADLINE in program.PHASES


def test_every_identity_label_is_written_by_the_program() -> None:
    written = {f"server.{name}" for name in program._IDENTITY_LABELS}
    assert set(gates.IDENTITY_LABELS) <= written
    assert arm.LABEL_MODE in program._IDENTITY_LABELS
