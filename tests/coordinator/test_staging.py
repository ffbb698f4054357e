"""What goes to a host before a hold: the programs by digest, and the proof that its interpreter can run them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from coordinator.errors import AdmissionRefused
from coordinator.local import LocalHost
from coordinator.staging import require_interpreter, stage_package


def without_packages(folder: Path) -> str:
    """An interpreter that has the standard library only."""
    wrapper = folder / "python"
    wrapper.write_text(f'#!/bin/sh\nshift\nexec {Path(sys.executable).resolve()} -I -S "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


def test_the_interpreter_of_this_environment_is_accepted(tmp_path: Path) -> None:
    """Red when a host that can run the programs is refused."""
    host = LocalHost("here")
    require_interpreter(host, sys.executable, stage_package(host, sys.executable, str(tmp_path)).path)


@pytest.mark.parametrize(
    ("kind", "found"), [("absent", "No such file"), ("false", "exited 1"), ("empty", "import numpy: ModuleNotFound")]
)
def test_an_interpreter_that_cannot_run_the_programs_is_refused(kind: str, found: str, tmp_path: Path) -> None:
    """Red when a host whose interpreter lacks what the arms import is found out only once production is down."""
    host = LocalHost("here")
    package = stage_package(host, sys.executable, str(tmp_path)).path
    python = {"absent": "/no/such/python", "false": "/bin/false", "empty": without_packages(tmp_path)}[kind]
    with pytest.raises(AdmissionRefused) as caught:
        require_interpreter(host, python, package)
    assert found in caught.value.found
    assert caught.value.exit_code == 10


def test_another_copy_of_the_package_is_not_taken_for_the_staged_one(tmp_path: Path) -> None:
    """Red when what is installed on the host passes for what was staged by digest."""
    with pytest.raises(AdmissionRefused) as caught:
        require_interpreter(LocalHost("here"), sys.executable, str(tmp_path / "empty"))
    assert "expected the staged one" in caught.value.found
